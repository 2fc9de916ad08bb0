"""Typed, frozen run configuration: YAML files overridden by dotted `key=value` pairs.

Every section is a pydantic model that refuses unknown keys. A module below `train` is given its
own section only, never the whole run's. `bagrpo.settings` reads, writes and compares sections.
Nothing here loads jax.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from bagrpo.settings import difference as difference
from bagrpo.settings import dump as dump
from bagrpo.settings import load as load

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(pydantic.BaseModel):
    """A frozen group of settings that knows all its keys. Numbers are finite."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """Which model, and how it is computed."""

    path: str
    """Hugging Face folder, GGUF file, or `gs://`, `s3://`, `http(s)://` address of either."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matrix products. Norms, softmax, log-probs and losses stay float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trained parameters and so of the optimizer's moments."""
    remat: Literal["none", "full", "dots"] = "full"
    """What the backward pass recomputes: nothing, each layer, or all but its matrix products."""
    logit_tokens: Positive = 1024
    """Tokens of a device whose logits exist at once."""


class MeshConfig(Section):
    """Devices along each mesh axis; -1 (at most once) takes what the others leave."""

    data: int = 1
    """Replicas of the parameters; rows are split over it."""
    fsdp: int = -1
    """Shards of parameters and optimizer state; rows are split over it too."""
    tensor: int = 1
    """Shards of heads, feed-forward width, experts and vocabulary."""


class ClipConfig(Section):
    """Trust region of the probability ratio: [1 - low, 1 + high]."""

    low: NonNegative = 0.2
    high: NonNegative = 0.2
    """DAPO's clip-higher (arXiv:2503.14476) is 0.28; GSPO (arXiv:2507.18071) has 3e-4 and 4e-4."""
    dual: float | None = Field(default=None, gt=1)
    """Dual clip (arXiv:1912.09729): where the advantage is negative the ratio counts at most
    this much. DAPO recipes use 10, verl's default is 3."""


class KLConfig(Section):
    """Penalty on the divergence from the reference model; off at coef 0."""

    coef: NonNegative = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    importance: bool = False
    """In the loss, multiply the estimator by the ratio of policy to sampler, so that the gradient
    is that of KL(policy || reference), also after the first update on a batch. Without it k3 has
    the gradient of KL(reference || policy), as in GRPO, and k1 has none: that pair is refused."""
    rule: Literal["group_token", "token", "sequence", "constant"] | None = None
    """How KL terms are combined. By default the run's own rule, and for `balanced`, whose
    weights depend on the advantage's sign, `group_token`."""

    @pydantic.model_validator(mode="after")
    def _has_the_gradient_it_claims(self) -> KLConfig:
        if self.where == "loss" and self.estimator == "k1" and not self.importance:
            raise ValueError(
                "estimator='k1' in the loss has no gradient towards the reference: use 'k2' or "
                "'k3', set importance=true, or where='reward'"
            )
        if self.where == "reward" and self.importance:
            raise ValueError(
                "importance=true belongs to where='loss': a penalty in the reward has no gradient "
                "to correct"
            )
        return self


class AlgorithmConfig(Section):
    """Advantage, surrogate and aggregation rule: any of each goes with any other."""

    advantage: Literal["group_norm", "group_mean", "leave_one_out", "batch_norm"] = "group_norm"
    std: Literal["population", "sample"] = "population"
    """Divisor of the variance: G (BA and arXiv:2502.18548) or G - 1 (TRL, verl)."""
    surrogate: Literal["token", "sequence", "reinforce", "likelihood"] = "token"
    rule: Literal["balanced", "group_token", "token", "sequence", "constant"] = "balanced"
    clip: ClipConfig = ClipConfig()
    kl: KLConfig = KLConfig()
    entropy: float = 0.0
    """Coefficient of the entropy bonus, combined by the same rule as the KL terms."""


class OptimizerConfig(Section):
    """AdamW under a learning-rate schedule, after clipping the gradient by its global norm."""

    learning_rate: NonNegative = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: held, or decayed to `final_fraction` of it at the run's last update."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates over which the rate rises linearly from 0."""
    final_fraction: Fraction = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: NonNegative = 0.0
    """On matrices only; norms and biases are never decayed."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)


class BatchConfig(Section):
    """How many rollouts make a step, how long they may be, and how they are cut for the chips."""

    problems: Positive = 8
    """Groups of a step."""
    group: Positive = 8
    """Responses to each problem (G)."""
    max_prompt: Positive = 256
    """Tokens."""
    max_response: Positive = 256
    """Tokens, the end-of-sequence token included."""
    prompt_buckets: tuple[Positive, ...] = ()
    """Prompt lengths that rows are padded to, rising, `max_prompt` last; by default only that."""
    response_buckets: tuple[Positive, ...] = ()
    """Response lengths likewise; by default halves of `max_response` down to 32."""
    microbatch_tokens: Positive = 4096
    """Tokens of a device, padding included, that forward and backward pass take at once. Rows are
    sorted by length first; the result of a step does not depend on it."""

    @pydantic.model_validator(mode="after")
    def _buckets(self) -> BatchConfig:
        for side in ("prompt", "response"):
            buckets = getattr(self, f"{side}_buckets")
            longest = getattr(self, f"max_{side}")
            if buckets and (list(buckets) != sorted(set(buckets)) or buckets[-1] != longest):
                raise ValueError(
                    f"{side}_buckets = {list(buckets)} must rise and end with max_{side} = {longest}"
                )
        return self


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
    options: dict[str, Any] = {}
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


class SandboxConfig(Section):
    """Limits of each program that a model wrote."""

    seconds: float = Field(default=4.0, gt=0)
    """Of wall clock and of processor time, for each test of a stdin problem and for all tests of a
    HumanEval problem. `VerifyConfig.seconds` bounds a problem's tests together."""
    memory_mb: Positive = 512
    """Address space of each of its processes."""
    processes: Positive = 16
    files: Positive = 64
    """Open at once."""
    file_mb: Positive = 16
    """Size of each file it writes, and of its output."""


class FormatReward(Section):
    """A reward part that is 1 where a completion has the asked form."""

    pattern: str
    """Searched for as Python's `re` does, `.` matching newlines too; anchor it with ^ and $. White
    space at the end of a completion is not held against it."""
    weight: float = 1.0

    @pydantic.field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None
        return pattern


class FunctionReward(Section):
    """A reward part that the user's own function gives."""

    function: str = Field(pattern=r"\.py:\w+$")
    """`path/to/file.py:name`, called as `name(problem, text)`."""
    weight: float = 1.0


class OverlongReward(Section):
    """Soft overlong punishment (arXiv:2503.14476, equation 13): a reward part in [-factor, 0].

    It is 0 up to `buffer` tokens below the limit and falls linearly to -factor at the limit.
    """

    buffer: Positive
    """Tokens, the end-of-sequence token included."""
    factor: NonNegative = 1.0


class VerifyConfig(Section):
    """How completions are checked, and how the checks add up to the reward.

    reward = correctness * (the verifier's score) + the sum of weight * part over the other parts
    + overlong. A constant offset, such as -1 for wrong answers, is absent on purpose: every group
    baseline removes it.
    """

    workers: Positive | None = None
    """Processes that verify; None: one for each CPU, 32 at most."""
    seconds: float = Field(default=10.0, gt=0)
    """Wall clock for each check. A worker that takes longer is killed and replaced."""
    start_seconds: float = Field(default=120.0, gt=0)
    """Wall clock for a worker to import what it needs."""
    memory_mb: Positive = 4096
    """Address space of each worker."""
    errors: Literal["raise", "drop"] = "raise"
    """When a check gives no reward (a user's function that fails, hangs or returns nan; a broken
    gold answer): stop the run, or give a verdict of reward nan, to be left out and counted. What a
    completion does to a built-in verifier is never such an error: it is a wrong answer."""
    marked_only: bool = False
    r"""Accept answers only in `\boxed{}`, after `####` or "answer is", or in <answer> tags;
    otherwise an unmarked completion answers with its last number or formula."""
    correctness: float = 1.0
    """Weight of the verifier's score, which is 0 for wrong and 1 for right."""
    format: FormatReward | None = None
    functions: tuple[FunctionReward, ...] = ()
    overlong: OverlongReward | None = None
    sandbox: SandboxConfig = SandboxConfig()
    allow_unsandboxed_code: bool = False
    """Run model-written programs without bubblewrap where that is missing. Limits on time, memory
    and output then hold, but the programs can read and write all that the user can, and use the
    network."""

    @pydantic.model_validator(mode="after")
    def _part_names_differ(self) -> VerifyConfig:
        names = [part.function.rpartition(":")[2] for part in self.functions]
        names += ["correctness", "format", "overlong"]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"reward parts are logged by name, and {', '.join(sorted(twice))} occurs twice: "
                "rename a function"
            )
        return self


class RunConfig(Section):
    """All settings of a run."""

    seed: int = 0
    """Keys all randomness of the run."""
    model: ModelConfig
    mesh: MeshConfig = MeshConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
