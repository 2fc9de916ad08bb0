import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import MESHES, mesh_of, spelled

from bagrpo.models import params
from bagrpo.models.experts import mixture

ARCH = spelled("qwen3_moe", "config.json")
NAMES = ("router", "gate", "up", "down")


def inputs():
    blocks = params.initialize(ARCH, jax.random.key(0))["blocks"]
    x_BTD = jax.random.normal(jax.random.key(1), (8, 12, ARCH.embed))
    return x_BTD, *(blocks[name][0] for name in NAMES)


def every_expert_for_every_token(x_BTD, router_DE, gate_EDF, up_EDF, down_EFD):
    """The mixture written the plain way: all experts compute, those not chosen weigh 0."""
    share_BTE = jax.nn.softmax(jnp.einsum("BTD,DE->BTE", x_BTD, router_DE))
    least = jnp.sort(share_BTE, axis=-1)[..., -ARCH.experts_per_token][..., None]
    share_BTE = jnp.where(share_BTE >= least, share_BTE, 0.0)
    share_BTE = share_BTE / share_BTE.sum(-1, keepdims=True)
    gate_BTEF = jnp.einsum("BTD,EDF->BTEF", x_BTD, gate_EDF)
    up_BTEF = jnp.einsum("BTD,EDF->BTEF", x_BTD, up_EDF)
    return jnp.einsum("BTEF,EFD,BTE->BTD", jax.nn.silu(gate_BTEF) * up_BTEF, down_EFD, share_BTE)


def value_and_gradients(function, arguments):
    direction = jax.random.normal(jax.random.key(2), arguments[0].shape)

    def along(*arguments):
        return (function(*arguments) * direction).sum()

    return jax.jit(jax.value_and_grad(along, argnums=range(5)))(*arguments)


@pytest.mark.parametrize("mesh", [None, *MESHES], ids=str)
def test_values_and_gradients_are_those_of_the_plain_sum_on_every_mesh(mesh):
    want_value, want = value_and_gradients(every_expert_for_every_token, inputs())
    function = lambda *arguments: mixture(ARCH, *arguments)  # noqa: E731
    if mesh is None:
        value, found = value_and_gradients(function, inputs())
    else:
        with jax.set_mesh(mesh_of(*mesh)):
            value, found = value_and_gradients(function, inputs())
    np.testing.assert_allclose(value, want_value, atol=1e-3)  # a sum of 6144 terms of size 1
    for a, b in zip(found, want, strict=True):
        assert jnp.linalg.norm(a - b) < 2e-6 * jnp.linalg.norm(b)


def test_a_token_does_not_see_the_others():
    x_BTD, *weights = inputs()
    whole = mixture(ARCH, x_BTD, *weights)
    alone = mixture(ARCH, x_BTD[3:4, 5:6], *weights)
    np.testing.assert_allclose(whole[3:4, 5:6], alone, atol=1e-6)
