"""Bytes of a connection, through h11 with the bounds of this service."""

from __future__ import annotations

import contextlib

import h11

from kog_dist.gateway.limits import LIMITS
from kog_dist.gateway.protocol import BoundedConnection


def one_input(data: bytes) -> None:
    """Requests with few events for their bytes, or RemoteProtocolError."""
    connection, num_events = BoundedConnection(LIMITS), 0
    connection.receive_data(data)
    with contextlib.suppress(h11.RemoteProtocolError):
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            num_events += 1
            assert num_events <= LIMITS.small_chunks + len(data) // LIMITS.chunk_bytes + 8
            if isinstance(event, h11.ConnectionClosed):
                return
