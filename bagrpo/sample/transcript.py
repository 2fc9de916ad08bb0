"""One completion while it is sampled: ids and log-probs as they come, and its text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from bagrpo.records import Completion
from bagrpo.text.tokenizer import Tokenizer


class Transcript:
    """Collects a completion and notices when it ends."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, stop: Sequence[str], eos_ids: Collection[int]
    ):
        """Start a completion.

        Args:
            tokenizer: decodes the text; without one it stays empty.
            stop: strings that end it; they need a tokenizer.
            eos_ids: ids that end it.
        """
        self._tokenizer, self._stop, self._eos_ids = tokenizer, stop, eos_ids
        self._stream = tokenizer.stream() if tokenizer is not None and stop else None
        self._tokens: list[int] = []
        self._logps: list[float] = []
        self._text = ""
        self.finish: Literal["stop"] | None = None
        """Set when an end-of-sequence id or a stop string was sampled; the rest is ignored."""

    def feed(self, tokens: Sequence[int], logps: Sequence[float]) -> None:
        """Take in the next ids and their log-probs, those beyond its end excepted."""
        for token, logp in zip(tokens, logps, strict=True):
            if self.finish:
                return
            self._tokens.append(token)
            self._logps.append(logp)
            if token in self._eos_ids:
                self.finish = "stop"
            elif self._stream is not None:
                self._read(self._stream.feed([token]))

    def completion(self) -> Completion:
        """What was collected; `finish` is `length` unless it ended by itself."""
        text = self._text
        if self._stream is not None:
            # A character that a stop string cut off belongs to the string.
            text += "" if self._cut else self._stream.close()
        elif self._tokenizer is not None:
            ended = self._tokens[-1:] and self._tokens[-1] in self._eos_ids
            text = self._tokenizer.decode(self._tokens[:-1] if ended else self._tokens)
        return Completion(self._tokens, self._logps, self.finish or "length", text)

    _cut = False

    def _read(self, piece: str) -> None:
        """Append to the text, and cut it before the first stop string that this completes."""
        before, self._text = len(self._text), self._text + piece
        found = [self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop]
        if starts := [start for start in found if start >= 0]:
            self._text, self._cut, self.finish = self._text[: min(starts)], True, "stop"
