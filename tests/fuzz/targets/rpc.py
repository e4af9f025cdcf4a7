"""RPC messages: one frame, from bytes to a request or an event."""

from __future__ import annotations

from kog_dist.rpc.messages import BadMessage, decode_event, decode_request, encode
from tests.fuzz.refusals import refused


def one_input(data: bytes) -> None:
    """What is accepted survives encoding; what is not is a BadMessage."""
    for decode in (decode_request, decode_event):
        with refused(BadMessage):
            message = decode(data)
            assert decode(encode(message)) == message
