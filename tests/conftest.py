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
import importlib.util

import cloud_storage
import jax
import pytest
from etils import epath

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


@pytest.fixture(scope="session")
def cloud():
    """A stand-in of Cloud Storage; its clients remember it, so there is one for all tests."""
    if importlib.util.find_spec("gcsfs") is None:  # Not imported: it reads the environment then.
        pytest.skip("gs:// needs the package gcsfs")
    with cloud_storage.serve() as storage, pytest.MonkeyPatch.context() as patch:
        for name, value in storage.environment.items():
            patch.setenv(name, value)
        yield storage


@pytest.fixture(params=["local", "gs"])
def anywhere(request, tmp_path):
    """An empty folder, local and at `gs://`."""
    if request.param == "local":
        return epath.Path(tmp_path)
    request.getfixturevalue("cloud")
    return epath.Path(f"gs://bucket/{tmp_path.name}")
