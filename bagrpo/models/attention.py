"""Causal attention of some queries over keys that know their positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30
"""Score of a key that may not be seen. Finite, so that a query that sees nothing (padding) gets
some average instead of nan."""


def attend(
    q_BTNH: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    visible_BTS: jax.Array,
    scale: float,
    softcap: float | None,
    axes: tuple[str, str] = ("BSKH", "BSKH"),
) -> jax.Array:
    """Softmax attention; each key head serves N / K neighbouring query heads.

    Args:
        q_BTNH: queries.
        k: keys.
        v: values.
        visible_BTS: bool, which keys a query may see.
        scale: factor on the products of queries and keys.
        softcap: cap on the scores, `softcap * tanh(score / softcap)`, or None.
        axes: order of the axes of `k` and of `v`.

    Returns:
        (B, T, N, H) in the dtype of the queries; scores and softmax are float32.
    """
    B, T, N, H = q_BTNH.shape
    k_BKHS, v_BKSH = jnp.einsum(f"{axes[0]}->BKHS", k), jnp.einsum(f"{axes[1]}->BKSH", v)
    K = k_BKHS.shape[1]
    J = N // K
    # Plain matrix products over (head, token): einsum would put the cache's axes first, and copy.
    q_BKMH = jnp.einsum("BTKJH->BKJTH", q_BTNH.reshape(B, T, K, J, H)).reshape(B, K, J * T, H)
    score_BKMS = jnp.matmul(q_BKMH, k_BKHS, preferred_element_type=jnp.float32)
    score_BKJTS = score_BKMS.reshape(B, K, J, T, -1) * jnp.float32(scale)
    if softcap is not None:
        cap = jnp.float32(softcap)
        score_BKJTS = cap * jnp.tanh(score_BKJTS / cap)
    score_BKJTS = jnp.where(visible_BTS[:, None, None], score_BKJTS, jnp.float32(MASKED))
    share_BKJTS = jax.nn.softmax(score_BKJTS, axis=-1).astype(v.dtype)
    out_BKMH = jnp.matmul(share_BKJTS.reshape(B, K, J * T, -1), v_BKSH)
    return jnp.einsum("BKJTH->BTKJH", out_BKMH.reshape(B, K, J, T, H)).reshape(B, T, N, H)


def visible(
    q_position_BT: jax.Array, k_position_BS: jax.Array, window: jax.Array | int
) -> jax.Array:
    """Which keys a query may see: not empty (position -1), not later, and within the window.

    Args:
        q_position_BT: int32 positions of the queries.
        k_position_BS: int32 positions of the keys, -1 where there is none.
        window: int32 scalar, tokens that a query sees, itself included.

    Returns:
        bool, (B, T, S).
    """
    q, k = q_position_BT[:, :, None], k_position_BS[:, None, :]
    return (k >= 0) & (k <= q) & (k > q - window)
