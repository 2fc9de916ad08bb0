"""Means over problems with 95 % confidence intervals.

The problems are taken as drawn from a population of problems, so it is the spread between them that
counts, not the number of samples (arXiv:2411.00640): k samples of a problem are one observation, a
cluster. With few problems every such interval is rough; from a single mixed one, nothing follows.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
"""Of the bootstrap."""
SEED = 0
"""Of the bootstrap, so that the same results always have the same interval."""

_Z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_CHUNK = 100
"""Resamples made at once: memory stays small for many problems."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over problems and its 95 % confidence interval."""

    value: float
    low: float
    high: float
    problems: int
    """How many it is over."""


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Returns Wilson's score interval (JASA 22, 1927) of a proportion.

    It keeps to [0, 1] and has a width also where all trials ended alike.

    Args:
        successes: 0 to `trials`.
        trials: independent ones, at least 1.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes in {trials} trials; 1 or more trials are needed")
    rate, spread = successes / trials, _Z**2 / trials
    center = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(rate * (1 - rate) * spread + spread**2 / 4) / (1 + spread)
    # At the ends the two are equal but for rounding.
    low = 0.0 if successes == 0 else center - half
    high = 1.0 if successes == trials else center + half
    return low, high


def clustered(values_P: np.ndarray) -> Estimate:
    """Returns the mean with a normal-theory interval from the spread between problems.

    The standard error is sqrt(sum (v_p - mean)^2 / (P (P - 1))), which is the clustered one of
    arXiv:2411.00640 where each problem weighs the same. Where every value is 0 or 1, as with one
    sample of each problem, the interval is Wilson's.

    Args:
        values_P: share of right samples of each problem, in [0, 1].

    Raises:
        ValueError: no problems, or values outside [0, 1].
    """
    values_P = _checked(values_P)
    if np.isin(values_P, (0, 1)).all():
        return _binary(values_P)
    P, value = len(values_P), float(values_P.mean())
    if P == 1:
        return Estimate(value, 0.0, 1.0, P)
    half = _Z * float(values_P.std(ddof=1)) / math.sqrt(P)
    return Estimate(value, max(0.0, value - half), min(1.0, value + half), P)


def bootstrap(values_P: np.ndarray) -> Estimate:
    """Returns the mean with the percentile interval of resampled problems, always the same.

    Where every value is 0, or every one 1, each resample is too: there the interval is Wilson's.

    Args:
        values_P: of each problem, in [0, 1]; their order makes no difference.

    Raises:
        ValueError: no problems, or values outside [0, 1].
    """
    values_P = np.sort(_checked(values_P))
    if values_P[0] == values_P[-1] and values_P[0] in (0, 1):
        return _binary(values_P)
    P, value = len(values_P), float(values_P.mean())
    if P == 1:
        return Estimate(value, 0.0, 1.0, P)
    rng = np.random.default_rng(SEED)
    means = [
        values_P[rng.integers(P, size=(_CHUNK, P))].mean(axis=1) for _ in range(RESAMPLES // _CHUNK)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high), P)


def _binary(values_P: np.ndarray) -> Estimate:
    P = len(values_P)
    return Estimate(float(values_P.mean()), *wilson(int(values_P.sum()), P), P)


def _checked(values_P: np.ndarray) -> np.ndarray:
    values_P = np.asarray(values_P, np.float64)
    if len(values_P) == 0:
        raise ValueError("no problems to take the mean over; evaluate on at least one")
    if not ((values_P >= 0) & (values_P <= 1)).all():
        raise ValueError(
            f"values of problems from {values_P.min()} to {values_P.max()}: not shares"
        )
    return values_P
