import math

import pytest

from bagrpo.config import VerifyConfig
from bagrpo.records import Verdict
from bagrpo.verify import function

CALLS = [
    ("half_length", "abc", Verdict(1.5, True)),  # 0.5 * 3 characters
    ("same", "3", Verdict(1.0, True)),
    ("same", "4", Verdict(0.0, False)),
    ("coroutine", "", Verdict(0.75, False)),
    ("mapping", "", Verdict(0.5, True, "half", {"style": 0.1})),
    ("brevity", "1234", Verdict(-0.04, False)),  # -4 characters / 100
]


@pytest.mark.parametrize(("name", "text", "expected"), CALLS)
def test_any_callable_gives_its_verdict(name, text, expected, problem, rewards):
    asked = problem("3", "function")
    assert function.score(asked, text, f"{rewards}:{name}", VerifyConfig()) == expected


@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, "1.0", [1.0], {"correct": True}, {"reward": None}, object()]
)
def test_a_missing_or_infinite_reward_is_an_error_that_names_the_function(value):
    with pytest.raises(ValueError, match=r"rewards\.py:f"):
        function.verdict(value, "rewards.py:f")
    with pytest.raises(ValueError, match=r"rewards\.py:f"):
        function.verdict(Verdict(math.nan, True), "rewards.py:f")


def test_a_reward_of_0_is_a_reward_and_numbers_of_any_type_count():
    import numpy

    for zero in (0, 0.0, False, numpy.float32(0), numpy.zeros(())):
        assert function.verdict(zero, "f") == Verdict(0.0, False)
    assert function.verdict(numpy.float64(1), "f") == Verdict(1.0, True)
    with pytest.raises(ValueError, match="size"):
        function.verdict(numpy.ones(2), "f")


def test_a_function_that_is_not_there_is_named(tmp_path, rewards):
    broken = tmp_path / "broken.py"
    broken.write_text("import sys; sys.exit(3)")
    for argument, message in [
        (f"{rewards}:nothing", "no function 'nothing'; it has behave"),
        (f"{rewards}:not_callable", "no function 'not_callable'"),
        (f"{tmp_path}/none.py:f", "no file"),
        (f"{broken}:f", "SystemExit: 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            function.load(argument)


def test_a_file_may_import_its_neighbours(tmp_path, problem):
    (tmp_path / "neighbour_of_reward.py").write_text("LENGTH = 4")
    file = tmp_path / "reward.py"
    file.write_text(
        "import neighbour_of_reward\n"
        "def f(problem, text): return len(text) / neighbour_of_reward.LENGTH"
    )
    verdict = function.score(problem("", ""), "abcd", f"{file}:f", VerifyConfig())
    assert verdict == Verdict(1.0, True)
