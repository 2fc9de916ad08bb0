import json
import struct

import golden_models
import ml_dtypes
import numpy as np
import pytest

from bagrpo.weights import safetensors, store

ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array([5.0, 6.0], np.float32),
}


def found(folder):
    return safetensors.tensors(store.open(str(folder)))


def values(folder):
    opened = store.open(str(folder))
    return {
        name: tensor.decode(opened.range(*tensor.rows(0, tensor.shape[0])), tensor.shape)
        for name, tensor in safetensors.tensors(opened).items()
    }


@pytest.mark.parametrize("dtype", safetensors.DTYPES)
@pytest.mark.parametrize("max_bytes", [1, 20, 10**6])
def test_what_is_written_is_read(tmp_path, dtype, max_bytes):
    # float32: a is 48 bytes, b 8; so 20 gives two files of one tensor each, as does 1.
    arrays = {name: array.astype(safetensors.DTYPES[dtype]) for name, array in ARRAYS.items()}
    plan = safetensors.plan({n: a.shape for n, a in arrays.items()}, dtype, max_bytes)
    safetensors.write(tmp_path, plan, dtype, iter(arrays.values()))
    files = sorted(path.name for path in tmp_path.iterdir())
    if max_bytes == 10**6:
        assert files == ["model.safetensors"]
    else:
        two = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert files == [*two, "model.safetensors.index.json"]
    for name, array in values(tmp_path).items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype
    assert sorted(found(tmp_path)) == ["a", "b"]


def test_a_file_holds_at_most_the_bytes_allowed_if_it_can():
    shapes = {"a": (2, 2), "b": (3,), "c": (1,), "d": (100,), "e": (1,)}
    # 16 + 12 = 28 <= 32, with c 32 <= 32; d alone is more than 32; e follows it.
    plan = safetensors.plan(shapes, "F32", 32)
    assert [list(names) for _, names in plan] == [["a", "b", "c"], ["d"], ["e"]]


def test_bfloat16_is_two_bytes_a_number(tmp_path):
    one = np.ones((2, 2), ml_dtypes.bfloat16)
    safetensors.write(tmp_path, safetensors.plan({"x": (2, 2)}, "BF16", 100), "BF16", iter([one]))
    data = (tmp_path / "model.safetensors").read_bytes()
    assert data[-8:] == b"\x80\x3f" * 4  # 1.0 is sign 0, exponent 127, mantissa 0, little-endian
    assert json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]) == {
        "__metadata__": {"format": "pt"},
        "x": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]},
    }


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")

    def arrays():
        yield ARRAYS["a"]
        raise OSError("disk full")

    plan = safetensors.plan({n: a.shape for n, a in ARRAYS.items()}, "F32", 1000)
    with pytest.raises(OSError, match="disk full"):
        safetensors.write(tmp_path, plan, "F32", arrays())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def beheaded(path):
    path.write_bytes(path.read_bytes()[:5])


def long_header(path):
    path.write_bytes(struct.pack("<Q", 10**12) + path.read_bytes()[8:])


def header_beyond_the_end(path):
    path.write_bytes(struct.pack("<Q", 10**6) + path.read_bytes()[8:])


def not_json(path):
    path.write_bytes(struct.pack("<Q", 4) + b"abcd")


def a_list(path):
    path.write_bytes(struct.pack("<Q", 2) + b"[]")


def twice(path):
    text = b'{"a": {}, "a": {}}'
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def edited(change):
    return lambda path: golden_models.write(path, ARRAYS, edit=change)


def put(name, key, value):
    return edited(lambda header: header[name].__setitem__(key, value))


DAMAGE = {
    "truncated": (shorten, "model.safetensors is truncated"),
    "too short for its length": (beheaded, "model.safetensors is truncated"),
    "header longer than allowed": (long_header, "header of 1000000000000 bytes, at most 100000000"),
    "header longer than the file": (header_beyond_the_end, "is truncated: it ends before bytes 8"),
    "not JSON": (not_json, "is not JSON"),
    "not an object": (a_list, "is not a JSON object"),
    "duplicate": (twice, "has 'a' twice"),
    "dtype": (
        put("b", "dtype", "I64"),
        "tensor 'b' in .* has dtype 'I64'; allowed: F32, F16, BF16",
    ),
    "double": (put("b", "dtype", "F64"), "tensor 'b' in .* has dtype 'F64'"),
    "size": (put("b", "shape", [3]), r"tensor 'b' of shape \(3,\) and dtype F32 occupies 8 bytes"),
    "negative": (put("b", "shape", [-2]), "tensor 'b' has the entry"),
    "no offsets": (edited(lambda h: h["b"].pop("data_offsets")), "tensor 'b' has the entry"),
    "overlap": (put("b", "data_offsets", [40, 48]), "'b' at byte 40 .* overlaps .* ends at 48"),
    "gap": (put("b", "data_offsets", [52, 60]), "'b' at byte 52 .* leaves a gap .* ends at 48"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_an_error_that_says_what_is_wrong(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    golden_models.write(path, ARRAYS)
    change, message = DAMAGE[damage]
    change(path)
    with pytest.raises(ValueError, match=message):
        found(tmp_path)


def test_an_index_and_its_files_must_agree(tmp_path):
    golden_models.write(tmp_path / "x.safetensors", ARRAYS)
    index = tmp_path / "model.safetensors.index.json"

    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "c": "x.safetensors"}}))
    with pytest.raises(ValueError, match=r"tensor 'c' is in x\.safetensors, which does not have"):
        found(tmp_path)

    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "c": "y.safetensors"}}))
    with pytest.raises(ValueError, match=r"there is no file .*y\.safetensors"):
        found(tmp_path)

    golden_models.write(tmp_path / "y.safetensors", ARRAYS)
    with pytest.raises(ValueError, match=r"'a' is in x\.safetensors and in y\.safetensors"):
        found(tmp_path)

    index.write_text("{}")
    with pytest.raises(ValueError, match="no 'weight_map'"):
        found(tmp_path)
