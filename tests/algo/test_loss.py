"""The loss: what no split, order or padding may change, and the forms in which peers write it."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bagrpo.algo import kl, surrogate
from bagrpo.algo.aggregate import RULES, weights
from bagrpo.algo.loss import loss
from bagrpo.config import AlgorithmConfig, ClipConfig, KLConfig

CLIP = ClipConfig(low=0.2, high=0.28, dual=3.0)
LENGTHS = [1, 16, 2, 15, 3, 12, 16, 1]
ADVANTAGES = [-1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]

every_pair = pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule in RULES for name in surrogate.SURROGATES]
)
every_surrogate = pytest.mark.parametrize("name", surrogate.SURROGATES)
TERMS = [
    KLConfig(coef=0.1, estimator="k1", importance=True),
    KLConfig(coef=0.1, estimator="k2"),
    KLConfig(coef=0.1, estimator="k2", importance=True),
    KLConfig(coef=0.1, estimator="k3"),
    KLConfig(coef=0.1, estimator="k3", importance=True),
]


def everything_on(rule, name, term=None):
    return AlgorithmConfig(
        rule=rule, surrogate=name, clip=CLIP, kl=term or KLConfig(coef=0.1), entropy=0.03
    )


every_config = pytest.mark.parametrize(
    "config",
    [everything_on("balanced", name) for name in surrogate.SURROGATES]
    + [everything_on("balanced", "token", term) for term in TERMS],
    ids=lambda c: f"{c.surrogate}-{c.kl.estimator}{'-importance' * c.kl.importance}",
)


@functools.partial(jax.jit, static_argnames="config")
def value_and_gradient(logp_BR, entropy_BR, batch, config):
    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        logp_BR, entropy_BR, batch, config
    )


def evaluate(case, config, batch=None):
    """Loss, gradients with respect to log-probs and entropies, sums per row."""
    batch = batch or case.batch(config)
    return run(case.logp_BR, case.entropy_BR, batch, config)


def run(logp_BR, entropy_BR, batch, config):
    # The rule is in the batch's weights: dropping its name lets all rules share a compilation.
    config = config.model_copy(update={"rule": "balanced"})
    (value, sums), gradients = value_and_gradient(logp_BR, entropy_BR, batch, config)
    return value, gradients, sums


def objective_only(case, rule, name):
    value, (gradient_BR, _), sums = evaluate(
        case, AlgorithmConfig(rule=rule, surrogate=name, clip=CLIP)
    )
    return value, gradient_BR, sums


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-7), a, b)


# --- what may not change the result ---------------------------------------------------------------


@every_pair
def test_microbatches_add_up_to_the_batch(rule, name, make_case):
    case = make_case(LENGTHS, ADVANTAGES, GROUPS)
    config = everything_on(rule, name)
    arrays = (case.logp_BR, case.entropy_BR, case.batch(config))
    whole = evaluate(case, config)
    for size in (4, 2, 1):
        parts = []
        for start in range(0, len(LENGTHS), size):
            rows = slice(start, start + size)
            parts.append(run(*jax.tree.map(operator.itemgetter(rows), arrays), config))
        values, *rows = zip(*parts, strict=True)
        joined = (jax.tree.map(lambda *x: np.concatenate(x), *row) for row in rows)
        assert_same((np.sum(values), *joined), whole)


def test_a_mean_of_microbatch_means_would_have_the_other_sign(make_case):
    # At r = 1 the token mean is sum(A T) / sum(T) = (47 - 19) / 66, the mean of row means -2 / 8:
    # the batch above does tell a loss that adds up from one that averages.
    case = make_case(LENGTHS, ADVANTAGES, GROUPS)
    case = dataclasses.replace(case, old_logp_BR=case.logp_BR)
    assert objective_only(case, "token", "token")[0] == pytest.approx(-28 / 66, rel=1e-6)
    assert objective_only(case, "sequence", "token")[0] == pytest.approx(2 / 8, rel=1e-6)


@every_pair
def test_the_order_of_rows_does_not_matter(rule, name, make_case):
    case = make_case(LENGTHS, ADVANTAGES, GROUPS)
    order = np.array([5, 0, 7, 2, 6, 1, 4, 3])
    take = operator.itemgetter(order)
    names = [field.name for field in dataclasses.fields(case)]
    shuffled = type(case)(**{name: jax.tree.map(take, getattr(case, name)) for name in names})
    config = everything_on(rule, name)
    value, gradients, sums = evaluate(case, config)
    assert_same(evaluate(shuffled, config), (value, *jax.tree.map(take, (gradients, sums))))


@pytest.mark.parametrize("hostile", [np.nan, np.inf, -np.inf, 3e38, -3e38])
@every_config
def test_padding_reaches_neither_value_nor_gradient(config, hostile, make_case):
    case = make_case([3, 0, 5, 2], [1.0, 2.0, -1.0, 0.5], [0, 0, 0, 1])
    batch, mask_BR = case.batch(config), case.rows.mask_BR

    def poison(x_BR):
        return jnp.where(mask_BR, x_BR, hostile)

    poisoned = dataclasses.replace(
        batch,
        advantage_B1=batch.advantage_B1.at[1].set(hostile),
        weight_BR=poison(batch.weight_BR),
        old_logp_BR=poison(batch.old_logp_BR),
        ref_logp_BR=poison(batch.ref_logp_BR),
        regular_weight_BR=poison(batch.regular_weight_BR),
    )
    clean = evaluate(case, config, batch)
    dirty_case = dataclasses.replace(
        case, logp_BR=poison(case.logp_BR), entropy_BR=poison(case.entropy_BR)
    )
    dirty = evaluate(dirty_case, config, poisoned)
    assert all(map(np.array_equal, jax.tree.leaves(dirty), jax.tree.leaves(clean)))
    assert all(np.all(np.asarray(g_BR)[~mask_BR] == 0) for g_BR in dirty[1])
    assert all(np.any(np.asarray(g_BR)[mask_BR] != 0) for g_BR in dirty[1])


@every_pair
def test_a_batch_with_every_row_masked_is_exactly_zero(rule, name, make_case):
    case = make_case([0, 0], [1.0, -1.0], [0, 0])
    value, gradients, sums = evaluate(case, everything_on(rule, name))
    assert value == 0
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves((gradients, sums)))


@every_config
@pytest.mark.parametrize("dual", [None, 3.0])
def test_no_finite_log_probs_give_nan_or_infinity(config, dual, make_case):
    # Sums over a row stay finite up to 1e38 / R, so 1e30 stands for any log-prob there is.
    levels = [0.0, 1e30, -1e30, -1e4, -20.0, 88.8, 1e-40]
    config = config.model_copy(update={"clip": ClipConfig(dual=dual)})
    grid = np.stack(np.meshgrid(levels, levels, levels)).reshape(3, -1)
    grid = np.resize(grid, (3, 3 * 128)).reshape(3, 3, 8, 16)
    for logp_BR, old_logp_BR, ref_logp_BR in grid.swapaxes(0, 1).astype(np.float32):
        for advantages in ([1.0, -1.0] * 4, [-1.0, 1.0] * 4):
            case = dataclasses.replace(
                make_case([16] * 8, advantages, GROUPS),
                logp_BR=jnp.array(logp_BR),
                old_logp_BR=jnp.array(old_logp_BR),
                ref_logp_BR=jnp.array(ref_logp_BR),
            )
            assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(evaluate(case, config)))


# --- identities of Balanced Aggregation (arXiv:2605.04077), clipping active -----------------------


def assert_rules_agree(case, rules, name):
    first, *others = (objective_only(case, rule, name)[:2] for rule in rules)
    assert np.any(np.asarray(first[1]) != 0)
    for other in others:
        assert_same(other, first)


@every_surrogate
def test_equal_lengths_make_all_rules_one(name, make_case):
    case = make_case([5] * 6, [1, 2, -1, -3, 2, -2], [0, 0, 0, 0, 1, 1])
    sums = objective_only(case, "balanced", name)[2]
    assert name not in surrogate.RATIOS or 0 < sums["clipped"].sum() < 30
    # `token` and `constant` know no groups, and so need groups of one size too.
    assert_rules_agree(case, ["balanced", "sequence", "group_token"], name)
    case = make_case([16] * 6, [1, 2, -1, -3, 2, -2], [0, 0, 0, 1, 1, 1])
    assert_rules_agree(case, list(RULES), name)


@every_surrogate
def test_lengths_constant_within_each_sign_make_balanced_and_sequence_one(name, make_case):
    lengths, advantages = [3, 3, 9, 9, 4, 7], [1, 2, -1, -3, 2, -2]
    case = make_case(lengths, advantages, [0, 0, 0, 0, 1, 1])
    assert_rules_agree(case, ["balanced", "sequence"], name)
    apart = objective_only(case, "group_token", name)[1]
    assert not np.allclose(apart, objective_only(case, "balanced", name)[1], rtol=1e-3)


@every_surrogate
def test_equal_mean_lengths_of_the_signs_make_balanced_and_group_token_one(name, make_case):
    # Means of 5 on both sides of the first group, of 4 in the second, spread differently.
    case = make_case([1, 9, 4, 6, 5, 2, 6, 4], [1, 2, -1, -3, -1, 2, 1, -2], [0] * 5 + [1] * 3)
    assert_rules_agree(case, ["balanced", "group_token"], name)
    apart = objective_only(case, "sequence", name)[1]
    assert not np.allclose(apart, objective_only(case, "balanced", name)[1], rtol=1e-3)


@pytest.mark.parametrize("name", sorted(surrogate.SURROGATES.keys() - {"likelihood"}))
@pytest.mark.parametrize("rule", RULES)
def test_groups_without_a_contrast_contribute_nothing(rule, name, make_case):
    value, gradient_BR, _ = objective_only(make_case([3, 5, 2], [0, 0, 0], [0, 0, 0]), rule, name)
    assert value == 0
    assert np.all(np.asarray(gradient_BR) == 0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # k = 2 of G = 3, A+ = sqrt(1/2), A- = -sqrt(2): per token A/(G T_i), A/sum(T), and
        # A+ k/(G sum+ T), A- (G - k)/(G sum- T), with T = 1, 4 | 3.
        ("sequence", [0.5**0.5 / 3, 0.5**0.5 / 12, -(2**0.5) / 9]),
        ("group_token", [0.5**0.5 / 8, 0.5**0.5 / 8, -(2**0.5) / 8]),
        ("balanced", [0.5**0.5 * 2 / 15, 0.5**0.5 * 2 / 15, -(2**0.5) / 9]),
    ],
)
@pytest.mark.parametrize("name", ["token", "sequence", "reinforce"])
def test_on_policy_gradient_is_weight_times_advantage(rule, expected, name, make_case):
    case = make_case([1, 4, 3], [0.5**0.5, 0.5**0.5, -(2**0.5)], [0, 0, 0])
    case = dataclasses.replace(case, old_logp_BR=None)
    _, gradient_BR, sums = objective_only(case, rule, name)
    expected_BR = np.where(case.rows.mask_BR, np.array([*expected, *[0] * 5])[:, None], 0)
    np.testing.assert_allclose(-gradient_BR, expected_BR, rtol=1e-6)
    assert np.array_equal(sums["ratio"][:3], [1, 4, 3])
    # Both signs have the mass sqrt(k (G - k)) / G under `balanced` and `sequence`.
    if rule != "group_token":
        mass = np.abs(gradient_BR).sum(axis=1)
        assert mass[:2].sum() == pytest.approx(2**0.5 / 3, rel=1e-6)
        assert mass[2] == pytest.approx(2**0.5 / 3, rel=1e-6)


# --- how TRL and verl write it --------------------------------------------------------------------


def peers_case(make_case):
    """Two groups of four, each with a fully masked row."""
    return make_case([4, 9, 0, 2, 7, 1, 5, 0], [1.5, -0.5, 1, -1, 0, 2, -0.7, 1], GROUPS, seed=1)


def trl_per_token_loss(case, clip):
    """GRPOTrainer: -min(coef_1 A, clip(coef_1) A), coef_1 capped by delta."""
    ratio = np.exp(np.float64(case.logp_BR) - np.float64(case.old_logp_BR))
    advantage = np.float64(case.rows.advantage_B1)
    bounded = np.clip(ratio, 1 - clip.low, 1 + clip.high)
    capped = ratio if clip.dual is None else np.minimum(ratio, clip.dual)
    return -np.minimum(capped * advantage, bounded * advantage), np.float64(case.rows.mask_BR)


def verl_per_token_loss(case, clip):
    """compute_policy_loss_vanilla: the dual clip applies where the advantage is negative."""
    ratio = np.exp(np.clip(np.float64(case.logp_BR) - np.float64(case.old_logp_BR), -20, 20))
    advantage = np.float64(case.rows.advantage_B1)
    worse = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 1 - clip.low, 1 + clip.high))
    return np.where(advantage < 0, np.minimum(worse, -advantage * clip.dual), worse)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("clip", [ClipConfig(low=0.2, high=0.28), CLIP], ids=["plain", "delta"])
def test_equals_trl(loss_type, clip, make_case):
    case = peers_case(make_case)
    per_token, mask = trl_per_token_loss(case, clip)
    length = mask.sum(axis=1)
    per_row = (per_token * mask).sum(axis=1)
    present = (length > 0).sum()
    # TRL keeps masked rows in the mean over rows; this project leaves them out, hence the factors.
    rule, expected = {
        "grpo": ("sequence", (per_row / np.maximum(length, 1)).mean() * len(length) / present),
        "bnpo": ("token", per_row.sum() / length.sum()),
        "dapo": ("token", per_row.sum() / length.sum()),
        "dr_grpo": ("constant", per_row.sum() / (len(length) * 16) * len(length) / present),
    }[loss_type]
    config = AlgorithmConfig(rule=rule, clip=clip)
    value, _, sums = evaluate(case, config)
    assert value == pytest.approx(expected, rel=1e-5)
    assert sums["clipped"].sum() > 0


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
)
def test_equals_verl(mode, make_case):
    case = peers_case(make_case)
    mask = np.float64(case.rows.mask_BR)
    length, present = mask.sum(axis=1), (mask.sum(axis=1) > 0).sum()
    per_row = (verl_per_token_loss(case, CLIP) * mask).sum(axis=1)
    # verl's sums over tokens are `constant` without its length, or without its count of rows.
    rule, factor, expected = {
        "token-mean": ("token", 1, per_row.sum() / mask.sum()),
        "seq-mean-token-sum": ("constant", 16, per_row.sum() / present),
        "seq-mean-token-mean": ("sequence", 1, (per_row / (length + 1e-8)).sum() / present),
        "seq-mean-token-sum-norm": ("constant", float(present), per_row.sum() / 16),
    }[mode]
    value, _, _ = evaluate(case, AlgorithmConfig(rule=rule, clip=CLIP))
    assert value * factor == pytest.approx(expected, rel=1e-5)


def test_terms_have_the_signs_and_weights_of_the_formula(make_case):
    case = make_case(LENGTHS, ADVANTAGES, GROUPS)
    config = everything_on("balanced", "token")
    value, (_, entropy_gradient_BR), _ = evaluate(case, config)
    weight_BR, regular_BR = (np.float64(x) for x in weights(case.rows, config))
    d_BR = np.float64(case.logp_BR) - np.float64(case.ref_logp_BR)
    expected = (
        (weight_BR * verl_per_token_loss(case, CLIP)).sum()
        + 0.1 * (regular_BR * (np.exp(-d_BR) - 1 + d_BR)).sum()
        - 0.03 * (regular_BR * np.float64(case.entropy_BR)).sum()
    )
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(entropy_gradient_BR, -0.03 * regular_BR, rtol=1e-6)


def test_sums_are_those_of_raw_arrays(make_case):
    case = make_case([4, 9, 0, 2], [1.5, -0.5, 1.0, 0.0], [0] * 4)
    _, _, sums = evaluate(case, everything_on("token", "token"))
    mask = np.asarray(case.rows.mask_BR)
    logp, old, ref, entropy = (
        np.float64(x) for x in (case.logp_BR, case.old_logp_BR, case.ref_logp_BR, case.entropy_BR)
    )
    ratio, advantage = np.exp(logp - old), np.asarray(case.rows.advantage_B1)
    # Outside the trust region towards which the advantage pushes; beyond the dual clip as well.
    outside = np.where(advantage > 0, ratio > 1.28, (ratio < 0.8) | (ratio > 3)) & (advantage != 0)
    expected = {
        "tokens": mask,
        "objective": -verl_per_token_loss(case, CLIP),
        "kl": np.exp(ref - logp) - 1 - (ref - logp),
        "entropy": entropy,
        "logp": logp,
        "clipped": outside,
        "ratio": ratio,
        "log_ratio": logp - old,
        "log_ratio_abs": np.abs(logp - old),
    }
    assert sums.keys() == expected.keys()
    for name, value_BR in expected.items():
        np.testing.assert_allclose(
            sums[name], np.where(mask, value_BR, 0).sum(axis=1), rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert 0 < sums["clipped"].sum() < mask.sum()


@pytest.mark.parametrize("missing", ["ref_logp_BR", "regular_weight_BR"])
def test_a_term_without_its_arrays_is_refused(missing, make_case):
    case = make_case([2, 3], [1, -1], [0, 0])
    config = AlgorithmConfig(kl=KLConfig(coef=0.1))
    batch = dataclasses.replace(case.batch(config), **{missing: None})
    with pytest.raises(ValueError, match=f"{missing}.*kl.coef = 0.1"):
        loss(case.logp_BR, case.entropy_BR, batch, config)


def test_a_penalty_in_the_reward_stays_out_of_the_loss(make_case):
    case = make_case([2, 3], [1, -1], [0, 0])
    penalised = AlgorithmConfig(kl=KLConfig(coef=0.1, estimator="k1", where="reward"))
    value, gradients, sums = evaluate(case, penalised)
    plain_value, plain_gradients, _ = evaluate(case, AlgorithmConfig())
    assert_same((value, gradients), (plain_value, plain_gradients))
    d_BR = kl.k1(case.logp_BR, case.ref_logp_BR, case.rows.mask_BR)
    np.testing.assert_allclose(sums["kl"], d_BR.sum(axis=1), rtol=1e-6)
