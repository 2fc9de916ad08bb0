import math

import numpy as np
import pytest

from bagrpo.eval.interval import Estimate, bootstrap, clustered, wilson

KINDS = {"clustered": clustered, "bootstrap": bootstrap}


def coverage(intervals, truth):
    return np.mean([low <= truth <= high for low, high in intervals])


def test_wilson_covers_a_proportion_as_often_as_it_says():
    # Exact, no simulation: the sum of the probabilities of the outcomes whose interval holds it.
    for trials in (30, 100, 500):
        covered = []
        for rate in np.linspace(0.05, 0.95, 19):
            chances = [
                math.comb(trials, c) * rate**c * (1 - rate) ** (trials - c)
                for c in range(trials + 1)
            ]
            intervals = [wilson(c, trials) for c in range(trials + 1)]
            covered.append(
                sum(
                    p
                    for p, (low, high) in zip(chances, intervals, strict=True)
                    if low <= rate <= high
                )
            )
        assert np.mean(covered) == pytest.approx(0.95, abs=0.01)
        assert min(covered) > 0.91


def test_wilson_agrees_with_the_equation_it_solves():
    # Its ends are the rates r from which the observed share is z standard errors away:
    # (c/n - r)^2 = z^2 r (1 - r) / n, with z = 1.959964.
    for successes, trials in [(1, 10), (7, 20), (50, 100)]:
        for rate in wilson(successes, trials):
            deviation = (successes / trials - rate) ** 2 / (rate * (1 - rate) / trials)
            assert deviation == pytest.approx(1.959964**2, rel=1e-6)


def test_wilson_has_a_width_where_all_trials_end_alike():
    # At the end the equation is (1 - r) = z^2 r / n: the other end is n / (n + z^2).
    other = 20 / (20 + 1.959964**2)
    assert wilson(20, 20) == (pytest.approx(other), 1.0)
    assert wilson(0, 20) == (0.0, pytest.approx(1 - other))


def test_clustered_intervals_cover_where_samples_of_a_problem_are_alike():
    # Problems' true rates are Beta(0.4, 0.6): mean 0.4, most are nearly always right or wrong.
    rng = np.random.default_rng(0)
    P, samples, runs = 60, 16, 2000
    rates = rng.beta(0.4, 0.6, size=(runs, P))
    values = rng.binomial(samples, rates) / samples
    estimates = [clustered(row) for row in values]
    # 2000 runs tell 0.95 to within 0.015 (three standard errors of a share of runs).
    assert coverage([(e.low, e.high) for e in estimates], 0.4) == pytest.approx(0.945, abs=0.02)
    # To take all 960 samples of a run as independent would cover less than half as often.
    naive = [wilson(round(row.sum() * samples), P * samples) for row in values]
    assert coverage(naive, 0.4) < 0.5


def test_bootstrap_intervals_cover_the_mean_of_the_population():
    rng = np.random.default_rng(1)
    values = rng.beta(0.8, 1.2, size=(250, 60))  # Mean 0.4.
    estimates = [bootstrap(row) for row in values]
    # 250 runs tell 0.94 to within 0.045; percentile intervals are slightly short.
    assert coverage([(e.low, e.high) for e in estimates], 0.4) == pytest.approx(0.94, abs=0.045)


def test_the_standard_error_is_that_of_a_mean_of_problems():
    # Mean 0.5, squares 4 * 0.0625 + 0 over 4 * 5: an error of sqrt(0.25 / 20).
    found = clustered(np.array([0.25, 0.25, 0.75, 0.75, 0.5]))
    half = 1.959964 * math.sqrt(0.25 / 20)
    assert (found.value, found.problems) == (0.5, 5)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-6)


def test_one_sample_of_each_problem_has_wilson_s_interval():
    found = clustered(np.array([1, 0, 0, 1, 1, 0, 0, 0]))
    assert (found.low, found.high) == wilson(3, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_or_all_wrong_is_not_certainty(kind, value):
    found = KINDS[kind](np.full(50, value))
    assert found == Estimate(value, *wilson(int(50 * value), 50), 50)
    assert found.high - found.low > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_mixed_problem_says_nothing_of_others(kind):
    assert KINDS[kind](np.array([0.25])) == Estimate(0.25, 0.0, 1.0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_hold_their_mean_and_stay_among_shares(kind):
    values = np.array([0.0] * 12 + [0.125])
    found = KINDS[kind](values)
    assert found.value == pytest.approx(0.125 / 13)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_a_bootstrap_interval_is_always_the_same_in_any_order_of_problems():
    values = np.random.default_rng(2).random(40)
    assert bootstrap(values) == bootstrap(values) == bootstrap(values[::-1])


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_of_nothing_or_of_no_shares_are_refused(kind):
    with pytest.raises(ValueError, match="no problems"):
        KINDS[kind](np.array([]))
    for wrong in (1.5, -0.1, np.nan):
        with pytest.raises(ValueError, match="not shares"):
            KINDS[kind](np.array([0.5, wrong]))
    for successes, trials in [(0, 0), (3, 2), (-1, 2)]:
        with pytest.raises(ValueError, match="trials are needed"):
            wilson(successes, trials)
