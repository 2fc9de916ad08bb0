"""KL terms on a tabular policy, where the expectation over tokens is a sum over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from bagrpo.algo import kl
from bagrpo.config import KLConfig

LOGITS = [0.5, -1.0, 0.2, 1.3]
REFERENCE = [-0.3, 0.4, 1.0, 0.1]
SAMPLER = [0.9, 0.1, -0.6, 0.4]


def forward(logits_V):
    """KL(policy || reference)."""
    logp_V, ref_V = map(jax.nn.log_softmax, (logits_V, jnp.array(REFERENCE)))
    return (jnp.exp(logp_V) * (logp_V - ref_V)).sum()


def reverse(logits_V):
    """KL(reference || policy)."""
    logp_V, ref_V = map(jax.nn.log_softmax, (logits_V, jnp.array(REFERENCE)))
    return (jnp.exp(ref_V) * (ref_V - logp_V)).sum()


def expected_penalty(logits_V, config, *, on_policy):
    """Expectation of the penalty over the sampler's tokens, each token a row of its own."""
    logp_V, ref_V = jax.nn.log_softmax(logits_V), jax.nn.log_softmax(jnp.array(REFERENCE))
    old_V = jax.lax.stop_gradient(logp_V) if on_policy else jax.nn.log_softmax(jnp.array(SAMPLER))
    old_V1 = None if on_policy else old_V[:, None]
    term_V1 = kl.penalty(logp_V[:, None], old_V1, ref_V[:, None], jnp.ones((4, 1), bool), config)
    return (jnp.exp(old_V) * term_V1[:, 0]).sum()


@pytest.mark.parametrize(
    ("config", "on_policy", "divergence"),
    [
        (KLConfig(estimator="k2"), True, forward),
        (KLConfig(estimator="k3"), True, reverse),
        *(
            (KLConfig(estimator=name, importance=True), on_policy, forward)
            for name in kl.ESTIMATORS
            for on_policy in (True, False)
        ),
    ],
)
def test_gradient_is_that_of_the_divergence(config, on_policy, divergence):
    logits_V = jnp.array(LOGITS)
    got_V = jax.grad(expected_penalty)(logits_V, config, on_policy=on_policy)
    np.testing.assert_allclose(got_V, jax.grad(divergence)(logits_V), rtol=1e-4, atol=1e-6)
    assert not np.allclose(jax.grad(forward)(logits_V), jax.grad(reverse)(logits_V), atol=0.05)


@pytest.mark.parametrize("name", ["k1", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_k1_and_k3_have_the_value_of_the_divergence(name, on_policy):
    config = KLConfig(estimator=name, importance=True)
    got = expected_penalty(jnp.array(LOGITS), config, on_policy=on_policy)
    assert got == pytest.approx(float(forward(jnp.array(LOGITS))), rel=1e-5)


def test_k1_in_the_loss_has_no_gradient_and_is_refused():
    def plain_k1(logits_V):
        logp_V, ref_V = map(jax.nn.log_softmax, (logits_V, jnp.array(REFERENCE)))
        term_V1 = kl.k1(logp_V[:, None], ref_V[:, None], jnp.ones((4, 1), bool))
        return (jax.lax.stop_gradient(jnp.exp(logp_V)) * term_V1[:, 0]).sum()

    np.testing.assert_allclose(jax.grad(plain_k1)(jnp.array(LOGITS)), 0, atol=1e-6)
    with pytest.raises(ValidationError, match=r"k1.*has no gradient.*importance"):
        KLConfig(estimator="k1")
    KLConfig(estimator="k1", where="reward")
    with pytest.raises(ValidationError, match="importance=true belongs to where='loss'"):
        KLConfig(where="reward", importance=True)


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_the_peers_case_with_nan_in_the_padding_is_finite(name):
    logp_BR = jnp.array([[0.2, 0.3, 0.5, 0.7]])
    ref_BR = jnp.array([[0.1, 0.2, 0.4, np.nan]])
    mask_BR = jnp.array([[True, True, True, False]])
    # d = 0.1 at each of the three tokens.
    value = {"k1": 0.1, "k2": 0.005, "k3": np.exp(-0.1) - 0.9}[name]
    slope = {"k1": 1.0, "k2": 0.1, "k3": 1 - np.exp(-0.1)}[name]
    estimate = kl.ESTIMATORS[name]
    np.testing.assert_allclose(estimate(logp_BR, ref_BR, mask_BR), [[value] * 3 + [0]], rtol=1e-4)
    got_BR = jax.grad(lambda x_BR: estimate(x_BR, ref_BR, mask_BR).sum())(logp_BR)
    np.testing.assert_allclose(got_BR, [[slope] * 3 + [0]], rtol=1e-4)
    penalty_B = kl.reward_penalty(
        logp_BR, ref_BR, mask_BR, KLConfig(coef=0.5, estimator=name, where="reward")
    )
    np.testing.assert_allclose(penalty_B, [0.5 * 3 * value], rtol=1e-4)


@pytest.mark.parametrize("name", kl.ESTIMATORS)
@pytest.mark.parametrize("d", [-1e4, -20.5, 20.5, 1e4])
def test_beyond_the_limit_there_is_no_stray_gradient(name, d):
    one = jnp.ones((1, 1))
    estimate = kl.ESTIMATORS[name]
    value, slope = jax.value_and_grad(lambda x: estimate(x, 0 * one, one > 0)[0, 0])(d * one)
    assert slope[0, 0] == 0
    assert value == estimate(np.sign(d) * 20.0 * one, 0 * one, one > 0)[0, 0]


def test_k3_of_near_policies_is_not_lost_to_rounding():
    # k3 = d^2 / 2 + O(d^3), whose 5e-9 float32's exp(-d) - 1 + d would make 0 or 1e-7.
    one = jnp.ones((1, 1))
    assert kl.k3(1e-4 * one, 0 * one, one > 0)[0, 0] == pytest.approx(5e-9, rel=1e-3)
