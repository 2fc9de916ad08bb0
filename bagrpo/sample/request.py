"""What the sampler is asked for: prompts, and how to sample. Nothing here loads jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bagrpo.config import SampleConfig

MAX_EOS = 8
"""End-of-sequence ids that there is room for; the count is not part of any compiled shape."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how many completions of it are wanted."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    problem: int
    """The problem's id, 0 <= id < 2 ** 32. It keys the noise: equal prompts with different ids get
    different samples, and the same id and sample index always the same."""
    samples: int = 1


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample. None of it is part of a compiled program."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings."""
    eos_ids: tuple[int, ...] | None = None
    """Ids that end a completion; None: the engine's, (): none does."""
    max_tokens: int | None = None
    """Of a completion, the end-of-sequence token included; None: all there is room for."""

    def __post_init__(self):
        """Refuse what has no meaning.

        Raises:
            ValueError: for a number out of its range.
        """
        allowed = {
            "temperature": (self.temperature >= 0, "0 (greedy) or above"),
            "top_k": (self.top_k is None or self.top_k > 0, "above 0, or None"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "stop": ("" not in self.stop, "non-empty strings"),
            "eos_ids": (len(self.eos_ids or ()) <= MAX_EOS, f"at most {MAX_EOS} ids"),
            "max_tokens": (self.max_tokens is None or self.max_tokens > 0, "above 0, or None"),
        }
        for name, (fits, range_) in allowed.items():
            if not fits:
                raise ValueError(
                    f"sampling with {name} = {getattr(self, name)!r}; it must be {range_}"
                )

    @classmethod
    def of(cls, config: SampleConfig) -> Sampling:
        """What the configuration says."""
        return cls(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            stop=config.stop,
            eos_ids=() if config.ignore_eos else None,
        )
