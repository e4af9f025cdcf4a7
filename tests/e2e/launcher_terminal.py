"""`kog-launch` at a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sys
import termios

from kog_dist.bench.engine.session import EngineSession


class Terminal:
    """`kog-launch` at a terminal that stops background processes that write to it (`stty tostop`)."""

    def __init__(self, session: EngineSession, *arguments: str) -> None:
        command = [sys.executable, "-m", "kog_dist.launch.cli", *arguments]
        self._session, self._shown = session, bytearray()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            modes = termios.tcgetattr(0)
            modes[3] |= termios.TOSTOP
            termios.tcsetattr(0, termios.TCSANOW, modes)
            os.execvpe(command[0], command, session.environment())
        os.set_blocking(self._fd, False)

    def shown(self) -> str:
        """All that it has shown."""
        with contextlib.suppress(OSError):  # nothing there yet, or the terminal's other side is closed
            while chunk := os.read(self._fd, 65536):
                self._shown.extend(chunk)
        return self._shown.decode()

    def has_ended(self) -> bool:
        """Whether the launcher has."""
        self.shown()
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def close(self) -> int:
        """Kill what is left; the launcher's exit code."""
        for left in self._session.processes().values():
            os.kill(left, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.shown()
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)
