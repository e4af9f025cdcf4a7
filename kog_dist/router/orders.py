"""What launcher and router tell each other: the whole state every time, so that what is late is made good by the next packet."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from typing import Any

from kog_dist.errors import LaunchError
from kog_dist.records import dataclass
from kog_dist.rpc.transport import Access

MAX_BYTES = 1 << 18  # of one packet: several hundred replicas


@dataclass(frozen=True, slots=True)
class ReplicaOrder:
    """A replica the router shall use. A new generation under an old name is another engine: its caches and links are new."""

    name: str
    generation: int
    access: Access
    is_retiring: bool = False  # finish what it has, send it nothing new


@dataclass(frozen=True, slots=True)
class FleetOrder:
    """All replicas there are, and whether to drain."""

    replicas: tuple[ReplicaOrder, ...] = ()
    is_draining: bool = False

    def to_bytes(self) -> bytes:
        """One packet."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, packet: bytes) -> FleetOrder:
        """The inverse of `to_bytes`. Raises LaunchError for anything else."""
        try:
            parsed: dict[str, Any] = json.loads(packet)
            replicas = tuple(ReplicaOrder(**{**item, "access": Access(**item["access"])}) for item in parsed["replicas"])
            return cls(replicas, bool(parsed["is_draining"]))
        except (ValueError, TypeError, KeyError) as error:
            raise LaunchError(f"the launcher's order cannot be read: {error}; use one kog_dist release") from None


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica as the router sees it. `state` is a LinkState; `reason` says why it is not in use."""

    name: str
    generation: int
    state: str
    reason: str
    num_running: int
    is_retiring: bool
    model: str = ""
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What the launcher decides upon: which replicas serve, and how many requests wait for one."""

    replicas: tuple[ReplicaReport, ...]
    num_waiting: int
    is_draining: bool
    address: str

    def to_bytes(self) -> bytes:
        """One packet."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, packet: bytes) -> FleetReport:
        """The inverse of `to_bytes`. Raises LaunchError for anything else."""
        try:
            parsed: dict[str, Any] = json.loads(packet)
            return cls(**{**parsed, "replicas": tuple(ReplicaReport(**item) for item in parsed["replicas"])})
        except (ValueError, TypeError, KeyError) as error:
            raise LaunchError(f"the router's report cannot be read: {error}; use one kog_dist release") from None


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep packets apart and never block: one for the launcher, one for the router."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    return ours, theirs


def latest_packet(end: socket.socket) -> bytes | None:
    """The newest packet that has come, None if there is none. Raises EOFError when the other side is gone."""
    newest = None
    while True:
        try:
            packet = end.recv(MAX_BYTES)
        except BlockingIOError:
            return newest
        except ConnectionError:
            packet = b""
        if not packet:
            raise EOFError
        newest = packet
