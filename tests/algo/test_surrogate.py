"""Surrogates: GSPO's two forms, ratios on policy, and where the trust region stops the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bagrpo.algo import aggregate, surrogate
from bagrpo.algo.ratio import LIMIT
from bagrpo.config import ClipConfig

CLIP = ClipConfig(low=0.2, high=0.28, dual=3.0)


def gspo(logp_BR, case, clip):
    """The paper's J as it stands: one clipped ratio a row, s = exp(mean log ratio)."""
    mask_BR = case.rows.mask_BR
    length_B = mask_BR.sum(axis=1).astype(jnp.float32)
    log_BR = jnp.where(mask_BR, logp_BR - case.old_logp_BR, 0.0)
    s_B = jnp.exp(log_BR.sum(axis=1) / length_B)
    a_B = case.rows.advantage_B1[:, 0]
    return jnp.minimum(s_B * a_B, jnp.clip(s_B, 1 - clip.low, 1 + clip.high) * a_B).mean()


@pytest.mark.parametrize("seed", range(3))
def test_sequence_has_value_and_gradient_of_gspo(seed, make_case):
    lengths, advantages = [3, 7, 1, 16, 5, 2, 9, 4], [1.0, -1, 2, 1, -3, 1, -1, -1]
    case = make_case(lengths, advantages, [0] * 8, seed=seed)
    clip = ClipConfig(low=0.1, high=0.2)
    weight_BR = aggregate.sequence(case.rows)

    def objective(logp_BR):
        return (
            weight_BR
            * surrogate.sequence(
                logp_BR, case.old_logp_BR, case.rows.advantage_B1, case.rows.mask_BR, clip
            )
        ).sum()

    got = jax.value_and_grad(objective)(case.logp_BR)
    expected = jax.value_and_grad(gspo)(case.logp_BR, case, clip)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-8)
    # The clip drops rows whole, and here it drops some and keeps some.
    kept_B = np.any(np.asarray(got[1]) != 0, axis=1)
    assert 0 < kept_B.sum() < 8


@pytest.mark.parametrize("name", surrogate.RATIOS)
def test_without_a_sampler_the_ratio_is_exactly_one(name, make_case):
    case = make_case([3, 7, 1, 16], [1.0, -1.0, 2.0, 0.5], [0] * 4)
    rows = case.rows
    clip = ClipConfig(low=0.0, high=0.0)  # every ratio lies on both bounds, and must not be cut

    def objective_BR(logp_BR):
        return surrogate.SURROGATES[name](logp_BR, None, rows.advantage_B1, rows.mask_BR, clip)

    advantage_BR = np.where(rows.mask_BR, rows.advantage_B1, 0)
    assert np.all(surrogate.RATIOS[name](case.logp_BR, None, rows.mask_BR) == 1)
    assert np.array_equal(objective_BR(case.logp_BR), advantage_BR)
    gradient_BR = jax.grad(lambda logp_BR: objective_BR(logp_BR).sum())(case.logp_BR)
    assert np.array_equal(gradient_BR, advantage_BR)


@pytest.mark.parametrize("name", surrogate.RATIOS)
def test_clipped_tokens_are_those_without_a_gradient(name, make_case):
    case = make_case([16] * 8, [1.0, -1.0] * 3 + [2.0, 0.0], [0] * 8)
    args = case.old_logp_BR, case.rows.advantage_B1, case.rows.mask_BR, CLIP
    gradient_BR = jax.grad(lambda x: surrogate.SURROGATES[name](x, *args).sum())(case.logp_BR)
    ratio_BR = surrogate.RATIOS[name](case.logp_BR, case.old_logp_BR, case.rows.mask_BR)
    clipped_BR = np.asarray(surrogate.clipped(ratio_BR, *args[1:]))
    assert np.array_equal(np.asarray(gradient_BR)[:7] == 0, clipped_BR[:7])
    assert 0 < clipped_BR.sum() < 7 * 16
    assert not clipped_BR[7].any()  # zero advantage pushes nowhere, so nothing stops it


@pytest.mark.parametrize(
    ("advantage", "ratio", "clip", "value", "slope"),
    [
        # min(r A, clip(r) A) by hand; the slope is d/dlogp = A r where nothing is cut.
        (2.0, 1.2, CLIP, 2.4, 2.4),
        (2.0, 1.5, CLIP, 2.56, 0.0),
        (2.0, 0.5, CLIP, 1.0, 1.0),
        (-1.0, 0.9, CLIP, -0.9, -0.9),
        (-1.0, 0.5, CLIP, -0.8, 0.0),
        (-1.0, 2.0, CLIP, -2.0, -2.0),
        (-1.0, 9.0, CLIP, -3.0, 0.0),
        (-1.0, 9.0, ClipConfig(), -9.0, -9.0),
        (-1.0, 1e12, ClipConfig(), -np.exp(LIMIT), 0.0),
        (0.0, 9.0, CLIP, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("name", surrogate.RATIOS)
def test_one_token_is_clipped_as_by_hand(name, advantage, ratio, clip, value, slope):
    one = jnp.ones((1, 1))
    args = 0 * one, advantage * one, one > 0, clip
    got = jax.value_and_grad(lambda x: surrogate.SURROGATES[name](x, *args)[0, 0])(
        np.float32(np.log(ratio)) * one
    )
    assert got[0] == pytest.approx(value, rel=1e-5)
    # Only the token's ratio is limited with its gradient; the row's has none of its own.
    if not (name == "sequence" and ratio == 1e12):
        assert got[1][0, 0] == pytest.approx(slope, rel=1e-5)


def test_reinforce_and_likelihood_are_linear_in_logp(make_case):
    case = make_case([3, 7], [1.5, -2.0], [0, 0])
    args = case.old_logp_BR, case.rows.advantage_B1, case.rows.mask_BR, CLIP
    logp_BR = np.where(case.rows.mask_BR, case.logp_BR, 0)
    advantage_B1 = np.asarray(case.rows.advantage_B1)
    assert np.array_equal(surrogate.reinforce(case.logp_BR, *args), advantage_B1 * logp_BR)
    assert np.array_equal(surrogate.likelihood(case.logp_BR, *args), logp_BR)
