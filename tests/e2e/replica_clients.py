"""Many client streams at once, each judged at its end: complete and right, or ended by one clear error."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kog_dist.errors import RequestError, RequestFailed
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, Tokens
from kog_dist.rpc.transport import Access


@dataclass
class Stream:
    """One client, its connection and its one request."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    done: Done | None = None
    error: RequestError | RequestFailed | None = None
    has_begun: threading.Event = field(default_factory=threading.Event)
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def run(self, access: Access) -> None:
        try:
            with Client(access, connect_timeout_s=20.0) as client:
                events = client.generate(
                    prompt_ids=self.prompt_ids, max_tokens=self.max_tokens, ignore_eos=True, request_id=self.request_id
                )  # fmt: skip
                for event in events:
                    if isinstance(event, Tokens):
                        assert event.index == len(self.token_ids), "no token is lost or sent twice"
                        self.token_ids += event.token_ids
                        self.has_begun.set()
                    elif isinstance(event, Done):
                        self.done = event
        except (RequestError, RequestFailed) as error:
            self.error = error

    def answered(self, access: Access) -> bool:
        """Run it to its end; whether the answer is complete."""
        self.run(access)
        return self.is_complete()

    def is_complete(self) -> bool:
        return self.done is not None and self.error is None and len(self.token_ids) == self.max_tokens


class Crowd:
    """Streams in threads of their own."""

    def __init__(self, access: Access, streams: Sequence[Stream]) -> None:
        self.streams = streams
        self._threads = [threading.Thread(target=stream.run, args=(access,), daemon=True) for stream in streams]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a stream neither ended nor failed"


def replay(access: Access, stream: Stream) -> list[int]:
    """What the answer to a stream's request is."""
    again = Stream(stream.prompt_ids, stream.max_tokens)
    assert again.answered(access), again.error
    return again.token_ids
