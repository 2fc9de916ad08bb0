"""The trainer's mathematics against exact theory: where it converges, to six digits.

"What is the Alignment Objective of GRPO?" (arXiv:2502.18548) gives the policy at which GRPO stops
moving, in closed form for groups of two. Here a tabular softmax policy over two or three answers is
trained by this project's own advantages, weights, surrogate and KL term. Nothing is sampled: every
possible group is in the batch, with the group's probability as a factor of its weights.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bagrpo.algo.advantage import ADVANTAGES
from bagrpo.algo.aggregate import RULES, Rows, weights
from bagrpo.algo.loss import loss
from bagrpo.batch import Batch
from bagrpo.config import AlgorithmConfig, KLConfig


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


@dataclasses.dataclass(frozen=True)
class World:
    """Answers 0, 1, ... with rewards and lengths, answered in groups of `size`.

    An answer is decided by its first token; the rest of its length has probability 1.
    """

    rewards: tuple[float, ...]
    size: int
    lengths: tuple[int, ...] | None = None

    @property
    def groups_PG(self):
        answers = range(len(self.rewards))
        return np.array(list(itertools.product(answers, repeat=self.size)))

    @property
    def lengths_V(self):
        return np.array(self.lengths or [1] * len(self.rewards))


def update(world, config):
    """The function from logits and reference to the gradient of this project's loss."""
    groups_PG, answer_B = world.groups_PG, world.groups_PG.reshape(-1)
    reward_PG = jnp.array(world.rewards)[groups_PG]
    advantage_PG = ADVANTAGES[config.advantage](
        reward_PG, jnp.ones(reward_PG.shape, bool), std=config.std
    )
    width = world.lengths_V.max()
    rows = Rows(
        mask_BR=jnp.array(np.arange(width) < world.lengths_V[answer_B][:, None]),
        advantage_B1=advantage_PG.reshape(-1, 1),
        group_B=jnp.repeat(jnp.arange(len(groups_PG)), world.size),
        constant=1,
    )
    weight_BR, regular_weight_BR = weights(rows, config)

    def spread(first_V):
        """Log-probs of all tokens from those of the first: the others are certain."""
        return jnp.pad(first_V[answer_B][:, None], ((0, 0), (0, width - 1)))

    def gradient_V(logits_V, reference_V):
        logp_V = jax.nn.log_softmax(logits_V)
        # Rules average over the groups that there are; here each counts as often as it occurs.
        share_P = jnp.exp(logp_V[groups_PG].sum(axis=1)) * len(groups_PG)
        share_B1 = jnp.repeat(share_P, world.size)[:, None]
        batch = Batch(
            tokens_BT=jnp.zeros((len(answer_B), 1 + width), int),
            prompt_B=jnp.ones(len(answer_B), int),
            mask_BR=rows.mask_BR,
            advantage_B1=rows.advantage_B1,
            weight_BR=weight_BR * share_B1,
            ref_logp_BR=spread(jnp.log(reference_V)),
            regular_weight_BR=(None if regular_weight_BR is None else regular_weight_BR * share_B1),
        )

        def scalar(logits_V):
            logp_BR = spread(jax.nn.log_softmax(logits_V))
            return loss(logp_BR, jnp.zeros_like(logp_BR), batch, config)[0]

        return jax.grad(scalar)(logits_V)

    return gradient_V


def fixed_points(world, config, references):
    """Policies, one for each reference, at which the update vanishes.

    By natural gradient: for a softmax over a table that is the gradient over the probability, with
    which rare answers move as fast as likely ones.
    """
    gradient_V, rate = update(world, config), 0.2

    def solve(reference_V):
        def step(state):
            logits_V, _, count = state
            move_V = -gradient_V(logits_V, reference_V) / jax.nn.softmax(logits_V)
            move_V -= move_V.mean()
            return logits_V + rate * move_V, jnp.abs(move_V).max(), count + 1

        def moving(state):
            return (state[1] > 1e-11) & (state[2] < 20_000)

        start = jnp.log(reference_V), jnp.array(jnp.inf), 0
        logits_V, move, _ = jax.lax.while_loop(moving, step, start)
        return jax.nn.softmax(logits_V), move

    policy_XV, move_X = jax.jit(jax.vmap(solve))(jnp.array(references))
    assert np.all(np.asarray(move_X) <= 1e-11)
    return np.asarray(policy_XV)


def two(shares):
    return [(x, 1 - x) for x in shares]


def k3_run(coef, std="population", **settings):
    return AlgorithmConfig(std=std, kl=KLConfig(coef=coef), **settings)


def difference(p, size):
    """P_G(a) - P_G(b) of a deterministic binary reward: sums over the others' successes."""

    def expectation(advantage):
        return sum(
            math.comb(size - 1, k) * p**k * (1 - p) ** (size - 1 - k) * advantage(k)
            for k in range(size)
        )

    right = expectation(lambda k: math.sqrt((size - k - 1) / (k + 1)))
    wrong = expectation(lambda k: -math.sqrt(k / (size - k)))
    return right - wrong


def stationary(x, coef, size):
    """Root of `P_G(a) - P_G(b) = coef (p - x) / (p (1 - p))`, by bisection."""
    low, high = x, 1.0
    for _ in range(100):
        p = (low + high) / 2
        above = p == 1 or coef * (p - x) > difference(p, size) * p * (1 - p)
        low, high = (low, p) if above else (p, high)
    return low


# --- groups of one-token answers: where training stops --------------------------------------------

# coef: reference's share of the right answer: policy's share at G = 2, G = 2 with the sample
# deviation, G = 8. G = 2 is equation 14, p = (1 - c + sqrt((1 - c)^2 + 4 c x)) / 2 with c = coef;
# the sample deviation makes it coef sqrt(2); G = 8 solves `stationary`'s equation.
TABLE = {
    0.04: {0.1: (0.964148737, 0.949389868, 0.986148702)},
    0.5: {
        0.1: (0.585410197, 0.450020797, 0.791111784),
        0.3: (0.710977223, 0.629746355, 0.853563612),
        0.5: (0.809016994, 0.758819045, 0.904433358),
    },
    1.0: {
        0.1: (0.316227766, 0.222211952, 0.559594914),
        0.3: (0.547722558, 0.476382273, 0.707770362),
        0.5: (0.707106781, 0.658918623, 0.818309971),
    },
    2.0: {0.5: (0.618033989, 0.585786438, 0.704752552)},
}


@pytest.mark.parametrize("coef", TABLE)
@pytest.mark.parametrize(
    ("column", "size", "std"), [(0, 2, "population"), (1, 2, "sample"), (2, 8, "population")]
)
def test_training_stops_where_the_paper_says(coef, column, size, std):
    expected = [row[column] for row in TABLE[coef].values()]
    got_XV = fixed_points(World((1.0, 0.0), size), k3_run(coef, std), two(TABLE[coef]))
    np.testing.assert_allclose(got_XV[:, 0], expected, atol=1e-8)


@pytest.mark.parametrize("coef", [0.5, 1.0])
def test_groups_of_four_stop_at_the_root_of_the_stationarity_condition(coef):
    got_XV = fixed_points(World((1.0, 0.0), 4), k3_run(coef), two(TABLE[coef]))
    expected = [stationary(x, coef, 4) for x in TABLE[coef]]
    np.testing.assert_allclose(got_XV[:, 0], expected, atol=1e-9)


@pytest.mark.parametrize(
    ("x", "coef", "expected"),
    [(0.2, 0.5, 0.648785644), (0.2, 1.0, 0.404609675), (0.5, 2.0, 0.622459331)],
)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_importance_ratio_makes_it_the_direct_divergence(x, coef, expected, estimator):
    # KL(policy || reference) stops at logit p = logit x + 1 / coef.
    kl = KLConfig(coef=coef, estimator=estimator, importance=True)
    got_XV = fixed_points(World((1.0, 0.0), 2), AlgorithmConfig(kl=kl), two([x]))
    assert got_XV[0, 0] == pytest.approx(expected, abs=1e-8)


def test_three_answers_of_three_rewards():
    got_XV = fixed_points(World((0.0, 1.0, 2.0), 2), k3_run(1.5), [(0.5, 0.3, 0.2)])
    # p(o) = reference(o) / (1 - (P[r > r'] - P[r < r']) / coef)
    np.testing.assert_allclose(got_XV[0], (0.34861218, 0.29930809, 0.35207973), atol=1e-8)


@pytest.mark.parametrize(
    ("advantage", "factor"), [("group_mean", 1 - 1 / 4), ("leave_one_out", 1.0)]
)
def test_without_a_deviation_it_is_regularised_expected_reward(advantage, factor):
    # P_G(o) = factor (r - E r): with the direct divergence p ~ reference e^(factor r / coef).
    kl = KLConfig(coef=0.7, importance=True)
    config = AlgorithmConfig(advantage=advantage, kl=kl)
    reference_V, reward_V = np.array([0.5, 0.3, 0.2]), np.array([0.0, 1.0, 3.0])
    got_XV = fixed_points(World(tuple(reward_V), 4), config, [reference_V])
    expected_V = reference_V * np.exp(factor * reward_V / 0.7)
    np.testing.assert_allclose(got_XV[0], expected_V / expected_V.sum(), atol=1e-9)


# --- the gradient itself --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "surrogate"),
    [(rule, "token") for rule in RULES] + [("balanced", "sequence"), ("balanced", "reinforce")],
)
@pytest.mark.parametrize(
    ("size", "values"),
    [(2, (1.0, 1.0)), (4, (1.6577945491, 1.6206664199)), (8, (2.1067290255, 1.8817503502))],
)
def test_one_token_answers_have_the_papers_gradient_under_every_rule(size, values, rule, surrogate):
    config = AlgorithmConfig(rule=rule, surrogate=surrogate)
    gradient_V = jax.jit(update(World((1.0, 0.0), size), config))
    for p, value in zip((0.2, 0.6), values, strict=True):
        # dJ/dlogit = p (1 - p) dJ/dp, and dJ/dp = P_G(a) - P_G(b).
        policy_V = np.array([p, 1 - p])
        got_V = -np.asarray(gradient_V(np.log(policy_V), policy_V)) / (p * (1 - p))
        np.testing.assert_allclose(got_V, [value, -value], rtol=1e-9)
        assert difference(p, size) == pytest.approx(value, rel=1e-9)


def weight_by_hand(rule, length, lengths, reward, rewards):
    """What each rule gives a token of one answer in a group, by its definition."""
    same = [other for other, r in zip(lengths, rewards, strict=True) if r == reward]
    return {
        "sequence": 1 / (len(lengths) * length),
        "group_token": 1 / sum(lengths),
        "balanced": len(same) / len(lengths) / sum(same),
    }[rule]


def gradient_by_hand(world, rule, policy_V):
    """Sum over groups of probability, weight, advantage and `onehot - policy`."""
    total_V = np.zeros(len(policy_V))
    for group in world.groups_PG:
        rewards, lengths = np.array(world.rewards)[group], world.lengths_V[group]
        if rewards.min() == rewards.max():
            continue
        advantages = (rewards - rewards.mean()) / rewards.std()
        for answer, advantage in zip(group, advantages, strict=True):
            weight = weight_by_hand(
                rule, world.lengths_V[answer], lengths, world.rewards[answer], rewards
            )
            score_V = np.eye(len(policy_V))[answer] - policy_V
            total_V += policy_V[group].prod() * weight * advantage * score_V
    return total_V


@functools.cache
def gradients(world, policy):
    """By rule: this project's ascent direction, checked against the one by hand."""
    policy_V, out = np.array(policy), {}
    for rule in ("balanced", "sequence", "group_token"):
        gradient_V = jax.jit(update(world, AlgorithmConfig(rule=rule)))
        out[rule] = -np.asarray(gradient_V(np.log(policy_V), policy_V))
        np.testing.assert_allclose(out[rule], gradient_by_hand(world, rule, policy_V), rtol=1e-9)
    return out


def test_lengths_constant_within_each_sign_part_token_from_the_other_two():
    got = gradients(World((1.0, 0.0), 4, (3, 7)), (0.4, 0.6))
    np.testing.assert_allclose(got["balanced"], got["sequence"], rtol=1e-12)
    assert not np.allclose(got["group_token"], got["balanced"], rtol=0.01)
    even = gradients(World((1.0, 0.0), 4, (5, 5)), (0.4, 0.6))
    np.testing.assert_allclose(even["group_token"], even["balanced"], rtol=1e-12)


def test_right_answers_of_two_lengths_part_balanced_from_sequence():
    got = gradients(World((1.0, 1.0, 0.0), 4, (2, 6, 3)), (0.25, 0.25, 0.5))
    assert not np.allclose(got["balanced"], got["sequence"], rtol=0.01)
    # `sequence` favours the short right answer. `balanced` gives both tokens of any one group the
    # same weight, and the answers differ only by the groups that they are found in.
    assert got["sequence"][0] / got["sequence"][1] > got["balanced"][0] / got["balanced"][1]


def test_in_one_group_balanced_weighs_right_answers_alike_and_sequence_by_length():
    # Right answers of 2 and 6 tokens, wrong ones of 3 and 3.
    rows = Rows(
        mask_BR=jnp.array(np.arange(6) < np.array([[2], [6], [3], [3]])),
        advantage_B1=jnp.array([[1.0], [1.0], [-1.0], [-1.0]]),
        group_B=jnp.zeros(4, int),
        constant=6,
    )
    first = {rule: np.asarray(RULES[rule](rows)[:, 0]) for rule in ("balanced", "sequence")}
    np.testing.assert_allclose(first["balanced"], [1 / 16, 1 / 16, 1 / 12, 1 / 12], rtol=1e-12)
    np.testing.assert_allclose(first["sequence"], [1 / 8, 1 / 24, 1 / 12, 1 / 12], rtol=1e-12)
