"""A scorer that all tests of verification share: its processes start once."""

from pathlib import Path

import pytest

from bagrpo.config import VerifyConfig
from bagrpo.records import Completion, Problem
from bagrpo.verify import sandbox
from bagrpo.verify.score import Scorer

REWARDS = str(Path(__file__).with_name("rewards.py"))
SECONDS = 3.0


@pytest.fixture(scope="session", autouse=True)  # It imports while the first tests run.
def scorer():
    config = VerifyConfig(
        workers=2, seconds=SECONDS, allow_unsandboxed_code=bool(sandbox.missing())
    )
    kinds = ["math", "choice", "regex", "code", "reasoning_gym", "reasoning_gym:countdown"]
    with Scorer(config, kinds) as scorer:
        yield scorer


@pytest.fixture
def problem():
    """Makes a problem of an answer and a kind."""

    def make(answer, kind, **extra):
        return Problem(id=7, messages=(), answer=answer, kind=kind, extra=extra)

    return make


@pytest.fixture
def completion():
    """Makes a completion of a text, and of a number of tokens that has nothing to do with it."""

    def make(text, tokens=3):
        return Completion(tokens=[5] * tokens, logps=[-1.0] * tokens, finish="stop", text=text)

    return make


@pytest.fixture(scope="session")
def rewards():
    """Path of a file with reward functions."""
    return REWARDS
