"""Diagnostics against a plain loop over groups, and at batches that leave them nothing to say."""

import dataclasses

import jax
import numpy as np
import pytest

from bagrpo.algo.aggregate import RULES
from bagrpo.algo.diagnostics import diagnostics
from bagrpo.algo.loss import loss
from bagrpo.config import AlgorithmConfig, KLConfig

LENGTHS = [3, 5, 2, 4, 0, 6, 1, 7]
ADVANTAGES = [1.0, 0.5, -2.0, 0.0, 1.0, 1.0, 3.0, -1.0]
GROUPS = [4, 4, 4, 4, 4, 9, 9, 9]


def config_of(rule):
    return AlgorithmConfig(rule=rule, kl=KLConfig(coef=0.1))


def measure(case, config):
    sums = jax.jit(loss, static_argnames="config")(
        case.logp_BR, case.entropy_BR, case.batch(config), config
    )[1]
    got = diagnostics(case.rows, sums, config)
    return {name: float(value) for name, value in got.items()}, sums


@pytest.mark.parametrize("rule", RULES)
def test_diagnostics_equal_a_loop_over_groups(rule, make_case):
    case = make_case(LENGTHS, ADVANTAGES, GROUPS)
    got, sums = measure(case, config_of(rule))
    sums = {name: np.float64(value) for name, value in sums.items()}

    def token_mean(name, rows):
        return sums[name][rows].sum() / np.array(LENGTHS)[rows].sum()

    # Rows of each sign in the two groups, written out: the fifth row is masked.
    plus, minus = ([0, 1], [5, 6]), ([2], [7])
    expected = {
        "kl": token_mean("kl", slice(None)),
        "entropy": token_mean("entropy", slice(None)),
        "logp": token_mean("logp", slice(None)),
        "ratio": token_mean("ratio", slice(None)),
        "log_ratio": token_mean("log_ratio", slice(None)),
        "log_ratio_abs": token_mean("log_ratio_abs", slice(None)),
        "clip_fraction": token_mean("clipped", slice(None)),
        "L_plus": np.mean([token_mean("objective", rows) for rows in plus]),
        "L_minus": np.mean([token_mean("objective", rows) for rows in minus]),
        "length/mean": 28 / 7,
        "length/plus": 15 / 4,
        "length/minus": 9 / 2,
        # Positive means 4 and 3.5, negative 2 and 7.
        "length/gap": (-2 + 3.5) / 2,
        "length/ratio": (2 / 4 + 7 / 3.5) / 2,
        "length/std": (np.std([3, 5, 2, 4]) + np.std([6, 1, 7])) / 2,
        "length/cv": (np.std([3, 5, 2, 4]) / 3.5 + np.std([6, 1, 7]) / (14 / 3)) / 2,
        "zero_advantage": 1 / 7,
        "mixed_groups": 1.0,
    }
    weight_BR = np.float64(RULES[rule](case.rows))
    expected["objective"] = (weight_BR.max(axis=1) * sums["objective"]).sum()
    for suffix, name in [("", rule)] + [(f"/{n}", n) for n in ("token", "sequence", "balanced")]:
        mass_B = np.float64(RULES[name](case.rows)).sum(axis=1) * np.abs(ADVANTAGES)
        expected[f"positive_mass{suffix}"] = mass_B[[0, 1, 5, 6]].sum() / mass_B.sum()
    assert got == pytest.approx(expected, rel=1e-5)


def test_objective_is_the_loss_without_its_regularisers(make_case):
    case = make_case(LENGTHS, ADVANTAGES, GROUPS)
    config = AlgorithmConfig()
    value = loss(case.logp_BR, case.entropy_BR, case.batch(config), config)[0]
    assert measure(case, config)[0]["objective"] == pytest.approx(-float(value), rel=1e-5)


def test_binary_rewards_balance_the_mass_of_the_signs_unless_tokens_are_counted(make_case):
    # k = 1 of 4: A+ = sqrt(3), A- = -sqrt(1/3). Token mass 2 sqrt(3) : 16 sqrt(1/3) = 6 : 16.
    case = make_case([2, 4, 9, 3], [3**0.5] + [-(3**-0.5)] * 3, [0] * 4)
    got, _ = measure(case, config_of("balanced"))
    assert got["positive_mass/balanced"] == pytest.approx(1 / 2, rel=1e-6)
    assert got["positive_mass/sequence"] == pytest.approx(1 / 2, rel=1e-6)
    assert got["positive_mass/token"] == pytest.approx(6 / 22, rel=1e-6)


def test_on_policy_loss_drifts_with_length_for_tokens_only(make_case):
    case = make_case([2, 4, 9, 3], [3**0.5] + [-(3**-0.5)] * 3, [0] * 4)
    case = dataclasses.replace(case, old_logp_BR=case.logp_BR)
    _, sums = measure(case, config_of("balanced"))
    got = {
        rule: float(diagnostics(case.rows, sums, config_of(rule))["objective"]) for rule in RULES
    }
    assert got["balanced"] == pytest.approx(0, abs=1e-6)
    assert got["sequence"] == pytest.approx(0, abs=1e-6)
    # (2 sqrt(3) - 16 / sqrt(3)) / 18 = -10 / (18 sqrt(3))
    assert got["group_token"] == pytest.approx(-10 / (18 * 3**0.5), rel=1e-5)


@pytest.mark.parametrize(
    ("lengths", "advantages", "absent"),
    [
        ([3, 5], [0.0, 0.0], ["L_plus", "L_minus", "length/gap", "length/ratio", "mixed_groups"]),
        ([3, 5], [1.0, 2.0], ["L_minus", "length/gap", "length/ratio", "length/minus"]),
        ([3, 5], [-1.0, -2.0], ["L_plus", "length/gap", "length/ratio", "positive_mass"]),
        ([0, 0], [1.0, np.nan], ["L_plus", "entropy", "length/mean", "length/cv", "objective"]),
    ],
)
def test_a_mean_over_nothing_is_zero(lengths, advantages, absent, make_case):
    got, _ = measure(make_case(lengths, advantages, [0, 0]), config_of("balanced"))
    assert all(np.isfinite(value) for value in got.values())
    assert [got[name] for name in absent] == [0] * len(absent)
    assert sum(lengths) == 0 or got["length/mean"] == 4
