"""A TCP connection whose packets are lost ends soon; one whose client does not read goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import time
from collections.abc import Iterator

import pytest
import zmq

from kog_dist.rpc.file_port import Gone
from kog_dist.rpc.port_end import PortEnd, PortEvent
from kog_dist.rpc.tcp_port import TcpPort
from kog_dist.rpc.transport import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from tests.patience import in_time

WAIT_S = 10.0
NOTICED_S = 1.5  # the promise
TURN_S = 0.001
BODY, SEND_BUFFER_BYTES = b"x" * 1_000_000, 1 << 16  # zmq cannot send a ping while the kernel has no room for the whole body
SO_ATTACH_FILTER = 26  # of Linux; the module socket does not name it
BPF_RETURN = 6


@pytest.fixture
def port() -> Iterator[TcpPort]:
    made = TcpPort("127.0.0.1", 0, 1 << 20)
    yield made
    made.close(0.0)


@contextlib.contextmanager
def client_of(port: TcpPort, options: dict[int, int] | None = None) -> Iterator[tuple[PortEnd, bytes]]:
    """A client and its name at the port, which has had a message of it."""
    with zmq.Context() as context:
        client = PortEnd(context, port.access, options)
        try:
            client.send(b"here")
            deadline_s = time.monotonic() + WAIT_S
            while not (received := port.receive(16)):
                assert time.monotonic() < deadline_s, "the client did not come"
                select.select([], [], [], TURN_S)
            [(peer, _)] = received
            yield client, peer
        finally:
            client.close()


def pull_cable(port: TcpPort) -> float:
    """Lose all packets to both ends of the connection of a port from now on; returns the moment."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))  # keep 0 bytes of a packet
    set_on_both_ends(port, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(instruction)))
    return time.monotonic()


def set_on_both_ends(port: TcpPort, option: int, value: int | bytes) -> None:
    """Set an option on both sockets of the only connection of a port: both are in this process, and zmq hides them."""
    number, num_found = int(port.access.address.rpartition(":")[2]), 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:  # else no socket, or not connected
            if end.family is socket.AF_INET and number in (end.getsockname()[1], end.getpeername()[1]):
                end.setsockopt(socket.SOL_SOCKET, option, value)
                num_found += 1
    assert num_found == 2


def is_connected(port: TcpPort, peer: bytes) -> bool:
    port.receive(16)
    try:
        port.send(peer, b"")
    except Gone:
        return False
    return True


def test_an_engine_in_the_middle_of_a_stream_notices_a_dead_link(port: TcpPort) -> None:
    """Though zmq has no timer: the client's last word was no ping, and the engine cannot send one since its buffers are full."""
    with client_of(port, {int(zmq.HEARTBEAT_IVL): 0}) as (_, peer):
        set_on_both_ends(port, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        pulled_s = pull_cable(port)
        assert port.send(peer, BODY)
        while is_connected(port, peer):
            assert in_time(time.monotonic() - pulled_s, NOTICED_S), "the engine still streams"
            select.select([], [], [], TURN_S)


def test_an_idle_engine_and_its_client_notice_a_dead_link(port: TcpPort) -> None:
    with client_of(port) as (client, peer):
        pulled_s = pull_cable(port)
        while client.next_event(0.1) is not PortEvent.LOST:
            assert in_time(time.monotonic() - pulled_s, NOTICED_S), "the client still waits"
        while is_connected(port, peer):
            assert in_time(time.monotonic() - pulled_s, NOTICED_S), "the engine keeps the connection"
            select.select([], [], [], TURN_S)


def test_a_client_that_does_not_read_keeps_its_connection(port: TcpPort) -> None:
    num_messages = 5_000  # five times what zmq keeps for a reader unless told otherwise
    with client_of(port) as (client, peer):
        num_sent, deadline_s = 0, time.monotonic() + WAIT_S
        while num_sent < num_messages:
            assert time.monotonic() < deadline_s, "zmq does not take the messages"
            if port.send(peer, num_sent.to_bytes(4)):
                num_sent += 1
            else:
                select.select([], [], [], TURN_S)
        longer_than_any_heartbeat_s = time.monotonic() + 2 * (HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS) / 1000
        while (remaining_s := longer_than_any_heartbeat_s - time.monotonic()) > 0:
            assert client.next_event(remaining_s) is not PortEvent.LOST
        assert port.send(peer, b"last")
        frames: list[bytes] = []
        while len(frames) <= num_messages:
            assert client.sockets[0].poll(round(WAIT_S * 1000)), "what was sent did not come"
            frame = client.receive()
            assert frame is not None
            frames.append(frame)
    assert frames == [*(i.to_bytes(4) for i in range(num_messages)), b"last"]
