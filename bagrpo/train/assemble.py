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
    share: int = 1
    """Consecutive rows that are read behind one copy of their prompt."""

    @property
    def positions(self) -> int:
        """T, positions of a row: a prompt and right after it a response."""
        return self.prompt + self.response

    @property
    def tokens(self) -> int:
        """What the model reads of a micro-batch, padding included."""
        return self.rows // self.share * (self.prompt + self.share * self.response)


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
    share = config.share_prompt
    total = -(-config.update_rows // (share * row_shards))
    found = []
    for prompt in prompt_buckets(config):
        for response in response_buckets(config):
            packs = max(1, config.microbatch_tokens // (prompt + share * response))
            packs = -(-total // -(-total // packs))  # evenly over so many micro-batches
            rows = packs * share * row_shards
            found.append(Shape(prompt, response, rows, share))
    return found


Places = dict[int, int]
"""Row of a micro-batch -> index of what stands there, rows rising; the others are empty."""


def cut(
    rows: Sequence[Row], config: BatchConfig, row_shards: int
) -> Iterator[tuple[Shape, Places]]:
    """Which rows go together: the shape of each micro-batch and where in it they stand.

    The longest come first, so that what doesn't fit in memory shows at once. Where prompts are
    shared, each `share_prompt` places in turn have rows of one prompt, of about the same length.

    Raises:
        ValueError: if a row has no prompt, or is longer than the longest bucket.
    """
    for index, row in enumerate(rows):
        _check_length(index, "prompt", len(row.prompt), 1, config.max_prompt)
        _check_length(index, "response", len(row.response), 0, config.max_response)
    limit = {(s.prompt, s.response): s for s in shapes(config, row_shards)}
    packs = [(_least_shape(pack, rows, config), pack) for pack in _packs(rows, config)]
    taken: list[list[int]] = []
    shape = None
    for (prompt, response), pack in sorted(packs, key=lambda p: (-p[0][1], -p[0][0], p[1])):
        grown = limit[prompt, response]
        if shape is not None:
            grown = limit[max(shape.prompt, prompt), shape.response]
            if len(taken) >= grown.rows // grown.share:
                yield shape, _places(taken, shape.share)
                taken, grown = [], limit[prompt, response]
        taken.append(pack)
        shape = grown
    if shape is not None:
        yield shape, _places(taken, shape.share)


def _places(packs: Sequence[Sequence[int]], share: int) -> Places:
    return {p * share + b: i for p, pack in enumerate(packs) for b, i in enumerate(pack)}


def _packs(rows: Sequence[Row], config: BatchConfig) -> list[list[int]]:
    """Indices of up to `share_prompt` rows each, of one prompt and about the same length."""
    share = config.share_prompt
    alike: dict[tuple[int, ...], list[int]] = {}
    for i in sorted(range(len(rows)), key=lambda i: (-len(rows[i].response), i)):
        alike.setdefault(tuple(rows[i].prompt) if share > 1 else (i,), []).append(i)
    return [same[i : i + share] for same in alike.values() for i in range(0, len(same), share)]


def _least_shape(pack: Sequence[int], rows: Sequence[Row], config: BatchConfig) -> tuple[int, int]:
    """Buckets of prompt and response that hold these rows."""
    prompt = len(rows[pack[0]].prompt)
    response = max(len(rows[i].response) for i in pack)
    return _bucket(prompt_buckets(config), prompt), _bucket(response_buckets(config), response)


def microbatches(
    rows: Sequence[Row],
    algorithm: AlgorithmConfig,
    config: BatchConfig,
    row_shards: int,
) -> list[tuple[Batch, Places]]:
    """A step's rows as micro-batches whose losses add up to the loss of all of them.

    Args:
        rows: all rows of one update.
        algorithm: which weights they get.
        config: lengths and sizes.
        row_shards: devices that rows are split over.

    Returns:
        Batches of numpy arrays, whose rows beyond those given are empty, and the places of the
        rows in each.
    """
    aggregated = aggregation_rows(rows, config)
    weight_BR, regular_BR = jax.device_get(weights(aggregated, algorithm))
    return [
        (_batch(rows, places, shape, weight_BR, regular_BR), places)
        for shape, places in cut(rows, config, row_shards)
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
    rows: Sequence[Row], places: Places, shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens_BT, prompt_B and mask_BR of the rows named, filtered ones included."""
    tokens_BT = np.zeros((shape.rows, shape.positions), np.int32)
    prompt_B = np.ones(shape.rows, np.int32)
    mask_BR = np.zeros((shape.rows, shape.response), bool)
    for b, i in places.items():
        prompt, response = rows[i].prompt, rows[i].response
        tokens_BT[b, : len(prompt) + len(response)] = [*prompt, *response]
        prompt_B[b] = len(prompt)
        mask_BR[b, : len(response)] = True
    return tokens_BT, prompt_B, mask_BR


def empty(shape: Shape, fields: Sequence[str]) -> Batch:
    """A batch without rows, of this shape and with these optional fields."""
    zeros_BR = np.zeros((shape.rows, shape.response), np.float32)
    arrays: tuple[Any, ...] = (*token_arrays([], {}, shape), zeros_BR[:, :1], zeros_BR)
    optional: dict[str, Any] = dict.fromkeys(fields, zeros_BR)
    return Batch(*arrays, **optional)


def _batch(
    rows: Sequence[Row],
    places: Places,
    shape: Shape,
    weight_BR: np.ndarray,
    regular_BR: np.ndarray | None,
) -> Batch:
    B, R = shape.rows, shape.response
    tokens_BT, prompt_B, mask_BR = token_arrays(rows, places, shape)
    advantage_B1 = np.zeros((B, 1), np.float32)
    for b, i in places.items():
        mask_BR[b] &= rows[i].trained
        advantage_B1[b] = rows[i].advantage
    fields: dict[str, Any] = {
        "tokens_BT": tokens_BT,
        "prompt_B": prompt_B,
        "mask_BR": mask_BR,
        "advantage_B1": advantage_B1,
        "weight_BR": _placed(weight_BR, places, B, R),
        "regular_weight_BR": None if regular_BR is None else _placed(regular_BR, places, B, R),
        "old_logp_BR": _ragged({b: rows[i].old_logps for b, i in places.items()}, B, R),
        "ref_logp_BR": _ragged({b: rows[i].ref_logps for b, i in places.items()}, B, R),
        "sampler_logp_BR": _ragged({b: rows[i].sampler_logps for b, i in places.items()}, B, R),
    }
    return Batch(**fields)


def _placed(array: np.ndarray, places: Places, B: int, R: int) -> np.ndarray:
    out = np.zeros((B, R), array.dtype)
    out[list(places)] = array[list(places.values()), :R]
    return out


def _ragged(lists: dict[int, Sequence[float] | None], B: int, R: int) -> np.ndarray | None:
    present = {b: values for b, values in lists.items() if values is not None}
    if not present:
        return None
    if len(present) < len(lists):
        raise ValueError("some rows of a step have old or reference log-probs and some have not")
    out = np.zeros((B, R), np.float32)
    for b, values in present.items():
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
