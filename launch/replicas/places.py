"""Who runs the engines of a fleet: what a launcher needs to know of one replica, and replicas that are child launchers here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Protocol

from kog_dist import env
from kog_dist.config import LaunchConfig, flag_name
from kog_dist.errors import ConfigError
from kog_dist.hardware.selection import GpuRequest
from kog_dist.launch import local
from kog_dist.launch.liveness import Silence, Vigil
from kog_dist.launch.outcome import EXIT_OK, Outcome, signal_name
from kog_dist.rpc.transport import Access
from kog_dist.runtime.instance import instances_root

_MAX_INSTANCE = 36  # characters: `.r255` follows
_OF_THE_FLEET = {  # settings that concern all replicas together
    "replicas", "min_replicas", "max_replicas", "scale_down_after", "remote_replicas", "rpc_port", "rpc_host", "launcher",
    "ray_address", "instance", "log_dir", "gpus", "model", "http", "host", "port", "api_key", "api_key_file", "cors_origin",
    "share_prefixes", "http_socket", "log_format", "log_prompts", "unknown_fields", "quiet",
    "special_tokens_in_content",
    "reasoning_parser", "tool_parser", "served_model_name",
}  # fmt: skip


class Replica(Protocol):
    """One generation of one replica, from its start to its end. `close` ends what is left of it, at any moment."""

    @property
    def outcome(self) -> Outcome | None:
        """How it ended."""

    @property
    def access(self) -> Access | None:
        """How to reach it, once that is known."""

    @property
    def doing(self) -> str:
        """What its start waits for."""

    def poll(self) -> list[str]:
        """Take news in without waiting; returns lines for the user."""

    def wake_fds(self) -> list[int]:
        """Descriptors that become readable when `poll` may have something to do."""

    def begin_stop(self, *, drain: bool) -> None:
        """Let it finish what it has and stop, or stop at once; `poll` until there is an outcome."""

    def close(self) -> None:
        """Kill what still runs and give everything back. A second call does nothing."""


StartReplica = Callable[[str, int], Replica]  # name and generation; raises KogError


def replica_instance(fleet: str, name: str) -> str:
    """Instance name of a replica."""
    return f"{fleet}.{name}"


class LocalReplica:
    """A child `kog-launch`: a plain engine with an instance of its own, killed by the kernel when this process dies."""

    def __init__(
        self, settings: LaunchConfig, fleet: str, name: str, *, watch: Callable[[int], None], log_dir: Path | None
    ) -> None:
        """Start it; its logs go into a folder in `log_dir`. `watch` is told its pid. Raises LaunchError, ConfigError."""
        instance = replica_instance(fleet, name)
        arguments = replica_arguments(settings, instance, gpus_of_replica(settings, int(name.removeprefix("r"))))
        if log_dir is not None:
            arguments.append(f"--log-dir={log_dir / name}")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(env.PREFIX)} | {"NO_COLOR": "1"}
        self._child = local.spawn(f"replica {name}", "kog_dist.launch.cli", arguments, environment=environment, log_dir=log_dir)
        self._vigil = Vigil(self._child, settings.stall_timeout)
        self._silence: Silence | None = None
        watch(self._child.pid)
        self.outcome: Outcome | None = None
        self.access: Access | None = Access.from_folder(instances_root() / instance)
        self.doing = "starting"

    def poll(self) -> list[str]:
        """See `Replica`."""
        self._child.read_output()
        if self._silence is None and (silence := self._vigil.look()) is not None:
            self._silence = silence
            self._child.send(signal.SIGKILL)
        code = self._child.exit_code
        if code is None or self.outcome is not None:
            return []
        self._child.read_output()
        said = self._child.last_line().removeprefix("kog-launch: ")
        how = self._child.how_it_ended() if self._silence is None else f"{self._silence} and was killed"
        what = said if said and code > 0 else f"its launcher (pid {self._child.pid}) {how}"
        self.outcome = Outcome(
            abs(code), "replica_ended", None if code == EXIT_OK else what, pid=self._child.pid, signal=signal_name(code)
        )
        return []

    def wake_fds(self) -> list[int]:
        """See `Replica`."""
        return [fd for fd in (self._child.ended_fd, self._child.stderr_fd) if fd >= 0 and self._child.exit_code is None]

    def begin_stop(self, *, drain: bool) -> None:
        """See `Replica`."""
        self._child.send(signal.SIGTERM)
        if not drain:
            self._child.send(signal.SIGINT)  # the second signal says: at once

    def close(self) -> None:
        """See `Replica`."""
        self._child.send(signal.SIGKILL)
        self._child.process.wait()
        self._child.close()


def replica_arguments(settings: LaunchConfig, instance: str, gpus: str | None) -> list[str]:
    """The command line of a plain engine with these settings."""
    model = settings.model  # a folder, a file, or a name in the cache, which the engine finds itself
    arguments = [] if model is None else [str(Path(model).absolute()) if Path(model).exists() else model]
    arguments += ["--launcher=local", f"--instance={instance}", "--no-http"]
    arguments += [] if gpus is None else [f"--gpus={gpus}"]
    for field in fields(LaunchConfig):
        value = getattr(settings, field.name)
        if field.name in _OF_THE_FLEET or value == field.default:
            continue
        flag = flag_name(field.name)
        arguments.append((flag if value else f"--no-{flag[2:]}") if isinstance(value, bool) else f"{flag}={value}")
    return arguments


def check_replicas(settings: LaunchConfig) -> None:
    """Raises ConfigError for what no number of replicas can have."""
    if settings.instance is not None and len(settings.instance) > _MAX_INSTANCE:
        raise ConfigError(f"--instance {settings.instance!r} must have at most {_MAX_INSTANCE} characters with replicas")
    for replica_idx in range(settings.max_replicas or settings.replicas):
        gpus_of_replica(settings, replica_idx)


def gpus_of_replica(settings: LaunchConfig, replica_idx: int) -> str | None:
    """GPUs of a replica on this machine as its launcher is told, None for CPU ranks; no two replicas share one.

    A number counts for each replica, a list is divided among them. Raises ConfigError.
    """
    if settings.gpus is None and settings.device != "cuda":
        return None
    request = GpuRequest.parse(settings.gpus if settings.gpus is not None else str(settings.ranks or 1))
    if request.count is not None:
        names = [str(replica_idx * request.count + i) for i in range(request.count)]
    elif request.names:
        most = settings.max_replicas or settings.replicas
        share, rest = divmod(len(request.names), most)
        if rest or not share:
            raise ConfigError(f"{request.shown} has {len(request.names)} GPUs, which do not divide into {most} replicas")
        names = list(request.names[replica_idx * share : (replica_idx + 1) * share])
    else:
        raise ConfigError("--gpus all is for one engine; with replicas give the number of GPUs of each, or a list to divide")
    return ",".join(names) + ","
