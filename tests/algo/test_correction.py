import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bagrpo.algo.correction import correction
from bagrpo.algo.loss import loss
from bagrpo.batch import Batch
from bagrpo.config import AlgorithmConfig, CorrectionConfig

# Ratios e^0.5 = 1.65 and e^1 = 2.72 in the first row; 1, 1 and e^-0.2 in the second.
GAP_BR = jnp.array([[0.5, 1.0, 0.0], [0.0, 0.0, -0.2]])


def test_token_weights_are_ratios_up_to_the_cap():
    found = correction(GAP_BR, CorrectionConfig(level="token", cap=2.0))
    np.testing.assert_allclose(found, [[np.exp(0.5), 2, 1], [1, 1, np.exp(-0.2)]], rtol=1e-6)


def test_sequence_weights_are_products_of_ratios_up_to_the_cap():
    found = correction(GAP_BR, CorrectionConfig(level="sequence", cap=3.0))
    np.testing.assert_allclose(found, [[3.0] * 3, [np.exp(-0.2)] * 3], rtol=1e-6)


@pytest.mark.parametrize("old", [None, "given"])
@pytest.mark.parametrize("level", ["none", "token", "sequence"])
def test_the_objective_is_weighted_and_the_weight_has_no_gradient(level, old):
    """On policy the gradient of a token is -weight * correction * advantage; padding may be nan."""
    logp_BR = jnp.array([[-1.0, -2.0, jnp.nan], [-1.5, -0.5, -3.0]])
    mask_BR = jnp.array([[True, True, False], [True, True, True]])
    gap_BR = jnp.where(mask_BR, GAP_BR, 0.0)
    config = AlgorithmConfig(correction=CorrectionConfig(level=level))
    batch = Batch(
        jnp.zeros((2, 4), jnp.int32),
        jnp.ones(2, jnp.int32),
        mask_BR,
        advantage_B1=jnp.array([[2.0], [-1.0]]),
        weight_BR=jnp.where(mask_BR, 0.2, jnp.nan),
        old_logp_BR=None if old is None else logp_BR,
        sampler_logp_BR=logp_BR - GAP_BR,
    )
    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(
        logp_BR, jnp.zeros((2, 3)), batch, config
    )
    factor_BR = jnp.where(mask_BR, 0.2 * correction(gap_BR, config.correction), 0.0)
    want = -factor_BR * batch.advantage_B1
    np.testing.assert_allclose(gradient, want, rtol=1e-5)
    np.testing.assert_allclose(value, want.sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["sampler_gap_abs"], [1.5, 0.2], rtol=1e-5)
