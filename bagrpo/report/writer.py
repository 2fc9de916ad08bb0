"""A run's records: `metrics.jsonl`, and for each step `rollouts/step_N.jsonl`, an object a line.

They are written through at once, so a killed run loses none of a finished step. A run that goes on
from step k first takes away what was written after it, so that its files become those of a run that
was never interrupted. TensorBoard and Weights & Biases get the same metrics.

At `gs://`, where nothing can be appended, `metrics.jsonl` is written anew with each step, and
TensorBoard's events are made in a local folder and copied.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from bagrpo import folders
from bagrpo.config import ReportConfig
from bagrpo.records import Rollout

METRICS, ROLLOUTS = "metrics.jsonl", "rollouts"
"""In a run's folder: a file, and a folder with a file a step."""


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
            folder: the run's, local or at `gs://`; created if need be.
            config: where else metrics go.
            step: that the run goes on from: its lines stay, those of later steps go. None: a new
                run, nothing stays.
            settings: of the whole run, for Weights & Biases.

        Raises:
            ValueError: if the folder can't be used, or a package that is asked for is missing.
        """
        self._folder = folders.path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Callable[[int, dict[str, float]], None]] = []
        self._end = contextlib.ExitStack()
        if config.wandb is not None:
            self._open_wandb(config.wandb, step, settings or {})
        if config.tensorboard:
            self._open_tensorboard(step)
        done = -1 if step is None else step
        for path in _later_rollouts(self._folder / ROLLOUTS, done):
            path.unlink()
        self._metrics = _cut(self._folder / METRICS, done)
        """All of the file where it can't be appended to, else nothing."""

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a line of metrics; several of a step are fine.

        Call it before the checkpoint of the step is saved: a run that goes on from there won't.

        Args:
            step: steps done.
            values: by name. Numbers that are not finite are `null` in the file.
        """
        plain = _plain(values)
        line = _text([{"step": step, **plain}])
        if folders.is_remote(self._folder):
            self._metrics += line
            folders.write(self._folder / METRICS, self._metrics)
        else:
            with open(self._folder / METRICS, "ab") as file:
                file.write(line)
        finite = {
            name: float(value) for name, value in plain.items() if isinstance(value, int | float)
        }
        for sink in self._sinks:
            sink(step, finite)

    def rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write a step's rollouts, all of them, a line for each; as `metrics` otherwise."""
        lines = [_plain(_rollout_line(step, rollout)) for rollout in rollouts]
        if lines:
            folders.write(self._folder / ROLLOUTS / f"step_{step}.jsonl", _text(lines))

    def close(self) -> None:
        """Close whatever metrics go to besides the files."""
        self._end.close()

    def _local(self) -> epath.Path:
        """Where a package writes that knows local files only."""
        if not folders.is_remote(self._folder):
            return self._folder
        return epath.Path(self._end.enter_context(tempfile.TemporaryDirectory(prefix="bagrpo")))

    def _open_tensorboard(self, step: int | None) -> None:
        try:
            package = importlib.import_module("tensorboardX")
        except ImportError:
            return
        # Events of later steps are left out by whoever reads the folder.
        events = self._local() / "tensorboard"
        board = package.SummaryWriter(str(events), purge_step=0 if step is None else step + 1)

        def copy() -> None:
            if events != self._folder / "tensorboard":
                for path in events.iterdir():
                    folders.write(self._folder / "tensorboard" / path.name, path.read_bytes())

        self._end.callback(copy)
        self._end.callback(board.close)

        def add(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, step)
            board.flush()
            copy()

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
            dir=str(self._local()),
            config=dict(settings),
        )
        self._end.callback(run.finish)
        # After a resume it ignores the steps that it has: they are the same.
        self._sinks.append(lambda step, values: run.log(values, step=step))


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Lines of a file that a writer wrote; a last one that broke off is left out."""
    with folders.path(path).open("rb") as file:
        yield from (line for line, _ in _lines(file))


def _lines(file: Iterable[Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Each line of bytes and where it ends, up to the first that is not whole."""
    end = 0
    for text in file:
        try:
            line = json.loads(text)
        except ValueError:
            return
        if not text.endswith(b"\n") or not isinstance(line, dict) or "step" not in line:
            return
        end += len(text)
        yield line, end


def _cut(path: epath.Path, step: int) -> bytes:
    """Takes away the lines of later steps, and one that broke off; makes the file if need be.

    Returns:
        What is left at `gs://`; of a local file nothing is kept in memory.
    """
    remote = folders.is_remote(path)
    if not remote:
        Path(path).touch()
    content = path.read_bytes() if path.exists() else b""
    kept = 0
    for line, end in _lines(io.BytesIO(content)):
        if line["step"] > step:
            break
        kept = end
    if not remote:
        os.truncate(path, kept)
        return b""
    folders.write(path, content[:kept])
    return content[:kept]


def _later_rollouts(folder: epath.Path, step: int) -> list[epath.Path]:
    """The files of later steps, and of steps that were not written to the end."""
    paths = list(folder.iterdir()) if folder.is_dir() else []
    found = [(path, re.match(r"step_(\d+)\.jsonl", path.name)) for path in paths]
    return [path for path, match in found if match and int(match[1]) > step]


def _text(lines: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()


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
