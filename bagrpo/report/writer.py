"""A run's records: `metrics.jsonl` and `rollouts.jsonl`, one JSON object a line and step by step.

Lines are written through at once, so a killed run loses none of a finished step. A run that goes
on from step k first cuts what was written after it, so that its files become those of a run that
was never interrupted. TensorBoard and Weights & Biases get the same metrics.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagrpo.config import ReportConfig
from bagrpo.records import Rollout

FILES = ("metrics.jsonl", "rollouts.jsonl")


class Writer:
    """Writes to a run's folder, from one process of the run."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: ReportConfig,
        *,
        step: int | None,
        settings: Mapping[str, Any] | None = None,
    ):
        """Open the files, cut to where the run goes on.

        Args:
            folder: the run's, local; created if need be.
            config: where else metrics go.
            step: that the run goes on from: its lines stay, those of later steps go. None: a new
                run, nothing stays.
            settings: of the whole run, for Weights & Biases.

        Raises:
            ValueError: if the folder is not local, or a package that is asked for is missing.
        """
        if "://" in os.fspath(folder):
            raise ValueError(
                f"metrics can't be appended to in {os.fspath(folder)}; give a local run folder, "
                "and copy it when the run is over"
            )
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Callable[[int, dict[str, float]], None]] = []
        self._end = contextlib.ExitStack()
        if config.wandb is not None:
            self._open_wandb(config.wandb, step, settings or {})
        if config.tensorboard:
            self._open_tensorboard(step)
        for name in FILES:
            _cut(self._folder / name, -1 if step is None else step)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a line of metrics; several of a step are fine.

        Call it before the checkpoint of the step is saved: a run that goes on from there won't.

        Args:
            step: steps done.
            values: by name. Numbers that are not finite are `null` in the file.
        """
        plain = _plain(values)
        self._write("metrics.jsonl", [{"step": step, **plain}])
        finite = {
            name: float(value) for name, value in plain.items() if isinstance(value, int | float)
        }
        for sink in self._sinks:
            sink(step, finite)

    def rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write a line for each rollout; as `metrics` otherwise."""
        lines = [_plain(_rollout_line(step, rollout)) for rollout in rollouts]
        self._write("rollouts.jsonl", lines)

    def close(self) -> None:
        """Close whatever metrics go to besides the files."""
        self._end.close()

    def _write(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with open(self._folder / name, "a") as file:
            file.write(text)

    def _open_tensorboard(self, step: int | None) -> None:
        try:
            package = importlib.import_module("tensorboardX")
        except ImportError:
            return
        # Events of later steps are left out by whoever reads the folder.
        board = package.SummaryWriter(
            str(self._folder / "tensorboard"), purge_step=0 if step is None else step + 1
        )
        self._end.callback(board.close)

        def add(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, step)
            board.flush()

        self._sinks.append(add)

    def _open_wandb(self, project: str, step: int | None, settings: Mapping[str, Any]) -> None:
        try:
            package = importlib.import_module("wandb")
        except ImportError:
            raise ValueError(
                f"report.wandb={project!r} needs the package wandb: install it (pip install "
                "wandb), or leave the setting out"
            ) from None
        identity = self._folder / "wandb.txt"
        if step is None or not identity.exists():
            identity.write_text(secrets.token_hex(8))
        run = package.init(
            project=project,
            name=self._folder.resolve().name,
            id=identity.read_text(),
            resume="allow",
            dir=str(self._folder),
            config=dict(settings),
        )
        self._end.callback(run.finish)
        # After a resume it ignores the steps that it has: they are the same.
        self._sinks.append(lambda step, values: run.log(values, step=step))


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Lines of a file that a writer wrote; a last one that broke off is left out."""
    return (line for line, _ in _lines(Path(path)))


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each line and where it ends, up to the first that is not whole."""
    end = 0
    with open(path, "rb") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                return
            if not text.endswith(b"\n") or not isinstance(line, dict) or "step" not in line:
                return
            end += len(text)
            yield line, end


def _cut(path: Path, step: int) -> None:
    """Takes away the lines of later steps, and one that broke off; makes the file if need be."""
    path.touch()
    kept = 0
    for line, end in _lines(path):
        if line["step"] > step:
            break
        kept = end
    os.truncate(path, kept)


def _rollout_line(step: int, rollout: Rollout) -> dict[str, Any]:
    problem, completion, verdict = rollout.problem, rollout.completion, rollout.verdict
    return {
        "step": step,
        "problem": problem.id,
        "sample": rollout.sample,
        "kind": problem.kind,
        "messages": problem.messages,
        "answer": problem.answer,
        "text": completion.text,
        "finish": completion.finish,
        "prompt_tokens": len(rollout.prompt),
        "tokens": len(completion.tokens),
        "reward": verdict.reward,
        "correct": verdict.correct,
        "reason": verdict.reason,
        "parts": verdict.parts,
    }


def _plain(value: Any) -> Any:
    """The value as JSON can have it: numpy's numbers as Python's, nan and infinities as None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
