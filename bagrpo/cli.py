"""The `bagrpo` command: one function for each of its commands, listed at the end of the file.

A command raises ValueError or FileNotFoundError for what its user can put right; `main` says that
as one sentence. Each command imports what it needs itself, so that help comes at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_DESCRIPTION = """\
Post-trains language models with reinforcement learning from verifiable rewards, in JAX, by
Balanced Aggregation (arXiv:2605.04077) or another GRPO-style loss."""

STOPPED = 75
"""Exit status of a run that a signal has stopped: sysexits.h's EX_TEMPFAIL, try again."""

_EPILOG = """\
`bagrpo COMMAND --help` explains a command. What a user can put right is reported as one sentence
and exit status 2; with BAGRPO_TRACEBACK=1 in the environment, as a traceback."""

_OVERRIDES = """\
key=value replaces a setting of CONFIG. The key is dotted, the value is YAML, a later one wins:
  optimizer.learning_rate=2e-6  algorithm.rule=token  'algorithm.clip={low: 0.2, high: 0.28}'"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the process's own, and returns its exit status.

    Raises:
        SystemExit: After `--help` and `--version` (0), and for a line that makes no sense (2).
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes no more settings once an option has stood among them.
    if any(word.startswith("-") or "overrides" not in options for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command is None:
        parser.print_help()
        return 0
    if rest:
        options.overrides += rest
    try:
        return options.run(options) or 0
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("BAGRPO_TRACEBACK") == "1":
            raise
        sys.stderr.write(f"bagrpo: error: {error}\n")
        _end_other_processes(str(error))
        return 2


def show_config(options: argparse.Namespace) -> None:
    """Prints the configuration that CONFIG and the overrides come to, defaults included."""
    from bagrpo import config

    sys.stdout.write(config.dump(config.load(config.RunConfig, options.config, options.overrides)))


def train(options: argparse.Namespace) -> int:
    """Runs or resumes reinforcement learning (or, on solutions, a supervised warm start).

    CONFIG says everything; configs/ has some to begin with. The run is written to its folder, local
    or at gs://, by default runs/ and the name of CONFIG: config.yaml, metrics.jsonl, rollouts/,
    evaluation/ and checkpoints/. The same command goes on where a run was stopped, by Ctrl-C or
    SIGTERM after the step under way (exit status 75), or by anything else from its newest
    checkpoint.
    """
    _keep_programs()
    from bagrpo import config, distributed
    from bagrpo.train import loop

    run = config.load(config.RunConfig, options.config, options.overrides)
    if run.folder is None:
        run = run.model_copy(update={"folder": str(Path("runs") / Path(options.config).stem)})
    distributed.initialize()
    complete = loop.train(run)
    distributed.finish()
    return 0 if complete else STOPPED


def evaluate(options: argparse.Namespace) -> None:
    """Scores a run's checkpoint or a model: avg@k, pass@k and maj@k, with 95 % intervals.

    TARGET is a run's folder, local or at gs://, or a model as `model.path` names one. A run is
    evaluated as its own settings say, a model by the defaults (greedy, one sample) or as --config
    says.
    """
    _keep_programs()
    import rich.console

    from bagrpo import distributed, folders
    from bagrpo.train import inspect, source

    distributed.initialize()
    config = inspect.settings(options.target, options.config, options.overrides)
    place = f"{options.target}/" if source.is_run(options.target) else ""
    out = folders.path(options.out or f"{place}samples.jsonl")
    found = inspect.evaluate_model(
        options.target, config, which=options.step, benchmarks=options.benchmark, out=out
    )
    if distributed.is_main():
        console = rich.console.Console(highlight=False)
        console.print(found.table())
        console.print(f"samples: {out}", markup=False)
    distributed.finish()


def sample(options: argparse.Namespace) -> None:
    """Prints what a run's checkpoint or a model says to a prompt.

    TARGET is a run's folder, or a model as `model.path` names one.
    """
    _keep_programs()
    from bagrpo.train import inspect

    config = inspect.settings(options.target, options.config, options.overrides)
    said = inspect.say(
        options.target,
        config,
        options.prompt,
        which=options.step,
        samples=options.samples,
        raw=options.raw,
    )
    for number, completion in enumerate(said):
        if number:
            sys.stdout.write("---\n")
        sys.stdout.write(completion.text + "\n")


def export(options: argparse.Namespace) -> None:
    """Writes a run's checkpoint as a Hugging Face folder, which transformers loads.

    TARGET is a run's folder, or a model as `model.path` names one, which converts it.
    """
    from bagrpo.train import inspect

    name = inspect.take_away(
        options.target,
        options.folder,
        which=options.step,
        dtype=options.dtype,
        overwrite=options.overwrite,
    )
    sys.stdout.write(f"wrote {name} to {options.folder}\n")


def bench(options: argparse.Namespace) -> None:
    """Times the steps of a run on this machine: tokens/s, useful GFLOP/s, peak memory, by stage.

    CONFIG is that of a run, which is neither resumed nor written. With sample.ignore_eos=true every
    response is as long as batch.max_response, so that all machines and versions do the same work.
    Memory is the peak of the fullest device since it was first used; where the CPU is the device,
    that of the process during the stage, without the processes that verify.
    """
    import json

    import rich.console

    from bagrpo import config, distributed
    from bagrpo.train import bench as benchmark

    run = config.load(config.RunConfig, options.config, options.overrides)
    distributed.initialize()
    found = benchmark.bench(run, steps=options.steps)
    if distributed.is_main():
        rich.console.Console(highlight=False).print(benchmark.table(found))
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    distributed.finish()


def plan(options: argparse.Namespace) -> None:
    """Compiles a run for TPU slices that are not there: does it fit, and how fast could it be?

    CONFIG is that of a run. Its programs are compiled for each slice, named as the cloud does:
    v5e-N and v6e-N count chips, v4-N and v5p-N cores, two a chip. cpu:N plans for CPU devices. Of
    the model only the description is read, so it may be a folder that holds only its config.json.

    Said of each program, on one chip: GiB of its arguments, of its scratch, and of what the loop
    holds beside them; FLOPs of the model (useful), and those compiled as a multiple of them; GB
    moved through HBM and by collectives, these as a multiple of the least that must move; and the
    time that the slowest of all takes at the chip's published peaks (roofline).
    """
    from bagrpo.plan import environment

    environment.prepare(options.topology)
    import json
    import logging

    import rich.console

    from bagrpo import config
    from bagrpo.plan import plan as planning
    from bagrpo.plan import table
    from bagrpo.train import source

    logging.basicConfig(format="%(message)s", level=logging.INFO, force=True)
    logging.getLogger("jax").setLevel(logging.WARNING)
    run = config.load(config.RunConfig, options.config, options.overrides)
    arch = source.architecture(run.model)
    console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    found = []
    for topology in options.topology:
        if options.search:
            plans = planning.search(
                run, arch, topology, thorough=options.thorough, response=options.response
            )
            console.print(f"{topology}, best first:", table.ranking(plans))
        else:
            plans = [
                planning.plan(
                    run,
                    arch,
                    topology,
                    largest=options.largest,
                    thorough=options.thorough,
                    response=options.response,
                )
            ]
            table.show(console, plans[0])
        found += plans
    if options.json:
        Path(options.json).write_text(json.dumps(list(map(table.values, found)), indent=1) + "\n")


def _keep_programs() -> None:
    """Lets compiled programs stay in the cache folder; before JAX is imported."""
    from bagrpo.weights import fetch

    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(fetch.cache_folder() / "compiled"))


def _end_other_processes(reason: str) -> None:
    """An error here would leave the run's other processes waiting."""
    if "bagrpo.distributed" in sys.modules:
        from bagrpo import distributed

        distributed.fail(reason)


def _takes_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="run folder or model")
    parser.add_argument("--step", type=_step, help="checkpoint: a step or `best` (the newest)")


def _takes_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="YAML file of settings in the place of the run's own")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="see below")
    parser.epilog = _OVERRIDES


def _evaluates(parser: argparse.ArgumentParser) -> None:
    _takes_target(parser)
    parser.add_argument(
        "--benchmark",
        metavar="FORM:PATH",
        action="append",
        default=[],
        help="data to evaluate on (gsm8k, dapo, humaneval, plain); may be repeated",
    )
    parser.add_argument("--out", help="file for the samples (samples.jsonl, a run's in its folder)")
    _takes_settings(parser)


def _samples(parser: argparse.ArgumentParser) -> None:
    _takes_target(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="a user's message")
    parser.add_argument("--samples", type=int, default=1, help="completions (%(default)s)")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT without chat template")
    _takes_settings(parser)


def _exports(parser: argparse.ArgumentParser) -> None:
    _takes_target(parser)
    parser.add_argument("folder", metavar="FOLDER", help="to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(that of the parameters)")
    parser.add_argument("--overwrite", action="store_true", help="also into a folder with files")


def _benches(parser: argparse.ArgumentParser) -> None:
    _takes_config(parser)
    parser.add_argument("--steps", type=_positive, default=3, help="timed (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")


def _plans(parser: argparse.ArgumentParser) -> None:
    _takes_config(parser)
    parser.add_argument(
        "--topology", metavar="SLICE", action="append", required=True, help="may be repeated"
    )
    parser.add_argument(
        "--largest", action="store_true", help="only each program's largest shape, as --search does"
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="let the compiler optimise as for a run; takes three times as long",
    )
    parser.add_argument(
        "--response", type=_positive, metavar="N", help="tokens of a response (the most)"
    )
    parser.add_argument("--search", action="store_true", help="try meshes, and rank them")
    parser.add_argument("--json", metavar="FILE", help="write what was found there too")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _step(text: str) -> int | str:
    if text != "best" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor `best`")
    return text if text == "best" else int(text)


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="see below")
    parser.epilog = _OVERRIDES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagrpo",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (run, add_arguments) in COMMANDS.items():
        description = inspect.getdoc(run) or ""
        command = commands.add_parser(
            name,
            help=description.partition("\n")[0].replace("%", "%%"),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


def _versions() -> str:
    """Returns what a bug report should say."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax"))
    return (
        f"bagrpo {importlib.metadata.version('bagrpo')} ({packages}, "
        f"Python {platform.python_version()}, {platform.platform()})"
    )


COMMANDS: dict[
    str,
    tuple[Callable[[argparse.Namespace], int | None], Callable[[argparse.ArgumentParser], None]],
] = {
    "train": (train, _takes_config),
    "eval": (evaluate, _evaluates),
    "sample": (sample, _samples),
    "export": (export, _exports),
    "plan": (plan, _plans),
    "bench": (bench, _benches),
    "config": (show_config, _takes_config),
}

if __name__ == "__main__":
    sys.exit(main())
