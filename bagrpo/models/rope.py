"""Rotary position embeddings (RoPE, arXiv:2104.09864) and the ways to stretch them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from bagrpo.models.family import Rope


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Angle per token of each rotated pair, and the factor on the rotated vectors.

    Returns:
        float32 of shape (head_dim / 2,) in radians per token, and a factor that is 1 except for
        yarn.
    """
    plain = rope.base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    stretched, factor = _STRETCH[rope.kind](rope, head_dim, plain)
    return stretched.astype(np.float32), factor


def rotations(
    ropes: tuple[Rope, ...], head_dim: int, position_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of each kind of rope at each position, float32, (kinds, B, T, 1, H/2)."""
    tables = [frequencies(rope, head_dim) for rope in ropes]
    position = position_BT.astype(jnp.float32)[None, :, :, None, None]
    angle = position * jnp.stack([table for table, _ in tables])[:, None, None, None, :]
    factor = jnp.array([f for _, f in tables], jnp.float32)[:, None, None, None, None]
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of each head by their angles, (B, T, 1, H/2)."""
    left, right = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


def _default(rope: Rope, head_dim: int, plain: np.ndarray) -> tuple[np.ndarray, float]:
    return plain, 1.0


def _linear(rope: Rope, head_dim: int, plain: np.ndarray) -> tuple[np.ndarray, float]:
    return plain / rope.factor, 1.0


def _llama3(rope: Rope, head_dim: int, plain: np.ndarray) -> tuple[np.ndarray, float]:
    """Slow pairs are stretched, fast ones kept, those between are blended."""
    turns = rope.original_positions * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor, 1.0


def _yarn(rope: Rope, head_dim: int, plain: np.ndarray) -> tuple[np.ndarray, float]:
    """Blend by pair index between the pairs that turn beta_fast and beta_slow times."""

    def pair(turns: float) -> float:
        ratio = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.base))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by 0
    keep = 1 - np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    return keep * plain + (1 - keep) * plain / rope.factor, factor


_STRETCH = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
