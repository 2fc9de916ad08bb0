"""Continuous batching: which sample runs in which slot, decided on the host.

The host fills free slots from the queue, starts the device on its next steps, hands out what
finished meanwhile, and waits for the device. All decisions follow from the requests and from small
replicated results, so every process of a multi-host run decides the same. None of them can change
a sample: its noise is keyed by seed, stream, step, problem, sample index and position alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bagrpo.models.params import Params
from bagrpo.records import Completion
from bagrpo.sample.decode import Limits, Sampled
from bagrpo.sample.draw import Shape
from bagrpo.sample.programs import Programs
from bagrpo.sample.request import MAX_EOS, Request, Sampling
from bagrpo.sample.slots import Entrants
from bagrpo.sample.transcript import Transcript
from bagrpo.text.tokenizer import Tokenizer

Finished = tuple[int, int, Completion]
"""Index of the request, index of the sample, and what was sampled."""


@dataclasses.dataclass
class _Row:
    """A slot's occupant."""

    request: int
    sample: int
    transcript: Transcript
    length: int
    """Tokens of prompt and response so far."""
    left: int
    """Tokens that it may still sample."""


class Session:
    """One call of `generate`."""

    def __init__(
        self,
        programs: Programs,
        weights: Params,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        eos_ids: Sequence[int],
        limit: int,
        tokenizer: Tokenizer | None,
        seed_3: np.ndarray,
    ):
        """Queue the requests.

        Args:
            programs: of the model.
            weights: with separate layers.
            requests: checked already.
            sampling: how.
            eos_ids: ids that end a completion.
            limit: tokens of a completion.
            tokenizer: for text, if it is wanted.
            seed_3: uint32 run seed, stream and step.
        """
        self.programs, self.weights, self.requests = programs, weights, requests
        self.eos_ids, self.limit, self.tokenizer = frozenset(eos_ids), limit, tokenizer
        self.stop, self.seed_3 = sampling.stop, seed_3
        self.shape = Shape(
            _host(sampling.temperature, np.float32),
            _host(sampling.top_k or 0, np.int32),
            _host(sampling.top_p, np.float32),
            _host(sampling.min_p, np.float32),
        )
        padded = [*eos_ids, *[-1] * (MAX_EOS - len(eos_ids))]
        self.eos_E = _host(padded, np.int32)
        self.queue = [(r, g) for r, request in enumerate(requests) for g in range(request.samples)]
        self.queue.reverse()  # the next is the last
        self.prefilled: Any = None
        """Cache of the prompts prefilled last."""
        self.sources: dict[int, int] = {}
        """Row of each of them in it, by request."""

    def run(self) -> Iterator[Finished]:
        """Sample everything."""
        wanted, sizes = len(self.queue), self.programs.slots
        self.rows: list[_Row | None] = [None] * next((B for B in sizes if wanted <= B), sizes[-1])
        self.positions = self.programs.positions[0]
        self.slots: Any = self.programs.run(("empty", len(self.rows)))
        finished: list[Finished] = []
        while self.queue or any(self.rows):
            entrants = self._assign()
            self._resize()
            self._admit(entrants)
            if not self.queue:
                self.prefilled = None
            sampled = self._decode()
            yield from finished  # The device is at work meanwhile.
            finished = self._collect(jax.device_get(sampled))
        self.slots = None  # The caller may hold on to what it iterates.
        yield from finished

    def _assign(self) -> list[int]:
        """Give free slots to samples from the queue; returns the slots, in the queue's order."""
        free = [b for b, row in enumerate(self.rows) if row is None][: len(self.queue)]
        for b in free:
            request, sample = self.queue.pop()
            self.rows[b] = _Row(
                request,
                sample,
                Transcript(self.tokenizer, stop=self.stop, eos_ids=self.eos_ids),
                length=len(self.requests[request].prompt),
                left=self.limit,
            )
        return free

    def _resize(self) -> None:
        """Go to the fewest rows and cache positions that hold the completions under way."""
        while not self.queue and self._shrink():
            pass

        steps = self.programs.steps
        need = max(row.length - 1 + min(steps, row.left) for row in self.rows if row is not None)
        sizes = self.programs.positions
        target = next(S for S in sizes if need <= S)
        while self.positions != target:
            toward = 1 if target > self.positions else -1
            to = sizes[sizes.index(self.positions) + toward]
            key = "stretch", len(self.rows), self.positions, to
            self.slots = self.programs.run(key, self.slots)
            self.positions = to

    def _shrink(self) -> bool:
        """Go down to the next smaller number of rows, if on every device so few are under way."""
        to, shards = self._fewer_rows(), self.programs.shards
        have, width = len(self.rows) // shards, to // shards
        parts = [self.rows[i : i + have] for i in range(0, len(self.rows), have)]
        live = [[b for b, row in enumerate(part) if row is not None] for part in parts]
        if not to or max(map(len, live)) > width:
            return False
        # Where nobody is, nothing is decoded: any row will do.
        places = [b for kept in live for b in [*kept, *[0] * (width - len(kept))]]
        key = "gather", len(self.rows), self.positions, to
        self.slots = self.programs.run(key, self.slots, _host(places, np.int32))
        self.rows = [
            row
            for part, kept in zip(parts, live, strict=True)
            for row in [*(part[b] for b in kept), *[None] * (width - len(kept))]
        ]
        return True

    def _fewer_rows(self) -> int:
        """The next smaller number of rows, 0 if there is none."""
        return max((B for B in self.programs.slots if len(self.rows) > B), default=0)

    def _admit(self, slots: Sequence[int]) -> None:
        """Start the samples newly assigned to these slots."""
        waiting = list(slots)
        while waiting:
            if self._row(waiting[0]).request not in self.sources:
                self._prefill(self._row(waiting[0]).request)
            batch = [b for b in waiting if self._row(b).request in self.sources]
            waiting = waiting[len(batch) :]
            self._enter(batch)

    def _prefill(self, first: int) -> None:
        """Keys and values of the prompts from this request on, each but for its last token."""
        P = self.programs.prefill_rows
        prompts = [request.prompt[:-1] for request in self.requests[first : first + P]]
        longest = max(map(len, prompts))
        T = next(T for T in self.programs.prompts if longest <= T)
        tokens_PT, length_P = np.zeros((P, T), np.int32), np.zeros(P, np.int32)
        for p, prompt in enumerate(prompts):
            tokens_PT[p, : len(prompt)] = prompt
            length_P[p] = len(prompt)
        self.sources = {first + p: p for p in range(len(prompts))}
        self.prefilled = None  # before its successor takes memory
        self.prefilled = self.programs.run(("prefill", T), self.weights, tokens_PT, length_P)
        self.prompt_positions = T

    def _enter(self, batch: Sequence[int]) -> None:
        """Copy prefilled prompts to these slots."""
        B = len(self.rows)
        fields: dict[str, Any] = {
            "row_B": np.full(B, B, np.int32),
            "source_B": np.zeros(B, np.int32),
            "token_B": np.zeros(B, np.int32),
            "position_B": np.zeros(B, np.int32),
            "left_B": np.zeros(B, np.int32),
            "problem_B": np.zeros(B, np.uint32),
            "sample_B": np.zeros(B, np.uint32),
        }
        for i, b in enumerate(batch):
            row = self._row(b)
            request = self.requests[row.request]
            fields["row_B"][i] = b
            fields["source_B"][i] = self.sources[row.request]
            fields["token_B"][i] = request.prompt[-1]
            fields["position_B"][i] = len(request.prompt) - 1
            fields["left_B"][i] = row.left
            fields["problem_B"][i] = request.problem
            fields["sample_B"][i] = row.sample
        entrants = Entrants(count=_host(len(batch), np.int32), **fields)
        key = "enter", B, self.positions, self.prompt_positions
        self.slots = self.programs.run(key, self.slots, self.prefilled, entrants, self.seed_3)

    def _decode(self) -> Sampled:
        """Start the device on its next steps."""
        alive_B = _host([row is not None for row in self.rows], bool)
        live = int(alive_B.sum())
        if self.queue:
            enough = max(0, live - self.programs.refill)
        else:
            enough = self._fewer_rows() if live > self._fewer_rows() else 0
        limits = Limits(self.eos_E, alive_B, _host(enough, np.int32))
        key = "decode", len(self.rows), self.positions
        self.slots, sampled = self.programs.run(key, self.weights, self.slots, self.shape, limits)
        return sampled

    def _collect(self, sampled: Sampled) -> list[Finished]:
        """Take in what the device sampled; returns what is finished and frees its slots."""
        finished: list[Finished] = []
        for b, row in enumerate(self.rows):
            if row is None:
                continue
            count = int(sampled.count_B[b])
            tokens, logps = sampled.token_IB[:count, b], sampled.logp_IB[:count, b]
            row.transcript.feed(tokens.tolist(), logps.tolist())
            row.length += count
            row.left = int(sampled.left_B[b])
            if row.transcript.finish or not row.left:
                finished.append((row.request, row.sample, row.transcript.completion()))
                self.rows[b] = None
        return finished

    def _row(self, b: int) -> _Row:
        row = self.rows[b]
        assert row is not None
        return row


def _host(value: Any, dtype: Any) -> Any:
    """An array of the host's, for a program that takes it to the devices."""
    return np.asarray(value, dtype)
