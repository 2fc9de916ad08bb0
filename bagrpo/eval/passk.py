"""What k samples of a problem come to, estimated without bias from the n >= k that were taken.

Each estimate is the exact mean over all subsets of k of the n samples: of how many are right (avg),
of whether any is (pass@k), of whether the answer that most of them give is (maj@k). No random
subsets are drawn. With k = 1 all three are the share of right samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def avg(samples_P: np.ndarray, correct_P: np.ndarray) -> np.ndarray:
    """Returns the share of right samples of each problem: avg@k where k were taken.

    Args:
        samples_P: samples of each problem, at least 1.
        correct_P: how many of them are right.

    Raises:
        ValueError: no problems, a problem without samples, or with more right ones than samples.
    """
    samples_P, correct_P = _checked(samples_P, correct_P, 1)
    return correct_P / samples_P


def pass_at_k(samples_P: np.ndarray, correct_P: np.ndarray, k: int) -> np.ndarray:
    """Returns the unbiased estimate of pass@k of each problem (arXiv:2107.03374, equation 1).

    1 - C(n - c, k) / C(n, k) for c right samples of n: the share of subsets of k with a right one.
    The quotient of binomials is the product of (n - c - i) / (n - i) over 0 <= i < k, whose factors
    are all in [0, 1]: nothing overflows.

    Args:
        samples_P: samples of each problem, at least k.
        correct_P: how many of them are right.
        k: size of the subsets, at least 1.

    Raises:
        ValueError: no problems, k is not in 1..n, or c is not in 0..n.
    """
    samples_P, correct_P = _checked(samples_P, correct_P, k)
    drawn_1K = np.arange(k)[None, :]
    wrong_PK = np.maximum((samples_P - correct_P)[:, None] - drawn_1K, 0)
    return 1 - np.prod(wrong_PK / (samples_P[:, None] - drawn_1K), axis=1)


def maj_at_k(correct: int, rivals: Sequence[int], silent: int, k: int) -> float:
    """Returns the probability that the vote of k of a problem's samples is right.

    The samples of a subset vote for their answers; the answer with most votes wins, and of t
    answers with equally many each wins with probability 1 / t. The right answer is one candidate,
    however it is written. Samples without an answer don't vote, and a subset of such alone is
    wrong. The mean over all subsets is exact: for each number of votes with which the right answer
    can win, the ways to draw the others are counted in whole numbers. With k = n it is the plain
    vote.

    Args:
        correct: samples with the right answer.
        rivals: samples with each of the wrong answers.
        silent: samples without an answer.
        k: size of the subsets, at least 1.

    Raises:
        ValueError: a negative count, or k is not in 1..n.
    """
    n = correct + sum(rivals) + silent
    if min(correct, silent, *rivals) < 0 or not 1 <= k <= n:
        raise ValueError(
            f"maj@{k} of {correct} right, {list(rivals)} wrong and {silent} silent samples; counts "
            f"must be 0 or more, and k from 1 to the {n} samples"
        )
    return _majority(correct, tuple(sorted(rivals)), silent, k)


@functools.lru_cache(maxsize=100_000)  # Most problems of a benchmark share a few patterns.
def _majority(correct: int, rivals: tuple[int, ...], silent: int, k: int) -> float:
    wins = Fraction(0)
    for votes in range(1, min(correct, k) + 1):
        others = k - votes
        # Who can't reach so many votes may be drawn freely.
        free = silent + sum(rival for rival in rivals if rival < votes)
        ways = _ways([rival for rival in rivals if rival >= votes], votes, others)
        outcomes = sum(
            Fraction(count * math.comb(free, others - drawn), tied + 1)
            for tied, row in enumerate(ways)
            for drawn, count in enumerate(row)
            if count
        )
        wins += math.comb(correct, votes) * outcomes
    return float(wins / math.comb(correct + sum(rivals) + silent, k))


def _ways(rivals: Sequence[int], votes: int, most: int) -> list[list[int]]:
    """Returns in how many ways samples can be drawn with no rival above `votes`.

    Indexed by how many rivals have just `votes`, and by how many samples are drawn, up to `most`.
    """
    ways = [[1] + [0] * most]
    for rival in rivals:
        extended = [[0] * (most + 1) for _ in range(len(ways) + 1)]
        for tied, row in enumerate(ways):
            for drawn, count in enumerate(row):
                for more in range(min(votes, most - drawn) + 1 if count else 0):
                    extended[tied + (more == votes)][drawn + more] += count * math.comb(rival, more)
        ways = extended
    return ways


def _checked(samples_P: np.ndarray, correct_P: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    samples_P, correct_P = np.asarray(samples_P), np.asarray(correct_P)
    if len(samples_P) == 0:
        raise ValueError("no problems to estimate anything of; evaluate on at least one")
    if not ((correct_P >= 0) & (correct_P <= samples_P)).all():
        raise ValueError("a problem has more right samples than samples, or fewer than none")
    if not 1 <= k <= samples_P.min():
        raise ValueError(
            f"k = {k} where a problem has {samples_P.min()} samples; k must be from 1 to the "
            "number of samples: take more of them"
        )
    return samples_P, correct_P
