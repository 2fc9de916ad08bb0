"""Starts a program as the processes of one run: CPU devices, joined through `jax.distributed`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start(program, *arguments, processes=2, devices=4):
    """Starts `program` so often, with the variables that `bagrpo.distributed.initialize` reads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    path = Path(program).parent
    started = []
    for number in range(processes):
        environment = os.environ | {
            "BAGRPO_COORDINATOR": coordinator,
            "BAGRPO_PROCESS": str(number),
            "BAGRPO_PROCESSES": str(processes),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{path}:{ROOT}",
            "PYTHONWARNINGS": "error",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
            " --xla_backend_optimization_level=1",
        }
        command = [sys.executable, program, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
    return started


def finish(started, timeout=120):
    """Waits; returns each process's exit status and all that it wrote."""
    try:
        said = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def run(program, *arguments, timeout=120, **options):
    """Runs `program` as several processes and returns what each wrote; all must end well."""
    ended = finish(start(program, *arguments, **options), timeout)
    for status, text in ended:
        assert status == 0, text
    return [text for _, text in ended]
