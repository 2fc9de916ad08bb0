"""Stages 1 to 4 of a step: problems, prompts, completions, verdicts, until a batch is full."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from bagrpo import distributed
from bagrpo.data.filter import Collector
from bagrpo.data.stream import Stream
from bagrpo.records import Completion, Message, Problem, Rollout, Verdict
from bagrpo.sample.engine import Engine
from bagrpo.sample.request import Request, Sampling
from bagrpo.text import chat
from bagrpo.text.tokenizer import Tokenizer
from bagrpo.verify.score import Scorer

NOW = datetime.datetime(2024, 7, 26)
"""The date that a chat template which prints it gets: prompts must not change overnight."""

Group = list[Rollout]


@dataclasses.dataclass
class Prompter:
    """Messages to prompt ids, always in the same way."""

    tokenizer: Tokenizer
    template: str | None

    def __call__(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the model reads."""
        template = chat.TEMPLATES.get(self.template or "", self.template)
        return chat.prompt_ids(self.tokenizer, messages, template, now=NOW)


@dataclasses.dataclass
class Sampler:
    """The engine with what a run always samples with."""

    engine: Engine
    prompter: Prompter
    scorer: Scorer
    seed: int

    def rollouts(
        self, problems: Sequence[Problem], samples: int, sampling: Sampling, *, step: int
    ) -> list[Group]:
        """Samples each problem and has each completion verified while others are sampled.

        The hosts share the verification; all get all verdicts.
        """
        times = collections.Counter(problem.id for problem in problems)
        unique = list({problem.id: problem for problem in problems}.values())
        prompts = {problem.id: self.prompter(problem.messages) for problem in unique}
        # A problem that comes twice gets further samples, not the same ones again.
        requests = [Request(prompts[p.id], p.id, samples * times[p.id]) for p in unique]
        host, hosts = jax.process_index(), jax.process_count()
        found: dict[tuple[int, int], Completion] = {}
        pending = {}
        for index, sample, completion in self.engine.generate(
            requests, sampling, seed=self.seed, step=step
        ):
            found[unique[index].id, sample] = completion
            if (index + sample) % hosts == host:
                pending[unique[index].id, sample] = self.scorer.submit(unique[index], completion)
        own = [[*key, dataclasses.asdict(waiting.result())] for key, waiting in pending.items()]
        verdicts = {
            (problem, sample): Verdict(**fields)
            for problem, sample, fields in distributed.gather_objects(own)
        }
        seen: collections.Counter[int] = collections.Counter()
        groups = []
        for problem in problems:
            first = samples * seen[problem.id]
            seen[problem.id] += 1
            groups.append(
                [
                    Rollout(problem, prompts[problem.id], found[key], verdicts[key], key[1])
                    for key in ((problem.id, first + g) for g in range(samples))
                ]
            )
        return groups

    def completions(
        self, problems: Sequence[Problem], samples: int, sampling: Sampling, *, step: int
    ) -> Iterator[tuple[int, int, Completion]]:
        """Samples for an evaluation, from its own stream of noise."""
        requests = [
            Request(self.prompter(problem.messages), problem.id, samples) for problem in problems
        ]
        yield from self.engine.generate(
            requests, sampling, seed=self.seed, step=step, stream="evaluation"
        )


def collect(
    sampler: Sampler,
    stream: Stream,
    sampling: Sampling,
    *,
    groups: int,
    samples: int,
    rounds: int | None,
    step: int,
) -> tuple[list[Group], dict[str, float]]:
    """The groups of a step, and what they say of the policy.

    Args:
        sampler: holds the current parameters.
        stream: of problems, which moves on.
        sampling: how.
        groups: of a full batch.
        samples: of each group.
        rounds: of dynamic sampling at most; None: all groups are taken as they come.
        step: keys the noise.

    Returns:
        Groups, fewer than asked for when the problems or the rounds end; and metrics over all
        rollouts sampled, those of dropped groups too.
    """
    start = time.perf_counter()
    if rounds is None:
        problems = stream.next_batch(groups)
        kept = sampler.rollouts(problems, samples, sampling, step=step) if problems else []
        return kept, _metrics(kept, start)
    collector, sampled = Collector(groups, rounds), []
    while not collector.done:
        problems = stream.next_batch(groups)
        if not problems:
            break
        noise = step * rounds + collector.rounds  # a problem may come again in a later round
        found = sampler.rollouts(problems, samples, sampling, step=noise)
        sampled += found
        collector.add(found)
    metrics = _metrics(sampled, start)
    metrics |= {
        f"dynamic/{name}": float(getattr(collector, name))
        for name in ("rounds", "all_correct", "all_wrong", "unscored", "surplus")
    }
    return [list(group) for group in collector.groups], metrics


def _metrics(groups: Sequence[Group], start: float) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    if not rollouts:
        return {}
    seconds = time.perf_counter() - start
    lengths = [len(rollout.completion.tokens) for rollout in rollouts]
    scored = [r.verdict for r in rollouts if np.isfinite(r.verdict.reward)]
    parts = collections.defaultdict(list)
    for verdict in scored:
        for name, value in verdict.parts.items():
            parts[name].append(value)
    return {
        "reward": _mean(verdict.reward for verdict in scored),
        "accuracy": _mean(float(verdict.correct) for verdict in scored),
        **{f"reward/{name}": _mean(values) for name, values in sorted(parts.items())},
        "unscored": float(len(rollouts) - len(scored)),
        "completion/length": _mean(lengths),
        "completion/longest": float(max(lengths)),
        "completion/truncated": _mean(r.completion.finish == "length" for r in rollouts),
        "completion/tokens": float(sum(lengths)),
        "prompt/length": _mean(len(rollout.prompt) for rollout in rollouts),
        "time/rollout": seconds,
        "rollout/tokens_per_second": sum(lengths) / seconds,
    }


def _mean(values) -> float:
    values = list(values)
    return float(np.mean(values)) if values else 0.0
