"""Problems, and a real scorer that all tests of evaluation share."""

import pytest

from bagrpo.config import VerifyConfig
from bagrpo.records import Completion, Problem
from bagrpo.verify.score import Scorer


@pytest.fixture(scope="session")
def scorer():
    with Scorer(VerifyConfig(workers=2), ["math", "choice"]) as scorer:
        yield scorer


@pytest.fixture
def problem():
    """Makes a problem of an id and an answer."""

    def make(id, answer="4", source="sums", kind="math"):
        extra = {"source": source, "question": f"Question {id}?"}
        return Problem(id=id, messages=(), answer=answer, kind=kind, extra=extra)

    return make


@pytest.fixture
def completion():
    def make(text, tokens=3, finish="stop"):
        return Completion(tokens=[5] * tokens, logps=[-1.0] * tokens, finish=finish, text=text)

    return make
