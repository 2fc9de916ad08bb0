"""The decoder: token ids in, hidden states out, for all families, with or without a cache.

Training, prefill and decode are the same code. A query sees the keys whose positions allow it;
the keys are those of the tokens given, or, with a cache, those in the cache after these tokens'
own have been written to it. Positions are explicit and padding has position -1, so it makes no
difference where in a row the tokens stand.

Training scans over stacked layers. Where keys and values are kept, the layers are unrolled: a scan
would copy each layer's weights out of the stack, and its cache in and out, for every token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from bagrpo import sharding
from bagrpo.models import flash, rope
from bagrpo.models.attention import attend, visible
from bagrpo.models.experts import ACTIVATIONS, mixture
from bagrpo.models.family import Architecture
from bagrpo.models.params import Params, specs
from bagrpo.sharding import ROWS, constrain, gather


@dataclasses.dataclass(frozen=True)
class Compute:
    """How, not what: nothing here changes a result beyond rounding."""

    dtype: str = "float32"
    """Of activations and matrix products."""
    remat: Literal["none", "full", "dots"] = "none"
    """What the backward pass recomputes: nothing, each layer, or all but its matrix products."""
    logit_tokens: int = 1024
    """Tokens of a device whose logits exist at once."""
    share_prompt: int = 1
    """Consecutive rows of a batch whose prompt is read once."""
    attention: Literal["xla", "splash"] = "xla"
    """Plain products, or JAX's kernels for TPU wherever a token sees all before it in its row."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of earlier tokens. S cache positions are slots in no particular order.

    The axes stand as the products of attention read them: with any other order a decode step on
    CPU would spend ten times as long on transposed copies as on the products.
    """

    k_BKHS: tuple[jax.Array, ...]
    """One for each layer."""
    v_BKSH: tuple[jax.Array, ...]
    """One for each layer."""
    position_BS: jax.Array
    """int32 position of the token in each slot, -1 where the slot is empty."""


def empty_cache(arch: Architecture, rows: int, slots: int, dtype: str = "float32") -> Cache:
    """A cache of `rows` x `slots` empty slots."""
    K, H = arch.kv_heads, arch.head_dim
    return Cache(
        tuple(jnp.zeros((rows, K, H, slots), dtype) for _ in range(arch.layers)),
        tuple(jnp.zeros((rows, K, slots, H), dtype) for _ in range(arch.layers)),
        jnp.full((rows, slots), -1, jnp.int32),
    )


def forward(  # noqa: PLR0913 - the model's whole interface, in one place
    params: Params,
    arch: Architecture,
    tokens_BT: jax.Array,
    position_BT: jax.Array,
    *,
    compute: Compute,
    cache: Cache | None = None,
    slot_BT: jax.Array | None = None,
    keep: bool = False,
    branch_BT: jax.Array | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Hidden states after the last norm.

    Args:
        params: as `models.params` declares them, or with `blocks` as a tuple of one dict a layer.
        arch: the architecture they belong to.
        tokens_BT: int32 ids; where the position is -1 they may be anything.
        position_BT: int32 position of each token in its text, -1 for padding.
        compute: how.
        cache: what came before, or None.
        slot_BT: with a cache, int32 slot that each token is written to; tokens whose slot lies
            outside of the cache are not written.
        keep: without a cache, return one of these tokens, in which token t has slot t.
        branch_BT: without a cache, int32: a token sees those of branch 0 and of its own. So a row
            can hold several continuations of one prompt.

    Returns:
        (B, T, D) in the compute dtype, and the cache with these tokens in it (None if there was
        none and none is to be kept).
    """
    return Decoder(arch, params)(
        tokens_BT,
        position_BT,
        compute=compute,
        cache=cache,
        slot_BT=slot_BT,
        keep=keep,
        branch_BT=branch_BT,
    )


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x` (B, T, ...) times a weight, over all axes after T, as a product of two matrices.

    As an einsum over B and T it would be the same, but XLA on CPU would transpose activations for
    the weight's gradient, which takes half as long again.

    Args:
        x: its axes after the first two are the weight's first ones.
        weight: the axes it has besides become those of the result after B and T.
    """
    B, T, *contracted = x.shape
    width, out = math.prod(contracted), weight.shape[len(contracted) :]
    return (x.reshape(B * T, width) @ weight.reshape(width, -1)).reshape(B, T, *out)


def logits(params: Params, arch: Architecture, hidden_BTD: jax.Array) -> jax.Array:
    """float32 logits (B, T, V) of hidden states (B, T, D), soft cap included."""
    name, axes = ("embed", "VD") if arch.tied else ("head", "DV")
    head = params[name].astype(hidden_BTD.dtype)
    B, T, D = hidden_BTD.shape
    out_MV = jnp.einsum(
        f"MD,{axes}->MV", hidden_BTD.reshape(B * T, D), head, preferred_element_type=jnp.float32
    )
    out = out_MV.reshape(B, T, -1)
    if arch.final_softcap is not None:
        cap = jnp.float32(arch.final_softcap)
        out = cap * jnp.tanh(out / cap)
    return out


class Decoder(nnx.Module):
    """The whole model around given parameters: embedding, the layers, last norm."""

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
        keep: bool = False,
        branch_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """See `forward`."""
        arch = self.arch
        embed_VD = self.embed[...]
        if isinstance(self.blocks, dict):  # as the trainer lays parameters out
            # Each device looks its part of all embeddings up: the table itself never moves.
            found_BTD = constrain(embed_VD[constrain(tokens_BT, "data")], "data", None, "fsdp")
        else:
            found_BTD = embed_VD[tokens_BT]
        x_BTD = constrain(found_BTD.astype(compute.dtype), ROWS)
        if arch.embed_scale:
            x_BTD = x_BTD * jnp.asarray(math.sqrt(arch.embed), x_BTD.dtype)
        cos, sin = rope.rotations(arch.ropes, arch.head_dim, position_BT)
        k_position_BS = position_BT
        if cache is not None:
            k_position_BS = _written(cache.position_BS, slot_BT, position_BT)
        looking = _Looking(arch, compute, position_BT, k_position_BS, branch_BT, cache is not None)

        def layer(x_BTD, scanned, kv=None):
            weights, rope_index, window = scanned
            block = Block(arch, compute, weights, looking.attention(window))
            x_BTD, kv = block(
                x_BTD, cos[rope_index], sin[rope_index], kv=kv, slot_BT=slot_BT, keep=keep
            )
            return constrain(x_BTD, ROWS), kv

        def apart(x_BTD, scanned):
            x_BTD, _ = layer(sharding.together(x_BTD), scanned)
            return sharding.apart(x_BTD), None

        weights = jax.tree.map(
            lambda param: param[...], self.blocks, is_leaf=lambda x: isinstance(x, nnx.Param)
        )
        if cache is None and not keep and isinstance(weights, dict):
            rope_L = jnp.array(arch.layer_ropes, jnp.int32)
            window_L = jnp.array(arch.windows, jnp.int32)
            x_BTD, _ = jax.lax.scan(
                _rematerialized(apart, compute.remat),
                sharding.apart(x_BTD),
                (weights, rope_L, window_L),
            )
            return _norm(sharding.together(x_BTD), self.norm[...], arch), None

        keys, values = [], []
        for index in range(arch.layers):
            scanned = _at(weights, index), arch.layer_ropes[index], arch.windows[index]
            kv = None if cache is None else (cache.k_BKHS[index], cache.v_BKSH[index])
            x_BTD, kv = layer(x_BTD, scanned, kv)
            if kv is not None:
                keys.append(kv[0])
                values.append(kv[1])
        if keys:
            cache = Cache(tuple(keys), tuple(values), k_position_BS)
        return _norm(x_BTD, self.norm[...], arch), cache


@dataclasses.dataclass(frozen=True)
class _Looking:
    """Which keys the tokens of a call see, and what computes attention over them."""

    arch: Architecture
    compute: Compute
    position_BT: jax.Array
    k_position_BS: jax.Array
    branch_BT: jax.Array | None
    cached: bool

    def attention(self, window: jax.Array | int) -> Callable[..., jax.Array]:
        """That of a layer with such a window, of q (B, T, N, H), k and v."""
        arch = self.arch
        scores = {"scale": arch.attn_scale, "softcap": arch.attn_softcap}
        # Rows are in order, so a token sees all before it in its row unless something says less.
        fits_windows = self.position_BT.shape[1] <= min(arch.windows)
        sees_all = fits_windows and not self.cached and self.branch_BT is None
        if self.compute.attention == "splash" and sees_all:
            return functools.partial(flash.attend, real_BT=self.position_BT >= 0, **scores)
        visible_BTS = visible(self.position_BT, self.k_position_BS, window)
        if self.branch_BT is not None:
            q, k = self.branch_BT[:, :, None], self.branch_BT[:, None]
            visible_BTS &= (k == 0) | (k == q)
        return functools.partial(attend, visible_BTS=visible_BTS, **scores)


class Block(nnx.Module):
    """One layer: attention and a gated feed-forward, or a mixture of them, each on a residual."""

    def __init__(
        self,
        arch: Architecture,
        compute: Compute,
        weights: Params,
        attend: Callable[..., jax.Array],
    ):
        """A layer of these weights.

        Args:
            arch: the architecture they belong to.
            compute: how.
            weights: of this layer.
            attend: attention of q (B, T, N, H) over k and v, which are (B, T, K, H) or as `axes`
                says.
        """
        self.arch = arch
        self.compute = compute
        self.attend = attend
        self.meanings = nnx.static(
            {name: spec.axes[1:] for name, spec in specs(arch)["blocks"].items()}
        )
        self.weights = nnx.data(jax.tree.map(nnx.Param, weights))

    def __call__(self, x_BTD, cos, sin, *, kv, slot_BT, keep):
        """The layer's output, and its keys and values if there is a cache or one is to be kept.

        Args:
            x_BTD: the residual stream.
            cos: (B, T, 1, H/2), with `sin` the rotation at each position.
            sin: see `cos`.
            kv: the cache's keys (B, K, H, S) and values (B, K, S, H) of this layer, or None.
            slot_BT: where in the cache the new ones go.
            keep: return the new ones in that form if there is no cache.
        """
        arch = self.arch
        normed_BTD = self._norm("attn_norm", x_BTD)
        out_BTD, kv = self.attention(normed_BTD, cos, sin, kv, slot_BT, keep)
        if arch.post_norms:
            out_BTD = self._norm("post_attn_norm", out_BTD)
        x_BTD = x_BTD + out_BTD
        out_BTD = self.feed_forward(self._norm("mlp_norm", x_BTD))
        if arch.post_norms:
            out_BTD = self._norm("post_mlp_norm", out_BTD)
        return x_BTD + out_BTD, kv

    def attention(self, x_BTD, cos, sin, kv, slot_BT, keep):
        """Self-attention over the tokens given, or over the cache."""
        arch = self.arch
        q_BTNH = project(x_BTD, self._weight("q"))
        k_BTKH = project(x_BTD, self._weight("k"))
        v_BTKH = project(x_BTD, self._weight("v"))
        if arch.qkv_bias:
            q_BTNH = q_BTNH + self._weight("q_bias")[None, None]
            k_BTKH = k_BTKH + self._weight("k_bias")[None, None]
            v_BTKH = v_BTKH + self._weight("v_bias")[None, None]
        if arch.qk_norm:
            q_BTNH = self._norm("q_norm", q_BTNH)
            k_BTKH = self._norm("k_norm", k_BTKH)
        q_BTNH, k_BTKH = rope.rotate(q_BTNH, cos, sin), rope.rotate(k_BTKH, cos, sin)
        if kv is None:
            out_BTNH = self.attend(q_BTNH, k_BTKH, v_BTKH)
            if keep:
                kv = jnp.einsum("BTKH->BKHT", k_BTKH), jnp.einsum("BTKH->BKTH", v_BTKH)
        else:
            kv = _written(kv[0], slot_BT, k_BTKH, axis=3), _written(kv[1], slot_BT, v_BTKH, axis=2)
            k_BKHS, v_BKSH = (x.astype(x_BTD.dtype) for x in kv)
            out_BTNH = self.attend(q_BTNH, k_BKHS, v_BKSH, axes=("BKHS", "BKSH"))
        return project(out_BTNH, self._weight("o")), kv

    def feed_forward(self, x_BTD):
        """The gated feed-forward, or the mixture of experts."""
        gate, up, down = self._weight("gate"), self._weight("up"), self._weight("down")
        if self.arch.experts:
            return mixture(self.arch, x_BTD, self._weight("router"), gate, up, down)
        gate_BTF, up_BTF = project(x_BTD, gate), project(x_BTD, up)
        return project(ACTIVATIONS[self.arch.activation](gate_BTF) * up_BTF, down)

    def _weight(self, name: str) -> jax.Array:
        weight = self.weights[name][...].astype(self.compute.dtype)
        return gather(weight, self.meanings[name])

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


def _at(weights, index: int):
    """The weights of one layer, of stacked or of separate ones."""
    if isinstance(weights, dict):
        return jax.tree.map(lambda stacked: stacked[index], weights)
    return weights[index]


def _written(
    cache: jax.Array, slot_BT: jax.Array | None, new: jax.Array, *, axis: int = 1
) -> jax.Array:
    """The cache with each row's new entries in their slots; a slot outside is not written.

    Args:
        cache: (B, ...), its slots on `axis`.
        slot_BT: int32.
        new: (B, T, ...), the axes after T in the order of the cache's others.
        axis: at least 1.
    """
    if slot_BT is None:
        raise ValueError("a cache needs slot_BT, the slot of each token")
    row_B1 = jnp.arange(cache.shape[0])[:, None]
    slot_BT = jnp.where(slot_BT < 0, cache.shape[axis], slot_BT)  # -1 would be the last slot
    index = (row_B1, *[slice(None)] * (axis - 1), slot_BT)
    return cache.at[index].set(new.astype(cache.dtype), mode="drop")


def _rematerialized(layer, remat: str):
    if remat == "none":
        return layer
    return jax.checkpoint(layer, prevent_cse=False, policy=_POLICIES[remat])


_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(flash.OUTPUT),
    ),
}
