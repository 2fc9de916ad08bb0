"""The decoder: token ids in, hidden states out, for all families, with or without a cache.

Training, prefill and decode are the same code. A query sees the keys whose positions allow it;
the keys are those of the tokens given, or, with a cache, those in the cache after these tokens'
own have been written to it. Positions are explicit and padding has position -1, so it makes no
difference where in a row the tokens stand.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from bagrpo.models import rope
from bagrpo.models.attention import attend, visible
from bagrpo.models.experts import ACTIVATIONS, mixture
from bagrpo.models.family import Architecture
from bagrpo.models.params import Params
from bagrpo.sharding import ROWS, constrain


@dataclasses.dataclass(frozen=True)
class Compute:
    """How, not what: nothing here changes a result beyond rounding."""

    dtype: str = "float32"
    """Of activations and matrix products."""
    remat: Literal["none", "full", "dots"] = "none"
    """What the backward pass recomputes: nothing, each layer, or all but its matrix products."""
    logit_tokens: int = 1024
    """Tokens of a device whose logits exist at once."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of earlier tokens. S cache positions are slots in no particular order."""

    k_LBSKH: jax.Array
    v_LBSKH: jax.Array
    position_BS: jax.Array
    """int32 position of the token in each slot, -1 where the slot is empty."""


def empty_cache(arch: Architecture, rows: int, slots: int, dtype: str = "float32") -> Cache:
    """A cache of `rows` x `slots` empty slots."""
    shape = (arch.layers, rows, slots, arch.kv_heads, arch.head_dim)
    return Cache(
        jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.full((rows, slots), -1, jnp.int32)
    )


def forward(
    params: Params,
    arch: Architecture,
    tokens_BT: jax.Array,
    position_BT: jax.Array,
    *,
    compute: Compute,
    cache: Cache | None = None,
    slot_BT: jax.Array | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Hidden states after the last norm.

    Args:
        params: as `models.params` declares them.
        arch: the architecture they belong to.
        tokens_BT: int32 ids; where the position is -1 they may be anything.
        position_BT: int32 position of each token in its text, -1 for padding.
        compute: how.
        cache: what came before, or None.
        slot_BT: with a cache, int32 slot that each token is written to; tokens whose slot lies
            outside of the cache are not written.

    Returns:
        (B, T, D) in the compute dtype, and the cache with these tokens in it (None without one).
    """
    return Decoder(arch, params)(
        tokens_BT, position_BT, compute=compute, cache=cache, slot_BT=slot_BT
    )


def logits(params: Params, arch: Architecture, hidden: jax.Array) -> jax.Array:
    """float32 logits (..., V) of hidden states (..., D), soft cap included."""
    if arch.tied:
        out = jnp.einsum(
            "...D,VD->...V",
            hidden,
            params["embed"].astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
    else:
        out = jnp.einsum(
            "...D,DV->...V",
            hidden,
            params["head"].astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
    if arch.final_softcap is not None:
        cap = jnp.float32(arch.final_softcap)
        out = cap * jnp.tanh(out / cap)
    return out


class Decoder(nnx.Module):
    """The whole model around given parameters: embedding, a scan over its layers, last norm."""

    def __init__(self, arch: Architecture, params: Params):
        self.arch = arch
        self.embed = nnx.Param(params["embed"])
        self.blocks = nnx.data(jax.tree.map(nnx.Param, params["blocks"]))
        self.norm = nnx.Param(params["norm"])

    def __call__(
        self,
        tokens_BT: jax.Array,
        position_BT: jax.Array,
        *,
        compute: Compute,
        cache: Cache | None = None,
        slot_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """See `forward`."""
        arch = self.arch
        embed_VD = constrain(self.embed[...].astype(compute.dtype), "tensor")
        x_BTD = constrain(embed_VD[tokens_BT], ROWS)
        if arch.embed_scale:
            x_BTD = x_BTD * jnp.asarray(math.sqrt(arch.embed), x_BTD.dtype)
        cos, sin = rope.rotations(arch.ropes, arch.head_dim, position_BT)
        k_position_BS = position_BT
        if cache is not None:
            k_position_BS = _write(cache.position_BS, slot_BT, position_BT)

        def layer(x_BTD, scanned):
            weights, rope_index, window, kv = scanned
            block = Block(arch, compute, weights)
            x_BTD, kv = block(
                x_BTD,
                cos[rope_index],
                sin[rope_index],
                visible_BTS=visible(position_BT, k_position_BS, window),
                kv=kv,
                slot_BT=slot_BT,
            )
            return constrain(x_BTD, ROWS), kv

        weights = {name: param[...] for name, param in self.blocks.items()}
        rope_L = jnp.array(arch.layer_ropes, jnp.int32)
        window_L = jnp.array(arch.windows, jnp.int32)
        kv_L = None if cache is None else (cache.k_LBSKH, cache.v_LBSKH)
        x_BTD, kv_L = jax.lax.scan(
            _rematerialized(layer, compute.remat), x_BTD, (weights, rope_L, window_L, kv_L)
        )
        if kv_L is not None:
            cache = Cache(kv_L[0], kv_L[1], k_position_BS)
        return _norm(x_BTD, self.norm[...], arch), cache


class Block(nnx.Module):
    """One layer: attention and a gated feed-forward, or a mixture of them, each on a residual."""

    def __init__(self, arch: Architecture, compute: Compute, weights: Params):
        self.arch = arch
        self.compute = compute
        self.weights = nnx.data(jax.tree.map(nnx.Param, weights))

    def __call__(self, x_BTD, cos, sin, *, visible_BTS, kv, slot_BT):
        """The layer's output, and its keys and values (None without a cache).

        Args:
            x_BTD: the residual stream.
            cos: (B, T, 1, H/2), with `sin` the rotation at each position.
            sin: see `cos`.
            visible_BTS: which keys each token sees.
            kv: the cache's keys and values (B, S, K, H) of this layer, or None.
            slot_BT: where in the cache the new ones go.
        """
        arch = self.arch
        normed_BTD = self._norm("attn_norm", x_BTD)
        out_BTD, kv = self.attention(normed_BTD, cos, sin, visible_BTS, kv, slot_BT)
        if arch.post_norms:
            out_BTD = self._norm("post_attn_norm", out_BTD)
        x_BTD = x_BTD + out_BTD
        out_BTD = self.feed_forward(self._norm("mlp_norm", x_BTD))
        if arch.post_norms:
            out_BTD = self._norm("post_mlp_norm", out_BTD)
        return x_BTD + out_BTD, kv

    def attention(self, x_BTD, cos, sin, visible_BTS, kv, slot_BT):
        """Self-attention over the tokens given, or over the cache."""
        arch = self.arch
        q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, self._weight("q"))
        k_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, self._weight("k"))
        v_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, self._weight("v"))
        if arch.qkv_bias:
            q_BTNH = q_BTNH + self._weight("q_bias")[None, None]
            k_BTKH = k_BTKH + self._weight("k_bias")[None, None]
            v_BTKH = v_BTKH + self._weight("v_bias")[None, None]
        if arch.qk_norm:
            q_BTNH = self._norm("q_norm", q_BTNH)
            k_BTKH = self._norm("k_norm", k_BTKH)
        q_BTNH, k_BTKH = rope.rotate(q_BTNH, cos, sin), rope.rotate(k_BTKH, cos, sin)
        if kv is None:
            k_BSKH, v_BSKH = k_BTKH, v_BTKH
        else:
            kv = _write(kv[0], slot_BT, k_BTKH), _write(kv[1], slot_BT, v_BTKH)
            k_BSKH, v_BSKH = (x.astype(x_BTD.dtype) for x in kv)
        out_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            visible_BTS=visible_BTS,
            scale=arch.attn_scale,
            softcap=arch.attn_softcap,
        )
        return jnp.einsum("BTNH,NHD->BTD", out_BTNH, self._weight("o")), kv

    def feed_forward(self, x_BTD):
        """The gated feed-forward, or the mixture of experts."""
        gate, up, down = self._weight("gate"), self._weight("up"), self._weight("down")
        if self.arch.experts:
            return mixture(self.arch, x_BTD, self._weight("router"), gate, up, down)
        gate_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, gate)
        up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, up)
        hidden_BTF = ACTIVATIONS[self.arch.activation](gate_BTF) * up_BTF
        return jnp.einsum("BTF,FD->BTD", hidden_BTF, down)

    def _weight(self, name: str) -> jax.Array:
        return self.weights[name][...].astype(self.compute.dtype)

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        return _norm(x, self.weights[name][...], self.arch)


def _norm(x: jax.Array, weight: jax.Array, arch: Architecture) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    weight = weight.astype(jnp.float32)
    if arch.unit_norms:
        weight = weight + jnp.float32(1)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + jnp.float32(arch.norm_eps))
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    return (x32 * scale * weight).astype(x.dtype)


def _write(cache_BS: jax.Array, slot_BT: jax.Array | None, new_BT: jax.Array) -> jax.Array:
    """Put the new entries of each row into their slots; a slot outside is not written."""
    if slot_BT is None:
        raise ValueError("a cache needs slot_BT, the slot of each token")
    row_B1 = jnp.arange(cache_BS.shape[0])[:, None]
    slot_BT = jnp.where(slot_BT < 0, cache_BS.shape[1], slot_BT)  # -1 would be the last slot
    return cache_BS.at[row_B1, slot_BT].set(new_BT.astype(cache_BS.dtype), mode="drop")


def _rematerialized(layer, remat: str):
    if remat == "none":
        return layer
    return jax.checkpoint(layer, prevent_cse=False, policy=_POLICIES[remat])


_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
