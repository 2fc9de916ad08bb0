"""A GGUF file's metadata in the words of a Hugging Face config.json.

GGUF says less than config.json: what llama.cpp fixes in its code for a family is filled in here
with the same values. Metadata of the model that nobody here has heard of might change the
mathematics, so it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bagrpo.weights.store import Tensor

ROPE_FREQS = "rope_freqs.weight"
"""The tensor by which llama.cpp stretches Llama 3's rotary frequencies."""


def config(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], rope_freqs: np.ndarray | None
) -> dict[str, Any]:
    """The config.json that describes a GGUF file's model.

    Args:
        metadata: from `gguf.read`.
        tensors: from `gguf.read`.
        rope_freqs: the values of tensor `ROPE_FREQS` where there is one: [head_dim / 2].

    Raises:
        ValueError: for an unknown architecture, missing or unknown metadata.
    """
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        raise ValueError(
            f"unknown general.architecture {family!r} in the GGUF file; "
            f"allowed: {', '.join(FAMILIES)}"
        )
    m = _Metadata(metadata, family)
    built = _common(m, tensors) | FAMILIES[family](m)
    if rope_freqs is not None:
        built["rope_scaling"] = _llama3_scaling(built, rope_freqs)
    unread = sorted(k for k in metadata if k.startswith(family + ".") and k not in m.read)
    if unread:
        raise ValueError(
            f"unknown metadata {unread[0]!r} = {metadata[unread[0]]!r} in the GGUF file; it may "
            "change what the model computes"
        )
    return built


class _Metadata:
    """The part of the metadata under the family's name; remembers what was read."""

    def __init__(self, metadata: Mapping[str, Any], family: str):
        self.metadata, self.family = metadata, family
        self.read = {f"{family}.{name}" for name in _WITHOUT_EFFECT}

    def __call__(self, name: str, default: Any = None) -> Any:
        key = f"{self.family}.{name}"
        self.read.add(key)
        return self.metadata.get(key, default)

    def need(self, name: str) -> Any:
        value = self(name)
        if value is None:
            raise ValueError(
                f"the GGUF file has no metadata {self.family}.{name}; it is needed to build the "
                "model, convert it anew"
            )
        return value

    def need_one(self, name: str) -> int:
        """A number that some files give for each layer; here all layers are alike."""
        value = self.need(name)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ValueError(
                f"metadata {self.family}.{name} = {value} in the GGUF file differs between layers, "
                "which is not supported"
            )
        return values.pop()


def _common(m: _Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    heads, embed = m.need_one("attention.head_count"), m.need("embedding_length")
    head_dim = m("attention.key_length", embed // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if m(name, head_dim) != head_dim:
            raise ValueError(
                f"metadata {m.family}.{name} = {m(name)} in the GGUF file differs from the head "
                f"dimension {head_dim}, which is not supported"
            )
    if "token_embd.weight" not in tensors:
        raise ValueError("the GGUF file has no tensor 'token_embd.weight'; convert it anew")
    common = {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": embed,
        "num_hidden_layers": m.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": (
            m.need_one("attention.head_count_kv") if m("attention.head_count_kv") else heads
        ),
        "head_dim": head_dim,
        "intermediate_size": m.need_one("feed_forward_length"),
        "max_position_embeddings": m.need("context_length"),
        "rms_norm_eps": _decimal(m.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(m("rope.freq_base", 10_000.0)),
        "rope_scaling": _scaling(m),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32",
    }
    for kind in ("bos", "eos"):
        token = m.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if token is not None:
            common[f"{kind}_token_id"] = token
    turn = m.metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and turn != common.get("eos_token_id", turn):
        common["eos_token_id"] = [common["eos_token_id"], turn]  # chat models end a turn with it
    return common


def _decimal(value: float) -> float:
    """The decimal that float32 metadata stands for: 9.99999997e-07 is 1e-6."""
    return float(str(np.float32(value)))


def _scaling(m: _Metadata) -> dict[str, Any] | None:
    kind = m("rope.scaling.type", "none")
    factor, original = m("rope.scaling.factor"), m("rope.scaling.original_context_length")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ValueError(
        f"rope scaling {kind!r} in the GGUF file is not supported; allowed: none, linear, yarn"
    )


def _llama3_scaling(built: Mapping[str, Any], rope_freqs: np.ndarray) -> dict[str, Any]:
    """The llama3 rope scaling that llama.cpp turned into one divisor per frequency.

    The factor is the largest divisor. Llama 3's other numbers are 1, 4 and a power of two; any
    power that gives these divisors gives this model.
    """
    half = np.arange(0, built["head_dim"], 2) / built["head_dim"]
    wavelength = 2 * math.pi * built["rope_theta"] ** half
    factor = float(rope_freqs.max())
    for power in range(5, 21):
        original = 2**power
        smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), rope_freqs, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ValueError(
        f"tensor {ROPE_FREQS!r} in the GGUF file is not Llama 3's stretching of rotary "
        "frequencies with low_freq_factor 1 and high_freq_factor 4, and no other is supported"
    )


def _llama(m: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _qwen2(m: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen3(m: _Metadata) -> dict[str, Any]:
    return _qwen2(m) | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
    }


def _qwen3_moe(m: _Metadata) -> dict[str, Any]:
    return _qwen3(m) | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": m.need("expert_count"),
        "num_experts_per_tok": m.need("expert_used_count"),
        "moe_intermediate_size": m.need("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always renormalises
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(m: _Metadata) -> dict[str, Any]:
    return _gemma(m, pattern=2, large=46) | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": m("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": m("final_logit_softcapping", 30.0),
    }


def _gemma3(m: _Metadata) -> dict[str, Any]:
    return _gemma(m, pattern=6, large=62) | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": _decimal(m("rope.freq_base", 1e6)),
        "rope_local_base_freq": _decimal(m("rope.freq_base_swa", 10_000.0)),
        "attn_logit_softcapping": m("attn_logit_softcapping"),
        "final_logit_softcapping": m("final_logit_softcapping"),
    }


def _gemma(m: _Metadata, *, pattern: int, large: int) -> dict[str, Any]:
    """What both have in common; `large` is how many layers the 27B model has.

    The file does not say by what queries are scaled: as in llama.cpp it is the head dimension,
    but for the 27B models the embedding's share of each head.
    """
    layers, heads = m.need("block_count"), m.need_one("attention.head_count")
    share = m.need("embedding_length") // heads
    every = m("attention.sliding_window_pattern", pattern)
    slides = every if isinstance(every, list) else [(i + 1) % every != 0 for i in range(layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": m.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "query_pre_attn_scalar": share if layers == large else m("attention.key_length", share),
    }


_WITHOUT_EFFECT = ("vocab_size", "rope.scaling.finetuned")

FAMILIES: dict[str, Callable[[_Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
