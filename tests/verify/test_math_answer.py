import pytest

from bagrpo.config import VerifyConfig
from bagrpo.verify import math_answer

SAME = [
    ("$200,000.", "200000"),
    ("1,000", "1000"),
    ("1000", "1,000"),
    ("18.00", "18"),
    ("−5", "-5"),  # U+2212
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("7 apples", "7"),
    (r"42\text{ cm}", "42"),
    (r"\$18", "18"),
    ("12%", "12"),
    ("12%", "0.12"),
    (r"12\%", "12%"),
    ("0.5", "1/2"),
    (r"\frac12", "0.5"),
    (r"-\dfrac{3}{4}", "-0.75"),
    (r"\frac{-3}{4}", "-0.75"),
    ("x = 5", "5"),
    (r"90^\circ", "90"),
    ("1.5e3", "1500"),
    (r"1\,000", "1000"),
    ("**12**", "12"),
    (r"\text{Tuesday}", "tuesday"),
    ("(B)", r"\text{B}"),
    # Through math-verify:
    (r"\sqrt{4}", "2"),
    ("0.333333", "1/3"),
    (r"1\frac{1}{2}", "3/2"),
    (r"x^2+2x+1", "(x+1)^2"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("[1,2)", "[1, 2)"),
]
DIFFERENT = [
    ("[8.124,12.852]", "8.12412"),
    ("8.12412", "[8.124,12.852]"),
    ("1,00", "100"),
    ("18.01", "18"),
    ("5", "-5"),
    ("0.12", "12"),
    ("0.12%", "12%"),
    ("2x", "2"),
    ("3 million", "3"),
    ("6 pi", "6"),
    (r"5\pi", "5"),
    ("42 or 43", "42"),
    ("0.33", "1/3"),
    ("1/0", "0"),
    ("[1,2]", "(1,2)"),
    ("Wednesday", "Tuesday"),
    ("", "3"),
    ("1e999", "1"),
    ("9" * 10_000, "9"),
]
MARKED = [
    (r"so \boxed{\frac{1}{2}} then \boxed{3} and 17 more words", "3"),
    (r"\boxed{\dfrac{5^{(5)} - 5}{16}}", r"\dfrac{5^{(5)} - 5}{16}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{7} and \boxed{cut of", "7"),
    (r"\fbox{7}", "7"),
    (r"\boxed {7}", "7"),
    (r"\boxed 7.", "7."),
    ("3 + 4 = 7\n#### 7", "7"),
    ("#### 42\n" + "and a long tail of 17 words " * 500, "42"),
    ("#### 1\n\n#### 2 apples, of 3\n4", "2"),
    ("#### Step 1: add 3\nWe get 5. #### 5 done\n4", "5 done"),
    ("#### Tuesday", "Tuesday"),
    (r"\boxed{1} #### 2", "2"),
    (r"#### 2, that is \boxed{1}", "1"),
    ("<think>\\boxed{1}</think><answer>\n12\n</answer> bye 5", "12"),
    ("The answer is 42. I hope you have 7.", "42"),
    ("The answer is 42 - as 7 says.", "42"),
    ("The answer is 3 + 4 = 7.", "7"),
    ("**Answer:** $1,234.50 per week, not 3", "$1,234.50"),
    ("Answer:\n$\\frac{1}{2}$ yes 3", r"\frac{1}{2}"),
    ("the answer is −5", "−5"),
    ("answer is 1, no, the answer is 2", "2"),
]
LAST_NUMBER = [
    ("So she has 1,234 left.", "1234"),
    ("from 3-5", "5"),
    ("it fell to -5 degrees", "-5"),
    ("it costs $3.50.", "3.5"),
    ("the probability is 3/4.", "0.75"),
    ("that is 16%", "16"),
]


@pytest.mark.parametrize(("found", "wanted"), SAME)
def test_the_same_answer_counts_however_it_is_written(found, wanted):
    assert math_answer.equal(found, wanted)


@pytest.mark.parametrize(("found", "wanted"), DIFFERENT)
def test_another_answer_does_not_count(found, wanted):
    assert not math_answer.equal(found, wanted)


@pytest.mark.parametrize(("text", "answer"), MARKED)
def test_the_last_marked_answer_is_found_wherever_it_stands(text, answer, problem):
    found = math_answer.extract(text)
    assert found is not None
    assert found.rstrip(".") == answer.rstrip(".") or math_answer.equal(found, answer)


@pytest.mark.parametrize(("text", "gold"), LAST_NUMBER)
def test_an_unmarked_answer_is_the_last_number_unless_only_marked_ones_count(text, gold, problem):
    asked = problem(gold, "math")
    assert math_answer.score(asked, text, "", VerifyConfig()).correct
    strict = math_answer.score(asked, text, "", VerifyConfig(marked_only=True))
    assert (strict.reward, strict.correct, strict.reason) == (0.0, False, "no answer found")


def test_an_interval_is_not_the_number_that_it_looks_like_without_its_comma(problem):
    text = r"Thus the interval is \boxed{[8.124,12.852]}"
    assert not math_answer.score(problem("8.12412", "math"), text, "", VerifyConfig()).correct
    assert math_answer.score(problem("[8.124, 12.852]", "math"), text, "", VerifyConfig()).correct


@pytest.mark.parametrize("text", ["", "   \n", "no digits here", r"\boxed{}"])
def test_a_text_without_an_answer_is_wrong(text, problem):
    verdict = math_answer.score(problem("3", "math"), text, "", VerifyConfig())
    assert (verdict.reward, verdict.correct) == (0.0, False)


def test_gold_answers_are_taken_from_worked_solutions(problem):
    for gold in ("3 + 4 = <<3+4=7>>7\n#### 7", r"We get $\boxed{7}$.", " 7 "):
        assert math_answer.score(problem(gold, "math"), "#### 7", "", VerifyConfig()).correct


@pytest.mark.parametrize(
    "gold", ["", "  ", "####", r"\frac{1}{", r"\boxed{}", "@@##", "42 and"], ids=repr
)
def test_gold_answers_that_mean_nothing_are_reported(gold, problem):
    assert math_answer.check(problem(gold, "math"), "")


@pytest.mark.parametrize(
    "gold",
    ["18", "#### 1,234", r"\frac{\sqrt{3}}{2}", r"(-\infty, 2]", "Tuesday", r"x^2 - 1", "3:2"],
)
def test_gold_answers_that_are_good_pass_and_equal_themselves(gold, problem):
    asked = problem(gold, "math")
    assert math_answer.check(asked, "") is None
    boxed = rf"\boxed{{{math_answer.gold(gold)}}}"
    assert math_answer.score(asked, boxed, "", VerifyConfig()).correct


def test_without_math_verify_only_numbers_and_words_pass_the_check(problem, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    assert math_answer.check(problem("18", "math"), "") is None
    assert "math-verify" in (math_answer.check(problem(r"\sqrt{2}", "math"), "") or "")
    assert not math_answer.equal(r"\sqrt{4}", "2")


@pytest.mark.parametrize("form", [r"\boxed{%s}", "#### %s", "%s", "$%s$", "answer: %s"])
def test_what_a_model_wrote_is_never_evaluated(form, problem, tmp_path):
    trap = tmp_path / "trap"
    attack = f"__import__('pathlib').Path('{trap}').touch()"
    for gold in ("31415926535", r"\sqrt{2}"):  # a small number might be in the folder's name
        assert not math_answer.score(
            problem(gold, "math"), form % attack, "", VerifyConfig()
        ).correct
    assert not trap.exists()
