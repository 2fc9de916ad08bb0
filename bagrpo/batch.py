"""The one pytree of a step's data that goes to the chips."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of prompt and response, with what the loss needs to know about each response token.

    B rows, T row positions, R response positions. Rows are left-aligned: row b holds its prompt at
    positions `[0, prompt_B[b])` and its response right after it, so response position r is row
    position `prompt_B[b] + r` and is predicted from the one before. A prompt has at most T - R
    tokens, since they are read apart from the response. What lies beyond is padding and may hold
    anything. A row without response tokens (all of `mask_BR` false) contributes nothing.
    """

    tokens_BT: jax.Array
    """int32."""
    prompt_B: jax.Array
    """int32, prompt tokens of each row, at least 1."""
    mask_BR: jax.Array
    """bool, true at the response tokens that are trained."""
    advantage_B1: jax.Array
    """float32."""
    weight_BR: jax.Array
    """float32, >= 0: the aggregation rule's weight of each token in the whole batch's loss."""
    old_logp_BR: jax.Array | None = None
    """float32, log-prob under the policy that sampled; None: the policy of this very update."""
    ref_logp_BR: jax.Array | None = None
    """float32, log-prob under the reference model; None when nothing needs it."""
    sampler_logp_BR: jax.Array | None = None
    """float32, log-prob that the sampler recorded; None when nothing is compared with it."""
    regular_weight_BR: jax.Array | None = None
    """float32, >= 0: weight of each token's KL and entropy terms; None when both are off."""
