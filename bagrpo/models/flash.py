"""Causal attention by JAX's splash kernels for TPU: scores never leave the chip's fast memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from bagrpo.sharding import ROWS

LANES = 128
"""Tokens of the smallest tile."""

_LARGEST_BLOCK = 512

OUTPUT = "flash"
"""Name of what a backward pass needs of a forward pass, for rematerialisation policies."""


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    real_BT: jax.Array,
    scale: float,
    softcap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention of each token over those before it in its row and itself.

    On the mesh in use, heads may be split over `tensor`; where the key heads are fewer than its
    devices, each takes the one that its query heads share.

    Args:
        q_BTNH: queries; query heads N / K neighbours share a key head.
        k_BTKH: keys.
        v_BTKH: values.
        real_BT: bool, False for padding, wherever it stands; what padding gets is meaningless.
        scale: factor on the products of queries and keys.
        softcap: cap on the scores, `softcap * tanh(score / softcap)`, or None.
        interpret: run the kernel without a TPU, slowly.

    Returns:
        (B, T, N, H) in the dtype of the queries; scores and softmax are float32.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ways = 1 if mesh.empty else mesh.shape["tensor"]
    K, J = k_BTKH.shape[2], q_BTNH.shape[2] // k_BTKH.shape[2]
    split = K % ways == 0

    def local(q, k, v, real_BT):
        if not split:
            mine = jax.lax.axis_index("tensor") * q.shape[2] // J
            k, v = (jax.lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in (k, v))
        return _local(q, k, v, real_BT, scale, softcap, interpret)

    if mesh.empty:
        return local(q_BTNH, k_BTKH, v_BTKH, real_BT)
    heads = PartitionSpec(ROWS, None, "tensor")
    kv_heads = heads if split else PartitionSpec(ROWS)
    return jax.shard_map(
        local,
        in_specs=(heads, kv_heads, kv_heads, PartitionSpec(ROWS)),
        out_specs=heads,
        check_vma=False,
    )(q_BTNH, k_BTKH, v_BTKH, real_BT)


def _local(q_BTNH, k_BTKH, v_BTKH, real_BT, scale, softcap, interpret):
    """On one device."""
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    pad = ((0, 0), (0, -T % LANES))
    segment_BT = jnp.pad(real_BT.astype(jnp.int32), pad)
    q_BTNH = q_BTNH * jnp.asarray(scale, q_BTNH.dtype)
    q_BTNH, k_BTKH, v_BTKH = (jnp.pad(x, (*pad, (0, 0), (0, 0))) for x in (q_BTNH, k_BTKH, v_BTKH))
    width = T + -T % LANES
    kernel = splash.make_splash_mqa_single_device(
        mask=masks.MultiHeadMask([masks.CausalMask((width, width))] * (N // K)),
        block_sizes=_blocks(width),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=OUTPUT,
        interpret=interpret,
    )
    q_BKJTH = jnp.einsum("BTKJH->BKJTH", q_BTNH.reshape(B, width, K, N // K, H))
    k_BKTH, v_BKTH = (jnp.einsum("BTKH->BKTH", x) for x in (k_BTKH, v_BTKH))

    def row(q_KJTH, k_KTH, v_KTH, segment_T):
        ids = splash.SegmentIds(segment_T, segment_T)
        return jax.vmap(kernel, in_axes=(0, 0, 0, None))(q_KJTH, k_KTH, v_KTH, ids)

    with jax.numpy_rank_promotion("allow"):
        out_BKJTH = jax.vmap(row)(q_BKJTH, k_BKTH, v_BKTH, segment_BT)
    return jnp.einsum("BKJTH->BTKJH", out_BKJTH).reshape(B, width, N, H)[:, :T]


def _blocks(width: int) -> splash.BlockSizes:
    block = LANES
    while block < _LARGEST_BLOCK and width % (2 * block) == 0:
        block *= 2
    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,  # fused with the former, it would write a part for each block of keys
        block_kv_dq=block,
    )
