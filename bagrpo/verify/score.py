"""Scores completions: the public face of verification.

A `Scorer` has each reward part of a completion checked in the pool, all at once, and adds the parts
up. `submit` returns at once, so that completions are verified while others are still sampled.

No reward is ever missing without a word. A completion that a built-in verifier chokes on is wrong.
A user's function that fails, hangs or returns nan stops the run, or, if `errors` says so, its
completion gets a verdict of reward nan, which `tally` counts and the loop must leave out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from bagrpo.config import FunctionReward, OverlongReward, VerifyConfig
from bagrpo.records import Completion, Problem, Verdict
from bagrpo.verify import code, sandbox
from bagrpo.verify.pool import Outcome, Pool

_PREFIXES = {"time": "time limit: ", "crash": "crash: ", "dropped": "dropped: "}


class Scorer:
    """Scores completions of problems of given kinds."""

    def __init__(
        self, config: VerifyConfig, kinds: Iterable[str], *, max_tokens: int | None = None
    ):
        """Starts the worker processes.

        Args:
            config: how to verify, and how parts add up.
            kinds: of all problems that will come.
            max_tokens: the sampler's limit, from which the overlong punishment counts.

        Raises:
            ValueError: An unknown kind; a function's file that is not there; code, but no sandbox;
                an overlong punishment without a limit, or with a buffer above it.
        """
        self._config = config
        self._kinds = sorted(set(kinds))
        self._max_tokens = max_tokens
        functions = [part.function for part in config.functions]
        for kind in [*self._kinds, *functions]:
            path = kind.rpartition(":")[0]
            if path.endswith(".py") and not Path(path).is_file():
                raise ValueError(f"there is no file {path!r} for the reward function {kind!r}")
        if "code" in self._kinds and not config.allow_unsandboxed_code and sandbox.missing():
            raise ValueError(code.refusal())
        if config.overlong and (max_tokens is None or config.overlong.buffer > max_tokens):
            raise ValueError(
                f"the overlong punishment begins {config.overlong.buffer} tokens before the limit "
                f"of {max_tokens} tokens: give a limit, and a buffer that is not above it"
            )
        formats = ["regex"] if config.format else []
        self._pool = Pool(config, sorted({*self._kinds, *functions, *formats}))

    def submit(self, problem: Problem, completion: Completion) -> Pending:
        """Begins to verify a completion and returns at once.

        Raises:
            ValueError: The problem's kind is not among the scorer's.
        """
        if problem.kind not in self._kinds:
            raise ValueError(
                f"problem {problem.id} is of kind {problem.kind!r}; this scorer was made for "
                f"{', '.join(self._kinds)}"
            )
        config, text = self._config, completion.text
        checks = {"correctness": (problem.kind, problem)}
        if config.format:
            form = dataclasses.replace(problem, answer=config.format.pattern)
            checks["format"] = ("regex", form)
        for part in config.functions:
            checks[_name(part)] = (part.function, problem)
        parts = {
            name: (kind, self._pool.submit("score", kind, asked, text))
            for name, (kind, asked) in checks.items()
        }
        fixed = {}
        if config.overlong and self._max_tokens is not None:
            fixed["overlong"] = overlong(len(completion.tokens), self._max_tokens, config.overlong)
        return Pending(problem.id, config, parts, fixed)

    def score(self, pairs: Iterable[tuple[Problem, Completion]]) -> list[Verdict]:
        """Returns the verdicts, one for each pair and in their order.

        Raises:
            ValueError: As `submit` and `Pending.result`.
        """
        pending = [self.submit(problem, completion) for problem, completion in pairs]
        return [verdict.result() for verdict in pending]

    def self_test(self) -> list[str]:
        """Has each kind score a known-right and a known-wrong completion.

        Returns:
            The kinds and functions that have no example and so were only loaded.

        Raises:
            ValueError: One of them gave the wrong verdict or none, which is named.
        """
        nothing = Problem(id=0, messages=(), answer="", kind="")
        names = self._kinds + [part.function for part in self._config.functions]
        futures = {name: self._pool.submit("self_test", name, nothing) for name in names}
        untested = []
        for name, future in futures.items():
            outcome = future.result()
            if outcome.failure or not outcome.verdict.correct:
                raise ValueError(f"verifier {name!r} fails its self-test: {_said(outcome)}")
            if not outcome.verdict.reward:
                untested.append(name)
        return untested

    def check_answer(self, problem: Problem) -> str | None:
        """Returns why a problem's gold answer can't be used; None if it can."""
        outcome = self._pool.submit("check", problem.kind, problem).result()
        if outcome.failure:
            return f"the check of the gold answer failed: {_said(outcome)}"
        return None if outcome.verdict.correct else outcome.verdict.reason

    def close(self) -> None:
        """Ends all processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends all processes."""
        self.close()


@dataclasses.dataclass(frozen=True)
class Pending:
    """A verdict that is being worked on."""

    problem: int
    """Its id."""
    config: VerifyConfig
    parts: Mapping[str, tuple[str, Future[Outcome]]]
    """The verifier of each reward part that the pool gives, and what will come of it."""
    fixed: Mapping[str, float]
    """Reward parts that are known."""

    def done(self) -> bool:
        """Tells whether `result` would return at once."""
        return all(future.done() for _, future in self.parts.values())

    def result(self) -> Verdict:
        """Waits for all parts and returns the verdict.

        Raises:
            ValueError: A part has no reward, and `errors` is `raise`.
            RuntimeError: No worker can be started.
        """
        verdicts = {
            name: self._settle(kind, future.result()) for name, (kind, future) in self.parts.items()
        }
        main = verdicts["correctness"]
        parts = {name: verdict.reward for name, verdict in verdicts.items()} | dict(self.fixed)
        reasons = [main.reason] + [
            f"{name}: {verdict.reason}"
            for name, verdict in verdicts.items()
            if name != "correctness" and verdict.reason.startswith(tuple(_PREFIXES.values()))
        ]
        reward = total(parts, self.config)
        if math.isnan(reward) and not main.reason.startswith(_PREFIXES["dropped"]):
            reasons.insert(0, _PREFIXES["dropped"] + "no reward in a part")
        details = {f"correctness/{name}": value for name, value in main.parts.items()}
        return Verdict(reward, main.correct, "; ".join(filter(None, reasons)), parts | details)

    def _settle(self, kind: str, outcome: Outcome) -> Verdict:
        """Returns a part's verdict, which it has also where its check failed."""
        if not outcome.failure:
            return outcome.verdict
        if outcome.failure != "error" and ".py:" not in kind:
            return Verdict(0.0, False, _said(outcome))
        if self.config.errors == "raise":
            raise ValueError(
                f"no reward for a completion of problem {self.problem} from verifier {kind!r}: "
                f"{_said(outcome)}; mend it, or set errors=drop to leave such completions out"
            )
        return Verdict(math.nan, False, _PREFIXES["dropped"] + _said(outcome))


def total(parts: Mapping[str, float], config: VerifyConfig) -> float:
    """Returns the reward that the parts add up to; nan if one is nan, whatever its weight."""
    weights = {"correctness": config.correctness, "overlong": 1.0}
    if config.format:
        weights["format"] = config.format.weight
    weights |= {_name(part): part.weight for part in config.functions}
    return math.fsum(weights[name] * value for name, value in parts.items())


def overlong(tokens: int, limit: int, settings: OverlongReward) -> float:
    """Returns the soft overlong punishment (arXiv:2503.14476, equation 13), in [-factor, 0].

    Args:
        tokens: length of the completion, the end-of-sequence token included.
        limit: tokens at which the punishment is full.
        settings: `buffer`, the tokens over which it rises, and `factor`, its greatest amount.
    """
    over = tokens - (limit - settings.buffer)
    return -settings.factor * min(1.0, max(0.0, over / settings.buffer))


def tally(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Returns how many verdicts come from a time limit or a dead worker, and how many are dropped.

    A dropped one has the reward nan: its completion must be left out of the group.
    """
    counts = {
        name: sum(prefix in verdict.reason for verdict in verdicts)
        for name, prefix in _PREFIXES.items()
    }
    return counts | {"dropped": sum(math.isnan(verdict.reward) for verdict in verdicts)}


def _name(part: FunctionReward) -> str:
    return part.function.rpartition(":")[2]


def _said(outcome: Outcome) -> str:
    return _PREFIXES.get(outcome.failure, "") + outcome.verdict.reason
