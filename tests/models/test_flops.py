import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import NAMES, model, spelled

from bagrpo.models import flops
from bagrpo.models.decoder import Compute, forward, logits

B, T = 2, 5


def products(jaxpr):
    """FLOPs of the matrix products in a program, those in its loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            total += times * products(inner) if hasattr(inner, "eqns") else 0
    return total


def dense(arch):
    """What the decoder computes for a batch: all its scores, those masked too."""
    scores = 4 * arch.heads * arch.head_dim * T * T * arch.layers
    return B * (T * flops.position(arch) + scores + T * flops.head(arch))


def output(params, arch):
    tokens_BT = jnp.zeros((B, T), jnp.int32)
    position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    hidden_BTD, _ = forward(params, arch, tokens_BT, position_BT, compute=Compute())
    return logits(params, arch, hidden_BTD).sum()


# Without the mixtures, whose grouped products are another operation.
DENSE = [name for name in NAMES if not spelled(name, "config.json").experts]


@pytest.mark.parametrize("name", DENSE)
def test_they_are_those_of_the_products_in_the_decoder(name):
    arch, params = model(name)
    assert products(jax.make_jaxpr(lambda p: output(p, arch))(params).jaxpr) == dense(arch)


@pytest.mark.parametrize("name", DENSE)
def test_a_gradient_takes_twice_as_many_again(name):
    arch, params = model(name)
    gradient = jax.make_jaxpr(jax.grad(lambda p: output(p, arch)))(params)
    assert products(gradient.jaxpr) == 3 * dense(arch)


def test_a_mixture_counts_the_experts_that_a_token_reaches():
    arch, _ = model("qwen3_moe")
    router = 2 * arch.layers * arch.embed * arch.experts
    one = dataclasses.replace(arch, experts_per_token=1)
    none = dataclasses.replace(arch, experts_per_token=0)
    each = flops.position(one) - flops.position(none)
    assert each == 2 * arch.layers * 3 * arch.embed * arch.ffw
    assert flops.position(arch) == flops.position(none) + arch.experts_per_token * each
    plain = dataclasses.replace(arch, experts=0, ffw=0)
    assert flops.position(none) == flops.position(plain) + router


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_a_token_attends_to_what_its_window_shows(window):
    arch = dataclasses.replace(model("llama_tied")[0], windows=(window, 2))
    seen = np.tril(np.ones((9, 9), int))
    keys = [(seen - np.tril(seen, -w))[4:].sum() for w in (window, 2)]
    assert flops.attention(arch, 4, 9) == 4 * arch.heads * arch.head_dim * sum(keys)


def test_a_rollout_reads_its_prompt_once_and_its_last_tokens_never():
    arch, _ = model("llama_tied")
    alone = flops.rollout(arch, 4, [3])
    # Six tokens are read, of which positions 3, 4 and 5 predict.
    assert alone == 6 * flops.position(arch) + flops.attention(arch, 0, 6) + 3 * flops.head(arch)
    prompt = 4 * flops.position(arch) + flops.attention(arch, 0, 4)
    assert flops.rollout(arch, 4, [3] * 8) == 8 * (alone - prompt) + prompt
    assert flops.rollout(arch, 4, [0, 1]) == prompt + flops.head(arch)


def test_a_shared_prompt_is_read_once():
    arch, _ = model("llama_tied")
    alone = flops.forward(arch, 4, [3])
    assert alone == 7 * flops.position(arch) + flops.attention(arch, 0, 7) + 3 * flops.head(arch)
    prompt = 4 * flops.position(arch) + flops.attention(arch, 0, 4)
    assert flops.forward(arch, 4, [3] * 5) == 5 * alone
    assert flops.forward(arch, 4, [3] * 5, share=2) == 5 * alone - 2 * prompt


def test_smollm2s_are_those_known():
    # 30 layers of q, o (576 x 576), k, v (576 x 192), gate, up, down (576 x 1536); tied head.
    arch = dataclasses.replace(
        model("llama_tied")[0], embed=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffw=1536
    )
    body = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert flops.position(arch) == 2 * body == 212_336_640
