import json
import logging
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from bagrpo.config import ArithmeticSource, DataConfig, FileSource, GymSource, PromptConfig, Turn
from bagrpo.data import arithmetic
from bagrpo.data.problems import load, overlap

NO_GYM = "reasoning-gym takes a C compiler, and launch/local.sh leaves it out where there is none"

GSM8K = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A thousand and 1?", "answer": "Add.\n#### 1,001"},
    {"question": "What is it?", "answer": "No answer follows"},
    {"question": "#### is what?", "answer": "#### 3\n#### 7 "},
]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"content": "Be brief.", "role": "system"}, {"content": q, "role": "user"}],
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
    }
    for q, answer in [("1 + 1?", "2"), ("2 + 3?", "5")]
]
PLAIN = [{"prompt": "1 + 1?", "answer": 2}, {"prompt": "2 + 3?", "answer": "5"}]


@pytest.fixture
def write(tmp_path):
    def write(records, name="data.jsonl"):
        path = tmp_path / name
        if isinstance(records, bytes):
            path.write_bytes(records)
        elif path.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=1)
        else:
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write


def load_file(path, prompt=None, **settings):
    given = {
        key: settings.pop(key) for key in ("check", "tokenize", "max_prompt") & settings.keys()
    }
    policy = settings.pop("long_prompts", "error")
    source = FileSource(path=path, **settings)
    config = DataConfig(sources=(source,), prompt=prompt or PromptConfig(), long_prompts=policy)
    (problems,), (report,) = load(config, "training", **given)
    return problems, report


def question(problem):
    return problem.messages[-1]["content"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("form", "records", "expected"),
    [
        (
            "gsm8k",
            GSM8K,
            [("Two and two?", "4"), ("A thousand and 1?", "1,001"), ("#### is what?", "7")],
        ),
        ("dapo", DAPO, [("1 + 1?", "2"), ("2 + 3?", "5")]),
        ("plain", [PLAIN[1]], [("2 + 3?", "5")]),
    ],
)
def test_each_form_is_read_from_each_format(write, form, records, expected, suffix):
    problems, _ = load_file(write(records, f"x.{suffix}"), form=form)
    assert [(question(problem), problem.answer) for problem in problems] == expected
    assert all(problem.kind == "math" for problem in problems)
    assert [problem.extra["question"] for problem in problems] == [q for q, _ in expected]
    assert {problem.extra["source"] for problem in problems} == {"x"}


def test_columns_may_have_other_names_lie_deeper_and_come_along(write):
    records = [{"q": "1?", "a": {"b": [1, 2]}, "test": {"x": 1.5}, "level": None}]
    problems, _ = load_file(
        write(records), question="q", answer="a.b", columns=("test", "level"), kind="code"
    )
    assert (question(problems[0]), problems[0].answer, problems[0].kind) == ("1?", "[1, 2]", "code")
    assert problems[0].extra["test"] == {"x": 1.5}
    assert problems[0].extra["level"] is None


def test_the_tests_of_humaneval_are_its_answer(write):
    record = {"prompt": "def f():\n", "test": "def check(c): ...", "entry_point": "f", "task_id": 1}
    problems, _ = load_file(write([record]), form="humaneval")
    assert (question(problems[0]), problems[0].kind) == (record["prompt"], "code")
    del record["task_id"]
    assert json.loads(problems[0].answer) == record


def test_the_worked_solution_of_gsm8k_is_kept(write):
    problems, _ = load_file(write(GSM8K), form="gsm8k")
    assert problems[0].extra["solution"] == GSM8K[0]["answer"]


def test_rows_without_question_or_answer_are_dropped_and_reported(write, caplog):
    path = write(
        [
            PLAIN[0],
            {"prompt": " ", "answer": "1"},
            {"prompt": None, "answer": "1"},
            {"prompt": "1?", "answer": None},
            {"prompt": "1?", "answer": ""},
            PLAIN[1],
        ]
    )
    with caplog.at_level(logging.INFO):
        problems, report = load_file(path)
    assert [problem.answer for problem in problems] == ["2", "5"]
    assert (report.read, report.kept) == (6, 2)
    assert report.dropped == {"without question": 2, "without answer": 2}
    assert "2 of 6 problems kept; dropped 2 without question, 2 without answer" in caplog.text
    assert f"{path} line 2" in report.examples[0]
    assert f"{path} line 4" in report.examples[1]


def test_a_function_of_the_users_needs_no_answer(write):
    problems, _ = load_file(write([{"prompt": "Rhyme!", "answer": ""}]), kind="poems.py:rhymes")
    assert (problems[0].kind, problems[0].answer) == ("poems.py:rhymes", "")


def test_answers_that_the_check_refuses_are_dropped_with_its_reason(write):
    def check(problem):
        return None if problem.answer.isdigit() else f"{problem.answer!r} is no number"

    records = [
        {"prompt": str(i), "answer": answer} for i, answer in enumerate(["1", "x", "3", "y"])
    ]
    problems, report = load_file(write(records), check=check)
    assert [problem.answer for problem in problems] == ["1", "3"]
    assert report.dropped == {"with an unusable answer": 2}
    assert "line 2 ('x' is no number)" in str(report)


def test_ids_name_source_and_row_whatever_is_dropped(write):
    path = write([{"prompt": str(i), "answer": str(i)} for i in range(6)])
    source = FileSource(path=path)
    config = DataConfig(sources=(source, source), evaluation=(source,))

    def ids(config, part, **given):
        return {
            (number, question(problem)): problem.id
            for number, problems in enumerate(load(config, part, **given)[0])
            for problem in problems
        }

    training, evaluation = ids(config, "training"), ids(config, "evaluation")
    together = [*training.values(), *evaluation.values()]
    assert len(set(together)) == 18
    assert all(0 <= number < 2**31 for number in together)
    odd = ids(config, "training", check=lambda p: None if int(p.answer) % 2 else "even")
    assert odd == {key: number for key, number in training.items() if int(key[1]) % 2}


def test_more_sources_than_ids_are_refused():
    config = DataConfig(sources=(ArithmeticSource(rows=1),) * 129)
    with pytest.raises(ValueError, match="129 sources are more than the 128"):
        load(config, "training")
    config = DataConfig(sources=(ArithmeticSource(rows=1, high=99),) * 128)
    assert load(config, "training")[0][-1][0].id == 127 * 2**24 < 2**31


def test_limit_and_unique_count_what_is_kept(write):
    records = [{"prompt": str(i % 3), "answer": str(i % 2)} for i in range(12)]
    problems, report = load_file(write(records), unique=True)
    assert [question(problem) for problem in problems] == ["0", "1", "2", "0", "1", "2"]
    assert report.dropped == {"repeated": 6}
    problems, report = load_file(
        write(records), limit=2, check=lambda p: "0" if p.answer == "0" else None
    )
    assert ([question(problem) for problem in problems], report.read) == (["1", "0"], 4)


def tokenize(messages):
    return [0] * sum(len(message["content"]) for message in messages)


def test_long_prompts_stop_the_run_or_are_counted(write):
    path = write([{"prompt": "1" * length, "answer": "1"} for length in (3, 5, 4, 6)])
    settings = {"tokenize": tokenize, "max_prompt": 4}
    with pytest.raises(ValueError, match=r"line 2 has 5 tokens, more than max_prompt=4.*drop"):
        load_file(path, **settings)
    problems, report = load_file(path, long_prompts="drop", **settings)
    assert [len(question(problem)) for problem in problems] == [3, 4]
    assert report.dropped == {"with too long a prompt": 2}
    # What counts is the whole prompt, not the question: with "ab" before it only 3 tokens fit 5.
    problems, _ = load_file(
        path,
        long_prompts="drop",
        prompt=PromptConfig(system="ab"),
        tokenize=tokenize,
        max_prompt=5,
    )
    assert [len(question(problem)) for problem in problems] == [3]
    with pytest.raises(ValueError, match="both, or neither"):
        load_file(path, max_prompt=5)


def test_a_prompt_is_system_examples_and_the_question_in_its_template(write):
    prompt = PromptConfig(
        system="Think.",
        template="{question}\nAnswer in \\boxed{}, not {answer}. {question}",
        examples=(Turn(role="user", content="{question}"), Turn(role="assistant", content="5")),
    )
    path = write([{"prompt": "Is {question} {0} \\1 a field?", "answer": "1"}])
    problems, _ = load_file(path, prompt=prompt)
    asked = "Is {question} {0} \\1 a field?"
    assert problems[0].messages == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "{question}"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": f"{asked}\nAnswer in \\boxed{{}}, not {{answer}}. {asked}"},
    ]
    assert problems[0].extra["question"] == asked


def test_conversations_in_the_data_keep_their_turns(write):
    turns = [("system", "S"), ("user", "1?"), ("assistant", "1"), ("user", "2?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = write([{"prompt": messages, "answer": "2"}])
    problems, _ = load_file(path, prompt=PromptConfig(template="{question}!"))
    assert problems[0].messages == [*messages[:-1], {"role": "user", "content": "2?!"}]
    with pytest.raises(ValueError, match="line 1 has a system message, and so has the config"):
        load_file(path, prompt=PromptConfig(system="T"))


def test_a_source_may_have_its_own_prompt(write):
    path = write(PLAIN)
    own = FileSource(path=path, prompt=PromptConfig(template="Own: {question}"))
    config = DataConfig(sources=(own, FileSource(path=path)), prompt=PromptConfig(system="All"))
    (first, second), _ = load(config, "training")
    assert first[0].messages == [{"role": "user", "content": "Own: 1 + 1?"}]
    assert second[0].messages[0] == {"role": "system", "content": "All"}


def test_lines_end_where_json_lines_end(write):
    # U+2028 and U+0085 end lines for str.splitlines; so do CR LF, a byte order mark, blank lines.
    text = '\ufeff{"prompt": "a\u2028b\u0085c", "answer": 1}\r\n\n  \n{"prompt": "d", "answer": 1}'
    problems, _ = load_file(write(text.encode()))
    assert [question(problem) for problem in problems] == ["a\u2028b\u0085c", "d"]
    assert [problem.id for problem in problems] == [0, 3]


GOOD = b'{"prompt": "1?", "answer": "1"}\n'
HOSTILE = {
    "not JSON": (GOOD + b"{'prompt': 1}\n", {}, r"jsonl line 2 is not JSON.*mend"),
    "cut short": (GOOD + b'{"prompt": "1', {}, "line 2 is not JSON"),
    "not UTF-8": (b'{"prompt": "\xff", "answer": 1}\n', {}, "line 1 is not JSON"),
    "too deep": (b"[" * 100_000, {}, "line 1 is not JSON"),
    "not an object": (b"[1]\n", {}, r"line 1 holds \[1\]; each line must be an object"),
    "no column": (
        GOOD + b'{"prompt": "1?", "gold": "1"}\n',
        {},
        "line 2 has no column 'answer', it has 'prompt', 'gold': set",
    ),
    "wrong form": (GOOD, {"form": "gsm8k"}, "no column 'question'"),
    "not nested": (GOOD, {"form": "dapo"}, "no column 'reward_model.ground_truth'"),
    "number for a question": (b'{"prompt": 5, "answer": 1}', {}, "'prompt' is 5; it must be"),
    "no messages": (b'{"prompt": [], "answer": 1}', {}, r"'prompt' is \[\]; it must be"),
    "no message": (b'{"prompt": ["x"], "answer": 1}', {}, "'prompt' holds 'x'; a message has"),
    "no role": (b'{"prompt": [{"content": "x"}], "answer": 1}', {}, "a message has a role"),
    "image": (
        b'{"prompt": [{"role": "user", "content": [{"image": 1}]}], "answer": 1}',
        {},
        "a message has a role and a content, both text",
    ),
    "no question at the end": (
        b'{"prompt": [{"role": "assistant", "content": "x"}], "answer": 1}',
        {},
        "ends with a message of role 'assistant'",
    ),
    "half a character": (b'{"prompt": "\\ud800", "answer": 1}', {}, "line 1 column 'prompt' holds"),
    "empty": (b"\n\n", {}, "no problem is left of data: 0 of 0"),
    "nothing usable": (
        b'{"prompt": "1", "answer": ""}',
        {},
        "no problem is left.*1 without answer",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_broken_file_is_named_with_line_and_remedy(write, name):
    content, settings, message = HOSTILE[name]
    with pytest.raises(ValueError, match=message):
        load_file(write(content), **settings)


def test_a_file_that_is_not_there_or_of_no_known_kind_is_named(write, tmp_path):
    with pytest.raises(ValueError, match=r"no data file '.*nowhere.jsonl'; check `path`"):
        load_file(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match=r"ends with '.csv'; .jsonl and .parquet files can be"):
        load_file(write(b"a,b", "x.csv"))


def test_broken_parquet_is_named(write):
    with pytest.raises(ValueError, match=r"x.parquet row 1 is not parquet"):
        load_file(write(b"PAR1 but not really", "x.parquet"))
    with pytest.raises(ValueError, match=r"row 1 has no column 'q', it has 'prompt', 'answer'"):
        load_file(write(PLAIN[1:], "y.parquet"), question="q", answer="a")
    path = Path(write([{"prompt": "x" * 99, "answer": "1"}], "z.parquet"))
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(60) + content[64:])  # The page's header is overwritten.
    with pytest.raises(ValueError, match=r"z.parquet row 1 is not parquet"):
        load_file(str(path))


def test_evaluation_problems_that_are_trained_on_are_found(write):
    path = write(PLAIN)
    source = FileSource(path=path, prompt=PromptConfig(template="Now: {question}"))
    config = DataConfig(
        sources=(FileSource(path=path, limit=1),), evaluation=(source, ArithmeticSource(rows=50))
    )
    (training,), _ = load(config, "training")
    (same, generated), _ = load(config, "evaluation")
    assert overlap(training, same + generated) == same[:1]


def test_generated_evaluation_is_never_trained_on():
    source = ArithmeticSource(rows=300)
    config = DataConfig(sources=(source,), evaluation=(source,))
    (training,), _ = load(config, "training")
    (evaluation,), _ = load(config, "evaluation")
    assert len(training) == len(evaluation) == 300
    assert overlap(training, evaluation) == []
    assert evaluation[0].kind == "math"


def test_reasoning_gym_tasks_are_problems_and_never_both_trained_on_and_evaluated():
    pytest.importorskip("reasoning_gym", reason=NO_GYM)
    source = GymSource(task="chain_sum", rows=40, options={"max_terms": 2, "max_digits": 1})
    config = DataConfig(
        sources=(source,), evaluation=(source, GymSource(task="rush_hour", rows=1, name="cars"))
    )
    (training,), _ = load(config, "training")
    (evaluation, answerless), _ = load(config, "evaluation")
    assert len(training) == len(evaluation) == 40
    assert overlap(training, evaluation) == []
    for problem in training + evaluation:
        assert problem.kind == "reasoning_gym"
        assert problem.extra["options"] == source.options
        assert problem.extra["entry"]["question"] == question(problem)
        assert eval(problem.extra["entry"]["metadata"]["expression"]) == int(problem.answer)
    assert (answerless[0].answer, answerless[0].extra["task"]) == ("", "rush_hour")
    assert answerless[0].extra["source"] == "cars"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "no_such_task"}, "no task 'no_such_task'"),
        ({"task": "chain_sum", "options": {"terms": 3}}, "unexpected keyword argument 'terms'"),
        ({"task": "chain_sum", "options": {"min_terms": -1}}, "min_terms must be positive"),
    ],
)
def test_unknown_tasks_and_options_are_named(settings, message):
    pytest.importorskip("reasoning_gym", reason=NO_GYM)
    with pytest.raises(ValueError, match=message):
        load(DataConfig(sources=(GymSource(**settings),)), "training")


def test_a_task_that_fills_one_side_only_is_named(monkeypatch):
    pytest.importorskip("reasoning_gym", reason=NO_GYM)
    monkeypatch.setattr(arithmetic, "held_out", lambda key: key.endswith(" 1 + 1 ="))
    config = DataConfig(evaluation=(GymSource(task="chain_sum", rows=10),))
    with pytest.raises(ValueError, match=r"180 draws .* held 0 held-out questions where rows=10"):
        load(config, "evaluation")  # 8 x 10 + 100 draws


def test_evaluation_sources_of_one_name_are_refused(write):
    source = FileSource(path=write(PLAIN))
    with pytest.raises(ValueError, match="two evaluation sources are called 'data'"):
        load(DataConfig(evaluation=(source, source)), "evaluation")
