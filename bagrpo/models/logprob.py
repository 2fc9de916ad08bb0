"""Log-probs of given tokens, in chunks: the logits of all positions never exist at once.

For a vocabulary of 151,936 the logits of 8 x 2048 tokens are 9.3 GiB in float32, and a plain
backward pass holds several such arrays. Here a scan runs over chunks of response positions; each
chunk's logits are made, reduced to two numbers a token and dropped, and made again in the
backward pass, where the gradient of the head is summed from chunk to chunk.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from bagrpo.models.decoder import Compute, forward, logits
from bagrpo.models.family import Architecture
from bagrpo.models.params import Params
from bagrpo.sharding import ROWS, constrain, for_rows, split_rows


def response_logps(
    params: Params,
    arch: Architecture,
    tokens_BT: jax.Array,
    prompt_B: jax.Array,
    mask_BR: jax.Array,
    *,
    temperature: jax.Array | float,
    compute: Compute,
    entropy: Literal["value", "gradient"] = "value",
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of every response token and entropy of the distribution it was drawn from, in nats.

    With `compute.share_prompt` above 1 so many consecutive rows must have one prompt, and the model
    reads that of the first of them only. Their responses follow one another behind it, at the
    positions that each has alone, and do not see each other.

    Args:
        params: as `models.params` declares them.
        arch: the architecture they belong to.
        tokens_BT: int32, each row a prompt of at most T - R tokens and right after it a response;
            padding may be anything.
        prompt_B: int32 prompt tokens of each row.
        mask_BR: bool, which response positions are wanted; the others get 0.
        temperature: logits are divided by it; 0 < temperature.
        compute: how.
        entropy: whether the entropy is differentiated too, which costs memory traffic.

    Returns:
        logp_BR and entropy_BR, float32.
    """
    (B, T), R = tokens_BT.shape, mask_BR.shape[1]
    share = compute.share_prompt
    P, width = B // share, T - R
    prompt_P, place_1T = prompt_B[::share], jnp.arange(width, dtype=jnp.int32)[None]
    place_BR = prompt_B[:, None] + jnp.arange(R, dtype=jnp.int32)[None]
    last_B1 = jnp.where(mask_BR, place_BR, 0).max(axis=1, keepdims=True)
    place_BR = jnp.where(place_BR <= last_B1, place_BR, -1)
    target_BR = jnp.take_along_axis(tokens_BT, jnp.maximum(place_BR, 0), axis=1)

    def packed(prompt_PT: jax.Array, response_BR: jax.Array) -> jax.Array:
        return jnp.concatenate([prompt_PT, response_BR.reshape(P, share * R)], axis=1)

    prompt_0 = jnp.zeros((P, width), jnp.int32)
    branch_B1 = jnp.arange(B, dtype=jnp.int32)[:, None] % share + 1
    hidden_PTD, _ = forward(
        params,
        arch,
        packed(tokens_BT[::share, :width], target_BR),
        packed(jnp.where(place_1T < prompt_P[:, None], place_1T, -1), place_BR),
        compute=compute,
        branch_BT=None if share == 1 else packed(prompt_0, jnp.tile(branch_B1, (1, R))),
    )
    # A response's first token is predicted by the prompt's last, the others by those before them.
    first_P1D = jnp.take_along_axis(hidden_PTD, (prompt_P - 1)[:, None, None], axis=1)
    hidden_BRD = hidden_PTD[:, width:].reshape(B, R, -1)
    first_B1D = jnp.repeat(first_P1D, share, axis=0)
    hidden_BRD = jnp.concatenate([first_B1D, hidden_BRD[:, :-1]], axis=1)
    logp_BR, entropy_BR = token_logps(
        params,
        arch,
        constrain(hidden_BRD, ROWS),
        target_BR,
        temperature=temperature,
        logit_tokens=compute.logit_tokens,
        entropy=entropy,
    )
    # Select rather than multiply: what was computed at masked positions may be anything.
    zero = jnp.float32(0)
    return jnp.where(mask_BR, logp_BR, zero), jnp.where(mask_BR, entropy_BR, zero)


def token_logps(
    params: Params,
    arch: Architecture,
    hidden_BRD: jax.Array,
    target_BR: jax.Array,
    *,
    temperature: jax.Array | float,
    logit_tokens: int,
    entropy: Literal["value", "gradient"] = "value",
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target under the logits of its hidden state, and their entropy, in nats.

    Args:
        params: only `head`, or the tied `embed`, is used.
        arch: for the tie and the final soft cap.
        hidden_BRD: hidden states that predict the targets.
        target_BR: int32 ids.
        temperature: logits are divided by it.
        logit_tokens: tokens of a device whose logits exist at once.
        entropy: see `response_logps`.

    Returns:
        logp_BR and entropy_BR, float32.
    """
    # Only what the head needs: a closed-over tree would have its whole gradient carried along.
    name, meanings = ("embed", ("vocab", "embed")) if arch.tied else ("head", ("embed", "vocab"))

    def of_my_rows(heads, hidden_BRD, target_BR):
        # The gradients of all chunks are summed before they leave the device.
        body = functools.partial(
            _chunk_logps, arch, {name: heads[0]}, jnp.float32(temperature), entropy
        )
        return _in_chunks(body, hidden_BRD, target_BR, logit_tokens)

    heads = for_rows(params[name].astype(jnp.float32), meanings, str(hidden_BRD.dtype))
    return split_rows(of_my_rows)(heads, hidden_BRD, target_BR)


def _in_chunks(body, hidden_BRD, target_BR, logit_tokens):
    B, R, D = hidden_BRD.shape
    chunk = max(1, min(R, logit_tokens // B))
    chunk -= chunk % 8 if chunk > 8 else 0  # in whole tiles
    chunks = -(-R // chunk)
    pad = ((0, 0), (0, chunks * chunk - R))
    hidden_BRD = jnp.pad(hidden_BRD, (*pad, (0, 0)))
    target_BR = jnp.pad(target_BR, pad)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry, chunk):
        return carry, body(*chunk)

    split = (
        hidden_BRD.reshape(B, chunks, chunk, D).swapaxes(0, 1),
        target_BR.reshape(B, chunks, chunk).swapaxes(0, 1),
    )
    _, out = jax.lax.scan(step, None, split)
    logp_BR, entropy_BR = (x.swapaxes(0, 1).reshape(B, chunks * chunk)[:, :R] for x in out)
    return logp_BR, entropy_BR


def _chunk_logps(arch, head, temperature, entropy, hidden_BCD, target_BC):
    logit_BCV = constrain(logits(head, arch, hidden_BCD) / temperature, None, None, "tensor")
    normalizer_BC = jax.nn.logsumexp(logit_BCV, axis=-1)
    chosen_BC = jnp.take_along_axis(logit_BCV, target_BC[:, :, None], axis=-1)[:, :, 0]
    logp_BC = chosen_BC - normalizer_BC
    free_BCV, free_BC = logit_BCV, normalizer_BC
    if entropy == "value":
        free_BCV, free_BC = jax.lax.stop_gradient((logit_BCV, normalizer_BC))
    share_BCV = jnp.exp(free_BCV - free_BC[:, :, None])
    entropy_BC = free_BC - jnp.sum(share_BCV * free_BCV, axis=-1)
    return logp_BC, entropy_BC
