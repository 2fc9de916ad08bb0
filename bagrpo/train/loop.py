"""A run of reinforcement learning from verifiable rewards, from its settings to its end.

Each step draws problems, samples a group of completions for each, has programs judge them, turns
rewards into advantages and advantages into token weights, and updates the policy; now and then it
evaluates and saves. The same command goes on from the newest checkpoint, to the bit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bagrpo import distributed, folders
from bagrpo.config import RunConfig
from bagrpo.eval.evaluate import Hosts, evaluate
from bagrpo.eval.results import Evaluation, write_samples
from bagrpo.records import Problem
from bagrpo.sample.request import Sampling
from bagrpo.train.assemble import Row
from bagrpo.train.checkpoint import Checkpoints
from bagrpo.train.preemption import stop_on_signal
from bagrpo.train.record import Record
from bagrpo.train.rollout import Group, Sampler, collect
from bagrpo.train.rows import demonstrations, rows
from bagrpo.train.setup import Run, prepare
from bagrpo.train.source import CHECKPOINTS
from bagrpo.train.step import TrainState

log = logging.getLogger(__name__)


def train(config: RunConfig) -> bool:
    """Run, or resume, what the settings say.

    Returns:
        Whether all steps are done; otherwise a signal has stopped the run, which is saved.

    Raises:
        ValueError: for settings, data or a model that cannot be used, or if the loss is not finite.
    """
    assert config.folder is not None
    folders.path(config.folder)  # An address of no use is said at once.
    with prepare(config) as run, stop_on_signal() as stop_requested:
        checkpoints = Checkpoints(run.folder / CHECKPOINTS, config.checkpoint)
        state, step = run.begin(checkpoints)
        run.describe()
        with contextlib.closing(checkpoints), contextlib.closing(Record(run, step)) as record:
            if step >= config.steps:
                record.say(f"{run.folder} is complete: all its {step} steps are done")
                return True
            if step:
                record.say(f"{run.folder} goes on after step {step}")
            record.say(run.compile())
            if step == 0:
                record.evaluation(0, evaluate_now(run, state, 0))
            record.start()
            while step < config.steps:
                state, metrics, groups = take_step(run, state, step)
                step += 1
                last = step == config.steps
                if last or (config.eval.every and step % config.eval.every == 0):
                    metrics |= evaluate_now(run, state, step)
                record.step(step, metrics, groups)
                stop = stop_requested()
                if last or stop or step % config.checkpoint.every == 0:
                    checkpoints.save(step, state, run.host_state(), metrics)
                if stop and not last:
                    record.say(f"{stop}: step {step} is saved; the same command goes on from it")
                    return False
            record.say(f"all {step} steps are done; the run is in {run.folder}")
            return True


def take_step(
    run: Run, state: TrainState, step: int
) -> tuple[TrainState, dict[str, float], list[Group]]:
    """Problems in, a better policy out."""
    start = time.perf_counter()
    groups, metrics = ([], {}) if run.imitates else explore(run, state, step)
    made = imitate(run) if run.imitates else judge(run, state, groups)
    begun = time.perf_counter()
    state, found = learn(run, state, made, step)
    metrics |= found | {
        "time/update": time.perf_counter() - begun,
        "time/step": time.perf_counter() - start,
        "updates": float(state.updates),
        "epoch": run.stream.epoch,
        "compilations": float(run.compilations()),
    }
    return state, metrics, groups


def explore(run: Run, state: TrainState, step: int) -> tuple[list[Group], dict[str, float]]:
    """Stages 1 to 4: the policy's completions of the next problems, with their verdicts."""
    config, sampler = run.config, run.sampler
    assert sampler is not None
    sampler.engine.load(state.params)
    groups, metrics = collect(
        sampler,
        run.stream,
        Sampling.of(config.sample),
        groups=config.batch.problems,
        samples=config.batch.group,
        rounds=config.data.dynamic_rounds,
        step=step,
    )
    sampler.engine.unload()
    return groups, metrics


def judge(run: Run, state: TrainState, groups: Sequence[Group]) -> list[Row]:
    """Stages 5 and 7: rows with advantages, and with the log-probs that something needs."""
    old, reference = run.old_logps(state), run.reference_logps()
    return rows(groups, run.config.algorithm, old=old, reference=reference)


def learn(
    run: Run, state: TrainState, made: list[Row], step: int
) -> tuple[TrainState, dict[str, float]]:
    """Stages 6 and 8 to 10: all the updates of a step, and the means of their metrics."""
    config = run.config
    updated: list[dict[str, float]] = []
    for epoch in range(config.batch.epochs if made else 0):
        for part in minibatches(made, config.batch.minibatches):
            state, found = run.trainer.train_step(
                state, part, temperature=config.sample.temperature or 1.0
            )
            _check_finite(found, step, epoch, part)
            updated.append(found)
    if not any(row.trained for row in made):
        log.warning("step %d: every group was filtered out, so nothing was learnt", step)
    return state, _mean_over_updates(updated)


def imitate(run: Run) -> list[Row]:
    """The rows of a supervised step: worked solutions."""
    problems = run.stream.next_batch(run.config.batch.problems * run.config.batch.group)
    prompts = [run.prompter(problem.messages) for problem in problems]
    return demonstrations(problems, prompts, run.source.tokenizer)


def minibatches(made: list[Row], count: int) -> list[list[Row]]:
    """Whole groups, in order, as evenly as they divide; parts without a group are left out."""
    groups = sorted({row.group for row in made})
    size = -(-len(groups) // count)
    parts = [set(groups[i : i + size]) for i in range(0, len(groups), max(1, size))]
    return [[row for row in made if row.group in part] for part in parts]


def evaluate_now(run: Run, state: TrainState, step: int) -> dict[str, float]:
    """Metrics of the evaluation problems, named `eval/...`; none without such problems."""
    if not run.evaluation or run.sampler is None:
        return {}
    start, samples = time.perf_counter(), run.config.eval.samples
    run.sampler.engine.load(state.params)
    found = evaluate_with(run.sampler, run.config, run.evaluation, step=step)
    run.sampler.engine.unload()
    if distributed.is_main():
        write_samples(run.folder / "evaluation" / f"step_{step}.jsonl", found.samples)
    values: dict[str, Any] = found.log_values()
    for end in ("", "_low", "_high"):
        values[f"accuracy{end}"] = values.get(f"avg@{samples}{end}", math.nan)
    values["time"] = time.perf_counter() - start
    return {f"eval/{name}": value for name, value in values.items()}


def evaluate_with(
    sampler: Sampler, config: RunConfig, problems: Sequence[Problem], *, step: int
) -> Evaluation:
    """Samples and verifies evaluation problems as `config.eval` says; `step` keys the noise."""
    how = config.eval
    sampling = Sampling(
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        min_p=how.min_p,
        stop=config.sample.stop,
        max_tokens=how.max_tokens,
    )
    return evaluate(
        problems,
        lambda problems, samples: sampler.completions(problems, samples, sampling, step=step),
        sampler.scorer,
        samples=how.samples,
        ks=how.ks,
        hosts=Hosts(jax.process_index(), jax.process_count(), distributed.gather_objects),
    )


def _check_finite(metrics: dict[str, float], step: int, epoch: int, part: list[Row]) -> None:
    if not math.isfinite(metrics["grad_norm"]) or not math.isfinite(metrics["objective"]):
        groups = sorted({row.group for row in part})
        raise ValueError(
            f"step {step}, epoch {epoch}, groups {groups[0]} to {groups[-1]}: the objective is "
            f"{metrics['objective']} and the gradient's norm {metrics['grad_norm']}. The newest "
            "checkpoint is from before; lower optimizer.learning_rate, or compute in float32"
        )


def _mean_over_updates(updated: list[dict[str, float]]) -> dict[str, float]:
    if not updated:
        return {}
    return {name: float(np.mean([one[name] for one in updated])) for name in updated[0]}
