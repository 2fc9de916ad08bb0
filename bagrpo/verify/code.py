"""Verifies programs by running tests on them in the sandbox.

The gold answer is JSON, in one of the forms

    {"prompt": ..., "test": ..., "entry_point": ...}   HumanEval; `test` defines check(candidate)
    {"inputs": [...], "outputs": [...]}                stdin and stdout of each test
    [{"input": ..., "output": ...}, ...]               the same

All tests must pass. Of a test's output, only white space may differ.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem, Verdict
from bagrpo.verify import sandbox

# A fence that is not closed, at the token limit or before a stop string, reaches to the end.
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Tests:
    """What a program has to pass: `test` code, or pairs of stdin and stdout."""

    prompt: str = ""
    test: str = ""
    entry_point: str = ""
    pairs: tuple[tuple[str, str], ...] = ()


def score(problem: Problem, text: str, argument: str, config: VerifyConfig) -> Verdict:
    """Scores 1 when the program in the text passes all tests.

    Raises:
        ValueError: The gold answer holds no tests.
    """
    tests = parse(problem.answer)
    walls = not sandbox.missing()
    if not walls and not config.allow_unsandboxed_code:
        raise ValueError(refusal())
    if tests.test:
        job = sandbox.Job(program(text, tests), test=tests.test, entry_point=tests.entry_point)
        outcome = sandbox.run(job, config.sandbox, walls=walls)
        return Verdict(float(outcome.finished), outcome.finished, _reason(outcome))
    source = program(text, tests)
    for number, (stdin, stdout) in enumerate(tests.pairs, 1):
        outcome = sandbox.run(sandbox.Job(source, stdin=stdin), config.sandbox, walls=walls)
        if outcome.timed_out or outcome.stdout.split() != stdout.split():
            return Verdict(0.0, False, f"test {number} of {len(tests.pairs)}: {_reason(outcome)}")
    return Verdict(1.0, True, f"passed {len(tests.pairs)} tests")


def check(problem: Problem, argument: str) -> str | None:
    """Returns why the tests can't be used; None if they can."""
    try:
        tests = parse(problem.answer)
        if tests.test:
            compile(tests.test, "test", "exec")
    except (ValueError, SyntaxError) as error:
        return str(error)
    return None


def example(argument: str) -> tuple[Problem, str, str]:
    """Returns a problem with a right and a wrong completion."""
    answer = json.dumps({"inputs": ["2 3\n"], "outputs": ["5\n"]})
    right = "```python\nprint(sum(map(int, input().split())))\n```"
    return Problem(0, (), answer, "code"), right, "```python\nprint(6)\n```"


def refusal() -> str:
    """Returns why code is not run where bubblewrap is missing."""
    return (
        f"verifier 'code' would run model-written programs without walls: {sandbox.missing()}. "
        f"Install it, or accept the risk with allow_unsandboxed_code=true"
    )


def parse(answer: str) -> Tests:
    """Returns the tests that a gold answer holds.

    Raises:
        ValueError: It holds none, or in no known form.
    """
    try:
        data: Any = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"tests {answer[:80]!r} are not JSON: {error}") from error
    if isinstance(data, list):
        data = _columns(data)
    if not isinstance(data, dict):
        raise ValueError(f"tests {answer[:80]!r} are neither an object nor a list of objects")
    if isinstance(data.get("test"), str) and isinstance(data.get("entry_point"), str):
        if "def check(" not in data["test"]:
            raise ValueError("the tests define no check(candidate)")
        return Tests(str(data.get("prompt", "")), data["test"], data["entry_point"])
    if data.get("fn_name"):
        raise ValueError(f"tests that call {data['fn_name']!r} with JSON are not supported")
    inputs, outputs = data.get("inputs"), data.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError("tests have neither test and entry_point nor inputs and outputs")
    if len(inputs) != len(outputs) or not all(isinstance(x, str) for x in [*inputs, *outputs]):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs don't pair up as texts")
    return Tests(pairs=tuple(zip(inputs, outputs, strict=True)))


def program(text: str, tests: Tests) -> str:
    """Returns the program in a completion.

    That is the last fenced block, for HumanEval the last that defines the function. Without a fence
    it is the whole text, which in HumanEval's form may go on where the prompt stops; such a body
    ends at the first line that is not indented.
    """
    languages = ("", "py", "python", "python3")
    blocks = [code for language, code in _FENCE.findall(text) if language.lower() in languages]
    if not tests.test:
        return blocks[-1] if blocks else text
    define = re.compile(rf"^(?:async\s+)?def\s+{re.escape(tests.entry_point)}\b", re.MULTILINE)
    for code in reversed(blocks or [text]):
        if define.search(code):
            # The prompt, a function of a docstring only, brings its imports and is replaced.
            return f"{tests.prompt}\n{code}"
    body = blocks[-1] if blocks else text
    end = re.search(r"^\S", body, re.MULTILINE)
    return tests.prompt + (body[: end.start()] if end else body)


def _columns(rows: list) -> dict[str, Any]:
    if not all(isinstance(row, dict) and {"input", "output"} <= row.keys() for row in rows):
        raise ValueError("a test in the list has no 'input' and 'output'")
    return {"inputs": [row["input"] for row in rows], "outputs": [row["output"] for row in rows]}


def _reason(outcome: sandbox.Run) -> str:
    if outcome.timed_out:
        return "time limit"
    lines = outcome.stderr.strip().splitlines()
    if lines:
        return lines[-1][:200]
    return "passed" if outcome.finished else "ended early, or with the wrong output"
