import json
import shutil

import golden_models
import jax
import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDEN, MESHES, NAMES

from bagrpo.config import MeshConfig
from bagrpo.models import params
from bagrpo.models.family import architecture
from bagrpo.sharding import SAMPLE, TRAIN, make_mesh, param_shardings
from bagrpo.weights import names
from bagrpo.weights.load import load, load_architecture
from bagrpo.weights.place import mover, route


def expected(name):
    return golden_models.parameters(
        golden_models.config(name), golden_models.tensors(GOLDEN / name)
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_family_loads_to_the_last_bit_on_every_mesh(name):
    want = expected(name)
    for sizes in MESHES:
        mesh = make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))))
        arch, loaded = load(str(GOLDEN / name), mesh)
        golden_models.assert_same(loaded, want)
        places = param_shardings(params.specs(arch), mesh, TRAIN)
        assert jax.tree.map(lambda x: x.sharding, loaded) == places
        assert arch == architecture(golden_models.config(name))


def test_a_process_reads_every_byte_once_whatever_the_mesh(served, mesh):
    path, address, sent = served
    shutil.copytree(GOLDEN / "gemma2", path / "gemma2")
    load(f"{address}/me/gemma2", mesh)
    sizes = [(path / "gemma2" / f).stat().st_size for f in ("config.json", "model.safetensors")]
    assert (
        sent["me"] == sum(sizes) + 1
    )  # the last byte is read twice, first to see that it is there


def test_the_table_says_where_parameters_go(mesh):
    arch, loaded = load(str(GOLDEN / "qwen3_moe"), mesh, table=SAMPLE)
    places = param_shardings(params.specs(arch), mesh, SAMPLE)
    assert jax.tree.map(lambda x: x.sharding, loaded) == places
    golden_models.assert_same(loaded, expected("qwen3_moe"))


def test_bfloat16_parameters_are_rounded_to_nearest(mesh):
    _, loaded = load(str(GOLDEN / "qwen2"), mesh, dtype="bfloat16")
    golden_models.assert_same(
        loaded, {n: a.astype(ml_dtypes.bfloat16) for n, a in expected("qwen2").items()}
    )


def test_an_index_of_several_files_loads_as_one_file_does(tmp_path, mesh):
    tensors = golden_models.tensors(GOLDEN / "gemma3")
    shutil.copy(GOLDEN / "gemma3" / "config.json", tmp_path)
    files = {f"part{i}.safetensors": sorted(tensors)[i::3] for i in range(3)}
    for key, chosen in files.items():
        golden_models.write(tmp_path / key, {name: tensors[name] for name in chosen})
    index = {"weight_map": {name: key for key, chosen in files.items() for name in chosen}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, loaded = load(tmp_path.as_uri(), mesh)
    golden_models.assert_same(loaded, expected("gemma3"))


def test_rows_that_do_not_divide_over_the_devices_are_padded_and_cut(tmp_path):
    # 321 tokens over 8 devices: 41 rows each, the last device has 321 - 7 * 41 = 34.
    config = golden_models.config("mistral") | {"vocab_size": 321}
    tensors = dict(golden_models.tensors(GOLDEN / "mistral"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], np.full((1, 64), 7, np.float32)])
    folder(tmp_path, config, tensors)
    _, loaded = load(str(tmp_path), make_mesh(MeshConfig()))
    golden_models.assert_same(loaded, golden_models.parameters(config, tensors))


def test_layers_of_different_dtypes_load(tmp_path, mesh):
    tensors = golden_models.tensors(GOLDEN / "llama_tied")
    half = "model.layers.1.mlp.up_proj.weight"
    halved = tensors[half].astype(np.float16)
    rounded = {**tensors, half: halved.astype(np.float32)}
    shutil.copy(GOLDEN / "llama_tied" / "config.json", tmp_path)
    others = {name: array for name, array in tensors.items() if name != half}
    golden_models.write(tmp_path / "a.safetensors", others)
    golden_models.write(tmp_path / "b.safetensors", {half: halved})
    index = dict.fromkeys(others, "a.safetensors") | {half: "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    _, loaded = load(str(tmp_path), mesh)
    golden_models.assert_same(
        loaded, golden_models.parameters(golden_models.config("llama_tied"), rounded)
    )


BIG = {
    "hidden_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4004,
    "moe_intermediate_size": 256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 1), (1, 2, 4), (1, 8, 1)])
def test_no_device_holds_much_more_than_twice_its_share_while_loading(sizes):
    mesh = make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))))
    arch = architecture(golden_models.config("qwen3_moe") | BIG)
    places = dict(names.flat(param_shardings(params.specs(arch), mesh)))
    stacks = names.stacks(arch, "hf")
    for stacked in stacks:
        if stacked.vector or stacked.path in ("blocks/v", "blocks/up"):
            continue  # vectors take no such way; these two take that of k and gate
        path = route(stacked, places[stacked.path], "float32")
        x = jax.ShapeDtypeStruct(path.shape, np.float32, sharding=path.source)
        memory = mover(path).lower(x).compile().memory_analysis()
        share = memory.output_size_in_bytes
        assert share > 1000
        # Shares of read and placed parameter differ by padding; 0.1 is room for it.
        assert memory.temp_size_in_bytes <= 2.1 * share, stacked.path


def folder(path, config, tensors):
    (path / "config.json").write_text(json.dumps(config))
    golden_models.write(path / "model.safetensors", tensors)


def test_generation_ends_at_the_ids_of_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(golden_models.config("gemma2")))
    assert load_architecture(str(tmp_path)).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 107]}))
    assert load_architecture(str(tmp_path)).eos_ids == (2, 107)


def test_tensors_that_say_nothing_new_are_ignored(tmp_path, mesh):
    tensors = golden_models.tensors(GOLDEN / "llama_tied")
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    folder(tmp_path, golden_models.config("llama_tied"), tensors | extra)
    _, loaded = load(str(tmp_path), mesh)
    golden_models.assert_same(loaded, expected("llama_tied"))


def without(tensors):
    del tensors["model.layers.2.mlp.up_proj.weight"]


def with_more(tensors):
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((160, 64), np.float32)


def transposed(tensors):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].T


WRONG = {
    "missing": (without, r"tensor 'model\.layers\.2\.mlp\.up_proj\.weight' .* is missing in"),
    "extra": (with_more, r"tensor 'model\.layers\.3\.mlp\.up_proj\.weight' .* is not part of"),
    "shape": (transposed, r"down_proj\.weight' in .* has shape \(160, 64\) where .* \(64, 160\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_tensor_is_an_error_naming_it(tmp_path, mesh, wrong):
    tensors = dict(golden_models.tensors(GOLDEN / "mistral"))
    change, message = WRONG[wrong]
    change(tensors)
    folder(tmp_path, golden_models.config("mistral"), tensors)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path), mesh)


def test_an_untied_model_needs_its_head(tmp_path, mesh):
    config = golden_models.config("llama_tied") | {"tie_word_embeddings": False}
    folder(tmp_path, config, golden_models.tensors(GOLDEN / "llama_tied"))
    with pytest.raises(ValueError, match=r"tensor 'lm_head\.weight' of shape \(320, 64\) is miss"):
        load(str(tmp_path), mesh)


def test_a_folder_without_configuration_or_weights_says_what_is_missing(tmp_path, mesh):
    with pytest.raises(ValueError, match=r"no config\.json in .*give a Hugging Face folder"):
        load(str(tmp_path), mesh)
    shutil.copy(GOLDEN / "qwen3" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"there is no file .*model\.safetensors"):
        load(str(tmp_path), mesh)


def test_a_dimension_that_does_not_divide_is_an_error_naming_it():
    wide = make_mesh(MeshConfig(fsdp=1, tensor=8))
    with pytest.raises(
        ValueError, match=r"parameter 'blocks/.*': dimension 'heads' of size 4 does not"
    ):
        load(str(GOLDEN / "llama_tied"), wide)
