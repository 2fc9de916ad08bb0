"""Which settings may change between a run's checkpoint and the run that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic

from bagrpo.config import difference

FREE = (
    "batch.microbatch_tokens",
    "batch.prompt_buckets",
    "batch.response_buckets",
    "checkpoint",
    "data.evaluation",
    "eval",
    "mesh",
    "model.logit_tokens",
    "model.remat",
    "report",
    "sample.cache_buckets",
    "sample.prefill",
    "sample.prompt_buckets",
    "sample.refill",
    "sample.slot_buckets",
    "sample.slots",
    "sample.steps",
    "verify.memory_mb",
    "verify.start_seconds",
    "verify.workers",
)
"""Settings, or sections of them, that do not change what a run learns, save for rounding."""


def check_settings(
    stored: Mapping[str, Any], new: Mapping[str, Any], *, accept: bool = False
) -> list[str]:
    """Compare a checkpoint's settings with those of the run that is to go on from it.

    Args:
        stored: the whole run's settings, nested, as JSON has them.
        new: likewise.
        accept: let any setting differ.

    Returns:
        Each difference, as `key: old -> new`.

    Raises:
        ValueError: if settings differ that shape the result, all but those in `FREE` and, under a
            constant learning rate, `steps`; it names them all.
    """
    free = [*FREE]
    if new.get("optimizer", {}).get("schedule") == "constant":
        free.append("steps")  # Else it is the schedule's length.
    differing = difference(_Settings(dict(stored)), _Settings(dict(new)))
    sentences = {key: f"{key}: {old!r} -> {now!r}" for key, old, now in differing}
    wrong = [
        sentence
        for key, sentence in sentences.items()
        if not any(key == part or key.startswith(f"{part}.") for part in free)
    ]
    if wrong and not accept:
        raise ValueError(
            f"the run's settings have changed since its checkpoint: {'; '.join(wrong)}. Undo "
            "that, start a new run in another folder, or set checkpoint.accept_changes=true"
        )
    return list(sentences.values())


_Settings = pydantic.RootModel[dict[str, Any]]
