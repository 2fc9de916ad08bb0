import pytest

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem
from bagrpo.verify import gym


def entry_problem(task):
    entry = gym._dataset(task, "{}")[0]
    return Problem(3, (), entry["answer"], "reasoning_gym", {"task": task, "entry": entry})


def evaluating_tasks():
    gym._dataset("basic_arithmetic", "{}")  # Imports reasoning-gym, less its warnings.
    from reasoning_gym.factory import DATASETS

    scorers = {name: task.score_answer.__code__ for name, (task, _) in DATASETS.items()}
    return {name for name, code in scorers.items() if gym._evaluators(code)}


def test_the_tasks_that_evaluate_answers_are_recognised():
    tasks = evaluating_tasks()
    assert {"countdown", "n_queens", "puzzle24", "simple_integration"} <= tasks
    assert "basic_arithmetic" not in tasks


def test_right_answers_pass_the_guard_of_tasks_that_evaluate_and_code_does_not_run(tmp_path):
    trap = tmp_path / "trap"
    call = f"__import__('pathlib').Path('{trap}').touch()"
    attacks = (call, f"({call})", f"[{call}]", f'"{call}"', f"sqrt('{call}')", f"2 + {call}")
    for task in sorted(evaluating_tasks()):
        asked = entry_problem(task)
        right = gym.score(asked, f"<answer>{asked.answer}</answer>", "", VerifyConfig())
        assert (right.reward, right.correct) == (1.0, True), task
        for attack in attacks:
            wrong = gym.score(asked, f"<answer>{attack}</answer>", "", VerifyConfig())
            assert not wrong.correct, task
            assert not trap.exists(), task


@pytest.mark.parametrize(
    "text",
    ["{}", "<answer>{}</answer>", "<answer>1</answer> <answer>{}</answer>", r"\boxed{{{}}}"],
)
def test_the_answer_is_taken_from_tags_or_marks_or_the_whole_text(text):
    asked = entry_problem("basic_arithmetic")
    assert gym.score(asked, text.format(asked.answer), "", VerifyConfig()).correct
    assert not gym.score(asked, text.format("17.25"), "", VerifyConfig()).correct


def test_partial_credit_is_kept_and_is_not_correct():
    asked = entry_problem("countdown")
    verdict = gym.score(asked, "<answer>1 + 1</answer>", "countdown", VerifyConfig())
    assert verdict.reward == pytest.approx(0.05)  # countdown's own, for a wrong expression
    assert not verdict.correct


def test_an_answer_that_makes_the_task_raise_is_wrong():
    verdict = gym.score(entry_problem("prime_factorization"), "no number", "", VerifyConfig())
    assert (verdict.reward, verdict.correct) == (0.0, False)
    assert "ValueError" in verdict.reason


def test_problems_that_cannot_be_scored_are_reported():
    entry = entry_problem("countdown").extra["entry"]
    for extra, reason in [
        ({}, "names no reasoning-gym task"),
        ({"task": "countdown"}, "no item"),
        ({"task": "no_such_task", "entry": entry}, "no_such_task"),
        ({"task": "countdown", "entry": entry, "options": {"none": 1}}, "none"),
    ]:
        asked = Problem(3, (), "", "reasoning_gym", extra)
        assert reason in (gym.check(asked, "") or "")
        with pytest.raises(ValueError, match="problem 3"):
            gym.score(asked, "1", "", VerifyConfig())


def test_a_task_without_gold_answers_has_no_example():
    assert gym.example("graph_color") is None
