"""The compiler's text of a program: its computations, and how often each of them runs."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array type."""

    dtype: str
    dims: tuple[int, ...]
    layout: str
    """In the compiler's words, empty where they are missing."""


@dataclasses.dataclass(frozen=True)
class Op:
    """An instruction."""

    name: str
    kind: str
    shape: str
    operands: tuple[str, ...]
    rest: str
    """What follows the operands."""
    inside: str
    """Between the parentheses, for constants and parameters."""


@dataclasses.dataclass
class Module:
    """A compiled program: its computations, by name."""

    entry: str
    computations: dict[str, dict[str, Op]]
    roots: dict[str, str]


def parse(text: str) -> Module:
    """Takes the text apart."""
    entry, computations, roots, current = "", {}, {}, ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = head[2]
            computations[current] = {}
            entry = current if head[1] else entry
            continue
        found = _LINE.match(line)
        if found and current:
            op = _op(found[1], found[2])
            computations[current][op.name] = op
            if line.lstrip().startswith("ROOT"):
                roots[current] = op.name
    return Module(entry, computations, roots)


def _op(name: str, text: str) -> Op:
    split = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, call = text[:split], text[split:].lstrip()
    begin = call.index("(")
    end = _closing(call, begin)
    inside = call[begin + 1 : end]
    return Op(name, call[:begin], shape, tuple(_NAME.findall(inside)), call[end + 1 :], inside)


def _closing(text: str, begin: int) -> int:
    depth = 0
    for place in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"no end to the parenthesis in {text[:80]!r}")


def times(module: Module, unknown: int) -> dict[str, float]:
    """How often each computation runs that is not inside a fused operation.

    Args:
        module: parsed.
        unknown: turns of a loop that goes on for as long as data say.
    """
    found: dict[str, float] = collections.defaultdict(float)

    def visit(name: str, often: float) -> None:
        found[name] += often
        here = module.computations[name]
        for op in here.values():
            if op.kind == "while":
                turns = _turns(module, here, op) or unknown
                visit(called(op, "body"), often * turns)
            elif op.kind == "conditional":
                for branch in _branches(op):  # each as if taken: an upper bound
                    visit(branch, often)
            elif op.kind in ("call", "async-start"):
                visit(called(op, "to_apply" if "to_apply=" in op.rest else "calls"), often)

    visit(module.entry, 1.0)
    return dict(found)


def called(op: Op, attribute: str) -> str:
    """The computation that an attribute of an operation names."""
    found = re.search(rf"\b{attribute}=%?([\w.\-]+)", op.rest)
    assert found is not None, (op, attribute)
    return found[1]


def _branches(op: Op) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", op.rest)
    if listed:
        return _NAME.findall(listed[1])
    return [called(op, f"{side}_computation") for side in ("true", "false")]


def _turns(module: Module, here: dict[str, Op], loop: Op) -> float | None:
    """Of a loop that counts up to a constant; None for any other."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return float(known[1])
    name = called(loop, "condition")
    condition = module.computations[name]
    test = condition[module.roots[name]]
    if test.kind == "fusion":
        return None
    sides = [condition.get(operand) for operand in test.operands]
    if test.kind != "compare" or "direction=LT" not in test.rest or len(sides) != 2:
        return None
    counter, limit = sides
    if counter is None or limit is None or counter.kind != "get-tuple-element":
        return None
    stop = _constant(condition, limit.name)
    index = re.search(r"index=(\d+)", counter.rest)
    if stop is None or index is None:
        return None
    body = called(loop, "body")
    first = _constant(here, here[loop.operands[0]].operands[int(index[1])])
    step = _step(module.computations[body], module.roots[body], int(index[1]))
    return math.ceil(max(0, stop - (first or 0)) / step)


def _constant(here: dict[str, Op], name: str) -> int | None:
    """The integer that a name stands for, if it is one."""
    op = here.get(name)
    while op is not None and op.kind in ("copy", "bitcast", "convert"):
        op = here.get(op.operands[0])
    if op is None or op.kind != "constant" or not re.fullmatch(r"-?\d+", op.inside):
        return None
    return int(op.inside)


def _step(body: dict[str, Op], root: str, index: int) -> int:
    """What the body adds to the counter; 1 where that is hidden in a fused operation."""
    if body[root].kind != "tuple":
        return 1
    op = body.get(body[root].operands[index])
    while op is not None and op.kind in ("copy", "bitcast"):
        op = body.get(op.operands[0])
    if op is None or op.kind != "add":
        return 1
    added = [_constant(body, operand) for operand in op.operands]
    return next((value for value in added if value), 1)


def arrays(shape: str) -> list[Array]:
    """The arrays of a type, of which a tuple has several."""
    return [
        Array(found[1], tuple(map(int, filter(None, found[2].split(",")))), found[3] or "")
        for found in _ARRAY.finditer(shape)
    ]
