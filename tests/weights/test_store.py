import pytest

from bagrpo.weights import store

CONTENT = bytes(range(256)) * 4


@pytest.fixture(params=["path", "file", "http"])
def folder(request, served):
    path, address, _ = served
    (path / "a b.bin").write_bytes(CONTENT)
    (path / "c.bin").write_bytes(CONTENT[::-1])
    return {"path": str(path), "file": path.as_uri(), "http": f"{address}/me"}[request.param]


def test_ranges_come_back_in_the_order_asked_for(folder, monkeypatch):
    monkeypatch.setattr(store, "_REQUEST", 100)  # so that ranges are cut and joined again
    ranges = [
        ("a b.bin", 500, 1024),
        ("c.bin", 3, 4),
        ("a b.bin", 0, 250),
        ("a b.bin", 250, 260),
        ("a b.bin", 7, 7),
        ("c.bin", 0, 1024),
    ]
    found = store.open(folder).start(ranges)()
    whole = {"a b.bin": CONTENT, "c.bin": CONTENT[::-1]}
    assert [bytes(data) for data in found] == [whole[key][a:b] for key, a, b in ranges]


def test_touching_ranges_become_one_request_and_long_ones_several(monkeypatch):
    monkeypatch.setattr(store, "_REQUEST", 100)
    merged = store._merge([("b", 0, 10), ("a", 90, 220), ("a", 0, 90), ("a", 300, 310)])
    assert merged == [
        ("a", 0, 100),
        ("a", 100, 200),
        ("a", 200, 220),
        ("a", 300, 310),
        ("b", 0, 10),
    ]


def test_a_missing_file_is_none_as_a_whole_and_an_error_by_range(folder):
    opened = store.open(folder)
    assert opened.read("nothing.json") is None
    with pytest.raises(ValueError, match=r"there is no file .*nothing\.json; give the address"):
        opened.range("nothing.json", 0, 4)


def test_a_range_beyond_the_end_says_truncated(folder):
    opened = store.open(folder)
    with pytest.raises(ValueError, match=r"c\.bin is truncated: it ends before bytes 1000 to 1030"):
        opened.range("c.bin", 1000, 1030)
    with pytest.raises(ValueError, match=r"c\.bin is truncated"):
        opened.range("c.bin", 2000, 2010)


def test_upto_stops_at_the_end_of_the_file(folder):
    opened = store.open(folder)
    assert bytes(opened.upto("c.bin", 1000, 5000)) == CONTENT[::-1][1000:]
    with pytest.raises(ValueError, match="truncated"):
        opened.upto("c.bin", 1024, 5000)


def test_an_unknown_scheme_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown scheme 'ftp' .* gs://, s3://"):
        store.open("ftp://host/model")


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("model.gguf", ("", "model.gguf")),
        ("/a/b/model.gguf", ("/a/b", "model.gguf")),
        ("gs://bucket/a/m.gguf", ("gs://bucket/a/", "m.gguf")),
        ("https://host/a/m%20n.gguf?token=x", ("https://host/a/?token=x", "m n.gguf")),
    ],
)
def test_a_file_address_splits_into_folder_and_name(address, parts):
    assert store.split(address) == parts
