"""Which problems there are, and how they are put to the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from bagrpo.config.section import Positive, Section


class Turn(Section):
    """One message of a worked example."""

    role: Literal["user", "assistant"]
    content: str


class PromptConfig(Section):
    """How a question becomes a conversation."""

    system: str | None = None
    template: str = "{question}"
    """Of the last user message. `{question}` is replaced literally; other braces mean nothing."""
    examples: tuple[Turn, ...] = ()
    """Sent, as written, between the system message and the question."""

    @pydantic.field_validator("template")
    @classmethod
    def _has_a_place_for_the_question(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError(
                f"template {template!r} doesn't say where the question goes: {{question}}"
            )
        return template


class ProblemSource(Section):
    """What every source of problems can be told."""

    name: str | None = None
    """In metrics and reports; by default the file's stem, `arithmetic`, or the task."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the training stream relative to the other sources' (all have one, or none has)."""
    limit: Positive | None = None
    """Keep the first so many problems that pass every other filter."""
    unique: bool = False
    """Drop problems whose question and answer occurred before in this source."""
    prompt: PromptConfig | None = None
    """Instead of the data's own."""


class FileSource(ProblemSource):
    """A jsonl or parquet file, one problem a line or row."""

    source: Literal["file"] = "file"
    path: str
    form: Literal["plain", "gsm8k", "dapo", "humaneval"] = "plain"
    """What the columns are called and hold. `plain`: prompt, answer. `gsm8k`: question, and an
    answer whose last line is `#### gold`. `dapo`, which is verl's: prompt (a list of messages) and
    reward_model.ground_truth. `humaneval`: prompt; the answer is prompt, test and entry_point."""
    question: str | None = None
    """Column of the question (text or list of messages), if the form's name is not right."""
    answer: str | None = None
    """Column of the answer, likewise. A dot descends into a nested column."""
    columns: tuple[str, ...] = ()
    """Further columns to hand to the verifier and the logs in `Problem.extra`; SFT takes its target
    from `solution` there, which the `gsm8k` form fills by itself."""
    kind: str | None = None
    """The verifier that checks the answers; by default `math`, for `humaneval` it is `code`."""

    @pydantic.field_validator("columns")
    @classmethod
    def _names_are_free(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        if taken := {"question", "source"}.intersection(columns):
            raise ValueError(f"{', '.join(sorted(taken))}: `extra` has the question and the source")
        return columns


class ArithmeticSource(ProblemSource):
    """Generated arithmetic: training and evaluation never share a set of numbers and operators."""

    source: Literal["arithmetic"] = "arithmetic"
    rows: Positive = 10_000
    """Drawn independently: of a narrow range some problems come often; see `unique`."""
    forms: tuple[Literal["sum", "story"], ...] = Field(default=("sum", "story"), min_length=1)
    operators: tuple[Literal["+", "-", "*"], ...] = Field(default=("+", "-"), min_length=1)
    terms: int = Field(default=2, ge=2, le=100)
    """Numbers in each problem."""
    low: Positive = 1
    high: Positive = 9
    """Smallest and largest number in a question; no intermediate result is negative."""
    seed: int = 0

    @pydantic.model_validator(mode="after")
    def _low_is_below_high(self) -> ArithmeticSource:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}")
        return self


class GymSource(ProblemSource):
    """A reasoning-gym task: training and evaluation never share a question."""

    source: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    rows: Positive = 1000
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the task's own configuration, e.g. `{max_terms: 3}`."""
    seed: int = 0


SourceConfig = Annotated[FileSource | ArithmeticSource | GymSource, Field(discriminator="source")]


class DataConfig(Section):
    """The problems that are trained on and those that are only evaluated."""

    sources: tuple[SourceConfig, ...] = ()
    evaluation: tuple[SourceConfig, ...] = ()
    """In the order given, every row once."""
    prompt: PromptConfig = PromptConfig()
    shuffle: bool = True
    """Anew in each epoch. Evaluation is never shuffled."""
    epochs: Positive | None = None
    """Passes over the training problems; None: without end. With weights a pass is as many
    problems as the sources hold together, and each source starts over when it is through."""
    long_prompts: Literal["error", "drop"] = "error"
    """What happens to a prompt of more than `max_prompt` tokens: loading stops, or the problem is
    dropped and counted."""
    dynamic_rounds: Positive | None = None
    """Dynamic sampling (arXiv:2503.14476): drop groups that are all right or all wrong and sample
    more problems, this many rounds at most, until the batch is full. None: train on all groups."""

    @pydantic.model_validator(mode="after")
    def _weights_are_used(self) -> DataConfig:
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            number = weighted.index(False)
            raise ValueError(f"sources[{number}] has no weight: give every source one, or none")
        if any(source.weight is not None for source in self.evaluation):
            raise ValueError("evaluation sources take no weight: every row is scored once")
        return self
