"""Model families as data: a Hugging Face `config.json` in, an `Architecture` out.

All families are one decoder that differs in a handful of switches, so a family is a function from
its configuration's attributes to those switches. Both spellings of the rotary settings are read:
`rope_theta` with `rope_scaling`, and `rope_parameters`. An attribute that nobody here has heard of
might change the mathematics, so it is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

FULL = 2**30
"""Window of a layer that attends to everything before it, in tokens."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: a base and the way it is stretched to longer contexts."""

    base: float
    kind: str = "default"
    """`default`, `linear`, `llama3` or `yarn` (arXiv:2309.00071)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    original_positions: int = 0
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Everything that decides which function of its parameters a decoder is."""

    family: str
    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffw: int
    norm_eps: float
    tied: bool
    activation: str
    """`silu` or `gelu_pytorch_tanh`, of the gate."""
    attn_scale: float
    """Factor on query-key products."""
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]
    """Index into `ropes` for each layer."""
    windows: tuple[int, ...]
    """Tokens that each layer attends to, itself included; `FULL` for all."""
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    """Also normalise each sublayer's output, as Gemma 2 and 3 do."""
    unit_norms: bool = False
    """Norm weights are stored as their difference from 1, as Gemma does."""
    embed_scale: bool = False
    """Multiply embeddings by sqrt(embed)."""
    attn_softcap: float | None = None
    final_softcap: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = False
    """Renormalise the chosen experts' probabilities to sum to 1."""
    eos_ids: tuple[int, ...] = ()
    max_positions: int = 0


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a Hugging Face `config.json` describes.

    Args:
        config: the parsed file.

    Raises:
        ValueError: for an unknown family, an attribute nobody has heard of, a missing one, or a
            known one with a value that this decoder does not compute.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"unknown model_type {family!r} in config.json; bagrpo computes {', '.join(FAMILIES)}"
        )
    attributes = _Attributes(config)
    built = FAMILIES[family](attributes)
    unread = sorted(set(config) - attributes.read - _WITHOUT_EFFECT)
    if unread:
        raise ValueError(
            f"unknown attribute {unread[0]!r} = {config[unread[0]]!r} in config.json of model_type "
            f"{family!r}; it may change what the model computes, so remove it only if you know it "
            "does not"
        )
    if built.heads % built.kv_heads:
        raise ValueError(
            f"num_attention_heads {built.heads} is not a multiple of num_key_value_heads "
            f"{built.kv_heads} in config.json"
        )
    return built


class _Attributes:
    """A config.json that remembers which of its attributes were read."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.read: set[str] = {"model_type"}

    def __call__(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        value = self.config.get(name)
        return default if value is None else value

    def need(self, *names: str) -> Any:
        """The first of these spellings that is there."""
        self.read.update(names)
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        raise ValueError(f"config.json has no {names[0]!r}; it is needed to build the model")

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse values that the decoder does not compute."""
        value = self(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"attribute {name!r} = {value!r} in config.json is not supported; "
                f"allowed: {', '.join(map(repr, allowed))}"
            )


def _common(a: _Attributes, layer_type: str = "") -> dict[str, Any]:
    heads, embed = a.need("num_attention_heads"), a.need("hidden_size")
    head_dim = a("head_dim", embed // heads)
    eos = a("eos_token_id", ())
    layers = a.need("num_hidden_layers")
    a.only("hidden_act", "silu", "gelu_pytorch_tanh")
    a.only("use_mrope", False)
    a.only("rope_interleaved", False)
    return {
        "family": a.config["model_type"],
        "vocab": a.need("vocab_size"),
        "embed": embed,
        "layers": layers,
        "heads": heads,
        "kv_heads": a("num_key_value_heads", heads),
        "head_dim": head_dim,
        "ffw": a.need("intermediate_size"),
        "norm_eps": a.need("rms_norm_eps"),
        "tied": a("tie_word_embeddings", False),
        "activation": a("hidden_act", "silu"),
        "attn_scale": head_dim**-0.5,
        "ropes": (_rope(a, layer_type),),
        "layer_ropes": (0,) * layers,
        "windows": (FULL,) * layers,
        "eos_ids": tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        "max_positions": a("max_position_embeddings", 0),
    }


def _llama(a: _Attributes) -> Architecture:
    a.only("attention_bias", False)
    a.only("layer_types", ["full_attention"] * a.need("num_hidden_layers"))
    a.only("mlp_bias", False)
    return Architecture(**_common(a))


def _mistral(a: _Attributes) -> Architecture:
    common = _common(a)
    common["windows"] = (a("sliding_window") or FULL,) * common["layers"]
    return Architecture(**common)


def _qwen2(a: _Attributes) -> Architecture:
    return Architecture(**_qwen_windows(a, _common(a)), qkv_bias=True)


def _qwen3(a: _Attributes) -> Architecture:
    a.only("attention_bias", False)
    return Architecture(**_qwen_windows(a, _common(a)), qk_norm=True)


def _qwen3_moe(a: _Attributes) -> Architecture:
    a.only("attention_bias", False)
    a.only("mlp_only_layers", [])
    a.only("decoder_sparse_step", 1)
    common = _qwen_windows(a, _common(a))
    common["ffw"] = a.need("moe_intermediate_size")  # intermediate_size is of dense layers only
    return Architecture(
        **common,
        qk_norm=True,
        experts=a.need("num_experts", "num_local_experts"),
        experts_per_token=a.need("num_experts_per_tok"),
        norm_topk=a("norm_topk_prob", False),
    )


def _gemma2(a: _Attributes) -> Architecture:
    common = _gemma(a)
    common["windows"] = _windows(a, common["layers"], pattern=2)
    return Architecture(
        **common,
        attn_softcap=a("attn_logit_softcapping"),
        final_softcap=a("final_logit_softcapping"),
    )


def _gemma3(a: _Attributes) -> Architecture:
    common = _gemma(a, "full_attention")
    pattern = a("sliding_window_pattern", a("_sliding_window_pattern", 6))
    windows = _windows(a, common["layers"], pattern=pattern)
    common["windows"] = windows
    common["ropes"] += (_local_rope(a),)
    common["layer_ropes"] = tuple(int(w != FULL) for w in windows)
    return Architecture(
        **common,
        qk_norm=True,
        attn_softcap=a("attn_logit_softcapping"),
        final_softcap=a("final_logit_softcapping"),
    )


def _gemma(a: _Attributes, layer_type: str = "") -> dict[str, Any]:
    a.only("attention_bias", False)
    a.only("use_bidirectional_attention", False)
    common = _common(a, layer_type)
    common["activation"] = a("hidden_activation", "gelu_pytorch_tanh")
    a.only("hidden_activation", "gelu_pytorch_tanh", "silu")
    common["tied"] = a("tie_word_embeddings", True)
    common["attn_scale"] = a.need("query_pre_attn_scalar") ** -0.5
    return common | {"post_norms": True, "unit_norms": True, "embed_scale": True}


def _qwen_windows(a: _Attributes, common: dict[str, Any]) -> dict[str, Any]:
    """Qwen's windows are switched by `use_sliding_window` and start at `max_window_layers`."""
    layers = common["layers"]
    window, first = a("sliding_window"), a("max_window_layers", layers)
    types = a("layer_types") or [
        "full_attention" if i < first else "sliding_attention" for i in range(layers)
    ]
    if a("use_sliding_window", False) and window:
        common["windows"] = _typed_windows(types, window, layers)
    return common


def _windows(a: _Attributes, layers: int, *, pattern: int) -> tuple[int, ...]:
    """Every `pattern`-th layer is full, the others slide, unless `layer_types` says it outright."""
    types = a("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)
    ]
    return _typed_windows(types, a.need("sliding_window"), layers)


def _typed_windows(types: list[str], window: int, layers: int) -> tuple[int, ...]:
    if len(types) != layers:
        raise ValueError(f"layer_types in config.json names {len(types)} layers of {layers}")
    known = {"full_attention": FULL, "sliding_attention": window}
    for kind in types:
        if kind not in known:
            raise ValueError(f"layer type {kind!r} in config.json; allowed: {', '.join(known)}")
    return tuple(known[kind] for kind in types)


def _rope(a: _Attributes, layer_type: str) -> Rope:
    """The rotary settings in either spelling, those of one layer type if they differ by it."""
    new = a("rope_parameters")
    scaling = dict(a("rope_scaling") or {})
    base = a("rope_theta", 10_000.0)
    if new is not None:
        scaling = dict(new.get(layer_type, new))
        base = scaling.pop("rope_theta", base)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if kind not in _ROPE_KEYS:
        raise ValueError(
            f"rope type {kind!r} in config.json is not supported; allowed: {', '.join(_ROPE_KEYS)}"
        )
    names = _ROPE_KEYS[kind]
    original = scaling.pop("original_max_position_embeddings", a("max_position_embeddings", 0))
    for name, value in scaling.items():
        if name not in names and value is not None:
            raise ValueError(
                f"unknown rope setting {name!r} = {value!r} for rope type {kind!r} in config.json; "
                f"allowed: {', '.join(names) or 'none'}"
            )
    if kind != "default" and "factor" not in scaling:
        raise ValueError(f"rope type {kind!r} in config.json has no 'factor'")
    known = {name: value for name, value in scaling.items() if value is not None}
    if kind in ("llama3", "yarn"):
        known["original_positions"] = original
    return Rope(base=float(base), kind=kind, **known)


def _local_rope(a: _Attributes) -> Rope:
    """Gemma 3's sliding layers have a base of their own and are never stretched."""
    if a("rope_parameters") is not None:
        return _rope(a, "sliding_attention")
    return Rope(base=float(a("rope_local_base_freq", 10_000.0)))


_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}

_WITHOUT_EFFECT = {
    *("architectures", "attention_dropout", "auto_map", "bos_token_id", "cache_implementation"),
    *("dtype", "initializer_range", "is_llama_config", "name_or_path", "_name_or_path"),
    *("output_router_logits", "pad_token_id", "pretraining_tp", "router_aux_loss_coef"),
    *("torch_dtype", "transformers.js_config", "transformers_version", "unsloth_fixed"),
    *("unsloth_version", "use_cache"),
}
"""Attributes that say nothing about the forward pass. Dropout does only in pretraining: here old
and new log-probs must be of the same function. The router's auxiliary loss is not a GRPO term."""

FAMILIES: dict[str, Callable[[_Attributes], Architecture]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
