"""The verifiers by name.

A kind is `math`, `choice`, `code`, `regex`, `reasoning_gym:TASK` (or `reasoning_gym`, where each
problem names its task) or `path/to/file.py:function`. All have the same three functions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem, Verdict
from bagrpo.verify import choice, code, function, gym, math_answer, pattern


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a verifier can do. `argument` is what the kind's name has after its colon."""

    score: Callable[[Problem, str, str, VerifyConfig], Verdict]
    """(problem, text, argument, config) -> verdict; raises only for what isn't the text's fault."""
    check: Callable[[Problem, str], str | None]
    """(problem, argument) -> why the gold answer can't be used, None if it can."""
    example: Callable[[str], tuple[Problem, str, str] | None]
    """(argument) -> a problem, a right and a wrong text; None if there is no example."""
    modules: Sequence[str] = ()
    """Slow imports, done once for all workers."""


def find(name: str) -> tuple[Kind, str]:
    """Returns the verifier of a name, and its argument.

    Raises:
        ValueError: There is none.
    """
    if re.search(r"\.py:\w+$", name):
        return kinds["function"], name
    plain, _, argument = name.partition(":")
    if plain not in kinds or plain == "function" or (argument and plain != "reasoning_gym"):
        allowed = [*(kind for kind in kinds if kind != "function"), "reasoning_gym:TASK"]
        raise ValueError(
            f"no verifier {name!r}; there are {', '.join(allowed)} and path/to/file.py:function"
        )
    return kinds[plain], argument


kinds = {
    "math": Kind(math_answer.score, math_answer.check, math_answer.example, math_answer.MODULES),
    "choice": Kind(choice.score, choice.check, choice.example),
    "code": Kind(code.score, code.check, code.example),
    "regex": Kind(pattern.score, pattern.check, pattern.example),
    "reasoning_gym": Kind(gym.score, gym.check, gym.example, gym.MODULES),
    "function": Kind(function.score, function.check, function.example),
}
