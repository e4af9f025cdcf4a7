"""Log-probabilities of RPC events in the forms of the APIs."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from typing import Any

from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import PromptLogprobs, Tokens


class TokenNames:
    """Texts of token ids. A token without text (a special one, or a model without a tokenizer) is called `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        """What it stands for; none for a special token."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def decoder(self, *, is_beginning: bool) -> Callable[[int], str]:
        """Ids one by one to text; `is_beginning`: of a whole text, which some models begin with a blank that does not count."""
        if is_beginning and self._tokenizer is not None:
            return self._tokenizer.stream().push
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token_id: utf8.decode(self.bytes_of(token_id))

    def text_of(self, token_id: int) -> str:
        """For readers: bytes that are no whole character show as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace") or f"token_id:{token_id}"

    def exact(self, token_id: int) -> str:
        r"""Distinct for distinct bytes, as the legacy API has it: `bytes:\xe2\x82` where they are no whole characters."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8") or f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def entries(event: Tokens, names: TokenNames) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat, and `logprobs` of a response: one entry for each token of the event."""
    return [
        {**_entry(token_id, logprob, names), "top_logprobs": [_entry(other, value, names) for other, value in alternatives]}
        for token_id, logprob, alternatives in _tokens(event)
    ]


class LegacyLogprobs:
    """`logprobs` of a text completion. `text_offset` counts characters from the beginning of the answer, or of its prompt."""

    def __init__(self, names: TokenNames, *, has_prompt: bool = False) -> None:
        self._names = names
        self._decode = names.decoder(is_beginning=has_prompt)
        self._offset = 0

    def first(self, token_id: int) -> dict[str, list[object]]:
        """The entry of a prompt's first token."""
        self._offset += len(self._decode(token_id))
        return {"tokens": [self._names.exact(token_id)], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}

    def of(self, event: Tokens | PromptLogprobs) -> dict[str, list[Any]]:
        """The entries of this event's tokens, which follow those of the events before."""
        found: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprob, alternatives in _tokens(event):
            found["tokens"].append(self._names.exact(token_id))
            found["token_logprobs"].append(logprob)
            found["top_logprobs"].append({self._names.exact(other): value for other, value in alternatives})
            found["text_offset"].append(self._offset)
            self._offset += len(self._decode(token_id))
        return found


def to_json(value: object) -> bytes:
    """Compact JSON, ASCII."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, object]:
    raw = names.bytes_of(token_id)
    return {"token": names.text_of(token_id), "logprob": logprob, "bytes": list(raw) if raw else None}


def _tokens(event: Tokens | PromptLogprobs) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Each token with its log-probability and its alternatives, if the request asked for them."""
    if not event.logprobs:
        return
    num_top = len(event.top_ids) // len(event.token_ids)
    top = list(zip(event.top_ids, event.top_logprobs, strict=True))
    for place, (token_id, logprob) in enumerate(zip(event.token_ids, event.logprobs, strict=True)):
        yield token_id, logprob, top[place * num_top : (place + 1) * num_top]
