"""Who votes for what when the answers of a problem's samples are put to the vote (maj@k)."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable

from bagrpo.records import Verdict
from bagrpo.verify.math_answer import parse_number

KINDS = frozenset({"math", "choice"})
"""Of problems with one right answer, which the verifier finds in a completion. Programs, patterns
and puzzles with many solutions can't be voted on."""

_QUOTED = re.compile(r"""answer (?P<quote>['"])(?P<text>(?:\\.|(?!(?P=quote))[^\\])*)(?P=quote)""")
_LETTER = re.compile(r"answer (?P<text>[A-J])\b")


def count(verdicts: Iterable[Verdict]) -> tuple[int, list[int], int]:
    """Returns how many samples are right, how many gave each wrong answer, how many gave none.

    All right samples agree, by the verifier's word. Wrong ones agree if they are one number or the
    same text but for spaces and case.
    """
    correct, silent = 0, 0
    rivals: collections.Counter[object] = collections.Counter()
    for verdict in verdicts:
        if verdict.correct:
            correct += 1
        elif (text := answer(verdict)) is None:
            silent += 1
        else:
            number = parse_number(text)
            rivals["".join(text.casefold().split()) if number is None else number.value] += 1
    return correct, list(rivals.values()), silent


def answer(verdict: Verdict) -> str | None:
    """Returns the answer that a verifier of `KINDS` found in a completion; None if it found none.

    It is read off the verdict's reason, so that nothing a model wrote is searched outside the
    verifier's process and time limit.
    """
    if quoted := _QUOTED.match(verdict.reason):
        return quoted["text"].replace("\\\\", "\\")
    letter = _LETTER.match(verdict.reason)
    return letter["text"] if letter else None
