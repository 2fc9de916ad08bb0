"""What is done with a model besides training it: evaluate it, see what it says, take it away."""

from __future__ import annotations

from collections.abc import Iterator

from etils import epath

from bagrpo import config as configuration
from bagrpo import distributed, folders, sharding
from bagrpo.config import FileSource, ModelConfig, RunConfig
from bagrpo.data import problems as problem_data
from bagrpo.data import sources
from bagrpo.eval.evaluate import first
from bagrpo.eval.results import Evaluation, write_samples
from bagrpo.records import Completion
from bagrpo.sample.request import Request, Sampling
from bagrpo.train.checkpoint import Which
from bagrpo.train.loop import evaluate_with
from bagrpo.train.rollout import Prompter, Sampler
from bagrpo.train.setup import make_engine
from bagrpo.train.source import CONFIG, description_address, is_run, open_source
from bagrpo.verify.score import Scorer
from bagrpo.weights import export


def settings(target: str, config: str | None, overrides: list[str]) -> RunConfig:
    """Settings for a run's folder (its own) or a model's address (those of a file, or defaults).

    Args:
        target: run folder or model address.
        config: file of settings instead of the run's own; its model is replaced by the target.
        overrides: `key=value` each.

    Raises:
        ValueError: for settings that are not allowed.
        FileNotFoundError: if there is no such file.
    """
    model = [f"model.path={target}"]
    if config is not None:
        return configuration.load(RunConfig, config, [*model, *overrides])
    if is_run(target):
        return configuration.load(RunConfig, folders.path(target) / CONFIG, overrides)
    return configuration.load(RunConfig, None, [*model, *overrides])


def evaluate_model(
    target: str, config: RunConfig, *, which: Which, benchmarks: list[str], out: epath.Path
) -> Evaluation:
    """Score a model on the evaluation problems, and write its samples.

    Args:
        target: run folder or model address.
        config: says how to sample and verify, and on what unless `benchmarks` do.
        which: checkpoint of a run.
        benchmarks: `FORM:PATH` of data files, each form as in `data.sources`.
        out: jsonl file for the samples, local or at `gs://`.

    Raises:
        ValueError: if the model or the problems cannot be had.
    """
    source = open_source(ModelConfig(path=target), which=which)
    if benchmarks:
        files = tuple(_benchmark(text) for text in benchmarks)
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"evaluation": files})}
        )
    if not config.data.evaluation:
        raise ValueError(
            "there is nothing to evaluate on: give --benchmark FORM:PATH (e.g. gsm8k:test.jsonl), "
            "or a --config with data.evaluation"
        )
    mesh = sharding.make_mesh(config.mesh)
    prompter = Prompter(source.tokenizer, config.model.chat_template)
    kinds = {sources.kind(part) for part in config.data.evaluation}
    with Scorer(config.verify, kinds, max_tokens=config.batch.max_response) as scorer:
        scorer.self_test()
        loaded, _ = problem_data.load(
            config.data,
            "evaluation",
            check=scorer.check_answer,
            tokenize=prompter,
            max_prompt=config.batch.max_prompt,
        )
        engine = make_engine(config, source.architecture, mesh, source.tokenizer)
        engine.load(source.load(mesh, config.model.dtype))
        sampler = Sampler(engine, prompter, scorer, config.seed)
        found = evaluate_with(sampler, config, first(loaded, config.eval.limit), step=0)
    if distributed.is_main():
        write_samples(out, found.samples)
    return found


def say(
    target: str, config: RunConfig, prompt: str, *, which: Which, samples: int, raw: bool
) -> Iterator[Completion]:
    """Completions of a prompt, as they are done.

    Args:
        target: run folder or model address.
        config: says how to sample.
        prompt: a user's message, or with `raw` the text to continue.
        which: checkpoint of a run.
        samples: how many.
        raw: do without the chat template.

    Raises:
        ValueError: if the model cannot be had, or the prompt is too long.
    """
    source = open_source(ModelConfig(path=target), which=which)
    mesh = sharding.make_mesh(config.mesh)
    if raw:
        ids = source.tokenizer.encode(prompt, special=True)
    else:
        template = config.model.chat_template
        ids = Prompter(source.tokenizer, template)([{"role": "user", "content": prompt}])
    slots = config.sample.model_copy(update={"slots": min(config.sample.slots, samples)})
    config = config.model_copy(update={"sample": slots})
    engine = make_engine(config, source.architecture, mesh, source.tokenizer)
    engine.load(source.load(mesh, config.model.dtype))
    request, sampling = Request(ids, 0, samples), Sampling.of(config.sample)
    for _, _, completion in engine.generate([request], sampling, seed=config.seed, step=0):
        yield completion


def take_away(target: str, folder: str, *, which: Which, dtype: str | None, overwrite: bool) -> str:
    """Write a run's checkpoint, or any model, as a Hugging Face folder; returns what it is.

    Args:
        target: run folder or model address.
        folder: to write.
        which: checkpoint of a run.
        dtype: `float32` or `bfloat16`; by default that of the parameters.
        overwrite: write into a folder that is not empty.

    Raises:
        ValueError: if the model cannot be had, or the folder cannot be written.
    """
    source = open_source(ModelConfig(path=target), which=which)
    param_dtype = "float32" if source.settings is None else source.settings.model.param_dtype
    params = source.load(sharding.make_mesh(configuration.MeshConfig()), param_dtype)
    export.export(
        params,
        source.architecture,
        folder,
        source=description_address(target),
        dtype=dtype,
        overwrite=overwrite,
    )
    if distributed.is_main():
        source.tokenizer.save(folder)
    return source.name


def _benchmark(text: str) -> FileSource:
    form, _, path = text.partition(":")
    if not path:
        raise ValueError(f"benchmark {text!r} is not FORM:PATH, for example gsm8k:test.jsonl")
    return FileSource.model_validate({"form": form, "path": path})
