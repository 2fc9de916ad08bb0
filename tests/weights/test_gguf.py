import dataclasses
import struct
import sys

import gguf as package
import gguf_models
import golden_models
import numpy as np
import pytest
from golden_models import GOLDEN, NAMES

from bagrpo.models.family import architecture
from bagrpo.weights import gguf, store
from bagrpo.weights.checkpoint import gguf_metadata
from bagrpo.weights.export import export
from bagrpo.weights.load import load, load_architecture

# llama.cpp writes a Mistral model as a Llama model, without its sliding window.
FILES = [name for name in NAMES if name != "mistral"]


def expected(name, change=lambda array: array):
    """Our parameters when each file tensor was changed before."""
    tensors = golden_models.tensors(GOLDEN / name)
    changed = {key: change(array) for key, array in tensors.items()}
    return golden_models.parameters(golden_models.config(name), changed)


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_loads_as_the_model_that_it_was_made_from(tmp_path, mesh, name):
    gguf_models.write(tmp_path / "model.gguf", name)
    arch, loaded = load(str(tmp_path / "model.gguf"), mesh)
    want = expected(name)
    if "gemma" in name:  # adding 1 in float32 and subtracting it again rounds
        for path, array in want.items():
            if path.endswith("norm"):
                want[path] = (array + np.float32(1)) - np.float32(1)
    golden_models.assert_same(loaded, want)

    golden = architecture(golden_models.config(name))
    if name == "gemma2":  # the file does not say the scale; llama.cpp takes the head dimension
        golden = dataclasses.replace(golden, attn_scale=32**-0.5)
    if name == "llama3_rope":  # 32 positions divide the frequencies as the golden 64 do
        rope = dataclasses.replace(golden.ropes[0], original_positions=32)
        golden = dataclasses.replace(golden, ropes=(rope,))
    assert arch == golden


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
@pytest.mark.parametrize("name", ["llama_tied", "gemma2"])
def test_quantised_tensors_load_as_the_gguf_package_decodes_them(tmp_path, mesh, name, kind):
    gguf_models.write(tmp_path / "model.gguf", name, kind)
    _, loaded = load(str(tmp_path / "model.gguf"), mesh)
    number = package.GGMLQuantizationType[kind]

    def change(array):
        # Blocks lie along the input, so permuting rows does not change what a row becomes.
        if array.ndim == 1:
            shift = np.float32(name == "gemma2")
            return (array + shift) - shift
        return package.quants.dequantize(package.quants.quantize(array, number), number)

    golden_models.assert_same(loaded, expected(name, change))


def test_every_divisor_of_llama_3_names_the_original_context(tmp_path):
    # Llama 3.2's own numbers; with 64 frequencies the context length is unambiguous.
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {"head_dim": 128, "rope_theta": 500_000.0, "rope_scaling": scaling}

    def edit(writer, tensors):
        tensors["rope_freqs.weight"] = gguf_models.rope_freqs(config)
        for key, value in (("key_length", 128), ("value_length", 128)):
            writer.kv_data[0][f"llama.attention.{key}"].value = value

    gguf_models.write(tmp_path / "m.gguf", "llama3_rope", edit=edit)
    (rope,) = load_architecture(str(tmp_path / "m.gguf")).ropes
    assert (rope.kind, rope.factor, rope.original_positions) == ("llama3", 32.0, 8192)

    def broken(writer, tensors):
        edit(writer, tensors)
        tensors["rope_freqs.weight"][30] *= 1.01

    gguf_models.write(tmp_path / "m.gguf", "llama3_rope", edit=broken)
    with pytest.raises(ValueError, match=r"'rope_freqs\.weight' .* is not Llama 3's stretching"):
        load_architecture(str(tmp_path / "m.gguf"))


def test_yarn_and_linear_scaling_come_from_the_metadata(tmp_path):
    def edit(kind):
        def add(writer, tensors):
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(128)

        return add

    for kind in (package.RopeScalingType.LINEAR, package.RopeScalingType.YARN):
        gguf_models.write(tmp_path / "m.gguf", "qwen2", edit=edit(kind))
        (rope,) = load_architecture(str(tmp_path / "m.gguf")).ropes
        assert (rope.kind, rope.factor) == (kind.value, 4.0)
        assert rope.original_positions == (128 if kind.value == "yarn" else 0)


def test_a_chat_model_also_stops_at_its_end_of_turn(tmp_path):
    gguf_models.write(tmp_path / "m.gguf", "qwen3", edit=lambda w, _: w.add_eot_token_id(7))
    assert load_architecture(str(tmp_path / "m.gguf")).eos_ids == (2, 7)


def test_metadata_are_plain_values(tmp_path, monkeypatch):
    def add(writer, tensors):
        writer.add_array("some.nested", [[1, 2], [3]])
        writer.add_bool("some.flag", True)
        writer.add_string("some.text", "\N{SNOWMAN}")
        writer.add_float64("some.number", 0.1)

    gguf_models.write(tmp_path / "m.gguf", "qwen2", edit=add)
    monkeypatch.setattr(gguf, "_CHUNK", 64)  # so that the header takes several requests
    found = gguf_metadata(str(tmp_path / "m.gguf"))
    assert found["some.nested"] == [[1, 2], [3]]
    assert found["some.flag"] is True
    assert found["some.text"] == "\N{SNOWMAN}"
    assert found["some.number"] == 0.1
    assert found["tokenizer.ggml.tokens"] == [f"token {i}" for i in range(320)]
    assert found["general.architecture"] == "qwen2"


@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "qwen3_moe"])
def test_a_model_from_gguf_exports_to_a_folder_that_loads_equal(tmp_path, mesh, name):
    source = str(tmp_path / "m.gguf")
    gguf_models.write(source, name)
    arch, loaded = load(source, mesh)
    export(loaded, arch, tmp_path / "out", source=source)
    again_arch, again = load(str(tmp_path / "out"), mesh)
    assert again_arch == arch
    golden_models.assert_same(again, golden_models.flat(loaded))


def test_a_gguf_file_is_read_by_range_over_http(served, mesh):
    path, address, sent = served
    gguf_models.write(path / "m.gguf", "llama_tied", "Q8_0")
    _, remote = load(f"{address}/me/m.gguf", mesh)
    _, local = load(str(path / "m.gguf"), mesh)
    golden_models.assert_same(remote, golden_models.flat(local))
    assert sent["me"] > 0


def set_(key, value):
    def edit(writer, tensors):
        writer.kv_data[0][key].value = value

    return edit


def drop(name):
    return lambda writer, tensors: tensors.pop(name)


def put(name, shape):
    return lambda w, tensors: tensors.__setitem__(name, np.zeros(shape, np.float32))


WRONG = {
    "architecture": (
        set_("general.architecture", "mamba"),
        r"unknown general\.architecture 'mamba' .* allowed: llama, qwen2",
    ),
    "unknown metadata": (
        lambda w, _: w.add_float32("llama.attention.surprise", 2.0),
        r"unknown metadata 'llama\.attention\.surprise' = 2\.0",
    ),
    "missing metadata": (
        lambda w, _: w.kv_data[0].pop("llama.block_count"),
        r"no metadata llama\.block_count",
    ),
    "partial rotation": (
        lambda w, _: w.add_rope_dimension_count(8),
        r"llama\.rope\.dimension_count = 8 .* differs from the head dimension 16",
    ),
    "layers differ": (
        lambda w, _: w.add_array("llama.attention.head_count", [4, 2, 4]),
        r"head_count = \[4, 2, 4\] .* differs between layers",
    ),
    "rope scaling": (
        lambda w, _: w.add_rope_scaling_type(package.RopeScalingType.LONGROPE),
        "rope scaling 'longrope' .* allowed: none, linear, yarn",
    ),
    "missing": (drop("blk.1.attn_k.weight"), r"'blk\.1\.attn_k\.weight' .* is missing"),
    "no embedding": (drop("token_embd.weight"), r"no tensor 'token_embd\.weight'"),
    "extra": (put("blk.0.attn_q.bias", 64), r"'blk\.0\.attn_q\.bias' .* is not part of"),
    "shape": (put("blk.0.ffn_up.weight", (64, 160)), r"ffn_up\.weight' .* has shape \(64, 160\)"),
    "integers": (
        lambda w, tensors: tensors.update(x=np.zeros((2, 2), np.int32)),
        "tensor 'x' in .* is of type 26, which cannot be decoded",
    ),
    "parts": (lambda w, _: w.add_uint16("split.count", 3), "is one of 3 parts; merge them"),
}


@pytest.mark.filterwarnings("ignore:Duplicated key name")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_does_not_fit_is_an_error_naming_why(tmp_path, mesh, wrong):
    edit, message = WRONG[wrong]
    gguf_models.write(tmp_path / "m.gguf", "llama_tied", edit=edit)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / "m.gguf"), mesh)


DAMAGE = {
    "data cut": (lambda data: data[:-1], "is truncated"),
    "header cut": (lambda data: data[:200], "is truncated"),
    "another format": (lambda data: b"PK" + data[2:], "does not begin with 'GGUF'"),
    "version": (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "GGUF version 1; allowed: 2, 3"),
    "big-endian": (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "GGUF version 50331648"),
    "huge string": (
        lambda d: d[:24] + struct.pack("<Q", 2**60) + d[32:],
        "claims a header of 1152921504606847008 bytes",  # 2**60 + 32
    ),
    "not UTF-8": (lambda d: d[:32] + b"\xff" + d[33:], "text that is not UTF-8"),
    "value type": (
        # 24 bytes of counts, then the first key "general.architecture" and its type
        lambda d: d[:52] + struct.pack("<I", 99) + d[56:],
        "metadata of unknown type 99",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_an_error_that_says_what_is_wrong(tmp_path, damage):
    path = tmp_path / "m.gguf"
    gguf_models.write(path, "llama_tied")
    change, message = DAMAGE[damage]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        gguf.read(store.open(str(tmp_path)), "m.gguf")


def test_a_missing_file_or_package_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"there is no file .*m\.gguf"):
        load_architecture(str(tmp_path / "m.gguf"))
    gguf_models.write(tmp_path / "m.gguf", "llama_tied")
    gguf._block.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"install `bagrpo\[gguf\]`"):
        load_architecture(str(tmp_path / "m.gguf"))
