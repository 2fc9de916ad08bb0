"""Every test runs on 8 CPU devices, with strict JAX promotion and warnings as errors."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # nothing outside of temporary folders
# Most of a test's time is compilation, and programs this small gain little from optimisation.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
)

import gc

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Compiled programs take memory maps, of which a process may have 65,530: thousands of tests
    would end in a segmentation fault."""
    yield
    jax.clear_caches()
    gc.collect()
