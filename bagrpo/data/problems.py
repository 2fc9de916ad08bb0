"""The problems of a run: rows of all sources, filtered, with their prompts and ids.

`load` reads one part of the data, training or evaluation, and accounts for every row that it drops.
A problem's id says which source and row it is, so it is the same in every epoch, on every host and
whatever else is dropped; ids of training and evaluation differ.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from bagrpo.config import DataConfig, PromptConfig, SourceConfig
from bagrpo.data import sources
from bagrpo.records import Message, Problem

ROW_BITS = 24
"""An id is source << ROW_BITS | row, below 2 ** 31."""
MAX_SOURCES = 2 ** (31 - ROW_BITS)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a source's rows."""

    source: str
    read: int
    kept: int
    dropped: Mapping[str, int]
    """Rows by reason."""
    examples: Sequence[str]
    """The first dropped row of each reason, and why."""

    def __str__(self) -> str:
        """Returns a line for the log."""
        text = f"{self.source}: {self.kept} of {self.read} problems kept"
        if self.dropped:
            counts = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            text += f"; dropped {counts}, such as {'; '.join(self.examples)}"
        return text


Check = Callable[[Problem], str | None]
"""Returns why a problem's gold answer can't be used; None when it can."""
Tokenize = Callable[[Sequence[Message]], Sequence[int]]
"""Returns the tokens of a prompt, chat template included."""
Fault = tuple[str, str]
"""Why a problem is dropped: a reason to count by, and what is wrong with this one."""


def load(
    config: DataConfig,
    part: Literal["training", "evaluation"],
    *,
    check: Check | None = None,
    tokenize: Tokenize | None = None,
    max_prompt: int | None = None,
) -> tuple[list[list[Problem]], list[Report]]:
    """Reads the training or the evaluation problems.

    Args:
        config: the data's settings.
        part: which of its lists of sources.
        check: problems that it finds a fault with are dropped; None: no answer is checked.
        tokenize: goes with `max_prompt`.
        max_prompt: most tokens that a prompt may have; None: prompts of any length.

    Returns:
        The problems of each source in its order, and a report on each.

    Raises:
        ValueError: a source can't be read or has no usable problem, a prompt is too long and the
            policy is `error`, data and configuration both have a system message, or two
            evaluation sources have one name.
    """
    if (max_prompt is None) != (tokenize is None):
        raise ValueError(f"max_prompt={max_prompt} and {tokenize=}: give both, or neither")
    judge = functools.partial(
        _judge, check=check, tokenize=tokenize, max_prompt=max_prompt, policy=config.long_prompts
    )
    loaded, reports = [], []
    for number, source in _numbered(config, part):
        problems, report = _load(source, number, config, judge)
        if not problems:
            raise ValueError(f"no problem is left of {report}")
        log.info("%s", report)
        loaded.append(problems)
        reports.append(report)
    return loaded, reports


def overlap(training: Iterable[Problem], evaluation: Iterable[Problem]) -> list[Problem]:
    """Returns the evaluation problems whose question, word for word, is also trained on."""
    trained = {problem.extra["question"] for problem in training}
    return [problem for problem in evaluation if problem.extra["question"] in trained]


def _numbered(config: DataConfig, part: str) -> Iterable[tuple[int, SourceConfig]]:
    total = len(config.sources) + len(config.evaluation)
    if total > MAX_SOURCES:
        raise ValueError(
            f"{total} sources are more than the {MAX_SOURCES} there are ids for: join files"
        )
    if part == "training":
        return enumerate(config.sources)
    names = [sources.name(source) for source in config.evaluation]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"two evaluation sources are called {sorted(twice)[0]!r}, and accuracy is reported by "
            f"name: give one another `name`"
        )
    return enumerate(config.evaluation, len(config.sources))


def _load(
    source: SourceConfig,
    number: int,
    config: DataConfig,
    judge: Callable[[Problem, str], Fault | None],
) -> tuple[list[Problem], Report]:
    problems: list[Problem] = []
    dropped: collections.Counter[str] = collections.Counter()
    examples: list[str] = []
    seen: set[tuple[str, ...]] | None = set() if source.unique else None
    evaluation = number >= len(config.sources)
    for row in sources.rows(source, evaluation=evaluation):
        problem = _problem(row, source, number, source.prompt or config.prompt)
        fault = _fault(row, seen) or judge(problem, row.where)
        if fault is None:
            problems.append(problem)
            if len(problems) == source.limit:
                break
            continue
        reason, detail = fault
        if reason not in dropped:
            examples.append(f"{row.where} ({detail})")
        dropped[reason] += 1
    read = len(problems) + dropped.total()
    return problems, Report(sources.name(source), read, len(problems), dropped, examples)


def _problem(row: sources.Row, source: SourceConfig, number: int, prompt: PromptConfig) -> Problem:
    if row.index >= 1 << ROW_BITS:
        raise ValueError(
            f"{row.where} is beyond the {1 << ROW_BITS} rows there are ids for: split the file"
        )
    return Problem(
        id=number << ROW_BITS | row.index,
        messages=_conversation(row, prompt),
        answer=row.answer,
        kind=row.kind,
        extra={
            **row.extra,
            "source": sources.name(source),
            "question": row.messages[-1]["content"],
        },
    )


def _conversation(row: sources.Row, prompt: PromptConfig) -> list[Message]:
    *before, last = row.messages
    system = [message for message in before if message["role"] == "system"]
    if prompt.system is not None:
        if system:
            raise ValueError(
                f"{row.where} has a system message, and so has the configuration: leave out "
                f"prompt.system, or take it from the data"
            )
        system = [{"role": "system", "content": prompt.system}]
    return [
        *system,
        *(turn.model_dump() for turn in prompt.examples),
        *(message for message in before if message["role"] != "system"),
        {**last, "content": prompt.template.replace("{question}", last["content"])},
    ]


def _judge(
    problem: Problem,
    where: str,
    *,
    check: Check | None,
    tokenize: Tokenize | None,
    max_prompt: int | None,
    policy: str,
) -> Fault | None:
    if check is not None and (why := check(problem)) is not None:
        return "with an unusable answer", why
    if tokenize is None or max_prompt is None:
        return None
    count = len(tokenize(problem.messages))
    if count <= max_prompt:
        return None
    if policy == "error":
        raise ValueError(
            f"the prompt of {where} has {count} tokens, more than max_prompt={max_prompt}: raise "
            f"it, or set long_prompts=drop"
        )
    return "with too long a prompt", f"{count} tokens"


def _fault(row: sources.Row, seen: set[tuple[str, ...]] | None) -> Fault | None:
    if not row.messages[-1]["content"].strip():
        return "without question", "empty"
    # reasoning-gym has tasks with many right answers that name none; so may a user's function.
    answerless = row.kind.startswith("reasoning_gym") or ".py:" in row.kind
    if not row.answer.strip() and not answerless:
        return "without answer", "empty, or not in the source's form"
    if seen is not None:
        key = (row.answer, *(message["content"] for message in row.messages))
        if key in seen:
            return "repeated", "question and answer came before"
        seen.add(key)
    return None
