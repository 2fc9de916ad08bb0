"""A step's time from the times of its programs, and what that means in tokens, chips and hours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from bagrpo.config import RunConfig
from bagrpo.models import flops
from bagrpo.models.family import Architecture
from bagrpo.plan.chips import Chip
from bagrpo.plan.programs import Program
from bagrpo.train.setup import needs_old_logps


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one run of a program, if one thing alone were slow."""

    compute: float
    memory: float
    links: float

    @property
    def roofline(self) -> float:
        """The least that it can take: that of the slowest."""
        return max(self.compute, self.memory, self.links)

    @property
    def bound(self) -> str:
        """What is slowest."""
        return max(("compute", "memory", "links"), key=lambda name: getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Step:
    """A whole step, every response as long as was assumed."""

    response: int
    """Tokens."""
    prompt: int
    rollout: float
    """Seconds."""
    update: float
    """Seconds, log-probs of old and reference policies included."""
    tokens: int
    """Response tokens of all rows."""
    useful: float
    """FLOPs of the model on each device."""

    @property
    def seconds(self) -> float:
        """Of the step, verification and host work left out."""
        return self.rollout + self.update


def times(program: Program, chip: Chip) -> Times:
    """Of a program that was compiled."""
    assert program.cost is not None
    cost = program.cost
    return Times(cost.flops / chip.flops, cost.bytes / chip.hbm_rate, cost.links / chip.link_rate)


def step(
    programs: Sequence[Program],
    config: RunConfig,
    arch: Architecture,
    chip: Chip,
    *,
    devices: int,
    response: int,
) -> Step | None:
    """What a step takes at least, by the rooflines of its programs; None if one does not fit.

    Args:
        programs: all that were compiled.
        config: of the run.
        arch: of its model.
        chip: published rates.
        devices: of the mesh.
        response: tokens of every response; prompts are taken as long as they may be.
    """
    if any(program.cost is None for program in programs):
        return None
    batch, prompt = config.batch, config.batch.max_prompt
    rows = batch.problems * batch.group
    seconds = {id(program): times(program, chip).roofline for program in programs}
    rollout = update = 0.0

    def fitting(kind: str, sizes: Sequence[int]) -> Program:
        """The smallest program of a kind that holds these sizes."""
        found = [p for p in programs if p.kind == kind and _holds(p, sizes)]
        return min(found, key=_sizes)

    sampled = config.algorithm.surrogate != "likelihood"
    if sampled:
        prefill = next(p for p in programs if p.kind == "prefill" and p.shape[0] >= prompt)
        width = max(1, config.sample.prefill)
        rollout += math.ceil(batch.problems / width) * seconds[id(prefill)]
        slots = max(p.shape[0] for p in programs if p.kind == "decode")
        turns = math.ceil(rows / slots)
        for token in range(response):
            decode = fitting("decode", (slots, prompt + token))
            rollout += turns * seconds[id(decode)] / decode.turns
    for kind, often in (("gradient", batch.epochs), ("logps", _passes(config))):
        if often:
            program = fitting(kind, (prompt, response))
            batches = batch.minibatches * math.ceil(batch.update_rows / program.shape.rows)
            update += often * batches * seconds[id(program)]
    update += batch.updates * sum(seconds[id(p)] for p in programs if p.kind == "update")
    lengths = [response] * batch.group
    useful = (3 * batch.epochs + _passes(config)) * flops.forward(
        arch, prompt, lengths, share=batch.share_prompt
    )
    if sampled:
        useful += flops.rollout(arch, prompt, lengths)
    return Step(
        response, prompt, rollout, update, rows * response, batch.problems * useful / devices
    )


def _passes(config: RunConfig) -> int:
    return needs_old_logps(config) + bool(config.algorithm.kl.coef)


def _sizes(program: Program) -> tuple[int, ...]:
    if program.kind in ("gradient", "logps"):
        return (program.shape.prompt, program.shape.response)
    return program.shape


def _holds(program: Program, sizes: Sequence[int]) -> bool:
    return all(have >= need for have, need in zip(_sizes(program), sizes, strict=True))
