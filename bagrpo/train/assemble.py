"""Rows of prompt and response become micro-batches of a few fixed shapes.

Rows are sorted by length, so that a micro-batch holds rows of about the same length and pads
little, and cut into micro-batches of about the same number of tokens. The weights of the loss are
made for all rows together beforehand, so that how they are cut makes no difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bagrpo.algo.aggregate import Rows, weights
from bagrpo.batch import Batch
from bagrpo.config import AlgorithmConfig, BatchConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt with one response to it, and what is known about them, on the host."""

    prompt: Sequence[int]
    response: Sequence[int]
    group: int
    """Rows with the same id answer the same problem."""
    advantage: float = 0.0
    old_logps: Sequence[float] | None = None
    """Log-prob of each response token under the policy that sampled it, nats."""
    ref_logps: Sequence[float] | None = None
    """The same under the reference model."""
    sampler_logps: Sequence[float] | None = None
    """The same as the sampler recorded it."""
    trained: bool = True
    """False: the row was filtered out and leaves every count."""


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """A micro-batch's size: rows of at most `prompt` and `response` tokens."""

    prompt: int
    response: int
    rows: int

    @property
    def positions(self) -> int:
        """T, positions of a row: a prompt and right after it a response."""
        return self.prompt + self.response


def prompt_buckets(config: BatchConfig) -> tuple[int, ...]:
    """Prompt lengths that rows are padded to."""
    return config.prompt_buckets or (config.max_prompt,)


def response_buckets(config: BatchConfig) -> tuple[int, ...]:
    """Response lengths that rows are padded to."""
    if config.response_buckets:
        return config.response_buckets
    halves = [config.max_response]
    while halves[-1] >= 64:
        halves.append(-(-halves[-1] // 2))
    return tuple(reversed(halves))


def shapes(config: BatchConfig, row_shards: int) -> list[Shape]:
    """Every micro-batch shape that a run can meet.

    Args:
        config: lengths and tokens per device.
        row_shards: devices that rows are split over; a micro-batch has a multiple of it.
    """
    total = -(-config.update_rows // row_shards) * row_shards
    found = []
    for prompt in prompt_buckets(config):
        for response in response_buckets(config):
            rows = max(1, config.microbatch_tokens // (prompt + response)) * row_shards
            found.append(Shape(prompt, response, min(rows, total)))
    return found


def cut(
    rows: Sequence[Row], config: BatchConfig, row_shards: int
) -> Iterator[tuple[Shape, list[int]]]:
    """Which rows go together: the shape of each micro-batch and the indices of its rows.

    The longest come first, so that what doesn't fit in memory shows at once.

    Raises:
        ValueError: if a row has no prompt, or is longer than the longest bucket.
    """
    for index, row in enumerate(rows):
        _check_length(index, "prompt", len(row.prompt), 1, config.max_prompt)
        _check_length(index, "response", len(row.response), 0, config.max_response)
    prompt_B = [_bucket(prompt_buckets(config), len(row.prompt)) for row in rows]
    response_B = [_bucket(response_buckets(config), len(row.response)) for row in rows]
    limit = {(s.prompt, s.response): s for s in shapes(config, row_shards)}
    taken: list[int] = []
    shape = None
    for i in sorted(range(len(rows)), key=lambda i: (-response_B[i], -prompt_B[i], i)):
        grown = limit[prompt_B[i], response_B[i]]
        if shape is not None:
            grown = limit[max(shape.prompt, grown.prompt), shape.response]
            if len(taken) >= grown.rows:
                yield shape, taken
                taken, grown = [], limit[prompt_B[i], response_B[i]]
        taken.append(i)
        shape = grown
    if shape is not None:
        yield shape, taken


def microbatches(
    rows: Sequence[Row],
    algorithm: AlgorithmConfig,
    config: BatchConfig,
    row_shards: int,
) -> list[tuple[Batch, list[int]]]:
    """A step's rows as micro-batches whose losses add up to the loss of all of them.

    Args:
        rows: all rows of one update.
        algorithm: which weights they get.
        config: lengths and sizes.
        row_shards: devices that rows are split over.

    Returns:
        Batches of numpy arrays, whose rows beyond those given are empty, and the indices of the
        rows in each.
    """
    aggregated = aggregation_rows(rows, config)
    weight_BR, regular_BR = jax.device_get(weights(aggregated, algorithm))
    return [
        (_batch(rows, indices, shape, weight_BR, regular_BR), indices)
        for shape, indices in cut(rows, config, row_shards)
    ]


def aggregation_rows(rows: Sequence[Row], config: BatchConfig) -> Rows:
    """What the aggregation rules look at, padded with empty rows to a multiple of a full update.

    The padding keeps the number of compiled programs at one when there are fewer rows.
    """
    B = max(1, -(-len(rows) // config.update_rows)) * config.update_rows
    fields: dict[str, Any] = {
        "mask_BR": np.zeros((B, config.max_response), bool),
        "advantage_B1": np.zeros((B, 1), np.float32),
        "group_B": np.full(B, -1, np.int32),
    }
    for b, row in enumerate(rows):
        fields["mask_BR"][b, : len(row.response)] = row.trained
        fields["advantage_B1"][b] = row.advantage
        fields["group_B"][b] = row.group
    return Rows(**fields, constant=config.max_response)


def token_arrays(
    rows: Sequence[Row], indices: Sequence[int], shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens_BT, prompt_B and mask_BR of the rows named, filtered ones included."""
    tokens_BT = np.zeros((shape.rows, shape.positions), np.int32)
    prompt_B = np.ones(shape.rows, np.int32)
    mask_BR = np.zeros((shape.rows, shape.response), bool)
    for b, i in enumerate(indices):
        prompt, response = rows[i].prompt, rows[i].response
        tokens_BT[b, : len(prompt) + len(response)] = [*prompt, *response]
        prompt_B[b] = len(prompt)
        mask_BR[b, : len(response)] = True
    return tokens_BT, prompt_B, mask_BR


def empty(shape: Shape, fields: Sequence[str]) -> Batch:
    """A batch without rows, of this shape and with these optional fields."""
    zeros_BR = np.zeros((shape.rows, shape.response), np.float32)
    arrays: tuple[Any, ...] = (*token_arrays([], [], shape), zeros_BR[:, :1], zeros_BR)
    optional: dict[str, Any] = dict.fromkeys(fields, zeros_BR)
    return Batch(*arrays, **optional)


def _batch(
    rows: Sequence[Row],
    indices: Sequence[int],
    shape: Shape,
    weight_BR: np.ndarray,
    regular_BR: np.ndarray | None,
) -> Batch:
    B, R = shape.rows, shape.response
    tokens_BT, prompt_B, mask_BR = token_arrays(rows, indices, shape)
    advantage_B1 = np.zeros((B, 1), np.float32)
    for b, i in enumerate(indices):
        mask_BR[b] &= rows[i].trained
        advantage_B1[b] = rows[i].advantage
    fields: dict[str, Any] = {
        "tokens_BT": tokens_BT,
        "prompt_B": prompt_B,
        "mask_BR": mask_BR,
        "advantage_B1": advantage_B1,
        "weight_BR": _padded(weight_BR[indices, :R], B),
        "regular_weight_BR": None if regular_BR is None else _padded(regular_BR[indices, :R], B),
        "old_logp_BR": _ragged([rows[i].old_logps for i in indices], B, R),
        "ref_logp_BR": _ragged([rows[i].ref_logps for i in indices], B, R),
        "sampler_logp_BR": _ragged([rows[i].sampler_logps for i in indices], B, R),
    }
    return Batch(**fields)


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(array, ((0, rows - len(array)), (0, 0)))


def _ragged(lists: Sequence[Sequence[float] | None], B: int, R: int) -> np.ndarray | None:
    present = [values is not None for values in lists]
    if not any(present):
        return None
    if not all(present):
        raise ValueError("some rows of a step have old or reference log-probs and some have not")
    out = np.zeros((B, R), np.float32)
    for b, values in enumerate(lists):
        assert values is not None
        out[b, : len(values)] = values
    return out


def _check_length(index: int, side: str, length: int, least: int, most: int) -> None:
    if not least <= length <= most:
        raise ValueError(
            f"row {index} has a {side} of {length} tokens; allowed are {least} to "
            f"batch.max_{side} = {most}"
        )


def _bucket(buckets: Sequence[int], length: int) -> int:
    return next(bucket for bucket in buckets if bucket >= length)
