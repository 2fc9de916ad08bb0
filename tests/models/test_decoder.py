import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import MESHES, NAMES, expected, mesh_of, model, positions, spelled

from bagrpo.models import params
from bagrpo.models.decoder import Compute, empty_cache, forward, logits
from bagrpo.sharding import param_shardings, put_rows, row_sharding

FLOAT32 = Compute()
BOUND = 2e-4  # asked of all families; the largest difference seen is 2e-5


@functools.partial(jax.jit, static_argnums=(1, 4))
def all_logits(weights, arch, tokens_BT, position_BT, compute=FLOAT32):
    hidden_BTD, _ = forward(weights, arch, tokens_BT, position_BT, compute=compute)
    return logits(weights, arch, hidden_BTD)


@functools.partial(jax.jit, static_argnums=1)
def step(weights, arch, cache, tokens_BT, position_BT, slot_BT):
    hidden_BTD, cache = forward(
        weights, arch, tokens_BT, position_BT, compute=FLOAT32, cache=cache, slot_BT=slot_BT
    )
    return logits(weights, arch, hidden_BTD[:, -1:]), cache


@pytest.mark.parametrize("name", NAMES)
def test_right_padded_logits_are_those_of_hugging_face(name):
    arch, weights = model(name)
    want = expected(name)
    position_BT = positions(want["lengths"], 48)
    found = all_logits(weights, arch, want["tokens"], position_BT)
    np.testing.assert_allclose(
        found[position_BT >= 0], want["logits"][position_BT >= 0], atol=BOUND, rtol=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_left_padding_and_what_stands_in_it_change_nothing(name):
    arch, weights = model(name)
    want = expected(name)
    tokens_BT = np.full((3, 48), arch.vocab + 7, np.int32)  # not even ids
    position_BT = np.full((3, 48), -1, np.int32)
    for b, length in enumerate(want["lengths"]):
        tokens_BT[b, 48 - length :] = want["tokens"][b, :length]
        position_BT[b, 48 - length :] = np.arange(length)
    found = all_logits(weights, arch, tokens_BT, position_BT)
    for b, length in enumerate(want["lengths"]):
        np.testing.assert_allclose(
            found[b, 48 - length :], want["logits"][b, :length], atol=BOUND, rtol=0
        )


@pytest.mark.parametrize("name", NAMES)
def test_unpadded_logits_are_those_of_hugging_face(name):
    arch, weights = model(name)
    want = expected(name)
    for b, length in enumerate(want["lengths"]):
        tokens_BT = want["tokens"][b : b + 1, :length]
        found = all_logits(weights, arch, tokens_BT, positions([length], length))
        np.testing.assert_allclose(found[0], want["logits"][b, :length], atol=BOUND, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_decoding_with_a_cache_says_what_hugging_face_says(name):
    """Prefill of ragged rows, then one token at a time: ids equal, log-probs within 2e-4."""
    arch, weights = model(name)
    want = expected(name)
    lengths = want["lengths"]
    cache = empty_cache(arch, 3, 64)
    # Right-aligned, so that the last position is every row's last token.
    tokens_BT, position_BT = np.zeros((3, 48), np.int32), np.full((3, 48), -1, np.int32)
    for b, length in enumerate(lengths):
        tokens_BT[b, 48 - length :] = want["tokens"][b, :length]
        position_BT[b, 48 - length :] = np.arange(length)
    slot_BT = position_BT  # padding has slot -1: it is not written
    for i in range(12):
        logit_B1V, cache = step(weights, arch, cache, tokens_BT, position_BT, slot_BT)
        logp_BV = jax.nn.log_softmax(logit_B1V[:, 0])
        chosen_B = np.asarray(logp_BV.argmax(-1))
        np.testing.assert_array_equal(chosen_B, want["greedy"][:, i])
        np.testing.assert_allclose(logp_BV.max(-1), want["greedy_logp"][:, i], atol=BOUND, rtol=0)
        tokens_BT = chosen_B[:, None].astype(np.int32)
        position_BT = slot_BT = (lengths + i)[:, None].astype(np.int32)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_is_the_whole_at_once(name):
    """Through a cache whose slots are in random order, with gaps."""
    arch, weights = model(name)
    want = expected(name)
    length = 20
    slot_T = np.random.default_rng(0).permutation(32)[:length].astype(np.int32)
    cache = empty_cache(arch, 1, 32)
    for t in range(length):
        token = want["tokens"][:1, t : t + 1]
        place = np.array([[t]], np.int32)
        found, cache = step(weights, arch, cache, token, place, slot_T[None, t : t + 1])
        np.testing.assert_allclose(found[0, 0], want["logits"][0, t], atol=BOUND, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_of_the_configuration_mean_the_same(name):
    assert spelled(name, "config.json") == spelled(name, "config_v5.json")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same_on_every_mesh(name, mesh):
    arch, weights = model(name)
    want = expected(name)
    tokens_BT = np.concatenate([want["tokens"][:, :24]] * 3)[:8]
    lengths = np.concatenate([np.minimum(want["lengths"], 24)] * 3)[:8]
    position_BT = positions(lengths, 24)
    mesh = mesh_of(*mesh)
    sharded = jax.device_put(weights, param_shardings(params.specs(arch), mesh))
    with jax.set_mesh(mesh):
        found = all_logits(sharded, arch, *put_rows((tokens_BT, position_BT), mesh))
    found, real = np.asarray(found), position_BT >= 0
    wanted = np.concatenate([want["logits"][:, :24]] * 3)[:8]
    np.testing.assert_allclose(found[real], wanted[real], atol=BOUND, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_near_float32(name):
    """Mean absolute difference of the logits below 2 % of their standard deviation.

    A bfloat16 has 8 bits, so each rounding is off by 2^-9 = 0.2 % on average at most; some 10 a
    layer in 3 layers, adding up like noise, make about sqrt(30) x 0.2 % = 1.1 %.
    """
    arch, weights = model(name)
    want = expected(name)
    position_BT = positions(want["lengths"], 48)
    found = all_logits(weights, arch, want["tokens"], position_BT, Compute(dtype="bfloat16"))
    real = position_BT >= 0
    difference = np.abs(np.asarray(found)[real] - want["logits"][real]).mean()
    assert 0 < difference < 0.02 * want["logits"][real].std()


def test_a_window_hides_what_lies_before_it():
    """Mistral's window is 16 in each of 3 layers: token 0 reaches position 45 and none after it."""
    arch, weights = model("mistral")
    tokens_BT = np.array(expected("mistral")["tokens"][:1])
    changed_BT = tokens_BT.copy()
    changed_BT[0, 0] = (changed_BT[0, 0] + 1) % arch.vocab
    place = positions([48], 48)
    one = all_logits(weights, arch, tokens_BT, place)
    other = all_logits(weights, arch, changed_BT, place)
    differs_T = np.abs(np.asarray(one) - np.asarray(other))[0].max(-1) > 0
    assert differs_T[:46].all()
    assert not differs_T[46:].any()


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_no_gradient(remat):
    arch, weights = model("gemma2")
    tokens_BT = expected("gemma2")["tokens"]

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(weights, compute):
        def total(weights):
            hidden_BTD, _ = forward(
                weights, arch, tokens_BT, positions([48] * 3, 48), compute=compute
            )
            return jnp.sum(hidden_BTD**2)

        return jax.grad(total)(weights)

    want = gradient(weights, Compute())
    found = gradient(weights, Compute(remat=remat))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()), rtol=0)


def test_what_is_kept_for_the_backward_pass_is_split_over_tensor():
    """Four layers of 8 rows of 48 positions over 64 features, with 2 devices for each row."""
    arch, _ = model("llama_tied")
    arch = dataclasses.replace(arch, layers=4, windows=arch.windows[:1] * 4, layer_ropes=(0,) * 4)
    mesh = mesh_of(2, 2, 2)
    specs = params.specs(arch)
    weights = jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding),
        specs,
        param_shardings(specs, mesh),
    )
    rows = jax.ShapeDtypeStruct((8, 48), jnp.int32, sharding=row_sharding(mesh))

    def total(weights, tokens_BT, position_BT):
        hidden_BTD, _ = forward(
            weights, arch, tokens_BT, position_BT, compute=Compute(remat="full")
        )
        return jnp.sum(hidden_BTD**2)

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(total)).lower(weights, rows, rows).compile().as_text()
    assert f"[4,2,24,{arch.embed}]" in text
    assert f"[4,2,48,{arch.embed}]" not in text


def test_a_cache_without_slots_is_refused():
    arch, weights = model("qwen2")
    with pytest.raises(ValueError, match="slot_BT"):
        forward(
            weights,
            arch,
            jnp.zeros((1, 1), jnp.int32),
            jnp.zeros((1, 1), jnp.int32),
            compute=FLOAT32,
            cache=empty_cache(arch, 1, 4),
        )
