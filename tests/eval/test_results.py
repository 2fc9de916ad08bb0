import io
import json
import math

import pytest
import rich.console

from bagrpo.eval.interval import bootstrap, clustered, wilson
from bagrpo.eval.results import Sample, summarise, write_samples
from bagrpo.records import Verdict

NAN = Verdict(math.nan, False, "dropped: the function raised")
RIGHT = Verdict(1.0, True, "answer '4'")


def wrong(answer):
    return Verdict(0.0, False, f"answer {answer!r}")


@pytest.fixture
def samples(problem, completion):
    """Makes the samples of problems, each given by its source and its verdicts."""

    def make(*problems, **settings):
        return [
            Sample(problem(id, source=source, **settings), number, completion("text"), verdict)
            for id, (source, verdicts) in enumerate(problems)
            for number, verdict in enumerate(verdicts)
        ]

    return make


def test_benchmarks_are_summed_up_apart_and_together(samples):
    found = summarise(
        samples(
            ("easy", [RIGHT, RIGHT]),
            ("hard", [wrong("5"), RIGHT]),
            ("easy", [RIGHT, wrong("5")]),
            ("easy", [RIGHT, RIGHT]),
        ),
        [2],
    )
    assert list(found.benchmarks) == ["easy", "hard"]
    assert [m.problems for m in found.benchmarks.values()] == [3, 1]
    assert found.benchmarks["easy"].estimates["avg@2"] == clustered([1, 0.5, 1])
    assert found.benchmarks["hard"].estimates["avg@2"] == clustered([0.5])
    assert found.overall.estimates == {
        "avg@2": clustered([1, 0.5, 0.5, 1]),
        "pass@2": bootstrap([1, 1, 1, 1]),
        "maj@2": bootstrap([1, 0.5, 0.5, 1]),
    }


def test_one_sample_of_each_problem_has_an_average_with_wilson_s_interval_only(samples):
    found = summarise(samples(("a", [RIGHT]), ("a", [wrong("5")]), ("a", [RIGHT])), [])
    (estimate,) = found.overall.estimates.values()
    assert list(found.overall.estimates) == ["avg@1"]
    assert (estimate.low, estimate.high) == wilson(2, 3)


def test_a_shaped_reward_is_not_correctness(samples):
    shaped = [Verdict(-0.7, True, "answer '4'"), Verdict(0.9, False, "answer '5'")]
    assert summarise(samples(("a", shaped)), []).overall.estimates["avg@2"].value == 0.5


def test_samples_without_a_reward_leave_every_count_and_are_counted(samples):
    found = summarise(
        samples(
            ("a", [RIGHT, NAN, wrong("5"), RIGHT]),  # 2 of 3
            ("a", [NAN, NAN, NAN, RIGHT]),  # 1 of 1
            ("a", [NAN] * 4),  # Nothing known.
            ("a", [wrong("5")] * 4),  # 0 of 4
        ),
        [2, 4],
    ).overall
    assert (found.problems, found.samples, found.errors["dropped"]) == (4, 16, 8)
    assert found.estimates["avg@4"].value == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found.estimates["avg@4"].problems == 3
    # Of two of three, of which two are right: always one. The second problem has too few.
    assert found.estimates["pass@2"].value == pytest.approx((1 + 0) / 2)
    assert found.estimates["pass@2"].problems == 2
    assert found.estimates["pass@4"].value == 0
    assert found.estimates["pass@4"].problems == 1


def test_nothing_is_estimated_where_nothing_has_a_reward(samples):
    found = summarise(samples(("a", [NAN, NAN]), ("b", [RIGHT, RIGHT])), [2])
    assert found.benchmarks["a"].estimates == {}
    assert found.benchmarks["b"].estimates["avg@2"].value == 1
    assert found.overall.estimates["avg@2"].problems == 1
    assert "avg@2" in text_of(found)


@pytest.mark.parametrize("kind", ["code", "regex", "reasoning_gym", "rewards.py:f"])
def test_there_is_no_vote_where_answers_are_not_of_one_kind(kind, samples):
    found = summarise(samples(("a", [RIGHT, wrong("5")]), kind=kind), [2])
    assert list(found.overall.estimates) == ["avg@2", "pass@2"]


def test_ends_lengths_and_errors_are_counted(problem, completion):
    ends = [(3, "stop", RIGHT), (10, "length", wrong("5")), (10, "length", wrong("5"))]
    ends.append((5, "stop", Verdict(0.0, False, "time limit: no verdict within 3 s")))
    found = summarise(
        [
            Sample(problem(0), number, completion("", tokens, finish), verdict)
            for number, (tokens, finish, verdict) in enumerate(ends)
        ],
        [],
    ).overall
    assert found.finish == {"stop": 2, "length": 2}
    assert (found.truncated, found.mean_length) == (0.5, 7.0)
    assert found.errors == {"time": 1, "crash": 0, "dropped": 0}


def test_log_values_hold_every_figure_and_no_two_share_a_name(samples):
    found = summarise(samples(("avg@2", [RIGHT, wrong("5")]), ("finish", [RIGHT, RIGHT])), [2])
    values = found.log_values()
    for prefix, metrics in {"": found.overall, "avg@2/": found.benchmarks["avg@2"]}.items():
        for name, estimate in metrics.estimates.items():
            assert values[f"{prefix}{name}"] == estimate.value
            assert values[f"{prefix}{name}_low"] == estimate.low
            assert values[f"{prefix}{name}_high"] == estimate.high
    assert values["avg@2"] == 0.75
    assert values["avg@2/avg@2"] == 0.5
    assert (values["problems"], values["finish/samples"], values["truncated"]) == (2, 2, 0.0)
    # Three estimates of three figures, four counts and means, two ends, three errors; three times.
    assert len(values) == 3 * (3 * 3 + 4 + 2 + 3)
    json.dumps(values, allow_nan=False)


def text_of(found):
    console = rich.console.Console(file=io.StringIO(), width=80)
    console.print(found.table())
    return console.file.getvalue()


def test_the_table_shows_each_benchmark_and_all_of_several(samples):
    found = summarise(samples(("easy", [RIGHT, RIGHT]), ("hard", [NAN, wrong("5")])), [2])
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text_of(found).splitlines()
        if line.startswith("│")
    ]
    # Wilson's interval of 1 in 1 begins at 1 / (1 + 1.96^2) = 0.207.
    assert cells == [
        ["easy", "avg@2", "100.0 %", "20.7 to 100.0 %", "1"],
        ["", "pass@2", "100.0 %", "20.7 to 100.0 %", "1"],
        ["", "maj@2", "100.0 %", "20.7 to 100.0 %", "1"],
        ["", "mean tokens", "3", "", "1"],
        ["", "truncated", "0.0 %", "", "1"],
        ["hard", "avg@2", "0.0 %", "0.0 to 79.3 %", "1"],
        ["", "mean tokens", "3", "", "1"],
        ["", "truncated", "0.0 %", "", "1"],
        ["", "errors: dropped", "1 of 2", "", "1"],
        # 1 in 2: 0.5 -+ 1.96 sqrt(0.125 + 1.96^2 / 16) / (1 + 1.96^2 / 2) = 0.5 -+ 0.405.
        ["all problems", "avg@2", "50.0 %", "9.5 to 90.5 %", "2"],
        # One problem only has two scored samples.
        ["", "pass@2", "100.0 %", "20.7 to 100.0 %", "1"],
        ["", "maj@2", "100.0 %", "20.7 to 100.0 %", "1"],
        ["", "mean tokens", "3", "", "2"],
        ["", "truncated", "0.0 %", "", "2"],
        ["", "errors: dropped", "1 of 4", "", "2"],
    ]
    assert "all problems" not in text_of(summarise(samples(("easy", [RIGHT])), []))


def test_written_samples_can_be_read_back(tmp_path, problem, completion):
    path = tmp_path / "new" / "samples.jsonl"
    parts = {"correctness": 1.0, "style": math.nan}
    text = "Ответ:\u20284\n\ud800"  # A line separator and a lone surrogate.
    write_samples(
        path,
        [
            Sample(problem(3), 0, completion(text, 9, "length"), Verdict(1.0, True, "ok", parts)),
            Sample(problem(3), 1, completion("#### 5"), NAN),
        ],
    )
    first, second = map(json.loads, path.read_bytes().decode().split("\n")[:-1])
    assert first == {
        "problem": 3,
        "benchmark": "sums",
        "question": "Question 3?",
        "answer": "4",
        "sample": 0,
        "text": text,
        "correct": True,
        "reward": 1.0,
        "parts": {"correctness": 1.0, "style": None},
        "reason": "ok",
        "finish": "length",
        "tokens": 9,
    }
    assert (second["sample"], second["reward"], second["correct"]) == (1, None, False)
    assert [file.name for file in path.parent.iterdir()] == ["samples.jsonl"]


def test_a_file_that_was_whole_stays_whole_when_writing_fails(tmp_path, samples):
    path = tmp_path / "samples.jsonl"
    write_samples(path, samples(("a", [RIGHT])))
    before = path.read_bytes()

    def breaking():
        yield from samples(("a", [RIGHT, RIGHT]))
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_samples(path, breaking())
    assert path.read_bytes() == before


def test_nothing_cannot_be_summed_up():
    with pytest.raises(ValueError, match="no samples to sum up"):
        summarise([], [])
