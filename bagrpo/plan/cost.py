"""What one run of a compiled program does on each device, counted in the compiler's own text.

The compiler's cost analysis counts the body of a loop once; here it counts as often as it runs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

from bagrpo.plan import hlo
from bagrpo.plan.hlo import Array, Module, Op, arrays
from bagrpo.plan.products import PRODUCTS

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "s4", "u4"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64"), 8),
}

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
}
_BOTH_SIDES = ("copy-start", "collective-permute-start", "all-gather-start")
"""Operations whose shape has the operand besides the result."""
_FAST = "S(1)"
"""In a layout: kept in the chip's fast memory, so not moved from or to HBM."""


@dataclasses.dataclass
class Cost:
    """Of one device."""

    flops: float = 0.0
    """Of matrix products."""
    bytes: float = 0.0
    """Read from and written to HBM."""
    cycles: float = 0.0
    """The compiler's estimate, where it gives one."""
    collectives: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    """Bytes that come in from other devices, by kind of collective."""

    @property
    def links(self) -> float:
        """Bytes of all collectives."""
        return sum(self.collectives.values())


def cost(text: str, *, turns: int = 1) -> Cost:
    """Counts a compiled program.

    Args:
        text: of the `jax.stages.Compiled`.
        turns: of a loop that goes on for as long as data say, as that of sampling does.
    """
    module = hlo.parse(text)
    found, stages = Cost(), set()
    for name, times in hlo.times(module, turns).items():
        for op in module.computations[name].values():
            _count(module, module.computations[name], op, times, found, stages)
    return found


def _count(
    module: Module, here: dict[str, Op], op: Op, times: float, found: Cost, stages: set[str]
) -> None:
    """Adds what an operation costs, all of its runs together."""
    if op.kind in _FREE or op.kind in ("while", "conditional", "call"):
        return
    cycles = re.search(r'"estimated_cycles":"(\d+)"', op.rest)
    if cycles:
        found.cycles += times * int(cycles[1])
    if not op.kind.endswith("-done"):
        found.bytes += times * _moved(module, here, op)
    for inner, ops in _within(module, here, op):
        if inner.kind in ("dot", "convolution", "custom-call"):
            found.flops += times * PRODUCTS[inner.kind](inner, ops)
        kind = inner.kind.removesuffix("-start")
        if kind in _COLLECTIVES:
            _add_collective(kind, inner, ops, times, found, None if inner is op else stages)


def _within(module: Module, here: dict[str, Op], op: Op) -> list[tuple[Op, dict[str, Op]]]:
    """The operation, or those that are fused into it, each with its surroundings."""
    if op.kind not in ("fusion", "custom-call") or "calls=" not in op.rest:
        return [(op, here)]
    inner = module.computations[hlo.called(op, "calls")]
    return [pair for each in inner.values() for pair in _within(module, inner, each)]


def _add_collective(
    kind: str, op: Op, ops: dict[str, Op], times: float, found: Cost, stages: set[str] | None
) -> None:
    """Those in fused operations may be stages of one collective, which they name by a channel."""
    channel = re.search(r"channel_id=(\d+)", op.rest)
    if channel and stages is not None:
        if kind + channel[1] in stages:
            return
        stages.add(kind + channel[1])
    size = max((_size(array) for array in arrays(op.shape)), default=0)
    if kind == "all-reduce":
        size = sum(_size(array) for array in arrays(op.shape))
    if kind == "reduce-scatter":
        size = sum(_size(a) for name in op.operands for a in arrays(ops[name].shape))
    group = _group(op.rest)
    share = 1.0 if kind == "collective-permute" else (group - 1) / group
    found.collectives[kind] += times * size * share * (2 if kind == "all-reduce" else 1)


def _group(rest: str) -> int:
    """Devices that take part together."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if iota:
        return int(iota[2])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    return len(listed[1].split(",")) if listed else 1


def _size(array: Array) -> float:
    return BYTES.get(array.dtype, 0) * math.prod(array.dims)


def _heavy(shape: str) -> float:
    """Bytes of the arrays of a shape that are in HBM."""
    return sum(_size(array) for array in arrays(shape) if _FAST not in array.layout)


def _moved(module: Module, here: dict[str, Op], op: Op) -> float:
    """Bytes that an operation reads and writes, of a slice only what is sliced."""
    if op.kind in _BOTH_SIDES:
        return _heavy(op.shape)
    if op.kind == "slice-start":
        source, result, *_ = arrays(op.shape)
        return _size(result) * sum(_FAST not in array.layout for array in (source, result))
    if op.kind in ("dynamic-slice", "slice", "gather"):
        return 2 * _heavy(op.shape)
    if op.kind == "dynamic-update-slice":
        return 2 * _heavy(here[op.operands[1]].shape)
    if op.kind == "scatter":
        return 3 * _heavy(here[op.operands[-1]].shape)
    operands = [here[name] for name in op.operands if name in here]
    if op.kind != "fusion":
        return _heavy(op.shape) + sum(_heavy(operand.shape) for operand in operands)
    name = hlo.called(op, "calls")
    inner = module.computations[name]
    total = _written(inner, inner[module.roots[name]], op.shape)
    for each in inner.values():
        if each.kind == "parameter" and int(each.inside) < len(operands):
            total += _read(inner, each, operands[int(each.inside)].shape)
    return total


def _read(inner: dict[str, Op], parameter: Op, shape: str) -> float:
    """Bytes that a fused operation reads of an argument of this shape."""
    whole, users, wanted = _heavy(shape), [parameter.name], 0.0
    if not whole:
        return 0.0
    while users:
        name = users.pop()
        for op in inner.values():
            if name not in op.operands:
                continue
            if op.kind in ("bitcast", "reshape", "copy", "convert"):
                users.append(op.name)
            elif op.kind in ("dynamic-slice", "slice", "gather"):
                wanted += _heavy(op.shape)
            elif op.kind in ("dynamic-update-slice", "scatter") and op.operands[0] == name:
                continue  # written in place
            else:
                return whole
    return min(whole, wanted)


def _written(inner: dict[str, Op], root: Op, shape: str) -> float:
    while root.kind in ("bitcast", "reshape", "copy"):
        root = inner[root.operands[0]]
    changed = _CHANGED.get(root.kind)
    if changed is not None and root.operands[changed] in inner and _heavy(shape):
        return _heavy(inner[root.operands[changed]].shape)
    return _heavy(shape)


_CHANGED = {"dynamic-update-slice": 1, "scatter": -1}
"""Which operand of an operation that changes an array in place has the new values."""
