"""Verifies answers to reasoning-gym's tasks by the task's own scoring.

A problem's `extra` holds `entry`, the item as the task made it, and `options`, if the task had any.
The task is the argument of the kind, `reasoning_gym:countdown`, or `extra["task"]`.

Some tasks hand the answer to `eval` or to sympy's parser, which is `eval` too. Those get it only if
it is literal data or arithmetic.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from types import CodeType
from typing import Any

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem, Verdict
from bagrpo.verify import math_answer

MODULES = ("reasoning_gym",)

_EVALUATORS = frozenset({"eval", "exec", "parse_expr", "sympify", "simplify", "nsimplify", "S"})
_FUNCTIONS = ("sqrt", "exp", "log", "ln", "sin", "cos", "tan", "asin", "acos", "atan", "Abs")
_INERT = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Dict,
    ast.Call,
)


def score(problem: Problem, text: str, argument: str, config: VerifyConfig) -> Verdict:
    """Returns the task's score of the answer, correct at 1.

    The answer is the last one in <answer> tags or otherwise marked, else the whole completion.

    Raises:
        ValueError: The problem has no item of the task.
    """
    if reason := check(problem, argument):
        raise ValueError(f"problem {problem.id}: {reason}")
    tags = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    answer = tags[-1] if tags else math_answer.extract(text)
    if answer is None and config.marked_only:
        return Verdict(0.0, False, "no answer found")
    answer = (text if answer is None else answer).strip()
    task = _dataset(_task(problem, argument), _options(problem))
    evaluators = _evaluators(type(task).score_answer.__code__)
    if evaluators and not _is_inert(answer, evaluators):
        return Verdict(0.0, False, f"answer {answer[:100]!r} is neither data nor arithmetic")
    try:
        reward = float(task.score_answer(answer, problem.extra["entry"]))
    except Exception as error:  # noqa: BLE001 - some tasks raise on answers of the wrong form
        return Verdict(0.0, False, f"answer {answer[:100]!r}: {type(error).__name__}: {error}")
    return Verdict(reward, reward >= 1, f"answer {answer[:100]!r}")


def check(problem: Problem, argument: str) -> str | None:
    """Returns why a problem can't be scored; None if it can."""
    task, entry = _task(problem, argument), problem.extra.get("entry")
    if task is None:
        return "extra['task'] names no reasoning-gym task"
    if not isinstance(entry, dict) or "metadata" not in entry:
        return "extra['entry'] is no item of a reasoning-gym task"
    try:
        _dataset(task, _options(problem))
    except ValueError as error:
        return str(error)
    return None


def example(argument: str) -> tuple[Problem, str, str] | None:
    """Returns an item of the task with a right and a wrong completion.

    It is None for the tasks that name no gold answer. To a question of yes or no, the wrong
    completion may be right by chance: the item is the first where it isn't.

    Raises:
        ValueError: There is no such task.
    """
    task = argument or "basic_arithmetic"
    dataset = _dataset(task, "{}")
    for index in range(16):
        entry = dataset[index]
        problem = Problem(
            0, (), entry["answer"] or "", "reasoning_gym", {"task": task, "entry": entry}
        )
        wrong = "<answer>no answer</answer>"
        if not entry["answer"]:
            return None
        if not score(problem, wrong, argument, VerifyConfig()).correct:
            break
    return problem, f"<answer>{entry['answer']}</answer>", wrong


def _task(problem: Problem, argument: str) -> Any:
    return argument or problem.extra.get("task")


def _options(problem: Problem) -> str:
    return json.dumps(problem.extra.get("options", {}), sort_keys=True)


@functools.cache
def _dataset(task: str, options: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise ValueError(
            f"task {task!r} needs reasoning-gym: pip install 'bagrpo[gym]' ({error})"
        ) from error
    try:
        return reasoning_gym.create_dataset(task, size=16, seed=0, **json.loads(options))
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning-gym makes no task {task!r} with {options}: {error}") from error


def _evaluators(code: CodeType) -> set[str]:
    """Returns the names of what evaluates text in a function's code."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return {name for name in code.co_names if name in _EVALUATORS}.union(*map(_evaluators, inner))


def _is_inert(answer: str, evaluators: set[str]) -> bool:
    """Tells whether evaluating the answer can do nothing but compute."""
    sympy = bool(evaluators - {"eval"})
    try:
        nodes = list(ast.walk(ast.parse(answer, mode="eval")))
    except SyntaxError:
        return not sympy  # `eval` refuses it as well; sympy rewrites it first.
    except (ValueError, MemoryError, RecursionError):
        return False
    for node in nodes:
        if not isinstance(node, _INERT):
            return False
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) not in _FUNCTIONS:
            return False
        # Text that sympy meets inside an expression is parsed in its turn.
        if sympy and isinstance(node, ast.Constant) and not isinstance(node.value, int | float):
            return False
    return True
