"""Advantages against exact two-pass computations, and at the inputs that broke the peers."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bagrpo.algo.advantage import ADVANTAGES, check_rewards

NORMALISED = ("group_norm", "batch_norm")


def whole(reward_PG):
    return jnp.ones(reward_PG.shape, bool)


def exact(name, reward_PG, valid_PG, std):
    """The definitions over rationals, one sample at a time."""
    groups = [
        [fractions.Fraction(float(r)) for r, v in zip(rs, vs, strict=True) if v]
        for rs, vs in zip(reward_PG, valid_PG, strict=True)
    ]
    everything = [r for group in groups for r in group]

    def deviation(values):
        mean = sum(values) / len(values)
        square = sum((r - mean) ** 2 for r in values)
        return math.sqrt(square / (len(values) - (std == "sample")))

    out = np.zeros(np.shape(reward_PG))
    for p, group in enumerate(groups):
        if len(group) < 2 or max(group) == min(group):
            continue
        mean, n = sum(group) / len(group), len(group)
        scale = {
            "group_norm": lambda group=group: 1 / deviation(group),
            "group_mean": lambda: 1.0,
            "leave_one_out": lambda n=n: n / (n - 1),
            "batch_norm": lambda: 1 / deviation(everything),
        }[name]()
        for g in np.flatnonzero(valid_PG[p]):
            out[p, g] = float(fractions.Fraction(float(reward_PG[p, g])) - mean) * scale
    return out


@pytest.mark.parametrize("std", ["population", "sample"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_the_exact_two_pass_computation(name, std):
    random = np.random.default_rng(0)
    reward_PG = random.normal(size=(7, 5)).astype(np.float32)
    reward_PG[1] = [1, 0, 0, 1, 1]
    reward_PG[2] = 0.7
    reward_PG[3] = [1.0, 1.00001, 1.00001, 1.0, 1.00002]
    valid_PG = random.random((7, 5)) < 0.7
    valid_PG[1:4] = True
    valid_PG[5] = [False, False, True, False, False]
    valid_PG[6] = False
    got_PG = ADVANTAGES[name](jnp.array(reward_PG), jnp.array(valid_PG), std=std)
    np.testing.assert_allclose(got_PG, exact(name, reward_PG, valid_PG, std), rtol=3e-6, atol=0)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("low", [1.0, -1000.0, 1e-30, 3e7])
def test_one_step_of_rounding_between_rewards_is_enough(name, low):
    low = np.float32(low)
    high = np.nextafter(low, np.float32(np.inf))
    reward_PG = np.array([[low, high, high], [low, low, high]])
    got_PG = ADVANTAGES[name](jnp.array(reward_PG), whole(reward_PG), std="population")
    expected_PG = exact(name, reward_PG, np.ones((2, 3), bool), "population")
    np.testing.assert_allclose(got_PG, expected_PG, rtol=1e-6)


def test_rewards_of_1_and_1_00001_are_plus_and_minus_1():
    reward_PG = jnp.array([[1.00000, 1.00001]])
    # Two values lie one population deviation from their mean, sqrt(1/2) sample deviations.
    for std, size in (("population", 1.0), ("sample", math.sqrt(0.5))):
        got_PG = ADVANTAGES["group_norm"](reward_PG, whole(reward_PG), std=std)
        np.testing.assert_allclose(got_PG, [[-size, size]], rtol=1e-7)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -1e7, 3e38, 1e-40])
def test_equal_rewards_give_exact_zeros(name, value):
    # A mean of 7 times 0.1 is not 0.1 in float32: only a comparison finds these equal. The second
    # group keeps the batch's deviation from being 0 too.
    reward_PG = jnp.stack([jnp.full(7, value), jnp.arange(7.0)]).astype(jnp.float32)
    got_PG = ADVANTAGES[name](reward_PG, whole(reward_PG), std="population")
    assert np.all(np.asarray(got_PG[0]) == 0)
    assert name == "batch_norm" or np.all(np.asarray(got_PG[1, :3]) < 0)


@pytest.mark.parametrize("std", ["population", "sample"])
@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("hostile", [np.nan, np.inf, -np.inf, 3e38])
def test_invalid_samples_get_zero_and_change_nothing(name, std, hostile):
    reward_PG = np.array([[1, 0, 0, 9, 9], [2, 0, 5, 9, 9]], np.float32)
    valid_PG = np.array([[1, 1, 1, 0, 0]] * 2, bool)
    reward_PG[:, 3:] = hostile
    got_PG = ADVANTAGES[name](jnp.array(reward_PG), jnp.array(valid_PG), std=std)
    short_PG = jnp.array(reward_PG[:, :3])
    expected_PG = ADVANTAGES[name](short_PG, whole(short_PG), std=std)
    assert np.array_equal(got_PG[:, :3], expected_PG)
    assert np.all(np.asarray(got_PG[:, 3:]) == 0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_left_with_one_sample_or_none_gets_zero(name):
    reward_PG = jnp.array([[5.0, 1.0, 2.0], [5.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    valid_PG = jnp.array([[True, False, False], [False] * 3, [True] * 3])
    got_PG = ADVANTAGES[name](reward_PG, valid_PG, std="sample")
    assert np.all(np.asarray(got_PG[:2]) == 0)
    assert np.all(np.asarray(got_PG[2, ::2]) != 0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_of_one_are_refused(name):
    with pytest.raises(ValueError, match="groups of 1 sample"):
        ADVANTAGES[name](jnp.ones((3, 1)), jnp.ones((3, 1), bool), std="population")
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(3, 1\)"):
        ADVANTAGES[name](jnp.ones((3, 2)), jnp.ones((3, 1), bool), std="population")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_missing_reward_is_an_error_unless_its_sample_is_invalid(bad):
    reward_PG = jnp.array([[0.0, 1.0], [1.0, bad]])
    with pytest.raises(ValueError, match="sample 1 of group 1"):
        check_rewards(reward_PG, whole(reward_PG))
    check_rewards(reward_PG, jnp.array([[True, True], [True, False]]))


@pytest.mark.parametrize("name", NORMALISED)
def test_normalised_advantages_ignore_the_scale_of_rewards(name):
    reward_PG = jnp.array([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]])
    got_PG = ADVANTAGES[name](reward_PG, whole(reward_PG), std="population")
    for scale in (1e-30, 1e30):  # their squares underflow and overflow float32
        scaled_PG = ADVANTAGES[name](scale * reward_PG, whole(reward_PG), std="population")
        np.testing.assert_allclose(scaled_PG, got_PG, rtol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_the_same_under_jit(name):
    reward_PG = jnp.array([[0.0, 1.0, 1.0], [0.5, 0.5, 0.5]])
    jitted = jax.jit(ADVANTAGES[name], static_argnames="std")
    np.testing.assert_allclose(
        jitted(reward_PG, whole(reward_PG), std="sample"),
        ADVANTAGES[name](reward_PG, whole(reward_PG), std="sample"),
        rtol=1e-6,
    )
