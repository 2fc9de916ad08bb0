"""Verifies answers to multiple-choice questions: one letter, A to J."""

from __future__ import annotations

import re

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem, Verdict
from bagrpo.verify import math_answer

# The letter as an answer starts with it: "B", "(B) 42", "**B.**", "\text{B}", "option B".
_LETTER = re.compile(
    r"(?:\\text\w*|\\math\w+|option|choice|answer|[^\w\\])*([A-J])(?![\w'’])", re.IGNORECASE
)
_UNMARKED = (
    re.compile(r"\(([A-J])\)"),
    re.compile(r"^\W*([A-J])\W*$", re.MULTILINE),
    re.compile(r"\A\W*([A-J])[.):]\s"),
)


def score(problem: Problem, text: str, argument: str, config: VerifyConfig) -> Verdict:
    """Scores 1 when the last letter that a completion chooses is the gold one.

    Chosen is what `math_answer.extract` finds; else, unless only marked answers count, the last
    "(B)" or line of one letter, or the "B." that a completion starts with.

    Raises:
        ValueError: The gold answer is no letter.
    """
    if reason := check(problem, argument):
        raise ValueError(f"problem {problem.id}: {reason}")
    chosen = _chosen(text, marked_only=config.marked_only)
    right = chosen is not None and chosen == _letter(math_answer.gold(problem.answer))
    return Verdict(float(right), right, f"answer {chosen}" if chosen else "no letter chosen")


def check(problem: Problem, argument: str) -> str | None:
    """Returns why a gold answer is no letter; None if it is one."""
    wanted = math_answer.gold(problem.answer)
    return None if _letter(wanted) else f"gold answer {wanted!r} is no letter from A to J"


def example(argument: str) -> tuple[Problem, str, str]:
    """Returns a problem with a right and a wrong completion."""
    return Problem(id=0, messages=(), answer="B", kind="choice"), "Answer: (B)", "Answer: (C)"


def _letter(text: str) -> str | None:
    """Returns the letter that a text starts with; a small one counts only by itself."""
    match = _LETTER.match(text.strip())
    if match is None or (match[1].islower() and len(re.sub(r"\W", "", text)) > 1):
        return None
    return match[1].upper()


def _chosen(text: str, *, marked_only: bool) -> str | None:
    marked = math_answer.extract(text)
    if marked is not None:
        return _letter(marked)
    if marked_only:
        return None
    found = [match for form in _UNMARKED for match in form.finditer(text)]
    return max(found, key=lambda match: match.start(1))[1] if found else None
