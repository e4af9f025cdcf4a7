"""What the fake engine answers: a text cut into the tokens of a model, or the moment of each token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from kog_dist.decode.reported import TokenLogprobs
from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.runtime.ring import Finish, TokenEntry
from kog_dist.workers.coordinator.streams import TextDecoder

_LOGPROBS = (-0.105, -2.9, -4.6)  # 90 %, 5.5 % and 1 %; then ever less


class StampDecoder:
    """The text of each token is the moment at which it is sent: nanoseconds of CLOCK_MONOTONIC, and a space."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock

    def push(self, token_id: int) -> str:
        """The moment, whatever the token is."""
        return f"{self._clock()} "

    def flush(self) -> str:
        """Nothing is held back."""
        return ""

    def special_name(self, token_id: int) -> str:
        """No token is special."""
        return ""


class ReplayScript:
    """Token ids in the order in which they are sent, repeated from the beginning where an answer is longer."""

    def __init__(self, token_ids: Sequence[int], end_id: int | None, num_top: int = 0) -> None:
        """`end_id`: end token that follows the ids, unless a request ignores it; None: answers end by their length only.

        `num_top`: ids of the vocabulary that may be named as alternatives. Raises ConfigError if there are no ids.
        """
        if not token_ids:
            raise ConfigError("the text to replay has no tokens; give one that is not empty")
        self._token_ids, self._end_id, self._num_top = tuple(token_ids), end_id, num_top

    @classmethod
    def of_text(cls, text: str, tokenizer: Tokenizer) -> ReplayScript:
        """The text as its tokens, then the end token of the tokenizer if it has one."""
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return cls(token_ids, next(iter(tokenizer.eos_ids), None), tokenizer.num_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def entry(
        self, index: int, stamp_ns: int, *, max_tokens: int, ignore_eos: bool = False, num_logprobs: int | None = None
    ) -> TokenEntry:
        """Token `index` of an answer, as rank 0 would have put it into the ring."""
        end_id = self._end_id if index == len(self._token_ids) and not ignore_eos else None
        token_id = end_id if end_id is not None else self._token_ids[index % len(self._token_ids)]
        finish = Finish.STOP if end_id is not None else Finish.LENGTH if index + 1 == max_tokens else Finish.NONE
        logprobs = None if num_logprobs is None else self._logprobs(token_id, num_logprobs)
        return TokenEntry(1, index, token_id, stamp_ns, None, finish, logprobs)

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """Always the same made-up distribution: the token itself is the most likely, the ids after it are the next."""
        top_ids = tuple((token_id + i) % max(self._num_top, token_id + 1) for i in range(num_top))
        top = tuple(_LOGPROBS[i] if i < len(_LOGPROBS) else -4.0 - i for i in range(num_top))
        return TokenLogprobs(_LOGPROBS[0], top_ids, top)


def script_text(path: str | None) -> str:
    """The text of a file; without one, Python source that is part of this package. Raises ConfigError."""
    if path is None:
        return resources.files("kog_dist.rpc").joinpath("fields.py").read_text(encoding="utf-8")
    try:
        return read_text(Path(path))
    except OSError as error:
        raise ConfigError(f"--text {path} cannot be read as text: {error.strerror}") from None


def decoder_of(tokenizer: Tokenizer | None, prompt: Sequence[int], *, stamps: bool) -> TextDecoder | None:
    """How the tokens of one answer become text."""
    if stamps:
        return StampDecoder()
    return None if tokenizer is None else tokenizer.stream(after=prompt)
