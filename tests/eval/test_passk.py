import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from bagrpo.eval.passk import avg, maj_at_k, pass_at_k


def vote(subset):
    """The probability that the right answer, 0, wins the vote of a subset; None is no answer."""
    counts = {answer: subset.count(answer) for answer in set(subset) - {None}}
    best = [answer for answer, count in counts.items() if count == max(counts.values())]
    return Fraction(0 in best, max(len(best), 1))


def mean_over_subsets(answers, k, value):
    values = [value(subset) for subset in itertools.combinations(answers, k)]
    return float(sum(values, Fraction(0)) / len(values))


def answers_of(correct, rivals, silent):
    wrong = [name for name, count in enumerate(rivals, 1) for _ in range(count)]
    return [0] * correct + wrong + [None] * silent


# All ways to have up to 7 samples: right ones, wrong answers by how many gave them, silent ones.
def patterns(most=7):
    for n in range(1, most + 1):
        for correct, silent in itertools.product(range(n + 1), repeat=2):
            wrong = n - correct - silent
            yield from (
                (correct, rivals, silent)
                for size in range(wrong + 1)
                for rivals in itertools.combinations_with_replacement(range(1, wrong + 1), size)
                if sum(rivals) == wrong
            )


PATTERNS = list(patterns())


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n in range(1, 9):
        for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
            answers = answers_of(correct, (n - correct,), 0)
            expected = mean_over_subsets(answers, k, lambda subset: Fraction(0 in subset))
            assert pass_at_k([n], [correct], k) == pytest.approx([expected], abs=1e-15)


def test_maj_at_k_is_the_mean_vote_of_all_subsets():
    # For n samples, of which w wrong: p(w) (n - w + 1), p counting partitions: 3 + 7 + ... + 120.
    assert len(PATTERNS) == 290
    for correct, rivals, silent in PATTERNS:
        answers = answers_of(correct, rivals, silent)
        for k in range(1, len(answers) + 1):
            expected = mean_over_subsets(answers, k, vote)
            assert maj_at_k(correct, rivals, silent, k) == expected, (correct, rivals, silent, k)


def test_of_one_sample_average_pass_and_majority_are_the_same():
    for correct, rivals, silent in PATTERNS:
        n = correct + sum(rivals) + silent
        assert avg([n], [correct]) == pytest.approx(pass_at_k([n], [correct], 1))
        assert maj_at_k(correct, rivals, silent, 1) == correct / n


def test_with_more_samples_pass_at_k_never_falls():
    n, correct = np.full(9, 8), np.arange(9)
    curve = np.stack([pass_at_k(n, correct, k) for k in range(1, 9)])
    assert (np.diff(curve, axis=0) >= 0).all()
    assert (curve[:, 0] == 0).all()
    assert (curve[:, 8] == 1).all()
    assert (curve[-1, 1:] == 1).all()  # A single right sample is in the one subset of all.


def test_pass_at_k_stays_exact_where_binomials_overflow():
    # C(100000, 1000) has over 2000 digits; whole-number arithmetic has no limit.
    n, correct, k = 100_000, 70, 1000
    expected = 1 - Fraction(math.comb(n - correct, k), math.comb(n, k))
    assert pass_at_k([n], [correct], k) == pytest.approx([float(expected)], rel=1e-12)


def test_problems_with_different_numbers_of_samples_are_estimated_each_by_its_own():
    # 1 - C(3,2)/C(4,2) = 1/2; 1 - C(1,2)/C(3,2) = 1; 1 - C(4,2)/C(5,2) = 4/10.
    assert pass_at_k([4, 3, 5], [1, 2, 1], 2) == pytest.approx([0.5, 1.0, 0.4])
    assert avg([4, 3, 5], [1, 2, 1]) == pytest.approx([0.25, 2 / 3, 0.2])


@pytest.mark.parametrize(
    ("correct", "rivals", "silent", "expected"),
    [
        (3, (2, 2), 1, 1.0),
        (2, (3,), 3, 0.0),
        (2, (2, 1), 0, 1 / 2),  # One rival ties.
        (2, (2, 2, 2), 0, 1 / 4),
        (1, (), 7, 1.0),  # Whoever votes decides.
        (0, (), 4, 0.0),
        (0, (1, 1), 0, 0.0),
        (5, (), 0, 1.0),
    ],
)
def test_the_vote_of_all_samples_is_plain_and_ties_share_it(correct, rivals, silent, expected):
    assert maj_at_k(correct, rivals, silent, correct + sum(rivals) + silent) == expected


def test_the_order_of_rivals_makes_no_difference():
    assert maj_at_k(3, (1, 2, 4), 1, 5) == maj_at_k(3, (4, 1, 2), 1, 5)


def test_a_large_vote_is_counted_not_sampled():
    # 33 of 64 agree on the right answer, 31 on one wrong one: k = 63 leaves out one sample. Leaving
    # out a right one (33/64) makes 32 : 31, a wrong one 33 : 30. Right either way; with 32 : 32 the
    # one left out decides against its own side.
    assert maj_at_k(33, (31,), 0, 63) == 1.0
    assert maj_at_k(32, (32,), 0, 63) == 0.5
    assert maj_at_k(31, (33,), 0, 63) == 0.0
    assert 0.5 < maj_at_k(33, (31,), 0, 15) < maj_at_k(33, (31,), 0, 31) < 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k([4, 3], [1, 1], 4), "k = 4 where a problem has 3 samples"),
        (lambda: pass_at_k([4], [1], 0), "k = 0"),
        (lambda: pass_at_k([], [], 1), "no problems"),
        (lambda: pass_at_k([4], [5], 1), "more right samples than samples"),
        (lambda: pass_at_k([4], [-1], 1), "fewer than none"),
        (lambda: avg([], []), "no problems"),
        (lambda: avg([0], [0]), "a problem has 0 samples"),
        (lambda: maj_at_k(2, (1,), 1, 5), "from 1 to the 4 samples"),
        (lambda: maj_at_k(2, (1,), 1, 0), "from 1 to the 4 samples"),
        (lambda: maj_at_k(2, (-1,), 1, 1), "counts must be 0 or more"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
