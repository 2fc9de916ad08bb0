import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import NAMES, expected, model, spelled

from bagrpo.models import params
from bagrpo.models.decoder import Compute, forward, logits
from bagrpo.models.logprob import response_logps, token_logps


def inputs(name, R=12):
    arch, weights = model(name)
    prompt_B = jnp.array([3, 9, 1], jnp.int32)
    mask_BR = jnp.arange(R)[None] < jnp.array([12, 5, 9])[:, None]
    return arch, weights, jnp.asarray(expected(name)["tokens"][:, :24]), prompt_B, mask_BR


def plainly(arch, weights, tokens_BT, prompt_B, mask_BR, temperature):
    """Softmax of all logits at once, and a Python loop over the response positions."""
    position_BT = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), tokens_BT.shape)
    hidden_BTD, _ = forward(weights, arch, tokens_BT, position_BT, compute=Compute())
    logp_BTV = jax.nn.log_softmax(logits(weights, arch, hidden_BTD) / temperature)
    logp, entropy = np.zeros((2, *mask_BR.shape))
    for b in range(3):
        for r in range(int(mask_BR[b].sum())):
            t = int(prompt_B[b]) + r
            row = np.asarray(logp_BTV[b, t - 1], np.float64)
            logp[b, r] = row[tokens_BT[b, t]]
            entropy[b, r] = -(np.exp(row) * row).sum()
    return logp, entropy


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "qwen2"])
@pytest.mark.parametrize("logit_tokens", [1, 15, 1024])
def test_log_probs_and_entropies_are_those_of_the_whole_softmax(name, logit_tokens):
    arch, weights, *rest = inputs(name)
    found = jax.jit(
        functools.partial(response_logps, compute=Compute(logit_tokens=logit_tokens)),
        static_argnums=1,
    )(weights, arch, *rest, temperature=0.7)
    for a, b in zip(found, plainly(arch, weights, *rest, 0.7), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_responses_behind_one_prompt_are_as_if_each_had_its_own(name):
    """Six responses of 0 to 8 tokens to two prompts, of which one is shorter than its bucket."""
    arch, weights = model(name)
    random = np.random.default_rng(0)
    length_B, prompt_B = np.array([8, 0, 3, 1, 8, 5]), jnp.array([4, 4, 4, 7, 7, 7], jnp.int32)
    tokens_BT = random.integers(0, arch.vocab, (6, 15))
    for first in (0, 3):
        tokens_BT[first : first + 3, : prompt_B[first]] = tokens_BT[first, : prompt_B[first]]
    mask_BR = jnp.asarray(np.arange(8) < length_B[:, None])
    alone, together = (
        response_logps(
            weights,
            arch,
            jnp.asarray(tokens_BT, jnp.int32),
            prompt_B,
            mask_BR,
            temperature=1.0,
            compute=Compute(share_prompt=share),
        )
        for share in (1, 3)
    )
    for found, wanted in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_padding_and_masked_positions_may_hold_anything():
    arch, weights, tokens_BT, prompt_B, mask_BR = inputs("llama_tied")
    call = functools.partial(response_logps, temperature=1.0, compute=Compute())
    used_BT = np.arange(24)[None] < np.asarray(prompt_B + mask_BR.sum(1))[:, None]
    poisoned_BT = jnp.where(used_BT, tokens_BT, 2**30)
    clean = call(weights, arch, tokens_BT, prompt_B, mask_BR)
    for a, b in zip(call(weights, arch, poisoned_BT, prompt_B, mask_BR), clean, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not clean[0][~mask_BR].any()


def test_the_entropy_is_differentiated_only_on_demand():
    arch, weights, *rest = inputs("llama_tied")

    def total(weights, entropy):
        _, entropy_BR = response_logps(
            weights, arch, *rest, temperature=1.0, compute=Compute(), entropy=entropy
        )
        return entropy_BR.sum()

    with_value = jax.grad(total)(weights, "value")
    assert all(not leaf.any() for leaf in jax.tree.leaves(with_value))
    # Along one direction, a central difference: float32 leaves about three digits.
    gradient = jax.grad(total)(weights, "gradient")["norm"]
    step = jnp.float32(1e-2) * jnp.sign(gradient)
    ends = [total({**weights, "norm": weights["norm"] + s * step}, "value") for s in (1.0, -1.0)]
    slope = float(ends[0] - ends[1]) / 2
    assert slope == pytest.approx(float(jnp.vdot(gradient, step)), rel=1e-2)


def test_forward_and_backward_never_hold_the_logits_of_all_tokens():
    """8 x 2048 tokens over 151,936 words: 9.3 GiB of logits for one array, compiled but not run.

    The plain version holds at least one such array; ours a few of 1024 tokens (0.58 GiB) each.
    """
    B, R, V, D = 8, 2048, 151_936, 64
    arch = dataclasses.replace(spelled("llama_tied", "config.json"), vocab=V, embed=D)
    head = {"embed": jax.ShapeDtypeStruct((V, D), jnp.float32)}
    hidden = jax.ShapeDtypeStruct((B, R, D), jnp.float32)
    target = jax.ShapeDtypeStruct((B, R), jnp.int32)

    def chunked(head, hidden_BRD, target_BR):
        logp_BR, entropy_BR = token_logps(
            head, arch, hidden_BRD, target_BR, temperature=1.0, logit_tokens=1024
        )
        return logp_BR.sum() + entropy_BR.sum()

    def naive(head, hidden_BRD, target_BR):
        logp_BRV = jax.nn.log_softmax(logits(head, arch, hidden_BRD))
        return jnp.take_along_axis(logp_BRV, target_BR[..., None], axis=-1).sum()

    def compiled(function):
        program = jax.jit(jax.grad(function, argnums=(0, 1))).lower(head, hidden, target).compile()
        return program.as_text(), program.memory_analysis().temp_size_in_bytes

    text, ours = compiled(chunked)
    plain_text, plain = compiled(naive)
    whole = (f"[{B},{R},{V}]", f"[{B * R},{V}]", f"[{V},{B * R}]")
    assert any(shape in plain_text for shape in whole)
    assert not any(shape in text for shape in whole)
    assert plain > 4 * B * R * V
    assert plain > 6 * ours, (plain, ours)


def test_parameters_are_counted():
    """SmolLM2-135M has 134,515,008: 49152 x 576 embedding, 30 layers, one norm."""
    arch = dataclasses.replace(
        spelled("llama_tied", "config.json"),
        **{"vocab": 49_152, "embed": 576, "ffw": 1536, "layers": 30},
        **{"heads": 9, "kv_heads": 3, "head_dim": 64},
    )
    assert params.count(arch) == 134_515_008
