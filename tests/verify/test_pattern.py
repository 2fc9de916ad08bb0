import pytest

from bagrpo.config import VerifyConfig
from bagrpo.verify import pattern

THINK = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>"
TEXT = "<think>\na\nb\n</think>\n<answer>\n3\n</answer>"


@pytest.mark.parametrize("end", ["", "$", "\n$", r"\n$", r"\s*$"], ids=repr)
@pytest.mark.parametrize("tail", ["", "\n", "\n\n", "  \n"], ids=repr)
def test_a_final_newline_is_neither_demanded_nor_forbidden(end, tail, problem):
    verdict = pattern.score(problem(THINK + end, "regex"), TEXT + tail, "", VerifyConfig())
    assert (verdict.reward, verdict.correct) == (1.0, True)


@pytest.mark.parametrize("text", ["", "3", "x" + TEXT, TEXT + " and more"])
def test_another_form_scores_0(text, problem):
    verdict = pattern.score(problem(THINK + "$", "regex"), text, "", VerifyConfig())
    assert (verdict.reward, verdict.correct) == (0.0, False)


@pytest.mark.parametrize("gold", ["", "(", "[a", "a{2,1}"])
def test_patterns_that_are_none_are_reported(gold, problem):
    assert pattern.check(problem(gold, "regex"), "")
