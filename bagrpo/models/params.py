"""A decoder's parameters: what there is, declared once, with shape, meaning of each axis and start.

Parameters are a plain nested dict. What all layers have is stacked on a leading axis:

    embed (V, D)                      norm (D)         head (D, V), absent when tied to embed
    blocks/attn_norm, mlp_norm, ...   (L, D)           blocks/q_norm, k_norm (L, H)
    blocks/q (L, D, N, H)             blocks/k, v (L, D, K, H)          blocks/o (L, N, H, D)
    blocks/gate, up (L, D, F)         blocks/down (L, F, D)
    with experts: blocks/router (L, D, E), gate, up (L, E, D, F), down (L, E, F, D)
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from bagrpo.models.family import Architecture

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One parameter: its shape, the meaning of each axis, and its standard deviation at the start.

    `axes` are keys of the tables in `bagrpo.sharding`. `std` 0 means a constant start, at `fill`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    std: float = 0.0
    fill: float = 0.0


def specs(arch: Architecture) -> dict[str, Any]:
    """The parameters of an architecture as a nested dict of `Spec`."""
    a, unit = arch, 0.0 if arch.unit_norms else 1.0
    layer = {
        "attn_norm": Spec((a.embed,), ("norm",), fill=unit),
        "mlp_norm": Spec((a.embed,), ("norm",), fill=unit),
        "q": _matrix((a.embed, a.heads, a.head_dim), ("embed", "heads", "head"), a.embed),
        "k": _matrix((a.embed, a.kv_heads, a.head_dim), ("embed", "kv_heads", "head"), a.embed),
        "v": _matrix((a.embed, a.kv_heads, a.head_dim), ("embed", "kv_heads", "head"), a.embed),
        "o": _matrix(
            (a.heads, a.head_dim, a.embed), ("heads", "head", "embed"), a.heads * a.head_dim
        ),
    }
    if a.qkv_bias:
        layer["q_bias"] = Spec((a.heads, a.head_dim), ("heads", "head"))
        layer["k_bias"] = Spec((a.kv_heads, a.head_dim), ("kv_heads", "head"))
        layer["v_bias"] = Spec((a.kv_heads, a.head_dim), ("kv_heads", "head"))
    if a.qk_norm:
        layer["q_norm"] = Spec((a.head_dim,), ("norm",), fill=unit)
        layer["k_norm"] = Spec((a.head_dim,), ("norm",), fill=unit)
    if a.post_norms:
        layer["post_attn_norm"] = Spec((a.embed,), ("norm",), fill=unit)
        layer["post_mlp_norm"] = Spec((a.embed,), ("norm",), fill=unit)
    expert: tuple[tuple[int, ...], tuple[str, ...]] = ((), ())
    wide = "ffw"
    if a.experts:
        expert, wide = ((a.experts,), ("experts",)), "expert_ffw"
        layer["router"] = _matrix((a.embed, a.experts), ("embed", "router"), a.embed)
    for name in ("gate", "up"):
        layer[name] = _matrix((*expert[0], a.embed, a.ffw), (*expert[1], "embed", wide), a.embed)
    layer["down"] = _matrix((*expert[0], a.ffw, a.embed), (*expert[1], wide, "embed"), a.ffw)

    tree: dict[str, Any] = {
        "embed": _matrix((a.vocab, a.embed), ("vocab", "embed"), a.embed),
        "blocks": {
            name: dataclasses.replace(
                spec, shape=(a.layers, *spec.shape), axes=("layers", *spec.axes)
            )
            for name, spec in layer.items()
        },
        "norm": Spec((a.embed,), ("norm",), fill=unit),
    }
    if not a.tied:
        tree["head"] = _matrix((a.embed, a.vocab), ("embed", "vocab"), a.embed)
    return tree


def _matrix(shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int) -> Spec:
    return Spec(shape, axes, std=1 / math.sqrt(fan_in))


def abstract(arch: Architecture, dtype: str = "float32") -> Params:
    """Shapes and dtype of every parameter, without any memory."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype)), specs(arch)
    )


def initialize(arch: Architecture, key: jax.Array, dtype: str = "float32") -> Params:
    """Random parameters: normal matrices of variance 1 / fan-in, unit norms, zero biases."""
    leaves, structure = jax.tree.flatten(specs(arch))
    keys = jax.random.split(key, len(leaves))

    def start(spec: Spec, key: jax.Array) -> jax.Array:
        if spec.std == 0:
            return jnp.full(spec.shape, spec.fill, dtype)
        noise = jax.random.normal(key, spec.shape, jnp.float32)
        return (noise * jnp.float32(spec.std)).astype(dtype)

    return jax.tree.unflatten(structure, map(start, leaves, keys))


def count(arch: Architecture) -> int:
    """Number of parameters."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs(arch)))
