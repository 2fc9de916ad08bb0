"""TPU slices by the names that their cloud gives them, and what is published about their chips."""

from __future__ import annotations

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip. Rates are the published peaks of one chip."""

    name: str
    cores: int
    """Cores of a chip, where the slice's name counts cores."""
    flops: float
    """bfloat16 FLOP/s."""
    hbm_bytes: float
    """What the compiler lets programs use of it."""
    hbm_rate: float
    """bytes/s."""
    link_rate: float
    """bytes/s over all links to its neighbours, in one direction."""
    hertz: float
    """Of the cycles that the compiler estimates."""
    torus: int
    """Dimensions of the network."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are rented together."""

    chip: Chip
    shape: tuple[int, ...]
    """Of one slice."""
    slices: int = 1
    """Which a data-centre network joins."""

    @property
    def chips(self) -> int:
        """How many, of all slices."""
        return self.slices * math.prod(self.shape)

    @property
    def compiler_name(self) -> str:
        """As the compiler knows it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


_GIB = 2**30

CHIPS = {
    chip.name: chip
    for chip in (
        # https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e. Of the links half the
        # two-way rate; clocks are the peak over 2 x 128 x 128 (v6e: 256 x 256) and matrix units.
        Chip("v4", 2, 275e12, 30.75 * _GIB, 1228e9, 300e9, 1.05e9, 3),
        Chip("v5e", 1, 197e12, 15.75 * _GIB, 819e9, 200e9, 1.5e9, 2),
        Chip("v5p", 2, 459e12, 95.74 * _GIB, 2765e9, 600e9, 1.75e9, 3),
        Chip("v6e", 1, 918e12, 31.25 * _GIB, 1638e9, 400e9, 1.75e9, 2),
    )
}


def parse(name: str) -> Slice:
    """The slice of a name such as v5e-256 (chips) or v5p-16 (cores, two a chip), or 2xv5e-256.

    Raises:
        ValueError: if there is none of that name.
    """
    found = re.fullmatch(r"(?:(\d+)x)?(v\d\w?)-(\d+)", name)
    chip = CHIPS.get(found[2]) if found else None
    if found is None or chip is None:
        raise ValueError(
            f"no slice is called {name!r}; give {', '.join(f'{kind}-N' for kind in CHIPS)} with "
            "the N of the cloud (v4 and v5p count cores, two a chip), 2xv5e-N for two, or cpu:N"
        )
    count = int(found[3])
    shape = _shape(count // chip.cores, chip.torus) if count % chip.cores == 0 else None
    if shape is None:
        sizes = [n * chip.cores for n in _COUNTS if _shape(n, chip.torus)]
        raise ValueError(f"no slice is called {name!r}; {chip.name} has N = {sizes}")
    return Slice(chip, shape, int(found[1] or 1))


_COUNTS = [2**power for power in range(13)]


def _shape(chips: int, torus: int) -> tuple[int, ...] | None:
    """The usual shape: powers of two, as even as they can be, the largest last."""
    if chips not in _COUNTS:
        return None
    if torus == 2:
        if chips == 2 or chips > 256:
            return None
        power = chips.bit_length() - 1
        return (2 ** (power // 2), 2 ** (power - power // 2))
    if chips < 4:
        return None
    if chips == 4:
        return (2, 2, 1)
    power = chips.bit_length() - 1
    parts = [power // 3 + (2 - i < power % 3) for i in range(3)]
    return (2 ** parts[0], 2 ** parts[1], 2 ** parts[2])
