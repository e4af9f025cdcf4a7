"""The engine's end of RPC among clients that are one thread with it: nothing happens between two turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kog_dist.rpc.listener import Delivery, RpcListener
from kog_dist.rpc.messages import Alive, Request, Status, decode_event, encode
from kog_dist.rpc.paths import ACCESS_NAME
from kog_dist.rpc.transport import Access, open_dealer

WAIT_S = 10.0


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[RpcListener]:
    tmp_path.chmod(0o700)
    made = RpcListener(tmp_path, tcp_port=0)
    yield made
    made.close()


def received(listener: RpcListener) -> tuple[bytes, Request]:
    """The next message, which must be the only one."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := listener.receive(16)):
        assert time.monotonic() < deadline_s, "no message came"
    [message] = found
    return message


def test_a_tcp_client_cannot_take_the_name_of_another(listener: RpcListener, tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as local:
        local.linger = 0
        local.connect(Access.from_folder(tmp_path).address)
        local.send(encode(Status()))
        name, _ = received(listener)
        access = Access.from_file(tmp_path / ACCESS_NAME)
        with open_dealer(context, access) as remote:
            remote.setsockopt(zmq.IDENTITY, name)
            remote.connect(access.address)
            remote.send(encode(Status()))
            impostor, _ = received(listener)
            assert impostor != name
            assert listener.send(impostor, Alive("theirs", 1)) is Delivery.TAKEN
            assert remote.poll(WAIT_S * 1000)
            assert decode_event(remote.recv()) == Alive("theirs", 1)
            assert listener.send(name, Alive("ours", 1)) is Delivery.TAKEN
            assert local.poll(WAIT_S * 1000)
            assert decode_event(local.recv()) == Alive("ours", 1)
