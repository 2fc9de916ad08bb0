import json
import shutil

import golden_models
import jax
import numpy as np
import pytest
from golden_models import GOLDEN, NAMES

from bagrpo.weights.export import export
from bagrpo.weights.load import load, load_architecture


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_has_the_tensors_and_configuration_of_its_source(tmp_path, mesh, name):
    source = str(GOLDEN / name)
    arch, loaded = load(source, mesh)
    export(loaded, arch, tmp_path, source=source)
    want = golden_models.tensors(source)
    found = golden_models.tensors(tmp_path)
    assert sorted(found) == sorted(want)  # so a tied model has no head
    for tensor in want:
        np.testing.assert_array_equal(found[tensor], want[tensor], err_msg=tensor)
    assert json.loads((tmp_path / "config.json").read_text()) == golden_models.config(name)


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe"])
def test_bfloat16_survives_a_round_trip_over_several_files(tmp_path, mesh, name):
    source = str(GOLDEN / name)
    arch, loaded = load(source, mesh, dtype="bfloat16")
    export(loaded, arch, tmp_path, source=source, file_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    _, again = load(str(tmp_path), mesh, dtype="bfloat16")
    golden_models.assert_same(again, golden_models.flat(loaded))


def test_float32_parameters_export_as_bfloat16_on_demand(tmp_path, mesh):
    source = str(GOLDEN / "llama_tied")
    arch, loaded = load(source, mesh)
    export(loaded, arch, tmp_path, source=source, dtype="bfloat16")
    _, again = load(str(tmp_path), mesh, dtype="bfloat16")
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), loaded)
    golden_models.assert_same(again, golden_models.flat(rounded))


def test_parameters_of_one_device_export_too(tmp_path, mesh):
    source = str(GOLDEN / "qwen2")
    arch, loaded = load(source, mesh)
    alone = jax.device_put(loaded, jax.devices()[3])
    export(alone, arch, tmp_path, source=source)
    _, again = load(str(tmp_path), mesh)
    golden_models.assert_same(again, golden_models.flat(loaded))


def test_generation_config_goes_along(tmp_path, mesh):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "llama_tied", source)
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    arch, loaded = load(str(source), mesh)
    export(loaded, arch, tmp_path / "out", source=str(source))
    assert load_architecture(str(tmp_path / "out")).eos_ids == (2, 9)


def test_a_used_folder_is_refused_unless_it_may_be_overwritten(tmp_path, mesh):
    source = str(GOLDEN / "llama_tied")
    arch, loaded = load(source, mesh)
    export(loaded, arch, tmp_path, source=source, file_bytes=100_000)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not empty; choose another, or overwrite"):
        export(loaded, arch, tmp_path, source=source)
    export(loaded, arch, tmp_path, source=source, overwrite=True)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["config.json", "model.safetensors", "tokenizer.json"]


def test_what_cannot_be_exported_says_why(tmp_path, mesh):
    source = str(GOLDEN / "llama_tied")
    arch, loaded = load(source, mesh)
    with pytest.raises(ValueError, match="export dtype 'int8'; allowed: float32, bfloat16"):
        export(loaded, arch, tmp_path, source=source, dtype="int8")
    with pytest.raises(ValueError, match=r"not of the architecture of source .*gemma2"):
        export(loaded, arch, tmp_path, source=str(GOLDEN / "gemma2"))
    with pytest.raises(ValueError, match="is remote; export to a local one"):
        export(loaded, arch, "gs://bucket/model", source=source)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; choose another name"):
        export(loaded, arch, tmp_path / "file", source=source)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    broken = loaded | {"norm": loaded["embed"]}
    with pytest.raises(ValueError, match=r"parameter 'norm' has shape \(320, 64\)"):
        export(broken, arch, tmp_path / "out", source=source)
