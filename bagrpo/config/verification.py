"""How completions are checked, and what they are worth."""

from __future__ import annotations

import re
from typing import Literal

import pydantic
from pydantic import Field

from bagrpo.config.section import NonNegative, Positive, Section


class SandboxConfig(Section):
    """Limits of each program that a model wrote."""

    seconds: float = Field(default=4.0, gt=0)
    """Of wall clock and of processor time, for each test of a stdin problem and for all tests of a
    HumanEval problem. `VerifyConfig.seconds` bounds a problem's tests together."""
    memory_mb: Positive = 512
    """Address space of each of its processes."""
    processes: Positive = 16
    files: Positive = 64
    """Open at once."""
    file_mb: Positive = 16
    """Size of each file it writes, and of its output."""


class FormatReward(Section):
    """A reward part that is 1 where a completion has the asked form."""

    pattern: str
    """Searched for as Python's `re` does, `.` matching newlines too; anchor it with ^ and $. White
    space at the end of a completion is not held against it."""
    weight: float = 1.0

    @pydantic.field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None
        return pattern


class FunctionReward(Section):
    """A reward part that the user's own function gives."""

    function: str = Field(pattern=r"\.py:\w+$")
    """`path/to/file.py:name`, called as `name(problem, text)`."""
    weight: float = 1.0


class OverlongReward(Section):
    """Soft overlong punishment (arXiv:2503.14476, equation 13): a reward part in [-factor, 0].

    It is 0 up to `buffer` tokens below the limit and falls linearly to -factor at the limit.
    """

    buffer: Positive
    """Tokens, the end-of-sequence token included."""
    factor: NonNegative = 1.0


class VerifyConfig(Section):
    """How completions are checked, and how the checks add up to the reward.

    reward = correctness * (the verifier's score) + the sum of weight * part over the other parts
    + overlong. A constant offset, such as -1 for wrong answers, is absent on purpose: every group
    baseline removes it.
    """

    workers: Positive | None = None
    """Processes that verify; None: one for each CPU, 32 at most."""
    seconds: float = Field(default=10.0, gt=0)
    """Wall clock for each check. A worker that takes longer is killed and replaced."""
    start_seconds: float = Field(default=120.0, gt=0)
    """Wall clock for a worker to import what it needs."""
    memory_mb: Positive = 4096
    """Address space of each worker."""
    errors: Literal["raise", "drop"] = "raise"
    """When a check gives no reward (a user's function that fails, hangs or returns nan; a broken
    gold answer): stop the run, or give a verdict of reward nan, to be left out and counted. What a
    completion does to a built-in verifier is never such an error: it is a wrong answer."""
    marked_only: bool = False
    r"""Accept answers only in `\boxed{}`, after `####` or "answer is", or in <answer> tags;
    otherwise an unmarked completion answers with its last number or formula."""
    correctness: float = 1.0
    """Weight of the verifier's score, which is 0 for wrong and 1 for right."""
    format: FormatReward | None = None
    functions: tuple[FunctionReward, ...] = ()
    overlong: OverlongReward | None = None
    sandbox: SandboxConfig = SandboxConfig()
    allow_unsandboxed_code: bool = False
    """Run model-written programs without bubblewrap where that is missing. Limits on time, memory
    and output then hold, but the programs can read and write all that the user can, and use the
    network."""

    @pydantic.model_validator(mode="after")
    def _part_names_differ(self) -> VerifyConfig:
        names = [part.function.rpartition(":")[2] for part in self.functions]
        names += ["correctness", "format", "overlong"]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"reward parts are logged by name, and {', '.join(sorted(twice))} occurs twice: "
                "rename a function"
            )
        return self
