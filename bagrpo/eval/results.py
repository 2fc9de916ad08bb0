"""What an evaluation found: summed up, shown, logged and written down.

A sample whose check gave no reward (`VerifyConfig.errors` = drop) is neither right nor wrong: it is
counted, and left out of every estimate.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from rich.table import Table

from bagrpo import folders
from bagrpo.eval import interval, passk, votes
from bagrpo.eval.interval import Estimate
from bagrpo.records import Completion, Problem, Verdict
from bagrpo.verify import score


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion of an evaluation problem, and the verdict on it."""

    problem: Problem
    number: int
    """Of the problem's samples."""
    completion: Completion
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Metrics:
    """A benchmark's, or all benchmarks' together."""

    problems: int
    samples: int
    estimates: Mapping[str, Estimate]
    """By name: `avg@8`, `pass@4`, `maj@8`. One that no problem has enough scored samples for is not
    there, and of those with some problems only, `Estimate.problems` says how many."""
    finish: Mapping[str, int]
    """Samples by the way they ended."""
    mean_length: float
    """Tokens, the end-of-sequence token included."""
    errors: Mapping[str, int]
    """Samples whose verifier ran into its time limit (`time`) or died (`crash`), and those without
    a reward (`dropped`)."""

    @property
    def truncated(self) -> float:
        """Share of samples that the token limit ended."""
        return self.finish["length"] / self.samples


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """All that an evaluation found."""

    benchmarks: Mapping[str, Metrics]
    """By the name of their source, in the order of the problems."""
    overall: Metrics
    """Of all problems, each weighing the same."""
    samples: Sequence[Sample]
    """In the order of problems and, of each, of numbers."""

    def log_values(self) -> dict[str, float]:
        """Returns all figures by name, for logs.

        A benchmark's begin with its name and a slash (`gsm8k/avg@8`), those of all problems don't.
        Intervals are `avg@8_low` and `avg@8_high`.
        """
        values = _log_values(self.overall)
        for name, metrics in self.benchmarks.items():
            values |= {f"{name}/{key}": value for key, value in _log_values(metrics).items()}
        return values

    def table(self) -> Table:
        """Returns a table for the terminal: a section a benchmark, and one for all of several."""
        sections = dict(self.benchmarks)
        if len(sections) > 1:
            sections["all problems"] = self.overall
        table = Table()
        table.add_column("benchmark")
        table.add_column("figure")
        for title in ("value", "95 % interval", "problems"):
            table.add_column(title, justify="right")
        for name, metrics in sections.items():
            first, *others = _lines(metrics)
            table.add_row(name, *first)
            for line in others:
                table.add_row("", *line)
            table.add_section()
        return table


def summarise(samples: Sequence[Sample], ks: Sequence[int]) -> Evaluation:
    """Returns the metrics of each benchmark and of all.

    Args:
        samples: of all problems, as many of each; the problems' `extra` names their `source`.
        ks: for pass@k and maj@k.

    Raises:
        ValueError: no samples.
    """
    benchmarks: dict[str, list[Sample]] = {}
    for sample in samples:
        benchmarks.setdefault(sample.problem.extra["source"], []).append(sample)
    return Evaluation(
        {name: _metrics(part, ks) for name, part in benchmarks.items()},
        _metrics(samples, ks),
        samples,
    )


def write_samples(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Writes a line of JSON for each sample; the file is there when it is whole, not before."""
    lines = (
        json.dumps(_record(sample), ensure_ascii=False, allow_nan=False) + "\n"
        for sample in samples
    )
    # A lone surrogate, which UTF-8 has no bytes for, becomes the escape that JSON has for it.
    content = b"".join(line.encode("utf-8", "backslashreplace") for line in lines)
    folders.write(folders.path(path), content)


def _metrics(samples: Sequence[Sample], ks: Sequence[int]) -> Metrics:
    if not samples:
        raise ValueError("no samples to sum up; evaluate on at least one problem")
    groups: dict[int, list[Verdict]] = {}
    for sample in samples:
        groups.setdefault(sample.problem.id, []).append(sample.verdict)
    voting = all(sample.problem.kind in votes.KINDS for sample in samples)
    finish = collections.Counter(sample.completion.finish for sample in samples)
    return Metrics(
        problems=len(groups),
        samples=len(samples),
        estimates=_estimates(list(groups.values()), ks, voting=voting),
        finish={end: finish[end] for end in ("stop", "length")},
        mean_length=float(np.mean([len(sample.completion.tokens) for sample in samples])),
        errors=score.tally([sample.verdict for sample in samples]),
    )


def _estimates(
    groups: Sequence[Sequence[Verdict]], ks: Sequence[int], *, voting: bool
) -> dict[str, Estimate]:
    """Returns the estimates by name; `groups` has the verdicts of each problem."""
    scored = [[v for v in verdicts if not math.isnan(v.reward)] for verdicts in groups]
    scored = [verdicts for verdicts in scored if verdicts]
    if not scored:
        return {}
    samples_P = np.array([len(verdicts) for verdicts in scored])
    correct_P = np.array([sum(v.correct for v in verdicts) for verdicts in scored])
    name = f"avg@{max(map(len, groups))}"
    estimates = {name: interval.clustered(passk.avg(samples_P, correct_P))}
    ks = [k for k in ks if k <= samples_P.max()]
    for k in ks:
        enough_P = samples_P >= k
        passed_P = passk.pass_at_k(samples_P[enough_P], correct_P[enough_P], k)
        estimates[f"pass@{k}"] = interval.bootstrap(passed_P)
    for k in ks if voting else ():
        won = [passk.maj_at_k(*votes.count(v), k) for v in scored if len(v) >= k]
        estimates[f"maj@{k}"] = interval.bootstrap(np.array(won))
    return estimates


def _log_values(metrics: Metrics) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, estimate in metrics.estimates.items():
        values |= {
            name: estimate.value,
            f"{name}_low": estimate.low,
            f"{name}_high": estimate.high,
        }
    return values | {
        "problems": metrics.problems,
        "samples": metrics.samples,
        "mean_length": metrics.mean_length,
        "truncated": metrics.truncated,
        **{f"finish_{name}": count for name, count in metrics.finish.items()},
        **{f"errors_{name}": count for name, count in metrics.errors.items()},
    }


def _lines(metrics: Metrics) -> Iterator[tuple[str, ...]]:
    """Yields the table's cells, after the first, for each figure."""
    for name, estimate in metrics.estimates.items():
        interval = f"{100 * estimate.low:.1f} to {100 * estimate.high:.1f} %"
        yield name, f"{100 * estimate.value:.1f} %", interval, str(estimate.problems)
    problems = str(metrics.problems)
    yield "mean tokens", f"{metrics.mean_length:.0f}", "", problems
    yield "truncated", f"{100 * metrics.truncated:.1f} %", "", problems
    for name, count in metrics.errors.items():
        if count:
            yield f"errors: {name}", f"{count} of {metrics.samples}", "", problems


def _record(sample: Sample) -> dict[str, object]:
    problem, completion, verdict = sample.problem, sample.completion, sample.verdict
    return {
        "problem": problem.id,
        "benchmark": problem.extra["source"],
        "question": problem.extra["question"],
        "answer": problem.answer,
        "sample": sample.number,
        "text": completion.text,
        "correct": verdict.correct,
        "reward": _number(verdict.reward),
        "parts": {name: _number(value) for name, value in verdict.parts.items()},
        "reason": verdict.reason,
        "finish": completion.finish,
        "tokens": len(completion.tokens),
    }


def _number(value: float) -> float | None:
    """Returns the value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None
