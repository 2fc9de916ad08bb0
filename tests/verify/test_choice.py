import pytest

from bagrpo.config import VerifyConfig
from bagrpo.verify import choice

CHOSEN = [
    (r"\boxed{B}", "B"),
    (r"\boxed{\text{(B)}}", "B"),
    (r"\boxed{\textbf{B}}", "B"),
    ("The answer is (B) 42.", "B"),
    ("The answer is B because A is wrong", "B"),
    ("Answer: b", "B"),
    ("**Answer: C**", "C"),
    ("Answer: option D", "D"),
    ("#### D", "D"),
    ("B", "B"),
    ("B. Paris", "B"),
    ("(C)", "C"),
    ("(A) is false, so it must be (D), as we saw.", "D"),
    ("Let us see.\nB\n", "B"),
]


@pytest.mark.parametrize(("text", "letter"), CHOSEN)
def test_the_last_chosen_letter_counts(text, letter, problem):
    for gold in "ABCDE":
        verdict = choice.score(problem(gold, "choice"), text, "", VerifyConfig())
        assert verdict.correct == (gold == letter), verdict
        assert verdict.reward == float(gold == letter)


@pytest.mark.parametrize(
    "text", ["", "A dog is an animal.", "The answer is big.", "I don't know", "Answer: 42"]
)
def test_articles_and_words_are_no_choice(text, problem):
    for gold in "ABI":
        assert not choice.score(problem(gold, "choice"), text, "", VerifyConfig()).correct


def test_unmarked_letters_do_not_count_if_only_marked_ones_do(problem):
    strict = VerifyConfig(marked_only=True)
    assert not choice.score(problem("B", "choice"), "(B)", "", strict).correct
    assert choice.score(problem("B", "choice"), "Answer: (B)", "", strict).correct


@pytest.mark.parametrize("gold", ["B", "(B)", "b", "B. Paris", r"\boxed{B}"])
def test_gold_letters_pass(gold, problem):
    assert choice.check(problem(gold, "choice"), "") is None


@pytest.mark.parametrize("gold", ["", "42", "Paris", "Z"])
def test_gold_answers_that_are_no_letter_are_reported(gold, problem):
    assert repr(gold) in (choice.check(problem(gold, "choice"), "") or "")
