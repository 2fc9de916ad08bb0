r"""Verifies mathematical answers: numbers exactly, everything else through math-verify.

`extract` finds what a completion answers, `equal` compares that with the gold answer, `score` does
both. Numbers, which are nearly all answers of GSM8K and most of others, take an exact path. The
rest is parsed as LaTeX by math-verify, without its own time limit, which sets a signal handler and
so works on main threads only: the pool's kill is the limit. Its parser for plain expressions is
left out because it ends in `eval`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from fractions import Fraction

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem, Verdict

MODULES = ("math_verify",)
"""What a worker imports beforehand, where it is installed."""

_MINUS = str.maketrans(dict.fromkeys("−‒–﹣－", "-"))
_CURRENCY = "$€£¥₹"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
_NUMBER_IN_TEXT = re.compile(
    rf"(?<![\w.])-?[{_CURRENCY}]?(?:\\frac\{{\d+\}}\{{\d+\}}|(?:{_DIGITS})(?:\s?/\s?\d+(?!\d|\.\d))?)"
    r"(?:\s?%)?"
)
_NUMBER = re.compile(
    rf"(?P<minus>[-+]?)\s*[{_CURRENCY}]?\s*(?P<minus2>-?)"
    rf"(?:(?P<digits>{_DIGITS})\.?(?P<exponent>[eE][-+]?\d{{1,3}})?(?:\s*/\s*(?P<over>\d+))?"
    r"|\\frac\s*(?:\{(?P<above>-?\d+)\}\s*\{(?P<below>\d+)\}|(?P<digit1>\d)\s*(?P<digit2>\d)))"
    r"\s*(?P<percent>%|percent\b)?(?P<unit>(?:\s+[A-Za-z]{2,}\.?)*)"
)
_LONGEST_NUMBER = 200
"""Characters; a longer one is left to math-verify."""
_NO_UNITS = re.compile(
    r"\b(and|or|to|by|of|over|mod|plus|minus|times|pi|sqrt|root|log|ln|exp|sin|cos|tan|inf|infinity"
    r"|half|dozen|hundred|thousand|million|billion|trillion|percent)\b",
    re.IGNORECASE,
)
"""Words that after a number change what it says."""
_GOES_ON = re.compile(r"[\w(\\]|,\d|\s*[-+*/^=×÷·x]\s*[\d(\\$]")
"""What after a number makes it the beginning of a longer expression."""

_BOX = re.compile(r"\\f?boxed\s*$|\\fbox\s*$")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PHRASE = re.compile(r"\banswer\**\s*(?:is\b|[:=])[\s:*]*", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S
)


@dataclasses.dataclass(frozen=True)
class Number:
    """A number and how it was written."""

    value: Fraction
    percent: bool
    ratio: bool
    """As a fraction, not as a decimal or whole number."""


def score(problem: Problem, text: str, argument: str, config: VerifyConfig) -> Verdict:
    """Scores 1 when the last answer in the text equals the gold answer.

    Raises:
        ValueError: The gold answer is empty.
    """
    wanted = gold(problem.answer)
    if not wanted:
        raise ValueError(f"problem {problem.id} has no gold answer")
    found = extract(text)
    if found is None and not config.marked_only:
        found = _unmarked(text, numeric=parse_number(wanted) is not None)
    if not found:
        return Verdict(0.0, False, "no answer found")
    right = equal(found, wanted)
    return Verdict(float(right), right, f"answer {found!r}")


def check(problem: Problem, argument: str) -> str | None:
    """Returns why a gold answer can't be compared with anything; None if it can."""
    wanted = gold(problem.answer)
    if not wanted:
        return "empty gold answer"
    if wanted.count("{") != wanted.count("}"):
        return f"unbalanced braces in gold answer {wanted!r}"
    if parse_number(wanted) or re.fullmatch(r"[A-Za-z]+([ -][A-Za-z]+)?", _clean(wanted)):
        return None
    try:
        parsed = _parse_latex(wanted)
    except ImportError as error:
        return f"gold answer {wanted!r} is no plain number, and others need math-verify: {error}"
    except Exception as error:  # noqa: BLE001 - a parser meets foreign text
        return f"unparsable gold answer {wanted!r}: {error}"
    return None if parsed else f"unparsable gold answer {wanted!r}"


def example(argument: str) -> tuple[Problem, str, str]:
    """Returns a problem with a right and a wrong completion."""
    problem = Problem(id=0, messages=(), answer="1/2", kind="math")
    return problem, r"It is $\boxed{0.5}$.", r"It is $\boxed{0.2}$."


def gold(answer: str) -> str:
    r"""Returns the answer in a gold answer or solution: in `\boxed{}`, after `####`, or all."""
    box = _boxed(answer)
    return (box[0] if box else answer.rpartition("####")[2]).strip()


def extract(text: str) -> str | None:
    r"""Returns the answer that a completion marks as such; None if it marks none.

    The last of `\boxed{}`, `#### ` and `<answer></answer>` counts, wherever it stands; without any,
    what follows the last "answer is" or "Answer:".
    """
    candidates: list[tuple[int, str]] = []
    if box := _boxed(text):
        candidates.append((box[1], box[0]))
    for found in _HASHES.finditer(text):
        # Four hashes and a word are a heading, unless nothing follows.
        if not found[1][0].isalpha() or not text[found.end() :].strip():
            candidates.append((found.end(), _answer_in(found[1])))
    for found in _TAG.finditer(text):
        candidates.append((found.end(), _answer_in(found[1])))
    if candidates:
        return max(candidates)[1].strip()
    for phrase in _PHRASE.finditer(text):
        candidates.append((phrase.end(), text[phrase.end() :].partition("\n")[0]))
    return _answer_in(candidates[-1][1]).strip() if candidates else None


def equal(found: str, wanted: str) -> bool:
    """Tells whether two answers are the same number, text or formula."""
    left, right = parse_number(found), parse_number(wanted)
    if left and right:
        if _same_number(left, right):
            return True
        if left.ratio == right.ratio:
            return False
    elif _squeezed(found) == _squeezed(wanted):
        return True
    return _equal_formulas(found, wanted)


def parse_number(text: str) -> Number | None:
    """Returns the number that the text as a whole is, units aside; None if it isn't one.

    "$200,000.", "-18.00", "3/4", "7 apples" and "12%" are numbers; "[8.124,12.852]", "2x" and
    "3 million" are not.
    """
    text = re.sub(r"^[A-Za-z]\s*=\s*", "", _clean(text))
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        return None
    part = match.groupdict()
    if _NO_UNITS.search(part["unit"]):
        return None
    if part["digits"]:
        value = Fraction(part["digits"].replace(",", "") + (part["exponent"] or ""))
        below = part["over"] or "1"
    else:
        value = Fraction(part["above"] or part["digit1"])
        below = part["below"] or part["digit2"]
    if int(below) == 0:
        return None
    negative = (part["minus"] == "-") != (part["minus2"] == "-")
    value = (-value if negative else value) / int(below)
    return Number(value, percent=bool(part["percent"]), ratio=below != "1")


def _same_number(left: Number, right: Number) -> bool:
    """Compares; "18%" is 18, as where a question asks for percent, and 0.18."""
    if left.value == right.value:
        return True
    if left.percent == right.percent:
        return False
    return left.value / (100 if left.percent else 1) == right.value / (100 if right.percent else 1)


def _boxed(text: str) -> tuple[str, int] | None:
    r"""Returns content and end of the last closed `\boxed{}`, `\boxed x` or `\fbox{}`."""
    last, opened = None, []
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if brace[0] == "{":
            opened.append(
                (bool(_BOX.search(text, max(0, brace.start() - 16), brace.start())), brace)
            )
        elif brace[0] == "}" and opened:
            box, start = opened.pop()
            if box:
                last = text[start.end() : brace.start()], brace.end()
    bare = list(re.finditer(r"\\f?boxed\s+([^\s{}$]+)", text))
    if bare and (last is None or bare[-1].end() > last[1]):
        last = bare[-1][1], bare[-1].end()
    if last and (inner := _boxed(last[0])):
        return inner[0], last[1]
    return last


def _answer_in(text: str) -> str:
    """Returns the answer at the start of a text that may go on."""
    text = text.strip()
    if box := _boxed(text):
        return box[0]
    if formula := _FORMULA.match(text.lstrip("*")):
        return next(group for group in formula.groups() if group is not None)
    plain = text.translate(_MINUS).lstrip("*")
    if number := _NUMBER_IN_TEXT.match(plain):
        if parse_number(text):
            return text
        if not _GOES_ON.match(plain, number.end()):
            return number[0]
        if "=" in plain:
            return _answer_in(plain.rpartition("=")[2])
    return re.split(r"(?<=\w)\.\s", text, maxsplit=1)[0]


def _unmarked(text: str, *, numeric: bool) -> str | None:
    """Returns the last number, or the last formula or line where the gold answer is no number."""
    if numeric:
        numbers = _NUMBER_IN_TEXT.findall(text.translate(_MINUS))
        return numbers[-1] if numbers else None
    if formulas := _FORMULA.findall(text):
        return next(group for group in formulas[-1] if group)
    lines = text.strip().splitlines()
    return lines[-1] if lines else None


def _clean(text: str) -> str:
    """Takes away what does not change an answer: layout, text commands, math delimiters."""
    text = text.translate(_MINUS).replace("{,}", ",").replace("°", "")
    text = re.sub(r"\\(?:text(?:bf|rm|it)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", "", text)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", "", text)
    text = re.sub(r"\\[,;:> ]|~|\s+", " ", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\([$%])", r"\1", text).strip().strip("*`").strip()
    for start, end in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(text) > 2 and text.startswith(start) and text.endswith(end):
            text = text[len(start) : -len(end)].strip("$")
    return text.strip().removesuffix(".").strip()


def _squeezed(text: str) -> str:
    """Returns the cleaned text without spaces; case does not count in words."""
    text = _clean(text)
    words = re.fullmatch(r"\(?[A-Za-z][A-Za-z -]+\)?", text)
    text = re.sub(r"\s+", "", text.casefold() if words else text)
    single = re.fullmatch(r"\(([A-Za-z])\)", text)
    return single[1] if single else text


def _equal_formulas(found: str, wanted: str) -> bool:
    try:
        from math_verify import verify
    except ImportError:
        return False  # `check` has refused the gold answers that need it.
    try:
        return bool(verify(_parse_latex(wanted), _parse_latex(found), timeout_seconds=None))
    except Exception:  # noqa: BLE001 - whatever sympy makes of a model's formula is a wrong answer
        return False


def _parse_latex(text: str) -> list:
    from math_verify import LatexExtractionConfig, parse

    # It warns, once and through logging, that somebody else has to end what takes too long.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse(
        rf"\boxed{{{_clean(text)}}}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType] - documented, not declared
    )
