"""What the replies of APIs with one choice have in common, whatever form their answers have."""

from __future__ import annotations

from collections.abc import Sequence

from kog_dist.gateway.openai.errors import ApiError, cancelled, from_rpc
from kog_dist.gateway.openai.reply import StreamEvent
from kog_dist.gateway.openai.tools import ToolUse
from kog_dist.gateway.reading.deltas import Delta
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import Done, Error, FinishReason, Tokens


class OneChoiceReply:
    """The part of Reply that reads the answer. A subclass says what is sent."""

    def __init__(self, use: ToolUse, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], *, stream: bool) -> None:
        self.use, self.stream = use, stream
        self.satisfied: set[int] = set()
        self.is_over = False
        self._parser = use.parser(tokenizer, prompt_ids)
        self._done: Done | None = None
        self._error: ApiError | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """See Reply."""
        return self._parser.num_reasoning_tokens

    @property
    def num_calls(self) -> int:
        """See Reply."""
        return self._parser.num_calls

    def on_event(self, choice: int, event: StreamEvent) -> bytes:
        """See Reply."""
        if self.is_over:
            return b""
        if isinstance(event, Tokens):
            deltas = self._parser.push(event.token_ids, event.text)
            if self._parser.is_enough:
                self.satisfied.add(choice)
            return self._take(deltas)
        if isinstance(event, Done):
            if event.finish_reason is FinishReason.CANCELLED:
                return self.on_error(choice, cancelled())
            self._done = event
            return self._take(self._parser.finish()) + self._last()
        return b""

    def on_error(self, choice: int, error: Error | ApiError) -> bytes:
        """See Reply."""
        if self.is_over:
            return b""
        self.is_over = True
        self._error = from_rpc(error) if isinstance(error, Error) else error
        return self._failed(self._error) if self.stream else b""

    def _take(self, deltas: Sequence[Delta]) -> bytes:
        """What is sent of them."""
        raise NotImplementedError

    def _last(self) -> bytes:
        """What is sent behind the last of them."""
        return b""

    def _failed(self, error: ApiError) -> bytes:
        """What ends a stream."""
        raise NotImplementedError

    def _finished(self) -> Done:
        assert self._done is not None, "it is done before the end"
        return self._done
