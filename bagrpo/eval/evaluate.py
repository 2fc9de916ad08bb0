"""Runs an evaluation: each problem is sampled, each sample verified once, all of it summed up.

A completion goes to the verifiers as soon as it is there, so they work while others are sampled.
With several hosts all of them see all completions, as they do in training; each verifies its share,
and the verdicts are put together.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bagrpo.eval.results import Evaluation, Sample, summarise
from bagrpo.records import Completion, Problem, Verdict
from bagrpo.verify.score import Pending, Scorer

Generate = Callable[[Sequence[Problem], int], Iterable[tuple[int, int, Completion]]]
"""(problems, samples of each) -> (index of a problem, number of the sample, completion), each pair
once and in any order; it may be lazy."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Who else runs the same evaluation."""

    index: int = 0
    """This host's, below `count`."""
    count: int = 1
    gather: Callable[[Iterable[Any]], list[Any]] = list
    """Takes objects for JSON from each host and returns all hosts', the same on each; of several
    hosts it is `distributed.gather_objects`."""


def evaluate(
    problems: Sequence[Problem],
    generate: Generate,
    scorer: Scorer,
    *,
    samples: int,
    ks: Sequence[int] = (),
    hosts: Hosts = Hosts(),
) -> Evaluation:
    """Samples and verifies all problems, and sums up.

    Args:
        problems: of one or more benchmarks, named by `source` in their `extra`.
        generate: samples them.
        scorer: for the problems' kinds.
        samples: of each problem.
        ks: for pass@k and maj@k; none given: 2, 4, 8, ... and `samples`.
        hosts: for a run of several processes.

    Raises:
        ValueError: no problems or samples, two problems with one id, a k that can't be estimated;
            samples that are missing, came twice or weren't asked for; what the scorer raises.
    """
    ks = list(ks or doubling(samples))
    if not problems or samples < 1 or not all(1 <= k <= samples for k in ks):
        raise ValueError(
            f"{len(problems)} problems with {samples} samples each and k = {ks}; there must be at "
            "least one of either, and k from 1 to the number of samples"
        )
    if len({problem.id for problem in problems}) != len(problems):
        raise ValueError("two problems to evaluate have the same id, by which samples are told")
    completions: dict[int, Completion] = {}
    mine: dict[int, Verdict] = {}
    waiting: collections.deque[tuple[int, Pending]] = collections.deque()
    for problem, number, completion in generate(problems, samples):
        row = problem * samples + number
        if not (0 <= problem < len(problems) and 0 <= number < samples) or row in completions:
            raise ValueError(
                f"sample {number} of problem {problem} came twice or was not asked for: there are "
                f"{samples} samples of {len(problems)} problems"
            )
        completions[row] = completion
        # In turn, not in blocks: so no host waits for the last problems to begin.
        if row % hosts.count == hosts.index:
            waiting.append((row, scorer.submit(problems[problem], completion)))
        # A verifier that fails for good is met here, not after hours of sampling.
        while waiting and waiting[0][1].done():
            _settle(waiting, mine)
    while waiting:
        _settle(waiting, mine)
    found = hosts.gather((row, dataclasses.asdict(verdict)) for row, verdict in mine.items())
    verdicts = {row: Verdict(**fields) for row, fields in found}
    wanted = range(len(problems) * samples)
    for name, rows in (("completion", completions), ("verdict", verdicts)):
        if missing := [row for row in wanted if row not in rows]:
            raise ValueError(
                f"no {name} of {len(missing)} of {len(wanted)} samples, the first being sample "
                f"{missing[0] % samples} of problem {missing[0] // samples}"
            )
    return summarise(
        [
            Sample(problems[row // samples], row % samples, completions[row], verdicts[row])
            for row in wanted
        ],
        ks,
    )


def first(loaded: Sequence[Sequence[Problem]], limit: int | None) -> list[Problem]:
    """Returns the first `limit` problems, or all, of each source that `data.problems` loaded."""
    return [problem for source in loaded for problem in source[:limit]]


def doubling(samples: int) -> list[int]:
    """Returns 2, 4, 8, ... below `samples`, and `samples`; nothing for one sample."""
    if samples == 1:
        return []
    return [*(2**power for power in range(1, (samples - 1).bit_length())), samples]


def _settle(waiting: collections.deque[tuple[int, Pending]], mine: dict[int, Verdict]) -> None:
    row, pending = waiting.popleft()
    mine[row] = pending.result()
