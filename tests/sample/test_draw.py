"""Drawn tokens against exact probabilities, by chi-square at fixed seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bagrpo.sample.draw import Shape, draw

ROWS = 40_000
DRAW = jax.jit(draw)


def shape(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Shape(np.float32(temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p))


def logits_of(vocab):
    return jax.random.normal(jax.random.key(vocab), (vocab,)) * 2


def exact(logit_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What the words mean, token by token, in float64."""
    share_V = np.exp(np.asarray(logit_V, np.float64) / temperature)
    share_V /= share_V.sum()
    order = sorted(range(len(share_V)), key=lambda v: -share_V[v])
    if top_k:
        order = order[:top_k]
    whole, kept, sum_ = sum(share_V[v] for v in order), [], 0.0
    for v in order:
        if sum_ < top_p * whole:
            kept.append(v)
        sum_ += share_V[v]
    kept = [v for v in kept if share_V[v] >= min_p * share_V.max()]
    out_V = np.zeros_like(share_V)
    out_V[kept] = share_V[kept] / share_V[kept].sum()
    return out_V


def drawn(logit_V, seed=0, rows=ROWS, **settings):
    uniform_B2 = jax.random.uniform(jax.random.key(seed), (rows, 2))
    logit_BV = jnp.broadcast_to(logit_V, (rows, len(logit_V)))
    return jax.device_get(DRAW(logit_BV, uniform_B2, shape(**settings)))


SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.3},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 7, "top_p": 0.9},
    {"top_p": 0.95, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


# One block, five blocks of 64, and blocks of one token each, as a prime number has.
@pytest.mark.parametrize("vocab", [12, 320, 131])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_come_as_often_as_their_probability_says(vocab, settings):
    logit_V = logits_of(vocab)
    want_V = exact(logit_V, **settings)
    token_B, _ = drawn(logit_V, **settings)
    count_V = np.bincount(token_B, minlength=vocab)
    assert count_V[want_V == 0].sum() == 0
    # Rare tokens are counted together: the test's distribution is for 5 and more expected.
    rare_V = ROWS * want_V < 5
    want = np.append(ROWS * want_V[~rare_V], ROWS * want_V[rare_V].sum())
    count = np.append(count_V[~rare_V], count_V[rare_V].sum())
    want, count = want[want > 0], count[want > 0]
    freedom = len(want) - 1
    # Mean and variance of chi-square are its degrees of freedom and twice that: 5 deviations.
    assert ((count - want) ** 2 / want).sum() <= freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_log_prob_is_of_the_full_softmax_at_the_temperature(settings):
    logit_V = logits_of(320)
    token_B, logp_B = drawn(logit_V, rows=64, **settings)
    want_V = jax.nn.log_softmax(logit_V / settings.get("temperature", 1.0))
    np.testing.assert_allclose(logp_B, want_V[token_B], atol=2e-6, rtol=0)


def test_temperature_0_takes_the_first_of_the_likeliest_at_temperature_1():
    logit_V = jnp.asarray([0.0] * 200 + [3.0, 3.0] + [1.0] * 54)  # 256 tokens in two blocks
    token_B, logp_B = drawn(logit_V, rows=16, temperature=0.0)
    assert (token_B == 200).all()
    np.testing.assert_allclose(logp_B, jax.nn.log_softmax(logit_V)[200], atol=1e-6)


def test_ties_with_the_last_of_the_top_k_are_kept():
    token_B, _ = drawn(jnp.asarray([0.0, 2.0, 1.0, 1.0, -1.0]), top_k=2)
    assert set(token_B.tolist()) == {1, 2, 3}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_probability(uniform):
    """The largest float below 1 times a sum may round to the sum; a hidden token has no share."""
    logit_V = jnp.asarray([-np.inf, *np.linspace(-3, 3, 298), -np.inf], jnp.float32)
    uniform_B2 = jnp.full((3, 2), uniform, jnp.float32)
    token_B, logp_B = DRAW(jnp.broadcast_to(logit_V, (3, 300)), uniform_B2, shape())
    assert (token_B == (1 if uniform == 0 else 298)).all()
    assert np.isfinite(logp_B).all()


def test_extreme_logits_stay_finite():
    logit_V = jnp.asarray([1e30, -1e30, 0.0, 88.0], jnp.float32)
    for settings in SETTINGS:
        token_B, logp_B = drawn(logit_V, rows=8, **settings)
        assert (token_B == 0).all()
        assert (logp_B == 0).all()
