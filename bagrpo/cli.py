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

_DESCRIPTION = """\
Post-trains language models with reinforcement learning from verifiable rewards, in JAX, by
Balanced Aggregation (arXiv:2605.04077) or another GRPO-style loss."""

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
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        options.run(options)
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("BAGRPO_TRACEBACK") == "1":
            raise
        sys.stderr.write(f"bagrpo: error: {error}\n")
        return 2
    return 0


def show_config(options: argparse.Namespace) -> None:
    """Prints the configuration that CONFIG and the overrides come to, defaults included."""
    from bagrpo import config

    sys.stdout.write(config.dump(config.load(config.RunConfig, options.config, options.overrides)))


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="see below")
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
            help=description.partition("\n")[0],
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
    tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]],
] = {
    "config": (show_config, _takes_config),
}
