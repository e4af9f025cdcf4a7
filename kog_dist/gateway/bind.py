"""The port of the HTTP service. It is bound before anything slow is begun, and passed on: whoever has it keeps it.

Used by the launcher, so it imports next to nothing.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.socket_file import SocketFile, check_file, listen_on_file

BACKLOG = 1024  # connections that wait while the gateway starts, or is started again
_SOCKET_FLAG = "--http-socket"
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


@dataclass(frozen=True, slots=True)
class HttpPort:
    """A listening socket and what was asked for. `close` ends this process's hold on it."""

    listener: socket.socket
    host: str  # empty for a socket file
    file: SocketFile | None = None

    @property
    def url(self) -> str:
        """Where the service is found, with the real port; an address that means all of them is shown as this machine's own."""
        return url_of(self.host, self.listener)

    def close(self) -> None:
        """Give the port up, as far as this process holds it; a socket file goes with it."""
        self.listener.close()
        if self.file is not None:
            self.file.remove()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address or name."""
    if host.lower() in _LOOPBACK_NAMES:
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def check_exposure(host: str, keys: Sequence[str]) -> None:
    """Raises ConfigError for an address that others can reach while nothing keeps them out."""
    if not is_loopback(host) and not keys:
        raise ConfigError(
            f"--host {host} lets other machines in, and there is no API key; give --api-key-file, KOG_API_KEY or --api-key, "
            "or leave --host at 127.0.0.1"
        )


def listen(host: str, port: int) -> HttpPort:
    """Bind and listen. Raises LaunchError that names the process that has the port, ConfigError for a host that is none."""
    try:
        listener = _bound(_resolve(host, port))
        try:
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise LaunchError(_why_not(host, port, error)) from None
    listener.setblocking(False)
    return HttpPort(listener, host.strip("[]"))


def check_address(host: str, port: int) -> None:
    """Raise what `listen` would, but not for a port that somebody listens on now. A socket that does not listen harms nobody."""
    try:
        _bound(_resolve(host, port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(_why_not(host, port, error)) from None


def check_socket(path: str) -> None:
    """Raise what `listen_on_socket` would, but not for a socket that somebody listens on now."""
    check_file(Path(path), _SOCKET_FLAG)


def listen_on_socket(path: str) -> HttpPort:
    """The same on a Unix socket, which only this user can reach. Raises LaunchError, ConfigError; see `listen_on_file`."""
    listener, file = listen_on_file(Path(path), _SOCKET_FLAG, BACKLOG)
    return HttpPort(listener, "", file)


def url_of(host: str, listener: socket.socket) -> str:
    """`http://HOST:PORT` of a listening socket, `unix:/PATH` of a file."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    port = listener.getsockname()[1]
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bound(address: tuple[socket.AddressFamily, Any]) -> socket.socket:
    bound = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a service that has ended do no harm
        if address[0] == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address[1])
    except OSError:
        bound.close()
        raise
    return bound


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, object]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is no address of this machine: {getattr(error, 'strerror', None) or error}") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # localhost: the address that every client tries
    return found[0][0], found[0][4]


def _why_not(host: str, port: int, error: OSError) -> str:
    by = ""
    if error.errno == errno.EADDRINUSE:
        from kog_dist.runtime.port_holder import holder_of_port

        holder = holder_of_port(port)
        by = f"; it is in use by {holder}" if holder else "; another process listens there"
    remedy = "choose another --port (--port 0 takes a free one), or serve RPC only with --no-http"
    if error.errno == errno.EADDRNOTAVAIL:
        remedy = "choose a --host that this machine has"
    return f"cannot listen on {host} port {port}: {error.strerror}{by}; {remedy}"
