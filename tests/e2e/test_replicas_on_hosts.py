"""Hosts of their own: network namespaces with a cable between them, which is pulled. No Ray; nothing closes a connection.

The promise: both sides of a link know within 1.5 s that it is down, clients have one clear error, engines are free again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.rpc.client import Client
from kog_dist.rpc.paths import ACCESS_NAME
from kog_dist.rpc.transport import Access
from tests.e2e.conftest import NUM_ENDLESS
from tests.patience import in_time, slowness

pytestmark = pytest.mark.alone
PARTITION_S = 1.5
READY_S = 20.0
STREAM = ("--prompt-ids=1,2,3", f"--max-tokens={NUM_ENDLESS}", "--ignore-eos")


class Hosts:
    """Two hosts, `a` and `b`, and a cable between them."""

    def __init__(self) -> None:
        mark = f"kog{os.getpid()}"
        self.names = {"a": f"{mark}a", "b": f"{mark}b"}
        self.addresses = {"a": "10.213.0.1", "b": "10.213.0.2"}
        _ip("link", "add", f"{mark}0", "type", "veth", "peer", "name", f"{mark}1")
        for host, cable in (("a", f"{mark}0"), ("b", f"{mark}1")):
            name = self.names[host]
            _ip("netns", "add", name)
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "link", "set", cable, "name", "eth0")
            _ip("-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def start(self, session: EngineSession, host: str, module: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `python -m module arguments` on a host."""
        before, session.starter = session.starter, ("ip", "netns", "exec", self.names[host])
        try:
            return session.start(module, arguments, name)
        finally:
            session.starter = before

    def pull_cable(self) -> float:
        """Take the link down; returns the moment."""
        _ip("-n", self.names["b"], "link", "set", "eth0", "down")
        return time.monotonic()

    def plug_in(self) -> None:
        _ip("-n", self.names["b"], "link", "set", "eth0", "up")

    def remove(self) -> None:
        for name in self.names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2) for network namespaces")
    if os.geteuid() != 0:
        pytest.skip("needs root for network namespaces")
    try:
        made = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
    try:
        yield made
    finally:
        made.remove()


def instance(session: EngineSession, name: str) -> Path:
    return session.folder / "kog" / name


def start_engine(session: EngineSession, hosts: Hosts, model: Path, host: str, name: str) -> Path:
    """An engine on a host, reachable from the other one; returns the access file that its user would carry there."""
    address = hosts.addresses[host]
    arguments = [str(model), "--ranks=1", f"--instance={name}", f"--rpc-host={address}", "--rpc-port=0", "--stall-timeout=10"]
    hosts.start(session, host, "kog_dist.launch.cli", name, *arguments)
    until(lambda: "ready after" in session.output(name, "out"), READY_S, lambda: session.output(name))
    return instance(session, name) / ACCESS_NAME


def seconds_until(begin_s: float, condition: Callable[[], object], failure: Callable[[], str]) -> float:
    until(condition, (PARTITION_S + 5.0) * slowness(), failure)
    return time.monotonic() - begin_s


def test_cable_between_engine_and_client_is_pulled(session: EngineSession, tiny_model: Path, hosts: Hosts) -> None:
    key_file = start_engine(session, hosts, tiny_model, "b", "far")
    with Client(Access.from_folder(instance(session, "far"))) as local:  # through the file system, past the network
        arguments = ["generate", f"--key-file={key_file}", *STREAM]
        client = hosts.start(session, "a", "kog_dist.rpc.cli", "client", *arguments)
        until(lambda: len(session.output("client", "out").split()) > 5, READY_S, lambda: session.output("client"))
        pulled_s = hosts.pull_cable()
        engine_s = seconds_until(pulled_s, lambda: local.status().running is None, lambda: "the engine still runs the request")
        client.wait(READY_S)
        client_s = time.monotonic() - pulled_s
        assert client.returncode == 4
        assert session.output("client").startswith("kog-client: engine_lost: the engine at tcp://10.213.0.2:")
        assert session.output("client").count("\n") == 1
        assert local.status().num_dropped_clients == 1
        assert in_time(engine_s, PARTITION_S), f"the engine noticed after {engine_s:.2f} s"
        assert in_time(client_s, PARTITION_S + 0.3), f"the client had ended {client_s:.2f} s after"  # its interpreter ends, too
        hosts.plug_in()
        again = hosts.start(
            session, "a", "kog_dist.rpc.cli", "again", "generate", f"--key-file={key_file}", "--prompt-ids=1", "--max-tokens=3"
        )
        assert again.wait(READY_S) == 0, session.output("again")
    print(f"\nlink down: engine {engine_s:.2f} s, client (ended) {client_s:.2f} s")


def test_a_client_stopped_in_the_middle_of_a_stream_is_lost(session: EngineSession, tiny_model: Path, hosts: Hosts) -> None:
    """As if its cable had been pulled, though its kernel still acknowledges what it can keep."""
    key_file = start_engine(session, hosts, tiny_model, "b", "far")
    with Client(Access.from_folder(instance(session, "far"))) as local:
        arguments = ["generate", f"--key-file={key_file}", *STREAM]
        client = hosts.start(session, "a", "kog_dist.rpc.cli", "client", *arguments)
        until(lambda: len(session.output("client", "out").split()) > 5, READY_S, lambda: session.output("client"))
        stopped_s = time.monotonic()
        client.send_signal(signal.SIGSTOP)
        engine_s = seconds_until(stopped_s, lambda: local.status().running is None, lambda: "the engine still runs the request")
        client.send_signal(signal.SIGCONT)
        assert client.wait(READY_S) == 4
        assert session.output("client").startswith("kog-client: engine_lost: the engine at tcp://10.213.0.2:")
        assert local.status().num_dropped_clients == 1
        assert in_time(engine_s, PARTITION_S), f"the engine noticed after {engine_s:.2f} s"
    print(f"\nclient stopped: engine {engine_s:.2f} s")


def test_cable_between_router_and_engine_is_pulled(session: EngineSession, tiny_model: Path, hosts: Hosts) -> None:
    files = [str(start_engine(session, hosts, tiny_model, host, name)) for host, name in (("a", "near"), ("b", "far"))]
    arguments = ["--replicas=0", f"--remote-replicas={','.join(files)}", "--instance=front"]
    hosts.start(session, "a", "kog_dist.launch.cli", "front", *arguments)
    front = Access.from_folder(instance(session, "front"))
    with Client(front, connect_timeout_s=READY_S, patient=True) as router:
        until(lambda: router.status().replica_states == ("ready", "ready"), READY_S, lambda: f"{router.status()}")
        streams = [
            hosts.start(session, "a", "kog_dist.rpc.cli", f"s{i}", "generate", "--instance=front", *STREAM) for i in (0, 1)
        ]
        for i in (0, 1):
            until(lambda i=i: len(session.output(f"s{i}", "out").split()) > 5, READY_S, lambda: f"{router.status()}")  # type: ignore[misc]
        with Client(Access.from_folder(instance(session, "far"))) as far:
            pulled_s = hosts.pull_cable()
            engine_s = seconds_until(pulled_s, lambda: far.status().running is None, lambda: "the engine still runs it")
        router_s = seconds_until(
            pulled_s, lambda: router.status().replica_states[1].startswith("lost"), lambda: f"{router.status().replica_states}"
        )
        until(lambda: any(stream.poll() is not None for stream in streams), READY_S, lambda: "no client has ended")
        client_s = time.monotonic() - pulled_s
        (lost,) = [i for i in (0, 1) if streams[i].poll() is not None]
        assert streams[lost].returncode == 4
        assert session.output(f"s{lost}") == (
            "kog-client: engine_lost: replica x1 was lost in the middle of the answer (the connection closed); "
            "send the request again\n"
        )
        assert in_time(engine_s, PARTITION_S), f"the engine noticed after {engine_s:.2f} s"
        assert in_time(router_s, PARTITION_S), f"the router noticed after {router_s:.2f} s"
        assert in_time(client_s, PARTITION_S + 0.3), f"the client had ended {client_s:.2f} s after"
        assert streams[1 - lost].poll() is None, "the other stream goes on"
        hosts.plug_in()
        until(lambda: router.status().replica_states == ("ready", "ready"), READY_S, lambda: f"{router.status()}")
    print(f"\nlink down: engine {engine_s:.2f} s, router {router_s:.2f} s, client (ended) {client_s:.2f} s")
