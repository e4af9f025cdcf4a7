"""Which process listens on a port, for the message of the one that came second."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_SHOWN = 120  # characters of a command line
_SECRET = re.compile(r"(--api-key)[ =]\S+")


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
    """`process PID (COMMAND)`, the command on one line, and left out where it cannot be read."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        arguments = ""
    command = " ".join("".join(one if one.isprintable() else " " for one in arguments).split())
    command = _SECRET.sub(r"\1 ...", command)
    return f"process {pid} ({command[:_SHOWN]})" if command else f"process {pid}"
