"""How completions are sampled, and the shapes in which that happens."""

from __future__ import annotations

from typing import Annotated

import pydantic
from pydantic import Field

from bagrpo.config.section import Fraction, NonNegative, Positive, Section


class SampleConfig(Section):
    """Which distribution completions are drawn from, and how many at a time.

    The shapes decide only how fast it goes: each token's noise belongs to its problem, sample and
    position, wherever and beside whatever it is sampled.
    """

    temperature: NonNegative = 1.0
    """0 is greedy: the likeliest token, always."""
    top_k: Positive | None = None
    """Sample among so many likeliest tokens; None: among all. Log-probs, the sampler's and the
    trainer's, are those before truncation by this and the next two."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: Fraction = 0.0
    """Sample among tokens of at least this share of the likeliest one's probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A completion ends with the token that completes one of these. The verified text is cut
    before it; the tokens are kept and trained."""
    ignore_eos: bool = False
    """Sample on past end-of-sequence tokens, until there is no room: for measuring."""
    slots: Positive = 64
    """Completions that are sampled at once, rounded up to the devices that share them."""
    slot_buckets: tuple[Positive, ...] = ()
    """Numbers of slots to go down to when fewer completions are left, rising, `slots` last. By
    default halves down to a quarter, but not below 8."""
    cache_buckets: tuple[Positive, ...] = ()
    """Tokens of a slot's keys and values that are held and attended to, rising: the smallest that
    holds the longest completion under way is in use. By default halves down to 256 of the longest
    prompt and response."""
    prompt_buckets: tuple[Positive, ...] = ()
    """Prompt lengths that prefills are padded to, rising. By default halves of the longest prompt
    down to 128."""
    prefill: Positive = 8
    """Prompts of one prefill, rounded up to the devices that share them: all, but where there are
    more devices than prompts only those of an `fsdp` axis. Their keys and values are kept, whole on
    every device, until all their samples have started."""
    steps: Positive = 32
    """Tokens of each slot, at most, between two looks of the host: stop strings end a completion,
    and finished ones go to their verifier, only then."""
    refill: Positive = 1
    """Slots that must be free before the host looks earlier to fill them again."""

    @pydantic.model_validator(mode="after")
    def _buckets_rise(self) -> SampleConfig:
        for name in ("slot_buckets", "cache_buckets", "prompt_buckets"):
            buckets = getattr(self, name)
            if list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name} = {list(buckets)} must rise")
        if self.slot_buckets and self.slot_buckets[-1] != self.slots:
            raise ValueError(
                f"slot_buckets = {list(self.slot_buckets)} must rise to slots = {self.slots}"
            )
        return self
