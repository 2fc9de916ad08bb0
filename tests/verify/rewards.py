"""Reward functions of every kind, good and bad, for the tests of the pool and of `function`."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bagrpo.records import Problem, Verdict


def behave(problem, text):
    """Does what the text says; otherwise the text is the reward."""
    word, _, argument = text.partition(" ")
    action = ACTIONS.get(word)
    return action(argument) if action else float(text)


def _hang(path):
    if path:
        sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
        Path(path).write_text(f"{os.getpid()} {sleeper.pid}")
    while True:
        time.sleep(1)


def _fill_memory(argument):
    return len(bytearray(2**31))


def _fork(argument):
    os.fork()
    return 0.25


def _raise_what_cannot_be_told(argument):
    class Error(Exception):
        def __str__(self):
            raise RuntimeError

    raise Error


ACTIONS = {
    "hang": _hang,
    "exit": lambda argument: os._exit(0),
    "sysexit": lambda argument: sys.exit(0),
    "killed": lambda argument: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda argument: {}["missing"],
    "untold": _raise_what_cannot_be_told,
    "unpicklable": lambda argument: lambda: 1,
    "none": lambda argument: None,
    "nan": lambda argument: float("nan"),
    "memory": _fill_memory,
    "fork": _fork,
    "sleep": lambda argument: time.sleep(float(argument)) or 1.0,
    "pid": lambda argument: Verdict(1.0, True, str(os.getpid())),
    "jax": lambda argument: float("jax" in sys.modules),
    "platform": lambda argument: {"reward": 1, "reason": os.environ["JAX_PLATFORMS"]},
}


def _scaled(problem, text, scale):
    return scale * len(text)


async def coroutine(problem, text):
    return 0.75


class _Callable:
    def __call__(self, problem, text):
        return problem.answer == text


half_length = functools.partial(_scaled, scale=0.5)
same = _Callable()


def mapping(problem, text):
    return {"reward": 0.5, "correct": True, "reason": "half", "parts": {"style": 0.1}}


def no_reward(problem, text):
    return {"correct": True}


def brevity(problem, text):
    return -len(text) / 100


def tested(problem, text):
    return float(text == problem.answer)


def mistaken(problem, text):
    return 1.0


_PROBLEM = Problem(id=0, messages=(), answer="4", kind="")
SELF_TEST = {"tested": (_PROBLEM, "4", "5"), "mistaken": (_PROBLEM, "4", "5")}
not_callable = 3
