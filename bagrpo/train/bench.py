"""How fast a run's steps are on this machine, stage by stage, and how far from its limit.

What is timed is what the loop runs: the same functions, shapes and problems. A first step, not
counted, sees to whatever happens only once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from jax.sharding import NamedSharding, PartitionSpec

from bagrpo.config import RunConfig
from bagrpo.models import flops
from bagrpo.models.family import Architecture
from bagrpo.train import memory
from bagrpo.train.assemble import Row
from bagrpo.train.loop import explore, imitate, judge, learn
from bagrpo.train.rollout import Group
from bagrpo.train.setup import Run, needs_old_logps, prepare
from bagrpo.train.step import TrainState


@dataclasses.dataclass
class Timing:
    """One pass through a stage."""

    seconds: float = 0.0
    tokens: int = 0
    """Response tokens."""
    flops: int = 0
    """Useful ones, as `models.flops` counts them."""
    peak_bytes: int = 0


def bench(config: RunConfig, *, steps: int) -> dict[str, Any]:
    """Take some steps, and say how they went.

    Args:
        config: of the run; nothing is written to its folder.
        steps: that are timed, at least 1.

    Returns:
        Values that JSON can hold: `stages`, those of rollout, log-probs, update and step that the
        run has, each with medians over the steps; `ceiling_gflop_per_second`, what matrix products
        alone reach; `programs` that were compiled before the first step, in `compile_seconds`,
        and `compiled_later`; `devices` and `dtype`.

    Raises:
        ValueError: for settings, data or a model that cannot be used, or data that end too soon.
    """
    with prepare(config) as run:
        state = run.trainer.create(run.source.load(run.mesh, config.model.param_dtype))
        start = time.perf_counter()
        run.compile()
        compiled, programs = time.perf_counter() - start, run.compilations()
        state, _ = _take_step(run, state, 0)
        found = []
        for step in range(1, steps + 1):
            state, timings = _take_step(run, state, step)
            found.append(timings)
        later = run.compilations() - programs
        ceiling = _ceiling(run)  # last, for its matrices take memory too
        return {
            "stages": {
                name: _summary([timings[name] for timings in found], ceiling) for name in found[0]
            },
            "ceiling_gflop_per_second": ceiling,
            "programs": programs,
            "compile_seconds": compiled,
            "compiled_later": later,
            "devices": f"{run.mesh.size} x {jax.devices()[0].device_kind}",
            "dtype": config.model.dtype,
        }


def table(found: dict[str, Any]) -> rich.table.Table:
    """What `bench` found, for people."""
    made = rich.table.Table(
        title=f"{found['devices']}, {found['dtype']}: medians (and range) of steps",
        caption=(
            f"{found['programs']} programs compiled in {found['compile_seconds']:.0f} s, "
            f"{found['compiled_later']} later; matrix products alone reach "
            f"{found['ceiling_gflop_per_second']:,.0f} GFLOP/s"
        ),
    )
    made.add_column("stage")
    for name in ("seconds", "tokens", "tokens/s", "useful GFLOP/s", "of products", "peak memory"):
        made.add_column(name, justify="right")
    for name, values in found["stages"].items():
        times = values["all_seconds"]
        made.add_row(
            name,
            f"{values['seconds']:.2f} ({min(times):.2f} to {max(times):.2f})",
            f"{values['tokens']:,.0f}",
            f"{values['tokens_per_second']:,.0f}",
            f"{values['useful_gflop_per_second']:,.0f}",
            f"{values['share_of_ceiling']:.0%}",
            f"{values['peak_bytes'] / 2**30:.2f} GiB",
        )
    return made


def _take_step(run: Run, state: TrainState, step: int) -> tuple[TrainState, dict[str, Timing]]:
    """What `loop.take_step` does, each stage timed."""
    arch, config = run.source.architecture, run.config
    timings: dict[str, Timing] = {}
    if run.imitates:
        made = imitate(run)
    else:
        with _timed(timings, "rollout") as timing:
            groups, _ = explore(run, state, step)
            timing.tokens, timing.flops = _sampled(arch, groups)
        passes = bool(config.algorithm.kl.coef) + needs_old_logps(config)
        with _timed(timings, "log-probs") as timing:
            made = judge(run, state, groups)
            timing.tokens, timing.flops = _trained(arch, config, made, passes)
        if not passes:
            del timings["log-probs"]
    if not made:
        raise ValueError("the problems end before the steps do: give fewer --steps")
    with _timed(timings, "update") as timing:
        state, _ = learn(run, state, made, step)
        timing.tokens, timing.flops = _trained(arch, config, made, 3 * config.batch.epochs)
    timings["step"] = Timing(
        seconds=sum(timing.seconds for timing in timings.values()),
        tokens=timings["update"].tokens,
        flops=sum(timing.flops for timing in timings.values()),
        peak_bytes=max(timing.peak_bytes for timing in timings.values()),
    )
    return state, timings


@contextlib.contextmanager
def _timed(timings: dict[str, Timing], name: str) -> Iterator[Timing]:
    memory.reset()
    timings[name] = timing = Timing()
    start = time.perf_counter()
    yield timing
    timing.seconds = time.perf_counter() - start
    timing.peak_bytes = memory.peak()


def _sampled(arch: Architecture, groups: Sequence[Group]) -> tuple[int, int]:
    """Tokens and useful FLOPs of a rollout."""
    tokens = useful = 0
    for group in groups:
        lengths = [len(rollout.completion.tokens) for rollout in group]
        tokens += sum(lengths)
        useful += flops.rollout(arch, len(group[0].prompt), lengths)
    return tokens, useful


def _trained(
    arch: Architecture, config: RunConfig, made: Sequence[Row], passes: int
) -> tuple[int, int]:
    """Tokens, and useful FLOPs of so many passes, each like a forward pass."""
    responses: dict[tuple[int, int], list[int]] = {}
    for row in made:
        responses.setdefault((row.group, len(row.prompt)), []).append(len(row.response))
    useful = sum(
        flops.forward(arch, prompt, lengths, share=config.batch.share_prompt)
        for (_, prompt), lengths in responses.items()
    )
    return sum(map(sum, responses.values())), passes * useful


def _summary(timings: Sequence[Timing], ceiling: float) -> dict[str, Any]:
    """Medians over the steps."""
    seconds = [timing.seconds for timing in timings]
    speed = statistics.median(timing.flops / timing.seconds for timing in timings) / 1e9
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "tokens": statistics.median(timing.tokens for timing in timings),
        "tokens_per_second": statistics.median(t.tokens / t.seconds for t in timings),
        "useful_gflop_per_second": speed,
        "share_of_ceiling": speed / ceiling,
        "peak_bytes": max(timing.peak_bytes for timing in timings),
    }


def _ceiling(run: Run, size: int = 2048, enough: float = 0.2) -> float:
    """GFLOP/s of square matrix products in the compute dtype, all devices of the mesh at work."""
    count = run.mesh.size
    place = NamedSharding(run.mesh, PartitionSpec(run.mesh.axis_names))
    multiply = jax.jit(jnp.matmul, out_shardings=place)
    while True:
        a = jax.device_put(np.ones((count, size, size), run.config.model.dtype), place)
        multiply(a, a).block_until_ready()
        seconds = min(_seconds_of(multiply, a) for _ in range(3))
        if seconds * 4 >= enough or size >= 16384:
            return 2e-9 * count * size**3 / seconds
        size *= 2


def _seconds_of(multiply: Any, a: jax.Array) -> float:
    start = time.perf_counter()
    multiply(a, a).block_until_ready()
    return time.perf_counter() - start
