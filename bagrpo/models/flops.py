"""Useful work of a model: the FLOPs of the matrix products that its function takes.

A product of (m, k) and (k, n) counts 2mkn; what padding, masked scores and recomputation add is not
useful and not counted. A backward pass takes twice the products of its forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bagrpo.models.family import Architecture


def position(arch: Architecture) -> int:
    """Of one token through all layers, without attention over keys and without the head."""
    heads = 2 * arch.heads + 2 * arch.kv_heads
    layer = arch.embed * heads * arch.head_dim
    if arch.experts:
        layer += arch.embed * arch.experts + 3 * arch.experts_per_token * arch.embed * arch.ffw
    else:
        layer += 3 * arch.embed * arch.ffw
    return 2 * arch.layers * layer


def head(arch: Architecture) -> int:
    """Of the logits of one token."""
    return 2 * arch.embed * arch.vocab


def attention(arch: Architecture, start: int, stop: int) -> int:
    """Of scores and weighted values for the tokens at positions `start` to `stop` - 1 of a text."""
    seen = np.arange(start, stop, dtype=np.int64) + 1
    keys = sum(int(np.minimum(seen, window).sum()) for window in arch.windows)
    return 4 * arch.heads * arch.head_dim * keys


def forward(arch: Architecture, prompt: int, responses: Sequence[int], *, share: int = 1) -> int:
    """Of a pass over responses to a prompt, with logits for the response tokens only.

    Args:
        arch: the model's.
        prompt: tokens.
        responses: tokens of each. The last of them is read by nobody, but counts, as in 6ND.
        share: responses that are read behind one copy of the prompt.
    """
    copies = -(-len(responses) // share)
    return copies * _read(arch, 0, prompt) + sum(
        _read(arch, prompt, prompt + n) + n * head(arch) for n in responses
    )


def rollout(arch: Architecture, prompt: int, responses: Sequence[int]) -> int:
    """Of sampling responses of these lengths from one prompt, which is read once.

    Each response's first token comes from the prompt's logits; its last is not read.
    """
    return _read(arch, 0, prompt) + sum(
        _read(arch, prompt, prompt + max(0, n - 1)) + n * head(arch) for n in responses
    )


def _read(arch: Architecture, start: int, stop: int) -> int:
    return (stop - start) * position(arch) + attention(arch, start, stop)
