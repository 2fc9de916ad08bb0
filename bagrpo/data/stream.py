"""The order in which problems are trained on, and the position in it.

Each source is a Grain dataset, shuffled anew in each of its epochs and repeated. With weights the
sources are interleaved; without, they are one. The order depends on seed, settings and problems
alone, so every host has the same stream, and a position is the number of problems taken from each
source.
"""

from __future__ import annotations

import fractions
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from bagrpo.config import DataConfig
from bagrpo.records import Problem


class Stream:
    """Training problems in the run's order, from any position."""

    def __init__(self, problems: Sequence[Sequence[Problem]], config: DataConfig, *, seed: int):
        """Starts at the beginning.

        Args:
            problems: of each of `config.sources`, none empty.
            config: gives weights, shuffling and the number of epochs.
            seed: the run's; keys the shuffling.

        Raises:
            ValueError: no problems, or not as many lists of them as sources.
        """
        if not problems or len(problems) != len(config.sources) or not all(problems):
            raise ValueError(
                f"the stream needs problems of each of the {len(config.sources)} sources and at "
                f"least one, not lists of {[len(part) for part in problems]}: set `sources`"
            )
        weights = [source.weight for source in config.sources if source.weight is not None]
        if not weights:
            problems, weights = [[item for part in problems for item in part]], [1.0]
        self.rows = sum(map(len, problems))
        """Problems in an epoch."""
        self._end = None if config.epochs is None else config.epochs * self.rows
        self._shares = _integers(weights)
        self._taken = [0] * len(problems)
        self._datasets = [
            _dataset(part, np.random.SeedSequence([seed, number]) if config.shuffle else None)
            for number, part in enumerate(problems)
        ]
        order = [seed if config.shuffle else None, self._shares]
        content = [[(item.id, item.answer) for item in part] for part in problems]
        self._fingerprint = hashlib.sha256(repr((order, content)).encode()).hexdigest()[:16]

    @property
    def taken(self) -> int:
        """Problems taken so far."""
        return sum(self._taken)

    @property
    def epoch(self) -> float:
        """Epochs passed so far."""
        return self.taken / self.rows

    def next_batch(self, count: int) -> list[Problem]:
        """Returns the next `count` problems; fewer, or none, at the end of the last epoch only."""
        if count < 1:
            raise ValueError(f"a batch of {count} problems; ask for at least 1")
        if self._end is not None:
            count = min(count, self._end - self.taken)
        batch = []
        for _ in range(count):
            source = next_source(self._shares, self._taken)
            batch.append(self._datasets[source][self._taken[source]])
            self._taken[source] += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Returns the position, for JSON."""
        return {"taken": list(self._taken), "fingerprint": self._fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` returned, of this or an equal stream.

        Raises:
            ValueError: the stream's seed, settings or problems are others: the position in it has
                no meaning here.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the checkpoint's position is in training data {state['fingerprint']}, this is "
                f"{self._fingerprint}: problems, answers, weights, shuffling or the seed have "
                f"changed since; undo that, or start a new run"
            )
        self._taken = list(state["taken"])


def next_source(shares: Sequence[int], taken: Sequence[int]) -> int:
    """Returns which source the next item comes from, so that counts keep to the shares.

    After any number k of items, source i has given k * share_i / sum(shares) of them to within
    1 - 1 / (2n - 2) < 1, for n sources: Tijdeman's solution of the chairman assignment problem
    (Discrete Mathematics 32, 1980), which is the best possible. Among the sources that may give an
    item without getting too far ahead, it takes the one that must give one soonest. Grain's own
    mixing rounds shares to whole multiples of a hundredth of the smallest.
    """
    if len(shares) == 1:
        return 0
    whole, scale, after = sum(shares), 2 * len(shares) - 2, sum(taken) + 1
    # By how much each is behind if it gives no item, in units of 1 / (whole * scale) items.
    behind = [
        scale * (share * after - count * whole) for share, count in zip(shares, taken, strict=True)
    ]
    return min(
        (source for source in range(len(shares)) if behind[source] >= whole),
        key=lambda i: fractions.Fraction((scale - 1) * whole - behind[i], shares[i]),
    )


def host_share(count: int, *, host: int, hosts: int) -> slice:
    """Returns which of `count` items a host verifies or scores: contiguous, each on one host.

    Shares differ by at most one item, and joined in the order of hosts they are the whole.

    Raises:
        ValueError: host is not in [0, hosts).
    """
    if not 0 <= host < hosts:
        raise ValueError(f"host {host} of {hosts} hosts; it must be at least 0 and below {hosts}")
    return slice(count * host // hosts, count * (host + 1) // hosts)


def _dataset(problems: Sequence[Problem], seed: np.random.SeedSequence | None) -> grain.MapDataset:
    dataset = grain.MapDataset.source(problems)
    if seed is not None:
        # Grain adds the epoch to the seed, so sources' seeds must not be neighbours.
        dataset = dataset.shuffle(int(seed.generate_state(1)[0]))
    return dataset.repeat()


def _integers(weights: Sequence[float]) -> list[int]:
    """Returns the smallest whole numbers in the proportions of the decimals that were written."""
    exact = [fractions.Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(part.denominator for part in exact))
    whole = [int(part * common) for part in exact]
    divisor = math.gcd(*whole)
    return [part // divisor for part in whole]
