"""Verifies with the user's own function, named as `path/to/file.py:function`.

It is called as `function(problem, text)` and returns the reward as a number, a `Verdict`, or a
dict with the keys `reward`, and if wanted `correct`, `reason` and `parts`. It may be a coroutine, a
partial or any other callable. The file is loaded once in each worker; it may import its neighbours.

A file with `SELF_TEST = {"function": (problem, right, wrong)}` has its function tried at start.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagrpo.config import VerifyConfig
from bagrpo.records import Problem, Verdict


def score(problem: Problem, text: str, argument: str, config: VerifyConfig) -> Verdict:
    """Calls the function that `argument` names.

    Raises:
        ValueError: What it returned has no finite reward.
        Exception: Whatever it raises.
    """
    result = load(argument)(problem, text)
    if inspect.isawaitable(result):
        import asyncio

        result = asyncio.run(_await(result))
    return verdict(result, argument)


def check(problem: Problem, argument: str) -> str | None:
    """Returns None: what a gold answer means is the function's own affair."""
    return None


def example(argument: str) -> tuple[Problem, str, str] | None:
    """Returns the file's own example for the function, None if it has none.

    Raises:
        ValueError: The function can't be loaded.
    """
    load(argument)
    path, _, name = argument.rpartition(":")
    return getattr(_module(path), "SELF_TEST", {}).get(name)


@functools.cache
def load(argument: str) -> Any:
    """Returns the callable that `path/to/file.py:name` names.

    Raises:
        ValueError: There is no such file or callable, or the file fails.
    """
    path, _, name = argument.rpartition(":")
    module = _module(path)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return function


def verdict(result: Any, argument: str) -> Verdict:
    """Makes a verdict of what a reward function returned; a bare reward of 1 or more is correct.

    Raises:
        ValueError: It holds no finite reward: a missing one is never taken for 0.
    """
    if isinstance(result, Verdict):
        reward, correct, reason, parts = result.reward, result.correct, result.reason, result.parts
    elif isinstance(result, Mapping):
        reward, correct = result.get("reward"), result.get("correct")
        reason, parts = str(result.get("reason", "")), result.get("parts", {})
    else:
        reward, correct, reason, parts = result, None, "", {}
    reward = _finite(reward, "reward", argument)
    parts = {str(key): _finite(value, str(key), argument) for key, value in parts.items()}
    return Verdict(reward, reward >= 1 if correct is None else bool(correct), reason, parts)


def _finite(value: Any, what: str, argument: str) -> float:
    # A numpy scalar or 0-d array of whatever library has `item`; a longer one raises in it.
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, numbers.Real) or not math.isfinite(plain):
        raise ValueError(
            f"function {argument} returned {value!r} as {what}; it must return a finite number, a "
            f"Verdict, or a dict with 'reward'"
        )
    return float(plain)


async def _await(result: Any) -> Any:
    return await result


@functools.cache
def _module(path: str) -> Any:
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"there is no file {path!r} with a reward function")
    # Not under its bare name, which may be that of a module it imports.
    name = f"bagrpo_reward_{file.stem}_{abs(hash(str(file)))}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise ValueError(f"{path} can't be loaded: {type(error).__name__}: {error}") from error
    return module
