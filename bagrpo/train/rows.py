"""Stages 5 and 7 of a step: groups of rollouts become the rows of an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from bagrpo.algo import kl
from bagrpo.algo.advantage import ADVANTAGES, check_rewards
from bagrpo.config import AlgorithmConfig
from bagrpo.records import Problem
from bagrpo.text.tokenizer import Tokenizer
from bagrpo.train.assemble import Row
from bagrpo.train.rollout import Group

Logps = Callable[[Sequence[Row]], list[np.ndarray]]
"""Log-probs of rows' response tokens under some parameters."""


def rows(
    groups: Sequence[Group], config: AlgorithmConfig, *, old: Logps | None, reference: Logps | None
) -> list[Row]:
    """The rows of all groups, in order, with their advantages.

    A rollout without a reward (nan: its verifier failed and `verify.errors` is `drop`) is left out
    of its group and is not trained.

    Args:
        groups: of equally many rollouts.
        config: advantage and KL.
        old: log-probs under the policy before the update; None when nothing needs them.
        reference: log-probs under the reference model; None when nothing needs them.

    Raises:
        ValueError: if a reward is infinite, or a group has a single rollout.
    """
    made = [
        Row(
            prompt=rollout.prompt,
            response=rollout.completion.tokens,
            group=g,
            sampler_logps=rollout.completion.logps,
            trained=not np.isnan(rollout.verdict.reward),
        )
        for g, group in enumerate(groups)
        for rollout in group
    ]
    if not made:
        return []
    if old is not None:
        made = _with(made, "old_logps", old(made))
    if reference is not None:
        made = _with(made, "ref_logps", reference(made))
    reward_PG = np.array([[r.verdict.reward for r in group] for group in groups], np.float32)
    valid_PG = ~np.isnan(reward_PG)
    if config.kl.coef and config.kl.where == "reward":
        reward_PG -= _penalty(made, config).reshape(reward_PG.shape)
    reward, valid = jnp.asarray(reward_PG), jnp.asarray(valid_PG)
    check_rewards(reward, valid)
    advantage_PG = ADVANTAGES[config.advantage](reward, valid, std=config.std)
    return _with(made, "advantage", np.asarray(advantage_PG).ravel().tolist())


def demonstrations(
    problems: Sequence[Problem], prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> list[Row]:
    """Rows of worked solutions for the surrogate `likelihood`: a supervised warm start.

    Raises:
        ValueError: if a problem has no solution.
    """
    made = []
    for g, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
        solution = problem.extra.get("solution")
        if solution is None:
            raise ValueError(
                f"problem {problem.id} has no solution to imitate; surrogate `likelihood` takes "
                "data with solutions: the forms gsm8k and arithmetic, or a column `solution`"
            )
        response = [*tokenizer.encode(solution, special=False), tokenizer.eos_ids[0]]
        made.append(Row(prompt, response, group=g, advantage=1.0))
    return made


def _with(made: list[Row], name: str, values: Sequence) -> list[Row]:
    return [
        dataclasses.replace(row, **{name: value}) for row, value in zip(made, values, strict=True)
    ]


def _penalty(made: list[Row], config: AlgorithmConfig) -> np.ndarray:
    """The KL penalty of each row, as it is subtracted from the reward."""
    longest = max(len(row.response) for row in made)
    arrays = np.zeros((3, len(made), longest), np.float32)
    for b, row in enumerate(made):
        assert row.old_logps is not None
        assert row.ref_logps is not None
        length = len(row.response)
        arrays[0, b, :length], arrays[1, b, :length] = row.old_logps, row.ref_logps
        arrays[2, b, :length] = 1
    logp_BR, ref_logp_BR, mask_BR = jnp.asarray(arrays)
    return np.asarray(kl.reward_penalty(logp_BR, ref_logp_BR, mask_BR > 0, config.kl))
