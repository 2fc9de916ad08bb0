"""Weights of the aggregation rules: their closed forms, their scopes, and who does not count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bagrpo.algo import aggregate
from bagrpo.algo.aggregate import Rows, weights
from bagrpo.config import AlgorithmConfig, KLConfig

RULES = {name: jax.jit(rule) for name, rule in aggregate.RULES.items()}

# A group with zero advantage and a masked row, one of one sign, one of one response; a masked one.
LENGTHS = [3, 5, 2, 4, 0, 6, 1, 7, 0]
ADVANTAGES = [1.0, 0.5, -2.0, 0.0, 1.0, 1.0, 3.0, -1.0, -1.0]
GROUPS = [4, 4, 4, 4, 4, 9, 9, -7, 2]

# n/(heads * tokens of the side * 3 groups). The row of zero advantage is a head, the masked not.
BALANCED = [2 / 96, 2 / 96, 1 / 24, 0, 0, 2 / 42, 2 / 42, 1 / 21, 0]
# 1/(tokens of the group * 3): 14, 7 and 7 tokens.
GROUP_TOKEN = [1 / 42, 1 / 42, 1 / 42, 1 / 42, 0, 1 / 21, 1 / 21, 1 / 21, 0]
TOKEN = [1 / 28, 1 / 28, 1 / 28, 1 / 28, 0, 1 / 28, 1 / 28, 1 / 28, 0]
# 1/(own tokens * heads * 3).
SEQUENCE = [1 / 36, 1 / 60, 1 / 24, 1 / 48, 0, 1 / 36, 1 / 6, 1 / 21, 0]
# 1/(7 rows * 16).
CONSTANT = [1 / 112, 1 / 112, 1 / 112, 1 / 112, 0, 1 / 112, 1 / 112, 1 / 112, 0]

EXPECTED = {
    "balanced": BALANCED,
    "group_token": GROUP_TOKEN,
    "token": TOKEN,
    "sequence": SEQUENCE,
    "constant": CONSTANT,
}


@pytest.mark.parametrize("name", RULES)
def test_weights_are_those_of_the_formula(name, make_rows):
    rows = make_rows(LENGTHS, ADVANTAGES, GROUPS)
    expected_BR = np.where(rows.mask_BR, np.array(EXPECTED[name])[:, None], 0)
    np.testing.assert_allclose(RULES[name](rows), expected_BR, rtol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_order_padding_and_names_of_groups_change_no_bit(name, make_rows):
    rows = make_rows(LENGTHS, ADVANTAGES, GROUPS)
    weight_BR = np.asarray(RULES[name](rows))
    order = np.random.default_rng(0).permutation(len(LENGTHS))
    shuffled = jax.tree.map(lambda x: x[order], rows)
    assert np.array_equal(RULES[name](shuffled), weight_BR[order])

    extra = [*LENGTHS, 0, 0], [*ADVANTAGES, np.nan, np.inf], [*GROUPS, 4, 77]
    padded_BR = np.asarray(RULES[name](make_rows(*extra, width=12)))
    assert np.array_equal(padded_BR[: len(LENGTHS), : weight_BR.shape[1]], weight_BR)
    assert padded_BR.sum() == pytest.approx(weight_BR.sum(), rel=1e-6)

    renamed = make_rows(LENGTHS, ADVANTAGES, [2**31 - 1 - 2 * (g % 97) for g in GROUPS])
    assert np.array_equal(RULES[name](renamed), weight_BR)


@pytest.mark.parametrize("name", RULES)
def test_holes_in_a_mask_move_weight_but_do_not_change_it(name, make_rows):
    rows = make_rows(LENGTHS, ADVANTAGES, GROUPS, width=14)
    holes = dataclasses.replace(rows, mask_BR=jnp.roll(rows.mask_BR, 3, axis=1)[:, ::-1])
    weight_BR = np.asarray(RULES[name](rows))
    assert np.array_equal(RULES[name](holes), np.roll(weight_BR, 3, axis=1)[:, ::-1])


@pytest.mark.parametrize("name", RULES)
def test_all_masked_gives_no_weight(name, make_rows):
    rows = make_rows([0, 0], [1.0, np.nan], [0, 0], width=3)
    assert np.array_equal(RULES[name](rows), np.zeros((2, 3)))


def test_equal_prompts_of_different_id_stay_two_groups(make_rows):
    one = make_rows([1, 3, 1, 3], [1, -1, 1, -1], [0, 0, 0, 0])
    two = make_rows([1, 3, 1, 9], [1, -1, 1, -1], [0, 0, 1, 1])
    # One group: 2/4 a side, over 2 and 6 tokens. Two: each 1/2 a side over 1 and 3 or 9, halved.
    assert RULES["balanced"](one)[:, 0] == pytest.approx([1 / 4, 1 / 12, 1 / 4, 1 / 12])
    assert RULES["balanced"](two)[:, 0] == pytest.approx([1 / 4, 1 / 12, 1 / 4, 1 / 36])


@pytest.mark.parametrize("name", RULES)
def test_memory_is_linear_in_rows(name):
    rows = Rows(
        mask_BR=jnp.ones((4096, 2), bool),
        advantage_B1=jnp.ones((4096, 1)),
        group_B=jnp.arange(4096) // 8,
        constant=2,
    )
    memory = RULES[name].lower(rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4096 * 4096 // 8  # not even one bit for each pair of rows


@pytest.mark.parametrize("name", RULES)
def test_regularisers_follow_the_rule_but_never_the_sign(name, make_rows):
    rows = make_rows(LENGTHS, ADVANTAGES, GROUPS)
    weight_BR, regular_weight_BR = weights(rows, AlgorithmConfig(rule=name, entropy=0.01))
    own = "group_token" if name == "balanced" else name
    np.testing.assert_allclose(weight_BR, RULES[name](rows), rtol=1e-6)
    np.testing.assert_allclose(regular_weight_BR, RULES[own](rows), rtol=1e-6)
    chosen = AlgorithmConfig(rule=name, kl=KLConfig(coef=0.1, rule="sequence"))
    np.testing.assert_allclose(weights(rows, chosen)[1], RULES["sequence"](rows), rtol=1e-6)


@pytest.mark.parametrize("kl", [KLConfig(), KLConfig(coef=0.1, where="reward")])
def test_without_regularisers_there_are_no_weights_for_them(kl, make_rows):
    assert weights(make_rows([1, 2], [1, -1], [0, 0]), AlgorithmConfig(kl=kl))[1] is None


def test_a_divisor_that_is_no_length_is_refused(make_rows):
    with pytest.raises(ValueError, match="constant = 0"):
        make_rows([1, 2], [1, -1], [0, 0], constant=0)
