"""The HTTP gateway of a launcher: its port from the first moment on, its process, and that process again when it was killed."""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kog_dist import env
from kog_dist.config import LaunchConfig
from kog_dist.gateway import bind
from kog_dist.gateway.args import GatewayArgs
from kog_dist.gateway.keys import keys_of, write_keys
from kog_dist.launch import local
from kog_dist.launch.detach import is_detached
from kog_dist.launch.events import is_terminal
from kog_dist.launch.liveness import WatchedChild
from kog_dist.launch.local import Child
from kog_dist.launch.outcome import EXIT_CANNOT_START, EXIT_RANK_DIED, Outcome, signal_name
from kog_dist.launch.restarts import RestartBudget
from kog_dist.records import dataclass
from kog_dist.runtime.http_file import HttpFile
from kog_dist.runtime.process_page import ProcessPage
from kog_dist.runtime.socket_file import SocketFile
from kog_dist.runtime.wait import Deadline

ROLE: Final = "gateway"
MODULE: Final = "kog_dist.gateway.process"
TERM_GRACE_S: Final = 0.5  # for its last bytes, once the engine is gone
_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class EngineOfGateway:
    """What a gateway serves, and where it finds it: the folder of an instance, or an access file that may come later."""

    model_folder: Path | None
    model_name: str
    instance_folder: Path
    key_file: Path | None = None


class HttpGateway:
    """One launcher's gateway. `open` before anything slow, `start` once there is a folder, `look` often, `stop` and `close`."""

    def __init__(self, settings: LaunchConfig, port: bind.HttpPort, keys: Sequence[str]) -> None:
        self._settings, self._port, self._keys = settings, port, keys
        self._restarts = RestartBudget()
        self._engine: EngineOfGateway | None = None
        self._log_dir: Path | None = None
        self._watched: WatchedChild | None = None
        self._is_stopping = False

    @classmethod
    def open(cls, settings: LaunchConfig) -> HttpGateway | None:
        """Take the port; None if the settings want no HTTP. Raises LaunchError naming who has the port, ConfigError."""
        if not settings.http:
            return None
        keys = _checked_keys(settings)
        if settings.http_socket is not None:
            return cls(settings, bind.listen_on_socket(settings.http_socket), keys)
        return cls(settings, bind.listen(settings.host, settings.port), keys)

    @staticmethod
    def check(settings: LaunchConfig) -> None:
        """Raise what `open` would, but not for a port or socket that is in use now. Takes nothing."""
        if not settings.http:
            return
        _checked_keys(settings)
        if settings.http_socket is not None:
            bind.check_socket(settings.http_socket)
        else:
            bind.check_address(settings.host, settings.port)

    @property
    def url(self) -> str:
        """Where the service is found."""
        return self._port.url

    @property
    def socket_file(self) -> SocketFile | None:
        """What the service listens on, where that is a file."""
        return self._port.file

    def is_ready(self) -> bool:
        """Whether it answers, and knows that the engine takes requests; what one before it has said does not count."""
        if self._engine is None or self._watched is None:
            return False
        said = HttpFile.read(self._engine.instance_folder)
        return said is not None and said.serves and said.pid == self._watched.child.pid

    def wake_fds(self) -> list[int]:
        """Descriptors that become readable when `look` may have something to do."""
        if self._watched is None or self._watched.child.exit_code is not None:
            return []
        child = self._watched.child
        return [fd for fd in (child.ended_fd, child.stderr_fd) if fd >= 0]

    # ---- its process ----
    def start(self, engine: EngineOfGateway, log_dir: Path | None) -> None:
        """Start the process. Raises LaunchError."""
        self._engine, self._log_dir, self._is_stopping = engine, log_dir, False
        self._watched = WatchedChild(functools.partial(self._spawn, engine), self._settings.stall_timeout)

    def _spawn(self, engine: EngineOfGateway, page: ProcessPage) -> Child:
        settings = self._settings
        key_fd = write_keys(self._keys)
        listen_fd = self._port.listener.fileno()
        terminal_fd = -1 if settings.quiet or is_detached() or not is_terminal("stdout") else os.dup(sys.stdout.fileno())
        try:
            arguments = GatewayArgs(
                listen_fd=listen_fd, host=self._port.host, key_fd=key_fd, instance_folder=str(engine.instance_folder),
                key_file=None if engine.key_file is None else str(engine.key_file),
                model=None if engine.model_folder is None else str(engine.model_folder), model_name=engine.model_name,
                quantize=settings.quantize, quantize_head=settings.quantize_head,
                served_names=settings.served_names, cors_origins=settings.cors_origins, drain_s=settings.shutdown_timeout,
                stall_s=settings.stall_timeout, log_format=settings.log_format, log_prompts=settings.log_prompts,
                page_fd=page.fd, unknown_fields=settings.unknown_fields, share_prefixes=settings.share_prefixes,
                special_tokens_in_content=settings.special_tokens_in_content, terminal_fd=terminal_fd, ends_with_engine=True,
                reasoning_parser=settings.reasoning_parser, tool_parser=settings.tool_parser,
            )  # fmt: skip
            return local.spawn(
                ROLE,
                MODULE,
                [arguments.to_json()],
                environment=env.child_environment(os.environ),
                log_dir=self._log_dir,
                pass_fds=[fd for fd in (listen_fd, key_fd, page.fd, terminal_fd) if fd >= 0],
            )
        finally:
            for fd in (key_fd, terminal_fd):
                if fd >= 0:
                    os.close(fd)

    def look(self, say: Callable[..., None], *, has_served: bool) -> Outcome | None:
        """Kill it if it is silent, and start it again if it has ended, a few times; an outcome when that is of no use.

        One that ends by itself before the engine `has_served` would do so again.
        """
        watched = self._watched
        if watched is None or self._engine is None:
            return None
        child = watched.child
        child.read_output()
        if watched.look() and self._is_stopping:
            say(f"the gateway (pid {child.pid}) {watched.silence} and was killed", error=True)
        code = child.exit_code
        if code is None or self._is_stopping:
            return None
        child.read_output()
        said = child.last_line().removeprefix(f"{ROLE}: ")
        why = said if said and code > 0 else f"it {watched.how_it_ended()}"
        pid = child.pid
        watched.kill()
        self._watched = None
        if not has_served and code >= 0:
            return Outcome(EXIT_CANNOT_START, "startup_failed", f"the gateway (pid {pid}) could not start: {why}", pid=pid)
        if not self._restarts.take():
            sentence = f"the gateway (pid {pid}) ended: {why}; it is not started again after {self._restarts}"
            exit_code = EXIT_RANK_DIED if has_served else EXIT_CANNOT_START
            return Outcome(exit_code, "gateway_died", sentence, pid=pid, signal=signal_name(code))
        say(f"the gateway (pid {pid}) ended: {why}; its clients have lost their requests, and it is started again", error=True)
        self.start(self._engine, self._log_dir)
        return None

    # ---- the end ----
    def begin_stop(self) -> None:
        """Let it finish what it has, and take nothing new. A second call means: at once."""
        self._is_stopping = True
        if self._watched is not None:
            self._watched.begin_stop()

    def close(self) -> None:
        """Give it a moment, less if it is stopped, then kill it; the port is free afterwards. A second call does nothing."""
        self.end_process()
        self._port.close()

    def end_process(self) -> None:
        """The same, but the port stays taken: whoever connects waits for the next process."""
        self._is_stopping = True
        deadline = Deadline.after(TERM_GRACE_S)
        if self._watched is not None:
            child = self._watched.child
            while child.exit_code is None and not deadline.expired():
                child.read_output()
                self._watched.look()
                select.select([child.ended_fd], [], [], _POLL_S)
            self._watched.kill()
            self._watched = None


def _checked_keys(settings: LaunchConfig) -> Sequence[str]:
    """The API keys, which are enough for the address. Raises ConfigError."""
    keys = keys_of(settings)
    if settings.http_socket is None:
        bind.check_exposure(settings.host, keys)
    return keys
