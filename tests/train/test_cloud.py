"""Runs in a bucket, which is a stand-in's (`cloud_storage`): real ones are not asked."""

import logging
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from processes import finish
from processes import start as start_processes
from runs import metrics, parameters, rollout_files, start, write_settings
from states import abstract_of, assert_equal, opened, small_state

import bagrpo.cli
from bagrpo import folders
from bagrpo.cli import main
from bagrpo.train.source import is_run

SMALL = abstract_of(small_state(0))


@pytest.fixture
def name(cloud, tmp_path):
    """Of a run in the bucket."""
    return f"runs/{tmp_path.name}"


@pytest.fixture
def three(cloud, name):
    """The address of checkpoints of steps 1 to 3."""
    with opened(f"gs://bucket/{name}", keep=10) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, small_state(step), {"data": [step]}, {})
    return f"gs://bucket/{name}"


def steps(cloud, name):
    """The steps of which there is anything."""
    return sorted(
        {int(found.removeprefix(f"{name}/").split("/")[0]) for found in cloud.names(name)}
    )


def test_what_is_saved_comes_back(three):
    with opened(three) as checkpoints:
        for step in (3, 1):
            _, state, host = checkpoints.restore(SMALL, step)
            assert host == {"data": [step]}
            assert_equal(state, small_state(step))


def test_an_unfinished_save_is_no_checkpoint_and_is_swept_up_by_the_next_run(cloud, name, three):
    del cloud.objects[f"{name}/3/commit_success.txt"]
    with opened(three) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.restore(SMALL).step == 2
    assert steps(cloud, name) == [1, 2, 3]  # Another process may be writing it.
    with opened(three, keep=2) as checkpoints:
        assert checkpoints.restore(SMALL).step == 2
        checkpoints.save(3, small_state(9), {"again": True}, {})
    assert steps(cloud, name) == [2, 3]
    with opened(three) as checkpoints:
        step, state, host = checkpoints.restore(SMALL)
    assert (step, host) == (3, {"again": True})
    assert_equal(state, small_state(9))


def largest(cloud, prefix):
    return max(cloud.names(prefix), key=lambda found: len(cloud.objects[found][1]))


DAMAGES = {
    "truncated array": lambda cloud, at: cloud.put(
        largest(cloud, at), cloud.objects[largest(cloud, at)][1][:-1]
    ),
    "array gone": lambda cloud, at: cloud.objects.pop(largest(cloud, at)),
    "listing gone": lambda cloud, at: cloud.objects.pop(f"{at}/files.json"),
    "item gone": lambda cloud, at: [cloud.objects.pop(name) for name in cloud.names(f"{at}/rest/")],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    cloud, name, three, damage, caplog
):
    DAMAGES[damage](cloud, f"{name}/3")
    with opened(three, keep=2) as checkpoints:
        step, state, _ = checkpoints.restore(SMALL)
        assert step == 2
        assert_equal(state, small_state(2))
        checkpoints.save(3, small_state(7), {"again": True}, {})
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("step 3 in gs://" in text and "can't be read" in text for text in warnings)
    with opened(three) as checkpoints:
        assert checkpoints.restore_host() == (3, {"again": True})
    assert steps(cloud, name) == [2, 3]


def test_an_old_checkpoint_stays_until_the_new_one_is_whole(cloud, name, monkeypatch):
    there, put = [], type(cloud).put

    def note(self, written, content, generation=None):
        if match := re.fullmatch(rf"{name}/(\d+)/commit_success.txt", written):
            assert f"{name}/{match[1]}/files.json" in cloud.objects
            there.append(steps(cloud, name))
        return put(self, written, content, generation)

    monkeypatch.setattr(type(cloud), "put", note)
    with opened(f"gs://bucket/{name}", keep=1, keep_best=0) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, small_state(step), {}, {})
    assert there == [[1], [1, 2], [2, 3]]
    assert steps(cloud, name) == [3]


def wait_for_step(cloud, name, step):
    """Returns once a run that is under way has logged this step."""
    for _ in range(2400):
        if f'"step": {step},' in cloud.text(f"{name}/metrics.jsonl"):
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} did not come to step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_stopped_goes_on_to_the_bit(cloud, name, tmp_path, how):
    path, address = write_settings(tmp_path), f"gs://bucket/{name}"
    assert start(path, f"folder={tmp_path}/straight", "steps=8").wait(240) == 0
    process = start(path, f"folder={address}", "steps=8")
    wait_for_step(cloud, name, 3)  # The checkpoint of step 1 is whole then.
    process.send_signal(how)
    assert process.wait(60) == (-how if how == signal.SIGKILL else 75)
    assert '"step": 8' not in cloud.text(f"{name}/metrics.jsonl")  # otherwise it was too late
    options = ("steps=8", "report.quiet=false")
    process = start(path, f"folder={address}", *options, stdout=subprocess.PIPE)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0
    assert f"{address} goes on after step" in said
    straight, broken = tmp_path / "straight", cloud.copy_to(name, tmp_path / "broken")
    assert metrics(broken) == metrics(straight)
    assert rollout_files(broken) == rollout_files(straight)
    assert len(rollout_files(broken)) == 8
    (done, want), (also_done, found) = (parameters(path, f) for f in (straight, broken))
    assert done == also_done == 8
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any("tfevents" in found for found in cloud.names(f"{name}/tensorboard/"))


@pytest.mark.slow
def test_several_processes_write_one_run_and_take_over_from_one(cloud, name, tmp_path):
    """Also where the last save of the one broke off."""
    path, address = write_settings(tmp_path), f"gs://bucket/{name}"
    mesh = ("mesh.data=2", "eval.every=1")
    assert start(path, f"folder={tmp_path}/one", *mesh, devices=2).wait(240) == 0
    goal = (f"folder={address}", *mesh, "steps=3", "checkpoint.keep=3")
    assert start(path, *goal, devices=2).wait(240) == 0
    del cloud.objects[f"{name}/checkpoints/3/commit_success.txt"]
    ended = finish(
        start_processes(
            bagrpo.cli.__file__,
            "train",
            path,
            f"folder={address}",
            *mesh,
            "report.quiet=false",
            devices=1,
        ),
        240,
    )
    assert [status for status, _ in ended] == [0, 0], ended
    assert f"{address} goes on after step 2" in ended[0][1]
    assert steps(cloud, f"{name}/checkpoints") == [3, 4]
    one, several = tmp_path / "one", cloud.copy_to(name, tmp_path / "several")
    for a, b in zip(metrics(one), metrics(several), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    for a, b in zip(parameters(path, one)[1], parameters(path, several)[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_commands_work_on_a_run(cloud, name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BAGRPO_PROCESSES", "1")
    path, address = write_settings(tmp_path), f"gs://bucket/{name}"
    assert main(["train", str(path), f"folder={address}", "steps=2"]) == 0
    assert is_run(address)
    assert not is_run(f"{address}/model")
    assert main(["train", str(path), f"folder={address}", "steps=2", "report.quiet=false"]) == 0
    assert f"{address} is complete: all its 2 steps are done" in capsys.readouterr().out
    assert main(["eval", address, "--step", "1"]) == 0
    assert f"samples: {address}/samples.jsonl" in capsys.readouterr().out.replace("\n", "")
    assert len(cloud.text(f"{name}/samples.jsonl").splitlines()) == 2
    assert main(["sample", address, "a?", "--samples", "3"]) == 0
    said = capsys.readouterr().out
    assert main(["export", address, f"{tmp_path}/hf"]) == 0
    assert (tmp_path / "hf/model.safetensors").is_file()
    # The run's folder is a bucket's copy, and what it says is what the run says there.
    copy = cloud.copy_to(name, tmp_path / "copy")
    capsys.readouterr()
    assert main(["sample", str(copy), "a?", "--samples", "3"]) == 0
    assert capsys.readouterr().out == said
    assert main(["export", str(copy), f"{tmp_path}/hf2"]) == 0
    names = {file.name for file in (tmp_path / "hf").iterdir()}
    assert names == {file.name for file in (tmp_path / "hf2").iterdir()}
    for file in names:
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "hf2" / file).read_bytes()
    # A run may start from another's newest checkpoint.
    model = f"model={{path: '{address}', chat_template: plain}}"
    assert main(["train", str(path), f"folder={tmp_path}/warm", "steps=1", model]) == 0
    assert main(["eval", address, "--step", "7"]) == 2
    assert "there is no checkpoint of step 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://bucket/run", "'s3://bucket/run' can't hold a run's files; give a local path or gs:"),
        ("gs://other/run", "the bucket gs://other can't be used (404"),
    ],
)
def test_a_folder_of_no_use_is_said_before_anything_is_loaded(
    cloud, tmp_path, capsys, monkeypatch, address, said
):
    monkeypatch.setenv("BAGRPO_PROCESSES", "1")
    monkeypatch.setattr("bagrpo.train.loop.prepare", None)
    assert main(["train", str(write_settings(tmp_path)), f"folder={address}"]) == 2
    assert said in capsys.readouterr().err


def test_without_gcsfs_a_run_in_a_bucket_is_refused_and_a_model_there_is_not(
    cloud, name, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("BAGRPO_PROCESSES", "1")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    folders._reach.cache_clear()
    assert main(["train", str(write_settings(tmp_path)), f"folder=gs://bucket/{name}"]) == 2
    assert "gs://bucket needs the package gcsfs: install" in capsys.readouterr().err
    assert not is_run(f"gs://bucket/{name}")
