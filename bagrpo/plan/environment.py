"""What has to be said before JAX is imported, so that a plan neither needs nor takes a device."""

from __future__ import annotations

import os
from collections.abc import Sequence


def prepare(topologies: Sequence[str]) -> None:
    """Keeps JAX on the CPU, with as many devices as `cpu:N` says, and the TPU compiler quiet."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    counts = [name.removeprefix("cpu:") for name in topologies if name.startswith("cpu:")]
    most = max((int(count) for count in counts if count.isdecimal()), default=0)
    if most:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(most)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


_QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""Without a TPU its library asks a server that is not there, and complains; and it would let one
process at a time use it, though all of them only compile."""
