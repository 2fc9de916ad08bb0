"""The host's plain records, in the order in which a step makes them.

A problem is what the data holds; a completion is what the sampler said to it; a verdict is what a
program thinks of that; a rollout is the three together. Nothing here loads jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Message = Mapping[str, str]
"""One turn of a conversation: `{"role": ..., "content": ...}`."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """An item of the data set: what is asked and how an answer to it is checked."""

    id: int
    """Unique in the run and stable across epochs and hosts: it keys the sampler's noise."""
    messages: Sequence[Message]
    answer: str
    """The gold answer (or tests) in the form that the verifier of `kind` reads."""
    kind: str
    """Names the verifier: `math`, `code`, `regex`, `choice`, a `file.py:function`, ..."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Whatever else the verifier or a log wants, e.g. the data set's name and the question."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """What the policy sampled after a prompt."""

    tokens: Sequence[int]
    """Sampled ids, the end-of-sequence token included when it was sampled. Trained as they are."""
    logps: Sequence[float]
    """Log-prob of each sampled token under the sampler, at the sampling temperature (nats)."""
    finish: Literal["stop", "length"]
    """`stop`: an end-of-sequence id or a stop string; `length`: the token limit."""
    text: str = ""
    """Decoded text without end-of-sequence token and stop string: what is verified."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a program says of a completion."""

    reward: float
    correct: bool
    reason: str = ""
    """For a person: what was extracted, or why nothing was."""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Each reward component before weighting, by name."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A problem, one completion of it, and the verdict on that."""

    problem: Problem
    prompt: Sequence[int]
    completion: Completion
    verdict: Verdict
    sample: int
    """Index of this completion in its group, 0 <= sample < G."""
