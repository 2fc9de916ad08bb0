"""Builds what a run is made of, and puts it into the state of its newest checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Iterator
from typing import Any

from etils import epath
from jax.sharding import Mesh

from bagrpo import config as configuration
from bagrpo import distributed, folders, sharding
from bagrpo.config import RunConfig
from bagrpo.data import problems as problem_data
from bagrpo.data import sources
from bagrpo.data.stream import Stream
from bagrpo.eval.evaluate import first
from bagrpo.models.family import Architecture
from bagrpo.models.params import Params
from bagrpo.records import Problem
from bagrpo.sample.engine import Engine
from bagrpo.text.tokenizer import Tokenizer
from bagrpo.train.checkpoint import Checkpoints
from bagrpo.train.resume import check_settings
from bagrpo.train.rollout import Prompter, Sampler
from bagrpo.train.rows import Logps
from bagrpo.train.source import CONFIG, Source, open_source, write_description
from bagrpo.train.step import Trainer, TrainState
from bagrpo.verify.score import Scorer

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Run:
    """What a run is made of."""

    config: RunConfig
    mesh: Mesh
    source: Source
    trainer: Trainer
    scorer: Scorer
    stream: Stream
    evaluation: list[Problem]
    prompter: Prompter
    sampler: Sampler | None
    """None for a supervised run that is never evaluated."""
    reference: Params | None
    """None unless something needs it."""

    @property
    def folder(self) -> epath.Path:
        """Where the run is written."""
        assert self.config.folder is not None
        return folders.path(self.config.folder)

    @property
    def imitates(self) -> bool:
        """Whether this is a supervised run, on worked solutions."""
        return self.config.algorithm.surrogate == "likelihood"

    def describe(self) -> None:
        """Write the settings, and what describes the model, to the run's folder."""
        if distributed.is_main():
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / CONFIG).write_text(configuration.dump(self.config))
            write_description(self.source, self.folder)

    def begin(self, checkpoints: Checkpoints) -> tuple[TrainState, int]:
        """The state to start from, and the steps done: the newest checkpoint's, or none.

        Raises:
            ValueError: if settings that shape the result have changed since the checkpoint.
        """
        if not checkpoints.steps():
            params = self.source.load(self.mesh, self.config.model.param_dtype)
            return self.trainer.create(params), 0
        restored = checkpoints.restore(self.trainer.abstract)
        changes = check_settings(
            restored.host["config"],
            self.config.model_dump(mode="json"),
            accept=self.config.checkpoint.accept_changes,
        )
        for change in changes:
            log.warning("resuming with a changed setting: %s", change)
        self.stream.restore(restored.host["stream"])
        return restored.state, restored.step

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides arrays."""
        return {"stream": self.stream.state(), "config": self.config.model_dump(mode="json")}

    def compile(self) -> str:
        """Compile whatever the run can need; says what memory it takes."""
        start = time.perf_counter()
        programs = {
            program.name: program.bytes
            for program in self.trainer.compile(
                fields=batch_fields(self.config), logps=needs_logps(self.config)
            )
        }
        if self.sampler is not None:
            programs |= self.sampler.engine.compile()
        largest = max(programs, key=lambda name: programs[name])
        mebibytes = programs[largest] / 2**20
        size = f"{mebibytes / 1024:.2f} GiB" if mebibytes >= 1024 else f"{mebibytes:.1f} MiB"
        return (
            f"compiled {len(programs)} programs in {time.perf_counter() - start:.0f} s; the "
            f"largest, {largest}, takes {size} of a device"
        )

    def compilations(self) -> int:
        """Programs compiled so far; it stays the same after `compile`."""
        engine = 0 if self.sampler is None else self.sampler.engine.compilations
        return len(self.trainer.programs) + engine

    def old_logps(self, state: TrainState) -> Logps | None:
        """Log-probs under the policy before the updates, if something needs them."""
        if not needs_old_logps(self.config):
            return None
        temperature = self.config.sample.temperature or 1.0
        return functools.partial(self.trainer.logps, state.params, temperature=temperature)

    def reference_logps(self) -> Logps | None:
        """Log-probs under the reference model, if something needs them."""
        if self.reference is None:
            return None
        temperature = self.config.sample.temperature or 1.0
        return functools.partial(self.trainer.logps, self.reference, temperature=temperature)


def needs_old_logps(config: RunConfig) -> bool:
    """One update per batch is on policy: its ratio is 1 without looking."""
    penalty = config.algorithm.kl.coef > 0 and config.algorithm.kl.where == "reward"
    return config.algorithm.surrogate != "likelihood" and (config.batch.updates > 1 or penalty)


def needs_logps(config: RunConfig) -> bool:
    """Whether the run makes log-probs outside of its updates."""
    return needs_old_logps(config) or config.algorithm.kl.coef > 0


def batch_fields(config: RunConfig) -> list[str]:
    """The optional fields that the run's batches have."""
    algorithm, fields = config.algorithm, []
    if algorithm.surrogate == "likelihood":
        return fields
    fields.append("sampler_logp_BR")
    if needs_old_logps(config):
        fields.append("old_logp_BR")
    if algorithm.kl.coef:
        fields.append("ref_logp_BR")
    if algorithm.entropy or (algorithm.kl.coef and algorithm.kl.where == "loss"):
        fields.append("regular_weight_BR")
    return fields


@contextlib.contextmanager
def prepare(config: RunConfig) -> Iterator[Run]:
    """Everything that a run needs; its processes end with the context.

    Raises:
        ValueError: for settings, data or a model that cannot be used.
    """
    mesh = sharding.make_mesh(config.mesh)
    source = open_source(config.model, seed=config.seed)
    arch, prompter = source.architecture, Prompter(source.tokenizer, config.model.chat_template)
    trainer = make_trainer(config, arch, mesh)
    kinds = {sources.kind(part) for part in (*config.data.sources, *config.data.evaluation)}
    with Scorer(config.verify, kinds, max_tokens=config.batch.max_response) as scorer:
        for kind in scorer.self_test():
            log.info("verifier %r has no example to test itself on", kind)
        stream, evaluation = load_problems(config, prompter, scorer)
        sampler = None
        if samples(config):
            engine = make_engine(config, arch, mesh, source.tokenizer)
            sampler = Sampler(engine, prompter, scorer, config.seed)
        reference = None
        if config.algorithm.kl.coef:
            reference = source.load(mesh, config.model.param_dtype)
        yield Run(
            config,
            mesh,
            source,
            trainer,
            scorer,
            stream,
            evaluation,
            prompter,
            sampler,
            reference,
        )


def samples(config: RunConfig) -> bool:
    """Whether the run samples: a supervised one that is never evaluated does not."""
    return config.algorithm.surrogate != "likelihood" or bool(config.data.evaluation)


def make_trainer(config: RunConfig, arch: Architecture, mesh: Mesh) -> Trainer:
    """The trainer of a run; nothing is compiled yet."""
    return Trainer(
        arch,
        mesh,
        model=config.model,
        algorithm=config.algorithm,
        optimizer_config=config.optimizer,
        batch=config.batch,
        updates=config.steps * config.batch.updates,
    )


def make_engine(
    config: RunConfig, arch: Architecture, mesh: Mesh, tokenizer: Tokenizer | None
) -> Engine:
    """The sampler of a run, without parameters yet."""
    return Engine(
        arch,
        mesh,
        compute_dtype=config.model.dtype,
        config=config.sample,
        max_prompt=config.batch.max_prompt,
        max_response=config.batch.max_response,
        tokenizer=tokenizer,
    )


def load_problems(
    config: RunConfig, prompter: Prompter, scorer: Scorer
) -> tuple[Stream, list[Problem]]:
    """The training problems as a stream, and the evaluation problems.

    Raises:
        ValueError: if a source cannot be read or has no usable problem.
    """
    options: dict[str, Any] = {
        "check": scorer.check_answer,
        "tokenize": prompter,
        "max_prompt": config.batch.max_prompt,
    }
    training, _ = problem_data.load(config.data, "training", **options)
    evaluation: list[Problem] = []
    if config.data.evaluation:
        loaded, _ = problem_data.load(config.data, "evaluation", **options)
        evaluation = first(loaded, config.eval.limit)
    trained = [problem for problems in training for problem in problems]
    shared = problem_data.overlap(trained, evaluation)
    if shared:
        log.warning("%d of %d evaluation problems are trained on", len(shared), len(evaluation))
    return Stream(training, config.data, seed=config.seed), evaluation
