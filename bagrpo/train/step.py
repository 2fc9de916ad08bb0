"""One exact update: gradients summed over micro-batches, then the optimizer.

The loss of a micro-batch is a weighted sum with weights made for the whole batch, so gradients and
statistics just add up. Parameters, optimizer state and the sum of gradients are sharded alike and
created sharded. A program is compiled for each shape of micro-batch, before the run when asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bagrpo import sharding
from bagrpo.algo.diagnostics import diagnostics
from bagrpo.algo.loss import loss
from bagrpo.batch import Batch
from bagrpo.config import AlgorithmConfig, BatchConfig, ModelConfig, OptimizerConfig
from bagrpo.models import params as model_params
from bagrpo.models.decoder import Compute
from bagrpo.models.family import Architecture
from bagrpo.models.logprob import response_logps
from bagrpo.train.assemble import (
    Row,
    Shape,
    aggregation_rows,
    cut,
    empty,
    microbatches,
    shapes,
    token_arrays,
)
from bagrpo.train.optimizer import optimizer, schedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update changes."""

    params: model_params.Params
    opt_state: Any
    updates: jax.Array
    """int32, updates done."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function and its name."""

    name: str
    compiled: jax.stages.Compiled

    @property
    def bytes(self) -> int:
        """On each device: arguments, results that don't take an argument's place, and scratch."""
        memory: Any = self.compiled.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


class Trainer:
    """The programs of a run on one mesh: log-probs, gradient of a micro-batch, optimizer update.

    Host arrays go in whole on every process; what comes out for logging is replicated.
    """

    def __init__(
        self,
        arch: Architecture,
        mesh: Mesh,
        *,
        model: ModelConfig,
        algorithm: AlgorithmConfig,
        optimizer_config: OptimizerConfig,
        batch: BatchConfig,
        updates: int,
    ):
        """Nothing is compiled yet.

        Args:
            arch: the model's.
            mesh: from `sharding.make_mesh`.
            model: dtypes and remat.
            algorithm: surrogate, rule, KL.
            optimizer_config: AdamW and its schedule.
            batch: shapes.
            updates: of the whole run, for the schedule.
        """
        self.arch, self.mesh, self.algorithm, self.batch = arch, mesh, algorithm, batch
        self.row_shards = sharding.row_shards(mesh)
        self.compute = Compute(
            dtype=model.dtype,
            remat=model.remat,
            logit_tokens=model.logit_tokens,
            share_prompt=batch.share_prompt,
            attention=sharding.attention(mesh),
        )
        self.schedule = schedule(optimizer_config, updates)
        self.optimizer = optimizer(optimizer_config, arch, updates)
        self.shardings = self._state_shardings(model.param_dtype)
        self.abstract = self._abstract_state(model.param_dtype)
        self.programs: dict[Any, Program] = {}
        whole, grads = sharding.replicated(mesh), self.shardings.params
        self._functions = {
            "moments": jax.jit(self.optimizer.init, out_shardings=self.shardings.opt_state),
            "zeros": jax.jit(self._zero_grads, out_shardings=grads),
            "gradient": jax.jit(
                self._add_microbatch, out_shardings=(grads, whole), donate_argnums=1
            ),
            "update": jax.jit(
                self._apply_grads, out_shardings=(self.shardings, whole), donate_argnums=0
            ),
            "logps": jax.jit(self._response_logps, out_shardings=whole),
        }

    def create(self, params: model_params.Params) -> TrainState:
        """A fresh state around parameters; the optimizer's moments are created sharded."""
        count = jax.device_put(np.int32(0), self.shardings.updates)
        return TrainState(params, self._run("moments", params), count)

    def compile(self, *, fields: Sequence[str], logps: bool) -> list[Program]:
        """Compile for every shape that a run can meet, the largest included.

        Args:
            fields: see `calls`.
            logps: see `calls`.
        """
        for name, arguments in self.calls(fields=fields, logps=logps):
            self._program(name, *arguments)
        return list(self.programs.values())

    def calls(self, *, fields: Sequence[str], logps: bool) -> list[tuple[str, tuple[Any, ...]]]:
        """The functions that a run calls, with abstract arguments of every shape it can meet.

        Args:
            fields: names of the optional fields that the run's batches have.
            logps: whether the run computes old or reference log-probs.
        """
        params = self.abstract.params
        grads = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), params
        )
        temperature = np.float32(1)
        calls: list[tuple[str, tuple[Any, ...]]] = [("zeros", ())]
        for shape in shapes(self.batch, self.row_shards):
            batch = self._abstract_batch(shape, fields)
            calls.append(("gradient", (params, grads, batch, temperature)))
            if logps:
                tokens = (batch.tokens_BT, batch.prompt_B, batch.mask_BR)
                calls.append(("logps", (params, tokens, temperature)))
        return [*calls, ("update", (self.abstract, grads))]

    def lower(self, name: str, *arguments: Any) -> jax.stages.Lowered:
        """One of the functions for arguments of these shapes, to be compiled."""
        with jax.set_mesh(self.mesh):
            return self._functions[name].lower(*arguments)

    def train_step(
        self, state: TrainState, rows: Sequence[Row], *, temperature: float = 1.0
    ) -> tuple[TrainState, dict[str, float]]:
        """One update from all these rows together.

        Args:
            state: donated.
            rows: of the whole update, in any order.
            temperature: the sampling temperature, by which the logits are divided here too.

        Returns:
            The new state, and metrics of the batch (means over its tokens, rows or groups).

        Raises:
            ValueError: if a row is too long, or lacks what the algorithm needs.
        """
        grads, parts = self._run("zeros"), []
        for batch, places in microbatches(rows, self.algorithm, self.batch, self.row_shards):
            batch = sharding.put_rows(batch, self.mesh)
            grads, sums = self._run("gradient", state.params, grads, batch, np.float32(temperature))
            parts.append((sums, places))
        state, metrics = self._run("update", state, grads)
        del grads
        metrics = {name: float(value) for name, value in metrics.items()}
        return state, metrics | self._batch_metrics(rows, parts)

    def logps(
        self, params: model_params.Params, rows: Sequence[Row], *, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-probs of each row's response tokens, in nats: the old policy's or the reference's."""
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for shape, places in cut(rows, self.batch, self.row_shards):
            arrays = sharding.put_rows(token_arrays(rows, places, shape), self.mesh)
            logp_BR = np.asarray(self._run("logps", params, arrays, np.float32(temperature)))
            for b, i in places.items():
                found[i] = logp_BR[b, : len(rows[i].response)]
        return found

    def _run(self, name: str, *arguments: Any) -> Any:
        return self._program(name, *arguments).compiled(*arguments)

    def _program(self, name: str, *arguments: Any) -> Program:
        """The program for arguments of these shapes, compiled if it is their first."""
        leaves, structure = jax.tree.flatten(arguments)
        key = (name, structure, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self.programs:
            compiled = self.lower(name, *arguments).compile()
            batch = next((x for x in arguments if isinstance(x, Batch)), None)
            size = "" if batch is None else f" {batch.tokens_BT.shape} {batch.mask_BR.shape[1]}"
            self.programs[key] = Program(name + size, compiled)
        return self.programs[key]

    def _state_shardings(self, dtype: str) -> TrainState:
        """Moments are laid out like their parameters, counters replicated."""
        specs = model_params.specs(self.arch)
        shardings = sharding.param_shardings(specs, self.mesh)
        whole: Any = sharding.replicated(self.mesh)
        state = jax.eval_shape(self.optimizer.init, model_params.abstract(self.arch, dtype))
        opt_shardings = optax.tree.map_params(
            self.optimizer,
            lambda _, param_sharding: param_sharding,
            state,
            shardings,
            transform_non_params=lambda _: whole,
        )
        return TrainState(shardings, opt_shardings, whole)

    def _abstract_state(self, dtype: str) -> TrainState:
        params = model_params.abstract(self.arch, dtype)
        count: Any = jax.ShapeDtypeStruct((), jnp.int32)
        state = TrainState(params, jax.eval_shape(self.optimizer.init, params), count)
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            state,
            self.shardings,
        )

    def _abstract_batch(self, shape: Shape, fields: Sequence[str]) -> Batch:
        place = sharding.row_sharding(self.mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), empty(shape, fields)
        )

    def _zero_grads(self) -> model_params.Params:
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), model_params.abstract(self.arch, "float32")
        )

    def _add_microbatch(self, params, grads, batch: Batch, temperature):
        tokens = (batch.tokens_BT, batch.prompt_B, batch.mask_BR)

        def objective(params):
            logp_BR, entropy_BR = self._logps_and_entropies(params, tokens, temperature)
            return loss(logp_BR, entropy_BR, batch, self.algorithm)

        more, sums = jax.grad(objective, has_aux=True)(params)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, more), sums

    def _response_logps(self, params, tokens, temperature):
        return self._logps_and_entropies(params, tokens, temperature)[0]

    def _logps_and_entropies(self, params, tokens, temperature):
        return response_logps(
            params,
            self.arch,
            *tokens,
            temperature=temperature,
            compute=self.compute,
            entropy="gradient" if self.algorithm.entropy else "value",
        )

    def _apply_grads(self, state: TrainState, grads):
        # Optax raises floats to integer counts, and adds float32 to parameters of any float type.
        with jax.numpy_dtype_promotion("standard"):
            changes, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            rate = jnp.float32(self.schedule(state.updates))
            params: Any = optax.apply_updates(state.params, changes)
        opt_state = jax.tree.map(lambda x, old: x.astype(old.dtype), opt_state, state.opt_state)
        metrics = {"grad_norm": optax.tree.norm(grads), "learning_rate": rate}
        return TrainState(params, opt_state, state.updates + 1), metrics

    def _batch_metrics(self, rows: Sequence[Row], parts) -> dict[str, float]:
        """Diagnostics of the whole batch from the per-row sums of its micro-batches."""
        aggregated = aggregation_rows(rows, self.batch)
        total = len(aggregated.group_B)
        joined: dict[str, np.ndarray] = {}
        for sums, places in parts:
            for name, value in sums.items():
                value = np.asarray(value)
                joined.setdefault(name, np.zeros(total, value.dtype))
                joined[name][list(places.values())] = value[list(places)]
        found = diagnostics(aggregated, joined, self.algorithm)
        return {name: float(value) for name, value in found.items()}
