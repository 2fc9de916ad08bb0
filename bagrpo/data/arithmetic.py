"""Generated arithmetic problems: plain sums, and short stories that come to the same.

A problem is a chain of operations, worked from left to right. Training and held-out problems are
disjoint by construction, whatever the settings of the two sources: the numbers and operators of a
problem, in any order and in either form, decide by a hash on which side it is, and a problem of the
wrong side is drawn again. So a held-out sum occurs in training neither as it is, nor turned around,
nor as a story.
"""

from __future__ import annotations

import operator
import random
import zlib
from collections.abc import Sequence

from bagrpo.config import ArithmeticSource

HELD_OUT = 5
"""One in so many possible problems is kept from training."""
DRAWS = 10_000
"""Before the settings are taken to allow no problem at all."""

_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_NAMES = ("Ana", "Ben", "Chen", "Dana", "Eli", "Fatima", "Goran", "Hana")
_ITEMS = ("apple", "book", "coin", "marble", "pencil", "ribbon", "shell", "sticker")
_EVENTS = {
    "+": (
        "{name} finds {more}.",
        "{name} buys {more}.",
        "A friend gives {name} {more}.",
    ),
    "-": (
        "{name} gives away {some}.",
        "{name} loses {some}.",
        "Then {name} sells {some}.",
    ),
    "*": ("Then {name} gets so many that there are {number} times as many {item}s as before.",),
}


def held_out(key: str) -> bool:
    """Returns whether what `key` identifies is kept from training: true for 1 key in `HELD_OUT`."""
    return zlib.crc32(key.encode()) % HELD_OUT == 0


def draw(source: ArithmeticSource, index: int, *, evaluation: bool) -> tuple[str, str, str]:
    """Returns question, answer and worked solution of row `index`; always the same for the same.

    Args:
        source: the settings.
        index: of the row.
        evaluation: whether to draw from the held-out side.

    Raises:
        ValueError: the settings allow no problem on that side.
    """
    rng = random.Random(f"{source.seed} {evaluation} {index}")
    for _ in range(DRAWS):
        numbers = [rng.randint(source.low, source.high) for _ in range(source.terms)]
        operators = [rng.choice(source.operators) for _ in numbers[1:]]
        totals = _totals(numbers, operators)
        if min(totals) >= 0 and held_out(f"{sorted(numbers)}{sorted(operators)}") == evaluation:
            break
    else:
        raise ValueError(
            f"the arithmetic source with numbers from {source.low} to {source.high}, "
            f"{source.terms} terms and operators {source.operators} has no "
            f"{'held-out' if evaluation else 'training'} problem without a negative intermediate "
            f"result: widen low..high, or allow another operator"
        )
    question = _FORMS[rng.choice(source.forms)](numbers, operators, rng)
    steps = [
        f"{before} {sign} {number} = {after}\n"
        for before, sign, number, after in zip(
            totals[:-1], operators, numbers[1:], totals[1:], strict=True
        )
    ]
    return question, str(totals[-1]), f"{''.join(steps)}#### {totals[-1]}"


def _totals(numbers: Sequence[int], operators: Sequence[str]) -> list[int]:
    totals = [numbers[0]]
    for sign, number in zip(operators, numbers[1:], strict=True):
        totals.append(_APPLY[sign](totals[-1], number))
    return totals


def _sum(numbers: Sequence[int], operators: Sequence[str], rng: random.Random) -> str:
    text, additive = str(numbers[0]), False
    for sign, number in zip(operators, numbers[1:], strict=True):
        if sign == "*" and additive:
            text = f"({text})"  # From left to right also by the rules of precedence.
        additive = sign != "*"
        text += f" {sign} {number}"
    return f"What is {text}?"


def _story(numbers: Sequence[int], operators: Sequence[str], rng: random.Random) -> str:
    name, item = rng.choice(_NAMES), rng.choice(_ITEMS)
    sentences = [f"{name} has {_counted(numbers[0], item)}."]
    for sign, number in zip(operators, numbers[1:], strict=True):
        sentences.append(
            rng.choice(_EVENTS[sign]).format(
                name=name,
                item=item,
                number=number,
                some=_counted(number, item),
                more=_counted(number, f"more {item}"),
            )
        )
    return " ".join([*sentences, f"How many {item}s does {name} have now?"])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_FORMS = {"sum": _sum, "story": _story}
