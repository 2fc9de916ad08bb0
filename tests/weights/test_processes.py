import shutil
from pathlib import Path

import golden_models
import numpy as np
import processes
from golden_models import GOLDEN

HERE = Path(__file__).parent
MODELS = ["qwen2", "qwen3_moe"]


def test_each_of_two_processes_reads_about_half_and_they_export_together(served, tmp_path_factory):
    folder, address, sent = served
    for name in MODELS:
        shutil.copytree(GOLDEN / name, folder / name)
    out = tmp_path_factory.mktemp("out")
    processes.run(HERE / "two_processes.py", out, *(f"{address}/PROCESS/{name}" for name in MODELS))

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
