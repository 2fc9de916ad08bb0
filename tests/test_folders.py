import os
import sys

import pytest
from etils import epath

from bagrpo import folders


@pytest.fixture(autouse=True)
def _ask_again():
    folders._reach.cache_clear()
    yield
    folders._reach.cache_clear()


@pytest.mark.parametrize("address", ["runs/a", "/runs/a", ".", "a:b", "~/x"])
def test_a_local_path_stays_as_it_is(address):
    assert os.fspath(folders.path(address)) == address
    assert not folders.is_remote(folders.path(address))


@pytest.mark.parametrize("address", ["s3://bucket/run", "http://host/run", "gs://", "gs:///run"])
def test_an_address_that_cannot_be_written_is_said(address):
    with pytest.raises(ValueError, match=f"'{address}' can't hold .*local path or gs://BUCKET"):
        folders.path(address)


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r"gs://bucket needs the package gcsfs: install .*\[gcs\]"):
        folders.path("gs://bucket/run")


def test_a_bucket_that_is_not_there_is_said(cloud):
    with pytest.raises(ValueError, match=r"gs://other can't be used \(404 .*check its name"):
        folders.path("gs://other/run")


def test_a_file_is_written_whole_and_sizes_are_those_of_all_files(anywhere):
    folder = folders.path(anywhere)
    content = {f"many/{i}/x": b"x" * i for i in range(20)} | {"y": b"\0\r\n\xff"}
    for name, text in content.items():
        folders.write(folder / name, b"before")
        folders.write(folder / name, text)
    assert folders.sizes(folder) == {name: len(text) for name, text in content.items()}
    assert (folder / "y").read_bytes() == content["y"]
    assert folders.sizes(folder / "many" / "1") == {"x": 1}


def test_what_others_write_to_a_bucket_is_seen(cloud, tmp_path):
    folder = folders.path(f"gs://bucket/{tmp_path.name}")
    folders.write(folder / "a/1", b"")
    assert [path.name for path in (folder / "a").iterdir()] == ["1"]
    cloud.put(f"{tmp_path.name}/a/2", b"xy")
    assert sorted(path.name for path in (folder / "a").iterdir()) == ["1", "2"]
    assert (folder / "a/2").exists()
    assert folders.sizes(folder) == {"a/1": 0, "a/2": 2}
    del cloud.objects[f"{tmp_path.name}/a/1"]
    assert not (folder / "a/1").exists()
    assert folders.sizes(folder) == {"a/2": 2}


def test_paths_of_a_bucket_join_like_local_ones(cloud):
    assert str(folders.path("gs://bucket/run") / "model") == "gs://bucket/run/model"
    assert folders.is_remote(epath.Path("gs://bucket/run"))
