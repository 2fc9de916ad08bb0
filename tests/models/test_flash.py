"""Splash attention, interpreted on the CPU, against plain products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bagrpo import sharding
from bagrpo.config import MeshConfig
from bagrpo.models import flash
from bagrpo.models.attention import attend, visible
from bagrpo.models.decoder import Compute, forward
from bagrpo.models.params import initialize
from bagrpo.train import source

B, T, H = 2, 140, 16  # more than a tile, and not a whole number of them


def inputs(heads, kv_heads):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, T, n, H) for n in (heads, kv_heads, kv_heads, heads)]
    real = np.ones((B, T), bool)
    real[:, 50:64] = False  # between prompt and response
    real[0, 120:] = False
    arrays = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
    return (*arrays, jnp.asarray(real))


def compare(found, q, k, v, weight, real, **options):
    position = jnp.where(real, jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, -1)
    seen = visible(position, position, T)

    def of(function):
        def total(q, k, v):
            out = function(q, k, v)
            out = jnp.where(real[:, :, None, None], out, 0)
            return (out * weight).sum(), out

        return jax.grad(total, (0, 1, 2), has_aux=True)(q, k, v)

    want = of(lambda q, k, v: attend(q, k, v, visible_BTS=seen, scale=0.25, **options))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), of(found), want)


@pytest.mark.parametrize(("heads", "kv_heads", "softcap"), [(4, 2, None), (3, 1, 5.0)])
def test_it_is_attention(heads, kv_heads, softcap):
    q, k, v, weight, real = inputs(heads, kv_heads)

    def found(q, k, v):
        return flash.attend(q, k, v, real_BT=real, scale=0.25, softcap=softcap, interpret=True)

    compare(found, q, k, v, weight, real, softcap=softcap)


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["split", "shared"])
def test_it_is_attention_on_a_mesh(kv_heads):
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=4))
    q, k, v, weight, real = inputs(8, kv_heads)

    @jax.jit
    def found(q, k, v):
        return flash.attend(q, k, v, real_BT=real, scale=0.25, softcap=None, interpret=True)

    with jax.set_mesh(mesh):
        compare(found, q, k, v, weight, real, softcap=None)


def test_a_model_takes_it_where_tokens_see_all_before_them(monkeypatch):
    arch = source.architecture(source.ModelConfig(random=source.RandomModelConfig()))
    params = initialize(arch, jax.random.key(1))
    tokens = jax.random.randint(jax.random.key(2), (1, 32), 0, arch.vocab, jnp.int32)
    place = jnp.arange(32, dtype=jnp.int32)[None]
    calls = []

    def noted(*arguments, **options):
        calls.append(options)
        return original(*arguments, **options, interpret=True)

    original = flash.attend
    monkeypatch.setattr(flash, "attend", noted)
    want, _ = forward(params, arch, tokens, place, compute=Compute())
    assert not calls
    found, _ = forward(params, arch, tokens, place, compute=Compute(attention="splash"))
    assert calls
    np.testing.assert_allclose(found, want, atol=1e-4)
    calls.clear()
    branch = jnp.zeros_like(place)
    forward(params, arch, tokens, place, compute=Compute(attention="splash"), branch_BT=branch)
    assert not calls  # branches do not see each other, which splash cannot say
