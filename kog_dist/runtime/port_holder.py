"""Which process listens on a port, for the message of the one that came second."""

from __future__ import annotations

import contextlib
from pathlib import Path


def holder_of_port(port: int) -> str | None:
    """`process PID (COMMAND)` that listens on a TCP port, as far as this user may know; secrets of its command are left out."""
    import psutil  # type: ignore[import-untyped]  # only for this message

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return process_name(launcher_of(connection.pid))
    return None


def launcher_of(pid: int) -> int:
    """A gateway has its port from the launcher, which is the one to stop."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if b"kog_dist.gateway.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def process_name(pid: int) -> str:
    """`process PID (COMMAND)`, without what may not be shown of the command, or all of it where it cannot be read."""
    from kog_dist.runtime.command_line import command_of  # which imports all settings; rarely does anybody ask

    command = command_of(pid)
    return f"process {pid} ({command})" if command else f"process {pid}"
