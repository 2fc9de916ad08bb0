"""A mixture of experts without capacity: every token reaches its experts, none is dropped.

So a token's output depends on that token alone, and padding or the other rows can't change it.
On a mesh the experts are split over `tensor`; each device computes its own experts' share for the
tokens of its rows, which all devices of the `tensor` axis hold, and the shares are summed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bagrpo.models.family import Architecture
from bagrpo.sharding import ROWS


def mixture(
    arch: Architecture,
    x_BTD: jax.Array,
    router_DE: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> jax.Array:
    """Sum of each token's best experts, weighted by the router's probabilities (float32 softmax).

    Returns:
        (B, T, D) in the dtype of x.
    """
    mesh = jax.sharding.get_abstract_mesh()
    compute = functools.partial(_local, arch)
    if mesh.empty:
        return compute(x_BTD, router_DE, gate_EDF, up_EDF, down_EFD, first_expert=jnp.int32(0))

    def share(x, router, gate, up, down):
        first = jax.lax.axis_index("tensor") * gate.shape[0]
        return jax.lax.psum(compute(x, router, gate, up, down, first_expert=first), "tensor")

    rows, split, whole = PartitionSpec(ROWS), PartitionSpec("tensor"), PartitionSpec()
    sharded = jax.shard_map(
        share, in_specs=(rows, whole, split, split, split), out_specs=rows, check_vma=False
    )
    return sharded(x_BTD, router_DE, gate_EDF, up_EDF, down_EFD)


def _local(arch, x_BTD, router_DE, gate_EDF, up_EDF, down_EFD, *, first_expert):
    """The part of the sum that the given experts, numbered from `first_expert`, contribute."""
    B, T, D = x_BTD.shape
    here, chosen = gate_EDF.shape[0], arch.experts_per_token
    x_MD = x_BTD.reshape(B * T, D)
    logit_ME = jnp.einsum("MD,DE->ME", x_MD, router_DE, preferred_element_type=jnp.float32)
    share_MC, expert_MC = jax.lax.top_k(jax.nn.softmax(logit_ME, axis=-1), chosen)
    if arch.norm_topk:
        share_MC = share_MC / share_MC.sum(-1, keepdims=True)

    # One entry per (token, chosen expert), sorted by expert; those of other devices come last.
    local_C = expert_MC.reshape(-1) - first_expert
    local_C = jnp.where((local_C >= 0) & (local_C < here), local_C, here)
    order_C = jnp.argsort(local_C, stable=True)
    token_C = order_C // chosen
    sizes_E = jnp.bincount(local_C, length=here + 1)[:here].astype(jnp.int32)
    x_CD = x_MD[token_C]
    gate_CF = jax.lax.ragged_dot(x_CD, gate_EDF, sizes_E)
    up_CF = jax.lax.ragged_dot(x_CD, up_EDF, sizes_E)
    out_CD = jax.lax.ragged_dot(ACTIVATIONS[arch.activation](gate_CF) * up_CF, down_EFD, sizes_E)
    share_C1 = share_MC.reshape(-1)[order_C][:, None]
    # Entries beyond the groups hold nothing defined: select, don't multiply by 0.
    out_CD = jnp.where(
        (local_C[order_C] < here)[:, None], out_CD.astype(jnp.float32) * share_C1, jnp.float32(0)
    )
    out_MD = jax.ops.segment_sum(out_CD, token_C, num_segments=B * T)
    return out_MD.reshape(B, T, D).astype(x_BTD.dtype)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
