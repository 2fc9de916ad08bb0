"""The golden models, read with numpy alone, and our parameters made of them by explicit formulas.

Nothing of bagrpo.weights is used here: it is what the tests compare it with.
"""

import json
import struct
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)]


def config(name):
    return json.loads((GOLDEN / name / "config.json").read_text())


def tensors(folder):
    """Names and arrays of all float32 safetensors files of a folder."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            assert entry["dtype"] == "F32"
            a, b = (start + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[a:b], np.float32).reshape(entry["shape"])
    return found


def write(path, arrays, edit=lambda header: None):
    """A safetensors file of float32 and float16 arrays; `edit` may damage its header."""
    kinds = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
    header, blob = {}, b""
    for name, array in arrays.items():
        offsets = [len(blob), len(blob) + array.nbytes]
        header[name] = {
            "dtype": kinds[array.dtype],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        blob += array.tobytes()
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)


def parameters(c, t):
    """Our flat parameters of a config and its tensors, each axis named by an einsum."""

    def stack(name, form, *shape):
        arrays = [t[f"model.layers.{i}.{name}"] for i in range(c["num_hidden_layers"])]
        return np.stack([np.einsum(form, a.reshape(shape or a.shape)) for a in arrays])

    ours = {
        "embed": t["model.embed_tokens.weight"],
        "norm": t["model.norm.weight"],
        **attention(c, stack),
        **norms(c, stack),
    }
    if not c["tie_word_embeddings"]:
        ours["head"] = np.einsum("vd->dv", t["lm_head.weight"])
    moe = c["model_type"] == "qwen3_moe"
    for name, form in (("gate", "fd->df"), ("up", "fd->df"), ("down", "df->fd")):
        weight = f"{name}_proj.weight"
        ours[f"blocks/{name}"] = (
            np.stack([stack(f"mlp.experts.{e}.{weight}", form) for e in range(8)], axis=1)
            if moe
            else stack(f"mlp.{weight}", form)
        )
    if moe:
        ours["blocks/router"] = stack("mlp.gate.weight", "ed->de")
    return ours


def attention(c, stack):
    heads, embed = c["num_attention_heads"], c["hidden_size"]
    head_dim = c.get("head_dim") or embed // heads
    ours = {"blocks/o": stack("self_attn.o_proj.weight", "dnh->nhd", embed, heads, head_dim)}
    for name, n in (("q", heads), ("k", c["num_key_value_heads"]), ("v", c["num_key_value_heads"])):
        weight = f"self_attn.{name}_proj.weight"
        ours[f"blocks/{name}"] = stack(weight, "nhd->dnh", n, head_dim, embed)
        if c["model_type"] == "qwen2":
            bias = f"self_attn.{name}_proj.bias"
            ours[f"blocks/{name}_bias"] = stack(bias, "nh->nh", n, head_dim)
    return ours


def norms(c, stack):
    files = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if c["model_type"] in ("gemma2", "gemma3_text"):
        files["mlp_norm"] = "pre_feedforward_layernorm"
        files["post_attn_norm"] = "post_attention_layernorm"
        files["post_mlp_norm"] = "post_feedforward_layernorm"
    if c["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
        files |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    return {f"blocks/{ours}": stack(f"{name}.weight", "d->d") for ours, name in files.items()}


def flat(params):
    """Our nested parameters by path, on the host."""
    inner = {f"blocks/{name}": array for name, array in params["blocks"].items()}
    outer = {name: array for name, array in params.items() if name != "blocks"}
    return {name: np.asarray(array) for name, array in {**outer, **inner}.items()}


def assert_same(params, expected):
    """Every parameter is there and equal to the last bit."""
    found = flat(params)
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
