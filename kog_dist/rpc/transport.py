"""Where an engine is found, and a client's socket for its TCP port. The other end is rpc/listener.py; clients use connection.py.

By default an engine listens on a Unix socket in its instance folder, which only its user may enter. A TCP port is opened on
request only, and then every connection must be encrypted (CURVE) with the one client key that the engine wrote into its folder.
"""

from __future__ import annotations

import os
import struct
from dataclasses import field
from pathlib import Path

import zmq
from zmq.utils import z85

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.foreign_file import opened, read_rest
from kog_dist.records import dataclass
from kog_dist.rpc.messages import MAX_MESSAGE_BYTES
from kog_dist.rpc.paths import ACCESS_NAME, SOCKET_NAME
from kog_dist.strict_json import parse_json

_MAX_ACCESS_BYTES, _MAX_ACCESS_ITEMS = 1 << 12, 16
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path that the kernel takes
PEER_HWM = 64  # messages that zmq itself queues per peer; an end of a client, to receive: any number
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 200, 800  # TCP only: a dead link is seen after about the sum of both
RECONNECT_MS = 20


# ---- where an engine is ----
@dataclass(frozen=True, slots=True)
class Access:
    """How to reach an engine: a zmq address, and for TCP the server's public key and the client's key pair (Z85)."""

    address: str
    server_public: str | None = None
    client_public: str | None = None
    client_secret: str | None = field(default=None, repr=False)

    @classmethod
    def from_folder(cls, folder: Path) -> Access:
        """The socket of the engine whose instance folder this is."""
        return cls(socket_address(folder))

    @classmethod
    def of_instance(cls, name: str) -> Access:
        """The socket of this user's engine of that name (`kog-launch --instance`). Raises ConfigError if it cannot be a name."""
        from kog_dist.runtime.instance import instances_root

        if not name or "/" in name or name.startswith("."):
            raise ConfigError(f"instance name {name!r} must be a name, not a path")
        return cls.from_folder(instances_root() / name)

    @classmethod
    def from_file(cls, path: Path) -> Access:
        """What an engine with a TCP port wrote. Raises LaunchError if the file is not that, or may be read by other users."""
        try:
            with opened(path) as stream:
                mode = os.fstat(stream.fileno()).st_mode
                parsed = parse_json(read_rest(stream, path, _MAX_ACCESS_BYTES), _MAX_ACCESS_ITEMS)
            access = cls(**_checked_access(parsed))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise LaunchError(f"{path} cannot be read as an engine's {ACCESS_NAME}: {why}") from None
        if mode & 0o077:
            raise LaunchError(f"{path} holds a secret key and other users may read it (mode {mode & 0o777:o}); chmod 600 it")
        return access


def _checked_access(parsed: object) -> dict[str, str]:
    """The values of an access file. Raises ValueError for what a file of an engine does not have."""
    names = list(Access.__slots__)
    if not isinstance(parsed, dict) or not set(parsed) <= set(names) or "address" not in parsed:
        raise ValueError(f"it must be an object with an address and keys ({', '.join(names)})")
    if not all(isinstance(value, str) for value in parsed.values()):
        raise ValueError("every value must be text")
    for name in names[1:]:
        if name in parsed and not _is_key(parsed[name]):
            raise ValueError(f"{name} is no key of 40 characters (Z85); it may be cut off")
    return parsed


def _is_key(value: str) -> bool:
    try:
        return len(z85.decode(value)) == 32
    except (ValueError, KeyError, struct.error):  # wrong length or not ASCII, no such digit, a group beyond 32 bits
        return False


def socket_address(folder: Path) -> str:
    """zmq address of the socket file in an instance folder. Raises LaunchError if the path is too long for the kernel."""
    path = folder / SOCKET_NAME
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH:
        raise LaunchError(
            f"the socket path {path} has {num_bytes} bytes, the system takes {MAX_SOCKET_PATH}; "
            "use a shorter folder or instance name"
        )
    return f"ipc://{path}"


# ---- client's side ----
def open_dealer(context: zmq.Context[zmq.Socket[bytes]], access: Access) -> zmq.Socket[bytes]:
    """A DEALER for an engine, encrypted for a TCP address, not connected yet. Raises LaunchError for keys that are none."""
    is_tcp = access.address.startswith("tcp://")
    if is_tcp and not (access.server_public and access.client_public and access.client_secret):
        raise LaunchError(f"{access.address} needs the keys of the engine's {ACCESS_NAME}")
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    dealer.setsockopt(zmq.SNDHWM, PEER_HWM)
    if not is_tcp:
        return dealer
    try:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, (access.server_public or "").encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, (access.client_public or "").encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, (access.client_secret or "").encode())
    except zmq.ZMQError:
        dealer.close()
        raise LaunchError(
            f"the keys given for {access.address} are no CURVE keys; take them from the engine's {ACCESS_NAME}"
        ) from None
    dealer.setsockopt(zmq.RCVHWM, 0)  # zmq takes everything at once, whenever the client reads it: see `set_heartbeats`
    set_heartbeats(dealer)
    return dealer


def set_heartbeats(end: zmq.Socket[bytes]) -> None:
    """Both ends of a TCP connection see a dead link after about HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS.

    An end that has room to send does by its pings: each wants an answer. One in the middle of a stream has none soon after
    the link died, so it sends no ping and nothing times out in zmq; the time to live in the other end's pings is no help,
    since zmq forgets it with whatever comes next, be it an answer to a ping. But what it has sent is not acknowledged, and
    that the kernel times (TCP_USER_TIMEOUT; zmq calls it TCP_MAXRT), from the first retransmission at 200 ms or so.

    The kernel does not ask why nothing moves: who takes nothing for so long is disconnected like a dead link. Hence a
    client's zmq has no limit of what it keeps for its reader. With a limit it would stop reading there, hear no answers to
    its pings and disconnect, or abort the process (libzmq issues 3937 and 4364) if the engine is gone just then.
    """
    end.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    end.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    end.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)  # for ends of others, which may send no pings
    end.setsockopt(zmq.TCP_MAXRT, HEARTBEAT_TIMEOUT_MS)
