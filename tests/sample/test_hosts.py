import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from engines import engine, generate, requests

from bagrpo.sample.request import Sampling

HERE = Path(__file__).parent


def test_two_processes_sample_together_what_one_device_does(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1",
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                HERE / "two_processes.py",
                str(number),
                coordinator,
                tmp_path / str(number),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, said, strict=True):
        assert process.returncode == 0, output
    completions = generate(engine(text=True), requests(), Sampling(temperature=1.3, stop=("一",)))
    want = {key: [list(c.tokens), c.text, c.finish] for key, c in completions.items()}
    for number in range(2):
        rows = json.loads((tmp_path / str(number)).read_text())
        assert {(problem, sample): rest for problem, sample, *rest in rows} == want
