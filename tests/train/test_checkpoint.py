import dataclasses
import logging
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint
import processes
import pytest
import tiny
from states import abstract_of, assert_equal, opened, small_state, update

from bagrpo.config import CheckpointConfig
from bagrpo.train.checkpoint import Checkpoints

METRIC = "eval/accuracy"


SMALL = abstract_of(small_state(0))


def fill(folder, scores, **settings):
    """Saves a checkpoint at steps 1, 2, ..., each with a state of its own."""
    with opened(folder, **{"keep": 10, **settings}) as checkpoints:
        for step, score in enumerate(scores, 1):
            metrics = {} if score is None else {METRIC: score}
            checkpoints.save(step, small_state(step), {"data": [step]}, metrics)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Checkpoints of steps 1, 2 and 3 without scores."""
    folder = tmp_path_factory.mktemp("three")
    fill(folder, [None] * 3)
    return folder


@pytest.fixture
def filled(three, tmp_path):
    return Path(shutil.copytree(three, tmp_path / "run"))


def on_disk(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def restored(folder, which=None, abstract=SMALL):
    with opened(folder) as checkpoints:
        return checkpoints.restore(abstract, which)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run's folder with the checkpoint of a model, sharded over 8 devices, and its state."""
    folder = tmp_path_factory.mktemp("whole")
    state = update(tiny.start(tiny.trainer((1, 8, 1))))
    with opened(folder, keep=1) as checkpoints:
        checkpoints.save(1, state, {}, {})
    return folder, state


@pytest.mark.parametrize("mesh", [*tiny.MESHES, (1, 1, 1), (2, 1, 2)])
def test_a_checkpoint_restores_onto_any_mesh_and_number_of_devices(whole, mesh):
    folder, state = whole
    trainer = tiny.trainer(mesh)
    step, found, _ = restored(folder, None, trainer.abstract)
    assert step == 1
    assert_equal(found, state)
    assert [x.sharding for x in jax.tree.leaves(found)] == jax.tree.leaves(trainer.shardings)


def test_parameters_restore_alone_in_another_layout_and_dtype(whole):
    folder, state = whole
    trainer = tiny.trainer((1, 2, 4), model={"param_dtype": "bfloat16"})
    with opened(folder) as checkpoints:
        step, found = checkpoints.restore_params(trainer.abstract.params)
    assert step == 1
    assert_equal(found, jax.tree.map(lambda x: x.astype("bfloat16"), state.params))


def test_the_hosts_state_comes_back_as_it_was(tmp_path):
    host = {"data": {"taken": [3, 1]}, "best": 0.1 + 0.2, "name": "größer", "none": None}
    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, small_state(1), host, {})
        assert checkpoints.restore_host() == (5, host)
    assert restored(tmp_path).host == host


def test_a_save_is_of_the_values_at_its_call_though_the_next_update_is_given_the_buffers(
    tmp_path,
):
    state, host = small_state(1), {"count": [1]}
    wanted = jax.tree.map(lambda x: np.array(x, copy=True), state)
    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, host, {})
        update(state)
        host["count"].append(2)
    _, found, found_host = restored(tmp_path)
    assert_equal(found, wanted)
    assert found_host == {"count": [1]}


@pytest.mark.parametrize(
    ("keep", "keep_best", "scores", "left"),
    [
        (2, 0, [0.9, 0.1, 0.2, 0.3], [3, 4]),
        (1, 1, [0.1, 0.9, 0.3, 0.2], [2, 4]),
        (1, 2, [0.1, 0.9, 0.3, 0.2], [2, 3, 4]),
        (1, 1, [0.1, None, 0.9, None], [3, 4]),  # Not measured is never best.
        (1, 1, [0.4, float("nan"), None, None], [1, 4]),  # Nor is nan.
        (1, 1, [0.5, 0.5, 0.1, 0.2], [2, 4]),  # The later of equals.
        (1, 1, [-3.0, -5.0, -4.0, -6.0], [1, 4]),
        (3, 1, [None, None, None, None], [2, 3, 4]),
    ],
)
def test_the_newest_and_the_best_stay(tmp_path, keep, keep_best, scores, left):
    fill(tmp_path, scores, keep=keep, keep_best=keep_best)
    assert on_disk(tmp_path) == left
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps() == left


def test_the_best_stays_when_a_run_goes_on(tmp_path):
    fill(tmp_path, [0.9, 0.1], keep=1)
    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.restore(SMALL)
        checkpoints.save(3, small_state(9), {}, {METRIC: 0.5})
    assert on_disk(tmp_path) == [1, 3]
    assert restored(tmp_path, "best").step == 1


def test_an_old_checkpoint_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    fill(tmp_path, [None])
    there, seal = [], Checkpoints._seal

    def full_disk_at_first(self):
        there.append(on_disk(tmp_path))
        if len(there) == 1:
            raise OSError(28, "No space left on device")
        seal(self)

    monkeypatch.setattr(Checkpoints, "_seal", full_disk_at_first)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_best=0))
    checkpoints.save(2, small_state(9), {}, {})
    with pytest.raises(OSError, match="No space left"):
        checkpoints.wait()
    assert on_disk(tmp_path) == [1] == checkpoints.steps()
    checkpoints.save(2, small_state(9), {"again": True}, {})
    checkpoints.close()
    assert there == [[1], [1]]
    assert list(tmp_path.iterdir()) == [tmp_path / "2"]
    assert restored(tmp_path).host == {"again": True}


def largest(folder):
    return max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )


DAMAGES = {
    "truncated array": lambda folder: os.truncate(
        largest(folder), largest(folder).stat().st_size - 1
    ),
    "empty array": lambda folder: os.truncate(largest(folder), 0),
    "array gone": lambda folder: largest(folder).unlink(),
    "metadata gone": lambda folder: (folder / "params" / "_METADATA").unlink(),
    "manifest gone": lambda folder: (folder / "rest" / "manifest.ocdbt").unlink(),
    "host truncated": lambda folder: os.truncate(folder / "host" / "metadata", 5),
    "listing gone": lambda folder: (folder / "files.json").unlink(),
    "listing truncated": lambda folder: os.truncate(folder / "files.json", 20),
    "note gone": lambda folder: (folder / "note" / "metadata").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(filled, damage, caplog):
    DAMAGES[damage](filled / "3")
    step, found, host = restored(filled)
    assert (step, host) == (2, {"data": [2]})
    assert_equal(found, small_state(2))
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.message.startswith(f"the checkpoint of step 3 in {filled} can't be read: ")
    assert record.message.endswith("; falling back to that of step 2")


def test_a_checkpoint_that_cannot_be_read_for_any_reason_gives_way(filled, monkeypatch, caplog):
    restore = orbax.checkpoint.Checkpointer.restore

    def unreadable(self, directory, args):
        if directory.name == "3" and "params" in args:
            raise Exception("Encountered error while reading array index")  # As Orbax does.
        return restore(self, directory, args=args)

    monkeypatch.setattr(orbax.checkpoint.Checkpointer, "restore", unreadable)
    assert restored(filled).step == 2
    assert "step 3" in caplog.text
    assert "reading array index" in caplog.text


def test_garbage_of_the_right_size_gives_way(filled):
    for item in ("host", "note"):
        path = filled / "3" / item / "metadata"
        path.write_bytes(b"\0" * path.stat().st_size)
    with opened(filled) as checkpoints:
        assert checkpoints.restore_host() == (2, {"data": [2]})


def test_a_run_goes_on_over_a_damaged_checkpoint(filled):
    DAMAGES["truncated array"](filled / "3")
    with opened(filled, keep=2) as checkpoints:
        assert checkpoints.restore(SMALL).step == 2
        checkpoints.save(3, small_state(7), {"again": True}, {})
    assert on_disk(filled) == [2, 3]
    step, state, host = restored(filled)
    assert (step, host) == (3, {"again": True})
    assert_equal(state, small_state(7))


def test_going_on_from_an_earlier_step_gives_up_the_later_ones(tmp_path):
    fill(tmp_path, [0.1, 0.9, 0.8])
    with opened(tmp_path, keep=5) as checkpoints:
        checkpoints.restore(SMALL, 1)
        assert on_disk(tmp_path) == [1, 2, 3]
        checkpoints.save(2, small_state(9), {"again": True}, {METRIC: 0.2})
    assert on_disk(tmp_path) == [1, 2]
    assert restored(tmp_path, "best").host == {"again": True}


def test_saving_a_step_twice_writes_it_once(filled):
    with opened(filled, keep=5) as checkpoints:
        checkpoints.save(3, small_state(9), {"again": True}, {})
    assert restored(filled).host == {"data": [3]}


def test_an_unfinished_save_is_no_checkpoint_and_is_swept_up_by_the_next_run(filled):
    unfinished = (filled / "3").rename(filled / "3.orbax-checkpoint-tmp")
    with opened(filled) as checkpoints:
        assert checkpoints.steps() == [1, 2]
    assert unfinished.exists()  # Another process may be writing it.
    with opened(filled, keep=2) as checkpoints:
        assert checkpoints.restore(SMALL).step == 2
        checkpoints.save(3, small_state(9), {}, {})
    assert sorted(path.name for path in filled.iterdir()) == ["2", "3"]


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (7, r"no checkpoint of step 7 .* steps \[1, 2, 3\]"),
        ("best", r"none is best; name one of the steps \[1, 2, 3\]"),
        (3, r"checkpoint of step 3 in .* can't be read: .* of \d+ bytes$"),  # Asked for by name.
    ],
)
def test_what_cannot_be_restored_is_said(filled, which, message):
    DAMAGES["truncated array"](filled / "3")
    with pytest.raises(ValueError, match=message):
        restored(filled, which)


def test_a_folder_without_checkpoints_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*/absent with checkpoints"):
        Checkpoints(tmp_path / "absent")
    with pytest.raises(ValueError, match="no finished checkpoint in"):
        restored(tmp_path)


def test_a_save_that_would_mix_two_runs_is_refused(three):
    with opened(three, keep=9) as checkpoints, pytest.raises(ValueError, match="restore one first"):
        checkpoints.save(0, small_state(9), {}, {})
    with opened(three) as checkpoints, pytest.raises(ValueError, match="to read only"):
        checkpoints.save(4, small_state(9), {}, {})


def test_another_model_is_not_restored(whole):
    other = tiny.trainer(arch=dataclasses.replace(tiny.ARCH, ffw=48))
    # A matrix of the feed-forward network is (layers, embed, ffw) = (1, 16, 32) in the checkpoint.
    said = (
        r"another model .* params/blocks/\w+ of shape \[1, .*32.*\] there is of \[1, .*48.*\] here"
    )
    with pytest.raises(ValueError, match=said):
        restored(whole[0], None, other.abstract)
    with opened(whole[0]) as checkpoints, pytest.raises(ValueError, match=said):
        checkpoints.restore_params(other.abstract.params)


def test_processes_save_together_and_read_what_one_process_saved_and_the_other_way_round(three):
    folder = Path(shutil.copytree(three, three.parent / "together"))
    processes.run(Path(__file__).parent / "save_together.py", folder)
    assert on_disk(folder) == [3, 4, 5]
    step, state, host = restored(folder)
    assert (step, host) == (5, {"data": [5]})
    assert_equal(state, update(small_state(5)))
