"""Aggregation rules: the weight of each response token in the whole batch's loss.

`name(rows) -> weight_BR`. A rule sees only the sign of each row's advantage, its length and its
group, never a log-prob, so weights are made once per batch, outside the gradient, and the loss is a
plain weighted sum over tokens. Tokens of one row always weigh the same.

Conventions of all rules. A row whose mask is empty (filtered, or padding) does not exist: it leaves
token counts, head counts and the number of groups. A row with zero advantage belongs to neither
sign but counts as a head and, where a rule takes all of a group's or batch's tokens together, with
its tokens. Nothing is renormalised: an empty side contributes 0, and with every row masked all
weights are 0. Counts are integers, so the order of the rows changes no bit of a weight.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from bagrpo.config import AlgorithmConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What aggregation looks at: B rows of R response positions."""

    mask_BR: jax.Array
    """bool, true at the response tokens that are trained."""
    advantage_B1: jax.Array
    """The advantage that the surrogate uses; the weights take its dtype."""
    group_B: jax.Array
    """int32, rows with the same id are responses to one prompt. Any ids, in any order."""
    constant: int = dataclasses.field(metadata={"static": True})
    """Tokens of the longest response allowed, by which the rule `constant` divides."""

    def __post_init__(self) -> None:
        """Refuses a divisor that is not positive."""
        if self.constant < 1:
            raise ValueError(
                f"constant = {self.constant}: it is the longest response allowed, at least 1 token"
            )

    @property
    def length_B(self) -> jax.Array:
        """int32, trained tokens of each row."""
        return self.mask_BR.sum(axis=1, dtype=jnp.int32)

    @property
    def present_B(self) -> jax.Array:
        """bool, true at rows with a trained token."""
        return self.mask_BR.any(axis=1)

    def side_B(self, sign: int) -> jax.Array:
        """bool, true at present rows whose advantage has this sign (1 or -1)."""
        return self.present_B & (sign * self.advantage_B1[:, 0] > 0)

    def total_B(self, value_B: jax.Array) -> jax.Array:
        """Sum of a per-row value over the row's group, at each of its rows."""
        index_B = self.index_B
        return jax.ops.segment_sum(value_B, index_B, num_segments=index_B.size)[index_B]

    @property
    def index_B(self) -> jax.Array:
        """int32, group ids renumbered from 0, so that no id is too large or too small."""
        return _renumber(self.group_B)

    @property
    def first_B(self) -> jax.Array:
        """bool, true at the first present row of each group: these stand for the groups."""
        row_B = jnp.arange(self.group_B.size)
        index_B = self.index_B
        candidate_B = jnp.where(self.present_B, row_B, row_B.size)
        first_B = jax.ops.segment_min(candidate_B, index_B, num_segments=row_B.size)
        return first_B[index_B] == row_B


def balanced(rows: Rows) -> jax.Array:
    """Balanced Aggregation (arXiv:2605.04077): token means within each sign, by head count.

    `J = mean over groups of (n+/n) L+ + (n-/n) L-`, where L± is the token mean over the n± rows of
    that sign. A token of sign s weighs `n_s / (n * T_s * groups)`, T_s the sign's tokens.
    """
    dtype = rows.advantage_B1.dtype
    heads_B = rows.total_B(rows.present_B.astype(jnp.int32))
    weight_B = jnp.zeros(rows.group_B.shape, dtype)
    for sign in (1, -1):
        side_B = rows.side_B(sign)
        share_B = divide(rows.total_B(side_B.astype(jnp.int32)), heads_B, dtype)
        token_B = divide(1, rows.total_B(jnp.where(side_B, rows.length_B, 0)), dtype)
        weight_B = jnp.where(side_B, share_B * token_B, weight_B)
    return _spread(rows, weight_B * divide(1, _groups(rows), dtype))


def group_token(rows: Rows) -> jax.Array:
    """Token mean over each group, then mean over groups (prompt average of arXiv:2510.13786).

    A token weighs `1 / (T * groups)`, T the tokens of its group. The BA paper's `token-agg`.
    """
    dtype = rows.advantage_B1.dtype
    return _spread(
        rows, divide(1, rows.total_B(rows.length_B), dtype) * divide(1, _groups(rows), dtype)
    )


def token(rows: Rows) -> jax.Array:
    """Token mean over the whole batch: DAPO (arXiv:2503.14476) as verl and TRL compute it."""
    total = rows.length_B.sum()
    return _spread(rows, jnp.full(rows.group_B.shape, divide(1, total, rows.advantage_B1.dtype)))


def sequence(rows: Rows) -> jax.Array:
    """Mean over tokens of each row, over rows of each group, over groups: GRPO (arXiv:2402.03300).

    A token weighs `1 / (T * n * groups)`, T the row's tokens and n the group's rows. This is TRL's
    and verl's mean over all rows whenever every group keeps the same number of rows.
    """
    dtype = rows.advantage_B1.dtype
    share_B = divide(1, rows.total_B(rows.present_B.astype(jnp.int32)), dtype)
    token_B = divide(1, rows.length_B, dtype) * divide(1, _groups(rows), dtype)
    return _spread(rows, share_B * token_B)


def constant(rows: Rows) -> jax.Array:
    """Dr. GRPO (arXiv:2503.20783): mean over rows of the sum over tokens, by a constant length.

    A token weighs `1 / (rows * constant)`. Fully masked rows are left out of the count, as verl
    does; TRL keeps them in it.
    """
    dtype = rows.advantage_B1.dtype
    weight = divide(1, rows.present_B.sum(dtype=jnp.int32), dtype) / rows.constant
    return _spread(rows, jnp.full(rows.group_B.shape, weight))


@functools.partial(jax.jit, static_argnames="config")
def weights(rows: Rows, config: AlgorithmConfig) -> tuple[jax.Array, jax.Array | None]:
    """Weights of a batch's objective and of its regularisers.

    The KL in the loss and the entropy bonus have no sign to balance, so they are combined by
    `config.kl.rule`, or by the run's own rule, with `group_token` in the place of `balanced`.

    Returns:
        weight_BR, and regular_weight_BR or None when no regulariser is on.
    """
    weight_BR = RULES[config.rule](rows)
    if not (config.entropy or (config.kl.coef and config.kl.where == "loss")):
        return weight_BR, None
    own = "group_token" if config.rule == "balanced" else config.rule
    return weight_BR, RULES[config.kl.rule or own](rows)


def divide(
    numerator: jax.Array | int, denominator: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Quotient as `dtype`, and 0 where the denominator is not positive: a mean over nothing."""
    numerator, denominator = (jnp.asarray(x).astype(dtype) for x in (numerator, denominator))
    return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1.0), 0.0)


@jax.jit
def _renumber(group_B: jax.Array) -> jax.Array:
    # Jitted by itself for tracing's sake: a rule asks for it several times, XLA computes it once.
    return jnp.unique(group_B, return_inverse=True, size=group_B.size)[1]


def _groups(rows: Rows) -> jax.Array:
    return rows.first_B.sum(dtype=jnp.int32)


def _spread(rows: Rows, weight_B: jax.Array) -> jax.Array:
    return jnp.where(rows.mask_BR, weight_B[:, None], 0.0)


RULES = {
    "balanced": balanced,
    "group_token": group_token,
    "token": token,
    "sequence": sequence,
    "constant": constant,
}
