"""Checkpoints of a run: parameters, optimizer state and the host's state, written by Orbax.

A checkpoint is a folder named by its step. It appears as a whole or not at all: it gets its name
last, or at `gs://`, where nothing can be renamed, the file commit_success.txt. It holds the size of
each of its files, and is read back onto any mesh. Every process of the run calls every function;
all of them see the same folder.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from bagrpo import distributed, folders
from bagrpo.config import CheckpointConfig
from bagrpo.models import params as model_params
from bagrpo.train.step import TrainState

log = logging.getLogger(__name__)

Which = int | Literal["best"] | None
"""A checkpoint: of a step, the best by the metric, or None for the newest."""

_FILES = "files.json"
"""The sizes of a checkpoint's other files."""


class Restored(NamedTuple):
    """What a checkpoint held."""

    step: int
    state: TrainState
    host: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder, to write and read, or only to read."""

    def __init__(self, folder: str | os.PathLike[str], config: CheckpointConfig | None = None):
        """Open the folder.

        Args:
            folder: local path or `gs://` address. To be written, it is created if need be, and
                what an interrupted save left in it is removed.
            config: says which checkpoints to keep; None to read only, also what another process
                is writing.

        Raises:
            ValueError: if the folder is to be read and isn't there.
        """
        path = folders.path(folder)
        self.folder = path if folders.is_remote(path) else path.resolve()
        if config is None and not self.folder.is_dir():
            raise ValueError(
                f"there is no folder {self.folder} with checkpoints; give that of a run which has "
                "saved one"
            )
        self._config = config
        number = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(number, {number}, f"process {number}")
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(
                composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
            ),
            multiprocessing_options=alone,
        )
        """Reads without the other processes: one that fails would leave them waiting for it."""
        self._notes = self._read_notes()
        self._last = max(self._notes, default=-1)
        """Step that the run has come to."""
        self._manager = None if config is None else self._open(config)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending; one that is still being written counts."""
        return sorted(self._notes if self._manager is None else self._manager.all_steps())

    def save(
        self, step: int, state: TrainState, host: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Start to write a checkpoint; the values are those of now, also if `state` is donated.

        Does nothing if the step has one. Checkpoints of later steps than the one last restored,
        or saved since, are removed: they are broken, or belong to a course that is given up.

        Args:
            step: done so far.
            state: on the devices.
            host: the rest of the run's state, for JSON, equal on all processes.
            metrics: of this step; the one that `config.metric` names decides which is best.

        Raises:
            ValueError: if the folder was opened to read, or holds later steps and none was
                restored; or when an earlier save failed.
        """
        if self._manager is None or self._config is None:
            raise ValueError(f"{self.folder} was opened to read only; give a config to write")
        self.wait()
        steps = self.steps()
        if step in steps and step <= self._last:
            return
        if step < self._last:
            raise ValueError(
                f"step {step} can't be saved in {self.folder}, which has checkpoints up to step "
                f"{self._last}: restore one first, or choose another folder"
            )
        for later in [found for found in steps if found > self._last]:
            self._manager.delete(later)
        score = float(metrics.get(self._config.metric, math.nan))
        note = {
            "metric": self._config.metric,
            "score": score if math.isfinite(score) else None,
            "shapes": _shapes(state),
        }
        self._last = step
        self._notes[step] = note
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                rest=ocp.args.StandardSave(_rest(state)),
                host=ocp.args.JsonSave(json.loads(json.dumps(host))),
                note=ocp.args.JsonSave(note),
            ),
            force=True,
        )

    def wait(self) -> None:
        """Wait until what was saved is whole.

        Raises:
            Exception: whatever made a save fail.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception:
            self._manager.reload()  # It left out already what the failed one should have replaced.
            raise

    def close(self) -> None:
        """Wait, and end the threads that write."""
        self._reader.close()
        if self._manager is not None:
            self._manager.close()

    def restore(self, abstract: TrainState, which: Which = None) -> Restored:
        """Read a checkpoint; the run goes on from there.

        If it is the newest or best one that is asked for and it is broken, the next one is taken,
        with a warning.

        Args:
            abstract: shape, dtype and sharding of each array, as `Trainer.abstract` has them.
            which: step, "best", or None for the newest.

        Raises:
            ValueError: if there is none, or none that can be read.
        """
        step, found = self._restore(
            which,
            _shapes(abstract),
            params=ocp.args.StandardRestore(abstract.params),
            rest=ocp.args.StandardRestore(_rest(abstract)),
            host=ocp.args.JsonRestore(),
        )
        self._last = step
        return Restored(step, TrainState(found["params"], **found["rest"]), found["host"])

    def restore_params(
        self, abstract: model_params.Params, which: Which = None
    ) -> tuple[int, model_params.Params]:
        """Read the parameters only, and say of which step; otherwise as `restore`."""
        shapes = _shapes({"params": abstract})
        step, found = self._restore(which, shapes, params=ocp.args.StandardRestore(abstract))
        return step, found["params"]

    def restore_host(self, which: Which = None) -> tuple[int, dict[str, Any]]:
        """Read the host's state only, and say of which step; otherwise as `restore`."""
        step, found = self._restore(which, {}, host=ocp.args.JsonRestore())
        return step, found["host"]

    def _restore(
        self, which: Which, shapes: Mapping[str, Any], **items: Any
    ) -> tuple[int, Mapping[str, Any]]:
        self.wait()
        problems = []
        for step in self._candidates(which):
            self._check_shapes(step, shapes)
            found, problem = self._read(step, ocp.args.Composite(**items))
            if found is not None:
                for text in problems:
                    log.warning("%s; falling back to that of step %d", text, step)
                return step, found
            problems.append(
                f"the checkpoint of step {step} in {self.folder} can't be read: {problem}"
            )
        raise ValueError("; ".join(problems))

    def _candidates(self, which: Which) -> list[int]:
        """Steps in the order in which they are to be tried, at least one."""
        newest_first = self.steps()[::-1]
        if not newest_first:
            raise ValueError(
                f"there is no finished checkpoint in {self.folder}; the first is written after "
                "checkpoint.every steps"
            )
        if which is None:
            return newest_first
        if which == "best":
            scored = [step for step in newest_first if self._score(step) > -math.inf]
            if not scored:
                raise ValueError(
                    f"no checkpoint in {self.folder} has been scored, so none is best; name one "
                    f"of the steps {self.steps()}"
                )
            return sorted(scored, key=self._score, reverse=True)
        if which not in newest_first:
            raise ValueError(
                f"there is no checkpoint of step {which} in {self.folder}; there are those of "
                f"steps {self.steps()}"
            )
        return [which]

    def _read(
        self, step: int, items: ocp.args.Composite
    ) -> tuple[Mapping[str, Any] | None, str | None]:
        """What a checkpoint holds, or else what is wrong with it, alike on all processes."""
        path = self.folder / str(step)
        (problem,) = distributed.gather_objects([_damage(path)] if distributed.is_main() else [])
        if problem is not None:
            return None, problem
        found = None
        try:
            found = self._reader.restore(path, args=items)
        except Exception as error:  # noqa: BLE001 - Orbax raises anything for damaged files
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        problems = distributed.gather_objects([problem])
        problem = next((text for text in problems if text is not None), None)
        return (found, None) if problem is None else (None, problem)

    def _score(self, step: int) -> float:
        """The metric at a step; -inf if it was not measured, or the checkpoint is damaged."""
        note = self._notes.get(step) or {}
        known = self._config is None or self._config.metric == note.get("metric")
        score = note.get("score") if known else None
        return -math.inf if score is None else score

    def _check_shapes(self, step: int, shapes: Mapping[str, Any]) -> None:
        if (note := self._notes.get(step)) is None:
            return
        parts = {name.split("/")[0] for name in shapes}
        there = {name: x for name, x in note["shapes"].items() if name.split("/")[0] in parts}
        for name in [*shapes, *there]:
            if shapes.get(name) != there.get(name):
                raise ValueError(
                    f"the checkpoint of step {step} in {self.folder} is of another model or "
                    f"optimizer: {name} of shape {there.get(name)} there is of {shapes.get(name)} "
                    "here; restore it with the settings it was saved with"
                )

    def _read_notes(self) -> dict[int, dict[str, Any] | None]:
        """Finished checkpoints and what is noted of each, as process 0 sees them."""
        notes = []
        if distributed.is_main():
            finished = ocp.path.step.standard_name_format().find_all(self.folder)
            notes = [[found.step, self._read_note(found.path)] for found in finished]
        return dict(sorted(distributed.gather_objects(notes)))

    def _read_note(self, path: epath.Path) -> dict[str, Any] | None:
        if _damage(path) is not None:
            return None  # What is wrong is told when the checkpoint is to be restored.
        try:
            items = ocp.args.Composite(note=ocp.args.JsonRestore())
            return self._reader.restore(path, args=items)["note"]
        except ValueError:
            return None

    def _open(self, config: CheckpointConfig) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            preservation_policy=_Keep(config, self._score),
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            lightweight_initialize=True,  # Else a damaged checkpoint is an error already now.
        )
        return ocp.CheckpointManager(self.folder, options=options)

    def _seal(self) -> None:
        """Adds the sizes of a checkpoint's files to it, before it is there; on process 0."""
        (path,) = (
            path
            for path in self.folder.iterdir()
            if path.name == str(self._last) or path.name.startswith(f"{self._last}.")
        )
        folders.write(path / _FILES, json.dumps(_sizes(path)).encode())


class _Keep:
    """Orbax's preservation policy: the newest, and the best of those that have a score."""

    def __init__(self, config: CheckpointConfig, score: Callable[[int], float]):
        self._config, self._score = config, score

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        scored = [step for step in steps if self._score(step) > -math.inf]
        best = sorted(scored, key=lambda step: (self._score(step), step), reverse=True)
        kept = {*sorted(steps)[-self._config.keep :], *best[: self._config.keep_best]}
        return [step in kept for step in steps]


def _rest(state: TrainState) -> dict[str, Any]:
    """All of a state but the parameters, which can be read alone."""
    return {"opt_state": state.opt_state, "updates": state.updates}


def _shapes(state: Any) -> dict[str, list[int]]:
    """Shape of each array by name."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): list(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _sizes(checkpoint: epath.Path) -> dict[str, int]:
    """Relative name and bytes of each file of an item; Orbax's own notes lie outside of those."""
    return {name: size for name, size in folders.sizes(checkpoint).items() if "/" in name}


def _damage(folder: epath.Path) -> str | None:
    """What is wrong with a checkpoint's files, going by their sizes."""
    listing = folder / _FILES
    if not listing.exists():
        return f"{_FILES} is missing"
    try:
        expected = json.loads(listing.read_text())
    except ValueError:
        return f"{_FILES} is not JSON"
    sizes = _sizes(folder)
    for name, size in expected.items():
        if sizes.get(name) != size:
            return f"{name} has {sizes.get(name, 'no')} of {size} bytes"
    return None
