import math

import pytest

from bagrpo.config import OverlongReward, VerifyConfig
from bagrpo.verify import code, sandbox
from bagrpo.verify.kinds import find, kinds
from bagrpo.verify.score import Scorer, overlong, tally, total


@pytest.mark.parametrize("name", [name for name in kinds if name != "function"])
def test_each_kind_tells_its_right_example_from_the_wrong_one(name, scorer, completion):
    kind, argument = find(name)
    example = kind.example(argument)
    assert example is not None
    problem, right, wrong = example
    assert kind.check(problem, argument) is None
    problem = type(problem)(3, (), problem.answer, name, problem.extra)
    verdicts = scorer.score([(problem, completion(right)), (problem, completion(wrong))])
    assert [verdict.correct for verdict in verdicts] == [True, False]
    assert verdicts[0].reward == 1.0
    assert verdicts[1].reward == 0.0


def test_the_self_test_passes_for_every_kind(scorer):
    assert scorer.self_test() == []


def test_the_self_test_names_what_fails_and_lists_what_has_no_example(rewards):
    with Scorer(VerifyConfig(workers=1), [f"{rewards}:tested", f"{rewards}:same"]) as scorer:
        assert scorer.self_test() == [f"{rewards}:same"]
    for name, reason in [("mistaken", "'5' should be False"), ("nothing", "no function 'nothing'")]:
        with (
            Scorer(VerifyConfig(workers=1), [f"{rewards}:{name}"]) as scorer,
            pytest.raises(ValueError, match=rf"{name}' fails its self-test: .*{reason}"),
        ):
            scorer.self_test()


def test_what_hangs_a_verifier_is_wrong_and_the_next_are_not_affected(scorer, problem, completion):
    power = r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})} - 4)} - 5}{16}}"
    backtracking = problem(r"^(a+)+$", "regex")
    pairs = [
        (problem("3", "math"), completion("#### 3")),
        (problem("3", "math"), completion(power)),
        (problem(r"\sqrt{2}", "math"), completion(r"\boxed{\frac{2}{\sqrt{2}}}")),
        (backtracking, completion("a" * 60 + "b")),
        (backtracking, completion("aaa")),
        (problem("3", "math"), completion("#### 4")),
    ]
    verdicts = scorer.score(pairs)
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert [verdict.correct for verdict in verdicts] == [True, False, True, False, True, False]
    assert verdicts[1].reason.startswith("time limit: no verdict within")
    assert tally(verdicts) == {"time": 2, "crash": 0, "dropped": 0}


def test_gold_answers_are_checked_before_they_are_used(scorer, problem):
    assert scorer.check_answer(problem("#### 18", "math")) is None
    for bad in (
        problem("", "math"),
        problem(r"\frac{1}{", "math"),
        problem("Paris", "choice"),
        problem("(", "regex"),
        problem("assert True", "code"),
        problem("3", "reasoning_gym"),
    ):
        assert scorer.check_answer(bad), bad
    assert "'poetry'" in scorer.check_answer(problem("3", "poetry"))


def test_a_broken_gold_answer_is_an_error_not_a_wrong_answer(scorer, problem, completion):
    with pytest.raises(ValueError, match="problem 7 has no gold answer"):
        scorer.score([(problem("", "math"), completion("#### 3"))])


def test_parts_are_weighted_as_reported(rewards, problem, completion):
    config = VerifyConfig(
        workers=1,
        correctness=2.0,
        format={"pattern": r"^<answer>.*</answer>\n$", "weight": 0.5},
        functions=({"function": f"{rewards}:brevity", "weight": 0.25},),
        overlong={"buffer": 10, "factor": 0.5},
    )
    text = "<answer>B</answer>"  # 18 characters
    with Scorer(config, ["choice"], max_tokens=100) as scorer:
        right, long = scorer.score(
            [
                (problem("B", "choice"), completion(text, tokens=90)),
                (problem("C", "choice"), completion("B", tokens=94)),
            ]
        )
    assert right.parts == {"correctness": 1.0, "format": 1.0, "brevity": -0.18, "overlong": 0.0}
    # 2 * 1 + 0.5 * 1 + 0.25 * -0.18
    assert right.reward == pytest.approx(2.455)
    # 4 of the 10 tokens of the buffer: -0.5 * 4 / 10
    assert long.parts == {"correctness": 0.0, "format": 0.0, "brevity": -0.01, "overlong": -0.2}
    assert long.reward == pytest.approx(0.25 * -0.01 - 0.2)
    assert (right.correct, long.correct) == (True, False)
    for verdict in (right, long):
        assert verdict.reward == total(verdict.parts, config)


def test_parts_that_a_function_reports_are_kept_apart(rewards, problem, completion):
    kind = f"{rewards}:mapping"
    with Scorer(VerifyConfig(workers=1, correctness=3.0), [kind]) as scorer:
        (verdict,) = scorer.score([(problem("", kind), completion(""))])
    assert verdict.parts == {"correctness": 0.5, "correctness/style": 0.1}
    assert (verdict.reward, verdict.correct, verdict.reason) == (1.5, True, "half")


@pytest.fixture(scope="module")
def strict(rewards):
    with Scorer(VerifyConfig(workers=1, seconds=1.0), [f"{rewards}:behave"]) as scorer:
        yield scorer


@pytest.fixture(scope="module")
def lenient(rewards):
    config = VerifyConfig(workers=1, seconds=1.0, errors="drop")
    with Scorer(config, [f"{rewards}:behave"]) as scorer:
        yield scorer


@pytest.mark.parametrize("text", ["nan", "none", "raise", "exit", "hang"])
def test_a_function_without_a_reward_stops_the_run_or_its_sample_is_dropped(
    text, rewards, strict, lenient, problem, completion
):
    kind = f"{rewards}:behave"
    pairs = [(problem("", kind), completion(each)) for each in ("1", text, "0", "0.5")]
    with pytest.raises(ValueError, match=r"problem 7 .*rewards\.py:behave.*errors=drop"):
        strict.score(pairs)
    first, dropped, zero, last = lenient.score(pairs)
    assert [verdict.reward for verdict in (first, zero, last)] == [1.0, 0.0, 0.5]
    assert math.isnan(dropped.reward)
    assert not dropped.correct
    assert dropped.reason.startswith("dropped: ")
    assert tally([first, dropped, zero, last])["dropped"] == 1


def test_a_part_without_reward_drops_the_sample_whatever_its_weight(rewards, problem, completion):
    config = VerifyConfig(
        workers=1,
        errors="drop",
        functions=({"function": f"{rewards}:no_reward", "weight": 0.0},),
    )
    with Scorer(config, ["choice"]) as scorer:
        (verdict,) = scorer.score([(problem("B", "choice"), completion("B"))])
    assert math.isnan(verdict.reward)
    assert verdict.parts["correctness"] == 1.0
    assert verdict.reason.startswith("dropped: ")


@pytest.mark.parametrize(
    # Limit 100, buffer 20: nothing up to 80 tokens, then 1/20 of the factor for each.
    ("tokens", "share"),
    [(1, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (100, 1.0), (101, 1.0), (10_000, 1.0)],
)
def test_overlong_punishment_is_linear_in_tokens_and_bounded(tokens, share):
    for factor in (0.0, 1.0, 0.5):
        settings = OverlongReward(buffer=20, factor=factor)
        assert overlong(tokens, 100, settings) == pytest.approx(-factor * share)


def test_overlong_counts_tokens_not_characters(problem, completion, rewards):
    config = VerifyConfig(workers=1, overlong={"buffer": 5})
    kind = f"{rewards}:same"
    with Scorer(config, [kind], max_tokens=10) as scorer:
        short, long = scorer.score(
            [
                (problem("x" * 1000, kind), completion("x" * 1000, tokens=5)),
                (problem("x", kind), completion("x", tokens=10)),
            ]
        )
    assert (short.reward, long.reward) == (1.0, 0.0)


def test_settings_that_cannot_be_meant_are_refused(rewards):
    for settings, message in [
        ({"overlong": {"buffer": 0}}, "greater than 0"),
        ({"format": {"pattern": "("}}, "no regular expression"),
        ({"functions": [{"function": "rewards.py"}]}, "pattern"),
        (
            {"functions": [{"function": "a.py:f"}, {"function": "b.py:f"}]},
            "f occurs twice",
        ),
        ({"functions": [{"function": "a.py:overlong"}]}, "overlong occurs twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            VerifyConfig.model_validate(settings)
    buffered = VerifyConfig(overlong={"buffer": 20})
    for config, names, limit, message in [
        (VerifyConfig(), ["poetry"], None, "no verifier 'poetry'; there are math"),
        (VerifyConfig(), ["math:easy"], None, "no verifier 'math:easy'"),
        (VerifyConfig(), ["none.py:f"], None, "no file 'none.py'"),
        (VerifyConfig(functions=({"function": "none.py:f"},)), [], None, "no file 'none.py'"),
        (buffered, ["math"], None, "give a limit"),
        (buffered, ["math"], 19, "begins 20 tokens before the limit of 19"),
    ]:
        with pytest.raises(ValueError, match=message):
            Scorer(config, names, max_tokens=limit)


def test_problems_of_another_kind_are_refused(scorer, problem, completion):
    with pytest.raises(ValueError, match="kind 'poetry'; this scorer was made for"):
        scorer.submit(problem("", "poetry"), completion(""))


def test_code_without_walls_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(sandbox, "missing", lambda: "bubblewrap is not installed")
    with pytest.raises(ValueError, match="allow_unsandboxed_code=true"):
        Scorer(VerifyConfig(), ["code"])
    assert "bubblewrap is not installed" in code.refusal()
