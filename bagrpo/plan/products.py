"""FLOPs of the operations that multiply matrices, as the compilers for CPU and TPU write them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

from bagrpo.plan.hlo import Op, arrays


def _dot(op: Op, ops: dict[str, Op]) -> float:
    left = _dims(ops[op.operands[0]].shape)
    contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.rest)
    width = math.prod(left[int(i)] for i in contracting[1].split(",") if i) if contracting else 1
    return 2.0 * math.prod(_dims(op.shape)) * width


def _convolution(op: Op, ops: dict[str, Op]) -> float:
    """Counts the pairs that meet, since TPU's compiler writes batched products as padded ones."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.rest)
    assert labels is not None, op
    left, kernel, out = (
        dict(zip(label, _dims(shape), strict=True))
        for label, shape in (
            (labels[1], ops[op.operands[0]].shape),
            (labels[2], ops[op.operands[1]].shape),
            (labels[3], op.shape),
        )
    )
    window = re.search(r"window=\{([^}]*)\}", op.rest)
    window = dict(part.split("=") for part in window[1].split()) if window else {}
    meeting = 1.0
    for place, name in enumerate(sorted(kind for kind in left if kind.isdigit())):
        meeting *= _meeting(left[name], kernel[name], out[name], _along(window, place))
    groups = re.search(r"batch_group_count=(\d+)", op.rest)
    return 2.0 * out["b"] * out["f"] * kernel["i"] * meeting / int(groups[1] if groups else 1)


def _along(window: dict[str, str], place: int) -> tuple[int, int, int, int]:
    """Stride, low padding, dilation of the input and of the kernel along a dimension."""

    def number(name: str, default: int) -> int:
        return int(window[name].split("x")[place].split("_")[0]) if name in window else default

    return (
        number("stride", 1),
        number("pad", 0),
        number("lhs_dilate", 1),
        number("rhs_dilate", 1),
    )


@functools.cache
def _meeting(left: int, kernel: int, out: int, along: tuple[int, int, int, int]) -> int:
    """Pairs of an output and a kernel position under which there is an input, not padding."""
    stride, pad, dilate, spread = along
    if kernel == 1 and dilate == 1 and pad == 0:
        return out
    count = 0
    for k in range(kernel):
        for o in range(out):
            place = o * stride + k * spread - pad
            count += place >= 0 and place % dilate == 0 and place // dilate < left
    return count


def _kernel(op: Op, ops: dict[str, Op]) -> float:
    """JAX's splash attention: the blocks on and below the diagonal."""
    name = re.search(r"splash_mqa_(fwd|dkv|dq)", op.name)
    if not name:
        return 0.0
    given = [array for operand in op.operands for array in arrays(ops[operand].shape)]
    queries = next(array.dims for array in given if array.dtype in ("bf16", "f16", "f32"))
    blocks = next(array.dims[-1] for array in given if array.dtype.startswith("s"))
    *heads, T, H = queries
    seen = T * T * (blocks + 1) / (2 * blocks)
    return 2.0 * _PASSES[name[1]] * math.prod(heads) * seen * H


_PASSES = {"fwd": 2, "dkv": 4, "dq": 3}
"""Matrix products of each of the kernels."""


def _dims(shape: str) -> tuple[int, ...]:
    """Of its first array."""
    return next((array.dims for array in arrays(shape)), ())


PRODUCTS: dict[str, Callable[[Op, dict[str, Op]], float]] = {
    "dot": _dot,
    "convolution": _convolution,
    "custom-call": _kernel,
}
"""FLOPs of an operation, given its surroundings."""
