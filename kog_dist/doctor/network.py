"""Loopback connections, and the ports that the settings in the environment ask for."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from kog_dist.doctor.report import Finding, ok, problem, warning

_CONNECT_S = 5.0


def loopback() -> Iterator[Finding]:
    """A connection of this process with itself, through a port that the system picks."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_CONNECT_S)
            with socket.create_connection(server.getsockname()[:2], _CONNECT_S):
                server.accept()[0].close()
    except OSError as error:
        yield warning(f"TCP over 127.0.0.1 does not work ({error}), which --rpc-port and Ray need; bring the loopback device up")
    else:
        yield ok("TCP over 127.0.0.1 works")


def settings() -> Iterator[Finding]:
    """KOG_ variables: every one must be a setting, and the ports that they give must be free."""
    from kog_dist import config, env
    from kog_dist.errors import ConfigError

    given = env.kog_variables(os.environ)
    try:
        found = config.resolve({}, os.environ, None)
    except ConfigError as error:
        yield problem(f"{error}; kog-launch refuses to start until that is changed")
        return
    yield from map(warning, found.left_out)
    resolved = found.config
    if settings := sorted(env.variable(name) for name in given if name in config.SETTINGS):
        yield ok(f"settings from the environment: {', '.join(settings)}")
    ports = {name: getattr(resolved, name) for name in config.SETTINGS if name.endswith("port") and getattr(resolved, name)}
    for name, port in ports.items():
        user = listener(port)
        if user is None:
            yield ok(f"port {port} ({name}) is free", port=port)
        else:
            flag = config.flag_name(name)
            yield warning(f"port {port} ({name}) is taken by {user}; give another with {flag}, or {flag} 0 for any", port=port)


def listener(port: int) -> str | None:
    """Who listens on a TCP port, from the kernel's tables: nothing is sent to it."""
    import psutil  # type: ignore[import-untyped]

    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            if connection.pid is None:
                return "a process of another user"
            try:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
            except psutil.Error:
                return f"process {connection.pid}"
    return None
