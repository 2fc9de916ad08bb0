"""Verifies the form of a completion by a regular expression, which is the gold answer.

A pattern can take exponential time on the right text. The pool's kill is the protection.
"""

from __future__ import annotations

import re

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem, Verdict


def score(problem: Problem, text: str, argument: str, config: VerifyConfig) -> Verdict:
    r"""Scores 1 when the pattern is found; `.` matches newlines too.

    A final newline is neither demanded nor forbidden: a pattern that ends with `\n$` matches
    without one, and one that ends with `>$` in spite of some.

    Raises:
        ValueError: The pattern is no regular expression.
    """
    if reason := check(problem, argument):
        raise ValueError(f"problem {problem.id}: {reason}")
    pattern = re.compile(problem.answer, re.DOTALL)
    stripped = text.rstrip()
    right = any(pattern.search(form) for form in (text, stripped, stripped + "\n"))
    return Verdict(float(right), right, "pattern found" if right else "pattern not found")


def check(problem: Problem, argument: str) -> str | None:
    """Returns why a pattern can't be used; None if it can."""
    if not problem.answer:
        return "empty pattern, which everything matches"
    try:
        re.compile(problem.answer)
    except re.error as error:
        return f"pattern {problem.answer!r} is no regular expression: {error}"
    return None


def example(argument: str) -> tuple[Problem, str, str]:
    """Returns a problem with a right and a wrong completion."""
    problem = Problem(
        id=0, messages=(), answer=r"^<think>.*</think>\n<answer>.*</answer>\n$", kind=""
    )
    return problem, "<think>\n2\n</think>\n<answer>3</answer>", "<answer>3</answer>"
