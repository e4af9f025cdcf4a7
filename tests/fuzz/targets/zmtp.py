"""ZMTP: a stream of bytes, in pieces, through the receiving half of a connection."""

from __future__ import annotations

from kog_dist.errors import ProtocolError
from kog_dist.rpc.zmtp import DEALER, ROUTER, Wire, ZmtpMessage
from tests.fuzz.refusals import refused

_MAX_BYTES = 1 << 16
_MANY = 1 << 16


def one_input(data: bytes) -> None:
    """The first byte says how long the pieces are. Messages are bounded, no call is endless, and pieces make no difference."""
    if not data:
        return
    for socket_type in (ROUTER, DEALER):
        assert _heard(socket_type, data[1:], 1 + data[0]) == _heard(socket_type, data[1:], len(data))


def _heard(socket_type: bytes, data: bytes, piece_bytes: int) -> list[ZmtpMessage]:
    wire, heard = Wire(socket_type, _MAX_BYTES), list[ZmtpMessage]()
    with refused(ProtocolError):
        for begin in range(0, len(data), piece_bytes):
            wire.feed(data[begin : begin + piece_bytes])
            for _ in range(_MANY):
                message = wire.next()
                if message is not None:
                    assert message.num_bytes <= _MAX_BYTES
                    heard.append(message)
                elif not wire.is_paused:
                    break
            else:
                raise AssertionError("the messages of a piece have no end")
            assert wire.num_held <= _MAX_BYTES + 9 + piece_bytes
    return heard
