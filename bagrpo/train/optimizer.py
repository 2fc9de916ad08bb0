"""AdamW (arXiv:1711.05101) under a schedule, after a global-norm clip: all parts are optax's."""

from __future__ import annotations

import jax
import optax

from bagrpo.config import OptimizerConfig
from bagrpo.models import params
from bagrpo.models.family import Architecture


def schedule(config: OptimizerConfig, updates: int) -> optax.Schedule:
    """Learning rate at each update: a linear rise, then held or decayed until the last update.

    Args:
        config: rate, shape, updates of warm-up and final fraction.
        updates: of the whole run.

    Raises:
        ValueError: if the warm-up is longer than the run.
    """
    if config.warmup > updates:
        raise ValueError(
            f"optimizer.warmup = {config.warmup} updates is longer than the run of {updates}; "
            "shorten it or lengthen the run"
        )
    peak, rest = config.learning_rate, max(1, updates - config.warmup)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, peak * config.final_fraction, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction),
    }[config.schedule]
    if not config.warmup:
        return after
    rise = optax.linear_schedule(0.0, peak, config.warmup)
    return optax.join_schedules([rise, after], [config.warmup])


def optimizer(
    config: OptimizerConfig, arch: Architecture, updates: int
) -> optax.GradientTransformation:
    """Global-norm clip and AdamW; weight decay on matrices only, not on norms and biases."""
    decayed = jax.tree.map(lambda spec: spec.std > 0, params.specs(arch))
    adamw = optax.adamw(
        schedule(config, updates),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    if config.max_grad_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)
