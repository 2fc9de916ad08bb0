import pytest

from bagrpo.eval import votes
from bagrpo.records import Verdict

# Completions, and what each votes for where the right answer is 4: a number or text, R for right.
MATH = {
    "#### 4": "R",
    "So it is 4.0": "R",
    "#### 5": "5",
    "#### 5.0": "5",
    r"\boxed{\frac{10}{2}}": "5",
    "#### 1,000": "1000",
    "It's $x + 1$, thus \\boxed{x+1}": "x+1",
    r"\boxed{X + 1}": "x+1",
    r"\boxed{it's}": "it's",
    r"\boxed{'a'}": "'a'",
    'The answer is "it\'s \\"five\\""': "quoted",
    "I can't tell.": None,
    "": None,
}


def test_completions_vote_together_if_their_answers_are_equal(scorer, problem, completion):
    verdicts = scorer.score([(problem(0), completion(text)) for text in MATH])
    assert [verdict.correct for verdict in verdicts] == [vote == "R" for vote in MATH.values()]
    correct, rivals, silent = votes.count(verdicts)
    assert (correct, silent) == (2, 2)
    # Three for 5, two for x+1, one each for 1000, it's, 'a' and the quoted text.
    assert sorted(rivals) == [1, 1, 1, 1, 2, 3]
    for one, name in zip(verdicts, MATH.values(), strict=True):
        for other, other_name in zip(verdicts, MATH.values(), strict=True):
            together = max([*votes.count([one, other])[1], votes.count([one, other])[0]]) == 2
            assert together == (name == other_name and name is not None), (name, other_name)


def test_letters_vote(scorer, problem, completion):
    texts = ["Answer: (B)", "(B)", "I choose (C).", "**(c)** is the answer is C", "Who knows"]
    verdicts = scorer.score([(problem(0, "B", kind="choice"), completion(text)) for text in texts])
    assert votes.count(verdicts) == (2, [2], 1)


@pytest.mark.parametrize(
    "reason", ["time limit: no verdict within 3 s", "crash: it died", "no answer found", "passed 3"]
)
def test_who_gave_no_answer_or_has_no_verdict_does_not_vote(reason):
    assert votes.answer(Verdict(0.0, False, reason)) is None
    assert votes.count([Verdict(0.0, False, reason)]) == (0, [], 1)


def test_what_follows_an_answer_in_the_reason_is_not_part_of_it():
    verdict = Verdict(0.0, False, f"answer {chr(39)}5{chr(39)}; format: time limit: no verdict")
    assert votes.answer(verdict) == "5"
