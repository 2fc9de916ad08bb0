import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import golden_models
import numpy as np
from golden_models import GOLDEN

HERE = Path(__file__).parent
MODELS = ["qwen2", "qwen3_moe"]


def test_each_of_two_processes_reads_about_half_and_they_export_together(served, tmp_path_factory):
    folder, address, sent = served
    for name in MODELS:
        shutil.copytree(GOLDEN / name, folder / name)
    out = tmp_path_factory.mktemp("out")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    processes = []
    for number in range(2):
        addresses = [f"{address}/{number}/{name}" for name in MODELS]
        arguments = [HERE / "two_processes.py", str(number), coordinator, out, *addresses]
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, said, strict=True):
        assert process.returncode == 0, output

    # Headers, configuration and the few vectors are read by both, so a little more than half.
    size = sum((GOLDEN / name / "model.safetensors").stat().st_size for name in MODELS)
    for number in range(2):
        assert 0.45 < sent[str(number)] / size < 0.6, sent

    for name in MODELS:
        exported = golden_models.tensors(out / name)
        original = golden_models.tensors(GOLDEN / name)
        assert sorted(exported) == sorted(original)
        for tensor in original:
            np.testing.assert_array_equal(exported[tensor], original[tensor], err_msg=tensor)
