import json

import pytest

from bagrpo.config import SandboxConfig, VerifyConfig
from bagrpo.verify import code, sandbox

BARE = VerifyConfig(allow_unsandboxed_code=True, sandbox=SandboxConfig(seconds=5.0))
PROMPT = 'from math import floor\n\ndef half(x):\n    """Half of x, rounded down."""\n'
TEST = "def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(-1) == -1\n"
HUMAN_EVAL = json.dumps({"prompt": PROMPT, "test": TEST, "entry_point": "half"})
STDIN = json.dumps({"inputs": ["2 3\n", "10 -4\n"], "outputs": ["5\n", "6"]})

RIGHT = {
    "continuation": "    return floor(x / 2)\n",
    "continuation that goes on": "    return floor(x / 2)\n\n\nHere is how to use it:\nhalf(3)",
    "whole function": "def half(x):\n    return floor(x / 2)",
    "fenced": "Sure!\n```python\ndef half(x):\n    return x // 2\n```\nDone.",
    "fenced continuation": "```python\n    return floor(x / 2)\n```",
    "then an example": "```python\ndef half(x):\n    return x // 2\n```\n```python\nhalf(3)\n```",
    "corrected": "```\ndef half(x): return 0\n```\nNo:\n```py\ndef half(x):\n    return x//2\n```",
    "not closed": "```python\ndef half(x):\n    return x // 2\n",
    "installs": "```python\ndef half(x):\n    return x // 2\n```\n```bash\npip install half\n```",
}
WRONG = {
    "empty": "",
    "words": "I can't do that.",
    "wrong": "    return x / 2\n",
    "not compiling": "```python\ndef half(x) return\n```",
    "exits": "```python\nimport os\nos._exit(0)\ndef half(x): pass\n```",
    "exits when called": "    import sys; sys.exit(0)\n",
    "other name": "```python\ndef double(x):\n    return x * 2\n```",
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_function_that_passes_scores_1_in_any_wrapping(text, problem):
    verdict = code.score(problem(HUMAN_EVAL, "code"), text, "", BARE)
    assert (verdict.reward, verdict.correct) == (1.0, True), verdict.reason


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_function_that_does_not_pass_scores_0(text, problem):
    verdict = code.score(problem(HUMAN_EVAL, "code"), text, "", BARE)
    assert (verdict.reward, verdict.correct) == (0.0, False)


def test_stdin_tests_must_all_pass(problem):
    fenced = "```python\n{}\n```"
    adds = "a, b = map(int, input().split())\nprint(a + b)"
    for source, correct, reason in [
        (adds, True, "passed 2 tests"),
        (adds + "\nexit(0)", True, "passed 2 tests"),
        ("print(5)", False, "test 2 of 2"),
        ("import os; os._exit(0)", False, "test 1 of 2"),
        (adds.replace("+", "/ 0 +"), False, "test 1 of 2: ZeroDivisionError"),
        ("print('5 ' * 10**7)", False, "test 1 of 2"),
    ]:
        verdict = code.score(problem(STDIN, "code"), fenced.format(source), "", BARE)
        assert (verdict.reward, verdict.correct) == (float(correct), correct)
        assert verdict.reason.startswith(reason)
    rows = json.dumps([{"input": "2 3\n", "output": "5"}])
    assert code.score(problem(rows, "code"), fenced.format(adds), "", BARE).correct


def test_a_program_that_hangs_fails_its_test(problem):
    config = VerifyConfig(allow_unsandboxed_code=True, sandbox=SandboxConfig(seconds=0.5))
    verdict = code.score(problem(STDIN, "code"), "while True: pass", "", config)
    assert verdict.reason == "test 1 of 2: time limit"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "assert f(2) == 3",
        "3",
        "{}",
        "[]",
        '[{"input": "1"}]',
        '{"inputs": [], "outputs": []}',
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": [[1]], "outputs": ["1"]}',
        '{"inputs": ["[1]"], "outputs": ["1"], "fn_name": "f"}',
        '{"test": "assert True", "entry_point": "f"}',
        '{"test": "def check(candidate) return", "entry_point": "f"}',
    ],
)
def test_tests_in_no_known_form_are_reported(answer, problem):
    assert code.check(problem(answer, "code"), "")


@pytest.mark.parametrize("answer", [HUMAN_EVAL, STDIN])
def test_good_tests_pass_the_check(answer, problem):
    assert code.check(problem(answer, "code"), "") is None


def test_without_bubblewrap_nothing_runs_unless_allowed(problem, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "missing", lambda: "bubblewrap is not installed")
    trap = tmp_path / "trap"
    source = f"open({str(trap)!r}, 'w')"
    with pytest.raises(ValueError, match="allow_unsandboxed_code"):
        code.score(problem(STDIN, "code"), source, "", VerifyConfig())
    assert not trap.exists()
    code.score(problem(STDIN, "code"), source, "", BARE)
    assert trap.exists()
