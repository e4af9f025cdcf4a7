"""The coordinator among peers that send nonsense, do not read, are not allowed, or hold its address."""

from __future__ import annotations

import dataclasses
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kog_dist.errors import LaunchError, ProtocolError, RequestFailed
from kog_dist.rpc.client import Client
from kog_dist.rpc.listener import RpcListener
from kog_dist.rpc.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Done,
    Error,
    Event,
    Hello,
    Tokens,
    Welcome,
    decode_event,
    encode,
)
from kog_dist.rpc.paths import ACCESS_NAME, SOCKET_NAME
from kog_dist.rpc.transport import Access

StartEngine = Callable[..., Any]  # the FakeEngine of conftest.py
PATIENCE_MS = 20_000
HEAD = b"KOG" + bytes((PROTOCOL_VERSION,))


@contextmanager
def raw_socket(address: str, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER with which anything can be sent."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        for name, value in options.items():
            dealer.setsockopt(getattr(zmq, name), value)
        dealer.connect(address)
        yield dealer


def receive(dealer: zmq.Socket[bytes]) -> Event:
    assert dealer.poll(PATIENCE_MS), "no answer came"
    return decode_event(dealer.recv())


def packed(tag: Any, body: Any) -> bytes:
    return HEAD + bytes(msgpack.packb([tag, body]))


BAD_MESSAGES = {
    "empty": b"",
    "not the protocol": b"GET / HTTP/1.1\r\n",
    "magic only": b"KOG",
    "nothing after the head": HEAD,
    "not msgpack": HEAD + b"\xc1",
    "two values": packed("status", {}) + b"\x01",
    "no array": HEAD + bytes(msgpack.packb({"tag": "status"})),
    "unknown tag": packed("shutdown", {}),
    "an event": packed("welcome", {}),
    "tag is no text": packed(7, {}),
    "fields are no map": packed("status", [1]),
    "keys are no text": packed("status", {b"a": 1}),
    "unknown field": packed("status", {"verbose": True}),
    "missing field": packed("cancel", {}),
    "wrong type": packed("generate", {"request_id": "a", "prompt": 5}),
    "bool for int": packed("generate", {"request_id": "a", "prompt": "x", "seed": True}),
    "NaN": packed("generate", {"request_id": "a", "prompt": "x", "seed": float("nan")}),
    "bytes for text": packed("generate", {"request_id": "a", "prompt": b"x"}),
    "bad id": packed("generate", {"request_id": "../a", "prompt": "x"}),
    "extension type": HEAD + b"\x92\xa6status\x81\xa1a\xd4\x01\x00",
    "field twice": HEAD + b"\x92\xa6cancel\x82\xaarequest_id\xa1a\xaarequest_id\xa1b",
    "deep nesting": HEAD + b"\x91" * 100_000,
    "many empty maps": HEAD + b"\x92\xa6status\xdc\xff\xff" + b"\x80" * 0xFFFF,
    "length that lies": HEAD + b"\xdd\xff\xff\xff\xff",
    "text that is no UTF-8": HEAD + b"\x92\xa2\xff\xfe\x80",
}


def test_bad_messages_are_answered_and_harm_nobody(start_engine: StartEngine) -> None:
    engine = start_engine("still here")
    with raw_socket(engine.access.address) as dealer:
        for what, frame in BAD_MESSAGES.items():
            dealer.send(frame)
            event = receive(dealer)
            assert isinstance(event, Error), what
            assert event.code == "protocol_error", what
    with engine.client() as client:
        assert client.status().num_bad_messages == len(BAD_MESSAGES)
        assert "".join(e.text for e in client.generate("x", max_tokens=10) if isinstance(e, Tokens)) == "still here"


def test_the_answer_to_a_bad_request_names_the_request(start_engine: StartEngine) -> None:
    engine = start_engine()
    with raw_socket(engine.access.address) as dealer:
        dealer.send(packed("generate", {"request_id": "r-1", "prompt": "x", "num_beams": 5}))
        event = receive(dealer)
        assert isinstance(event, Error)
        assert (event.request_id, "num_beams" in event.message) == ("r-1", True)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 255])
def test_another_protocol_version_is_told_both(start_engine: StartEngine, version: int) -> None:
    engine = start_engine()
    with raw_socket(engine.access.address) as dealer:
        dealer.send(b"KOG" + bytes((version,)) + encode(Hello())[4:])
        event = receive(dealer)
        assert isinstance(event, Error)
        assert event.code == "protocol_version"
        assert f"version {version}" in event.message
        assert f"version {PROTOCOL_VERSION}" in event.message


@pytest.mark.parametrize(
    "parts",
    [[b""] * 64, [b"", encode(Hello())], [encode(Hello())] * 2, [b"x" * (MAX_MESSAGE_BYTES // 8)] * 8],
    ids=lambda p: str(len(p)),
)
def test_messages_of_many_parts_are_refused(start_engine: StartEngine, parts: list[bytes]) -> None:
    engine = start_engine()
    with raw_socket(engine.access.address) as dealer:
        dealer.send_multipart(parts)
        event = receive(dealer)
        assert isinstance(event, Error)
        assert f"got {len(parts)} frames" in event.message
        dealer.send(encode(Hello()))
        assert isinstance(receive(dealer), Welcome)


@pytest.mark.parametrize(
    "parts",
    [[b"x" * (MAX_MESSAGE_BYTES + 1)], [b"x" * MAX_MESSAGE_BYTES, b"x"], [b""] * 65],
    ids=["one frame", "all frames", "many frames"],
)
def test_a_message_over_the_limit_costs_its_sender_the_connection(start_engine: StartEngine, parts: list[bytes]) -> None:
    engine = start_engine()
    with raw_socket(engine.access.address) as dealer, dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        dealer.send_multipart(parts)
        assert monitor.poll(PATIENCE_MS)
        with engine.client() as client:
            assert client.welcome.instance == "test"
        dealer.disable_monitor()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=200) | st.binary(max_size=200).map(HEAD.__add__), min_size=1, max_size=4))
def test_any_bytes_get_an_answer(fuzzed: zmq.Socket[bytes], frames: list[bytes]) -> None:
    fuzzed.send_multipart(frames)
    fuzzed.send(encode(Hello()))
    events = [receive(fuzzed), receive(fuzzed)]
    assert isinstance(events[1], Welcome)


@pytest.fixture
def fuzzed(start_engine: StartEngine) -> Iterator[zmq.Socket[bytes]]:
    engine = start_engine()
    with raw_socket(engine.access.address) as dealer:
        yield dealer


def test_a_client_that_does_not_read_is_dropped_with_the_reason(start_engine: StartEngine) -> None:
    length = 30_000
    engine = start_engine("x", max_context=length + 1)
    with raw_socket(engine.access.address, RCVHWM=1, RCVBUF=4096) as dealer, engine.client() as client:
        dealer.send(packed("generate", {"request_id": "a", "prompt": "x", "max_tokens": length, "logit_digests": True}))
        engine.until(lambda: client.status().num_dropped_clients == 1)
        engine.until(lambda: engine.control.cancelled(1))
        assert "".join(e.text for e in client.generate("x", max_tokens=3) if isinstance(e, Tokens)) == "xxx"
        events = [receive(dealer)]
        while not isinstance(events[-1], Error | Done):
            events.append(receive(dealer))
        assert isinstance(events[-1], Error)
        assert (events[-1].code, events[-1].request_id) == ("slow_reader", "a")
        indices = [event.index for event in events if isinstance(event, Tokens)]
        counts = [len(event.token_ids) for event in events if isinstance(event, Tokens)]
        assert indices == [0, *itertools.accumulate(counts)][:-1], "what it got is a prefix of the answer"
        assert sum(counts) < length


def test_a_flood_of_nonsense_does_not_stop_the_others(start_engine: StartEngine) -> None:
    engine = start_engine("still here")
    with raw_socket(engine.access.address, SNDHWM=10_000) as dealer:
        for _ in range(5000):
            dealer.send(b"nonsense")
        with engine.client() as client:
            assert "".join(e.text for e in client.generate("x", max_tokens=10) if isinstance(e, Tokens)) == "still here"
            engine.until(lambda: client.status().num_bad_messages == 5000)


def test_a_client_that_reads_late_loses_nothing_within_the_buffer(start_engine: StartEngine) -> None:
    engine = start_engine("abcd", paced=True)
    with raw_socket(engine.access.address, RCVHWM=1) as dealer:
        dealer.send(packed("generate", {"request_id": "a", "prompt": "x", "max_tokens": 200}))
        engine.allow(200)
        with engine.client() as client:
            engine.until(lambda: client.status().num_completed == 1)
        events = [receive(dealer)]
        while not isinstance(events[-1], Error | Done):
            events.append(receive(dealer))
        assert isinstance(events[-1], Done)
        assert "".join(event.text for event in events if isinstance(event, Tokens)) == "abcd" * 50


# ---- addresses and keys ----
def test_tcp_takes_the_one_key_and_no_other(start_engine: StartEngine) -> None:
    engine = start_engine("over tcp", tcp_port=0)
    access_file = engine.folder / ACCESS_NAME
    assert stat.S_IMODE(access_file.stat().st_mode) == 0o600
    allowed = Access.from_file(access_file)
    assert allowed.address.startswith("tcp://127.0.0.1:")
    assert "secret" not in repr(allowed)
    with Client(allowed) as client:
        assert "".join(e.text for e in client.generate("x", max_tokens=8) if isinstance(e, Tokens)) == "over tcp"
    public, secret = zmq.curve_keypair()
    with pytest.raises(LaunchError, match="refuses this client's key"):
        Client(Access(allowed.address, allowed.server_public, public.decode(), secret.decode()))
    with pytest.raises(LaunchError, match="needs the keys"):
        Client(Access(allowed.address))
    with raw_socket(allowed.address) as dealer, dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
        dealer.send(encode(Hello()))  # without encryption
        assert dealer.poll(300) == 0
        assert monitor.poll(0) == 0
        dealer.disable_monitor()
    with engine.client() as client:
        assert client.status().num_bad_messages == 0


def test_a_wrong_server_key_is_not_called_a_missing_engine(start_engine: StartEngine) -> None:
    allowed = Access.from_file(start_engine(tcp_port=0).folder / ACCESS_NAME)
    other, _ = zmq.curve_keypair()
    with pytest.raises(LaunchError, match="during the handshake; the keys may be those of another engine"):
        Client(dataclasses.replace(allowed, server_public=other.decode()), connect_timeout_s=20)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "it must be an object with an address"),
        ("[1]", "it must be an object with an address"),
        ('{"address": "tcp://127.0.0.1:1", "port": "1"}', "it must be an object with an address"),
        ('{"address": 5}', "every value must be text"),
        ('{"address": "tcp://127.0.0.1:1", "client_secret": "short"}', "client_secret is no key of 40"),
        ('{"address": "tcp://127.0.0.1:1", "server_public": "%s"}' % ("#" * 40), "server_public is no key"),
        ("{", "Expecting"),
    ],
)
def test_a_damaged_access_file_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / ACCESS_NAME
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(LaunchError, match=words) as refused:
        Access.from_file(path)
    assert str(path) in str(refused.value)
    assert "__init__" not in str(refused.value)


def test_keys_that_are_none_are_refused() -> None:
    with pytest.raises(LaunchError, match="are no CURVE keys"):
        Client(Access("tcp://127.0.0.1:1", "short", "short", "short"))


def test_an_access_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ACCESS_NAME
    path.write_text('{"address": "tcp://127.0.0.1:1"}')
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="chmod 600"):
        Access.from_file(path)
    path.chmod(0o600)
    assert Access.from_file(path).address == "tcp://127.0.0.1:1"
    path.write_text('{"address": 5, "extra": 1}')
    with pytest.raises(LaunchError, match="cannot be read"):
        Access.from_file(path)


def test_a_port_in_use_names_its_holder(start_engine: StartEngine, tmp_path: Path) -> None:
    engine = start_engine(tcp_port=0)
    port = int(Access.from_file(engine.folder / ACCESS_NAME).address.rsplit(":", 1)[1])
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with pytest.raises(LaunchError, match=f"port {port}.*process {os.getpid()} "):
        RpcListener(other, tcp_port=port)
    assert list(other.iterdir()) == []


def test_a_socket_in_use_is_not_taken_away(start_engine: StartEngine) -> None:
    engine = start_engine()
    with pytest.raises(LaunchError, match=f"in use by process {os.getpid()} "):
        RpcListener(engine.folder)
    with engine.client() as client:
        assert client.welcome.instance == "test"


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / SOCKET_NAME).touch()
    listener = RpcListener(tmp_path)
    assert stat.S_IMODE((tmp_path / SOCKET_NAME).stat().st_mode) == 0o600
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(LaunchError, match="mode 0700"):
        RpcListener(tmp_path)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir(mode=0o700)
    with pytest.raises(LaunchError, match="107"):
        RpcListener(folder)


def test_no_engine_is_one_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no engine listens"):
        Client(Access.from_folder(tmp_path), connect_timeout_s=20)
    with pytest.raises(LaunchError, match="not an address"):
        Client(Access("nonsense://"))


def test_an_engine_of_another_version_is_one_error(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{tmp_path / SOCKET_NAME}")

        def answer() -> None:
            assert router.poll(PATIENCE_MS)
            peer, _ = router.recv_multipart()
            router.send_multipart([peer, b"KOG" + bytes((PROTOCOL_VERSION + 1,)) + encode(Hello())[4:]])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match=f"version {PROTOCOL_VERSION + 1}.*version {PROTOCOL_VERSION}"):
            Client(Access.from_folder(tmp_path))
        thread.join(20)


def test_an_engine_that_vanishes_is_one_error(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True, own_process=True)
    with engine.client() as client:
        events = client.generate("x", max_tokens=100)
        next(events)
        engine.signal_coordinator(9)
        with pytest.raises(RequestFailed) as lost:
            list(events)
        assert lost.value.code == "engine_lost"
