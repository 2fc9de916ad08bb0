"""The sampler as the rest of the program knows it: load parameters, generate completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from bagrpo import sharding
from bagrpo.config import SampleConfig
from bagrpo.models.decoder import Compute
from bagrpo.models.family import Architecture
from bagrpo.models.params import Params
from bagrpo.sample.programs import Programs
from bagrpo.sample.request import MAX_EOS, Request, Sampling
from bagrpo.sample.session import Finished, Session
from bagrpo.text.tokenizer import Tokenizer

_STREAMS = {"train": 0, "evaluation": 1}
"""Noise of its own for each purpose."""


class Engine:
    """Samples completions from one model's current weights."""

    def __init__(
        self,
        arch: Architecture,
        mesh: Mesh,
        *,
        compute_dtype: str,
        config: SampleConfig,
        max_prompt: int,
        max_response: int,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] | None = None,
    ):
        """Work out the shapes; `compile` or the first use compiles the programs.

        Args:
            arch: the model's.
            mesh: from `sharding.make_mesh`.
            compute_dtype: of activations, matrix products, and the weights and caches they read.
            config: shapes; its distribution is for `Sampling.of`.
            max_prompt: tokens.
            max_response: tokens, the end-of-sequence token included.
            tokenizer: decodes the text of completions; without one they have none.
            eos_ids: ids that end a completion where `Sampling` says nothing else; by default the
                tokenizer's, or else the architecture's.

        Raises:
            ValueError: if the model has too few positions, or the buckets don't hold the longest.
        """
        if arch.max_positions and max_prompt + max_response > arch.max_positions:
            raise ValueError(
                f"prompts of {max_prompt} and responses of {max_response} tokens are longer than "
                f"the model's {arch.max_positions} positions; lower max_prompt or max_response"
            )
        self.max_prompt, self.max_response = max_prompt, max_response
        self.tokenizer = tokenizer
        if eos_ids is None:
            eos_ids = arch.eos_ids if tokenizer is None else tokenizer.eos_ids
        self.eos_ids = tuple(eos_ids)
        if len(self.eos_ids) > MAX_EOS:
            raise ValueError(f"{len(self.eos_ids)} end-of-sequence ids; at most {MAX_EOS} fit")
        self.programs = Programs(
            arch,
            mesh,
            compute=Compute(dtype=compute_dtype, attention=sharding.attention(mesh)),
            config=config,
            max_prompt=max_prompt,
            max_response=max_response,
        )
        self._weights: Params | None = None

    def compile(self) -> dict[str, int]:
        """Compile every program that any call of `generate` can need.

        Returns:
            Bytes on each device of every program, by name: arguments, results and scratch.
        """
        return self.programs.compile()

    def load(self, params: Params) -> None:
        """Take these parameters, in the trainer's layout, for the samples to come.

        What was loaded before is dropped first, so that its memory can be used.
        """
        self._weights = None
        self._weights = self.programs.separate(params)

    def unload(self) -> None:
        """Give the parameters' memory back until the next `load`."""
        self._weights = None

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return self.programs.compilations

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        step: int,
        stream: Literal["train", "evaluation"] = "train",
    ) -> Iterator[Finished]:
        """Sample all that is requested, yielding each completion as soon as it is known.

        While the caller deals with what was yielded, the device works on what is left.

        Args:
            requests: prompts, each with its number of samples.
            sampling: how.
            seed: the run's.
            step: of the run; the same seed, stream, step, problem and sample index give the same
                completion, whatever else is requested and on whatever mesh, up to the rounding
                of the logits.
            stream: evaluation has its own noise.

        Raises:
            ValueError: at once, if a prompt is empty or too long, an id is out of range, or the
                sampling asks for what this engine hasn't.
        """
        if self._weights is None:
            raise ValueError("the sampler has no weights; call load(params) before generate")
        self._check(requests, sampling)
        eos_ids = self.eos_ids if sampling.eos_ids is None else sampling.eos_ids
        session = Session(
            self.programs,
            self._weights,
            requests,
            sampling,
            eos_ids=eos_ids,
            limit=sampling.max_tokens or self.max_response,
            tokenizer=self.tokenizer,
            seed_3=np.array([seed & 0xFFFFFFFF, _STREAMS[stream], step], np.uint32),
        )
        return session.run()

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        for number, request in enumerate(requests):
            if not 1 <= len(request.prompt) <= self.max_prompt:
                raise ValueError(
                    f"request {number} (problem {request.problem}) has a prompt of "
                    f"{len(request.prompt)} tokens; allowed are 1 to max_prompt = {self.max_prompt}"
                )
            if not 0 <= request.problem < 2**32 or request.samples < 1:
                raise ValueError(
                    f"request {number} has problem id {request.problem} and {request.samples} "
                    "samples; an id is from 0 to 2 ** 32 - 1, and samples are 1 or more"
                )
        if (sampling.max_tokens or 1) > self.max_response:
            raise ValueError(
                f"max_tokens = {sampling.max_tokens} is more than this sampler has room for; at "
                f"most max_response = {self.max_response}"
            )
        if sampling.stop and self.tokenizer is None:
            raise ValueError(
                f"stop strings {list(sampling.stop)} need text; give the engine a tokenizer"
            )
