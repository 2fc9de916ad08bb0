import pytest

from bagrpo.plan import chips


@pytest.mark.parametrize(
    ("name", "compiler_name", "count"),
    [
        ("v5e-1", "v5e:1x1", 1),
        ("v5e-8", "v5e:2x4", 8),
        ("v5e-16", "v5e:4x4", 16),
        ("v5e-256", "v5e:16x16", 256),
        ("v6e-32", "v6e:4x8", 32),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-16", "v5p:2x2x2", 8),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v4-32", "v4:2x2x4", 16),
        ("4xv6e-16", "v6e:4x4", 64),
    ],
)
def test_a_slice_of_the_cloud_is_known_by_name(name, compiler_name, count):
    found = chips.parse(name)
    assert (found.compiler_name, found.chips) == (compiler_name, count)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e-12", r"v5e has N = \[1, 4, 8, 16, 32, 64, 128, 256\]"),
        ("v5e-512", "v5e has N"),
        ("v5p-9", r"v5p has N = \[8, 16, 32"),
        ("v7-8", "give v4-N, v5e-N, v5p-N, v6e-N"),
        ("v5e", "give v4-N"),
        ("v5litepod-16", "give v4-N"),
    ],
)
def test_one_that_is_not_there_is_said(name, said):
    with pytest.raises(ValueError, match=said):
        chips.parse(name)
