"""The most memory that was in use at once."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

import jax

_PROCESS = Path("/proc/self")


def reset() -> None:
    """Forget the peak so far, where the system can: on Linux, for devices that are the host."""
    clear = _PROCESS / "clear_refs"
    if os.access(clear, os.W_OK):
        clear.write_text("5")


def peak() -> int:
    """Bytes of the fullest device; where devices are the host, of this process.

    The process's peak counts from the last `reset`, the runtime's own of a device from its start.
    """
    found = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in found if stats]
    if peaks:
        return max(peaks)
    status = _PROCESS / "status"
    if status.exists():
        kibibytes = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if kibibytes:
            return int(kibibytes[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
