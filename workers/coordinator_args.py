"""What the coordinator process is told on its command line: one JSON object, checked field by field."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from kog_dist.errors import ConfigError

_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "int | None": (int, type(None)),
}


@dataclass(frozen=True, slots=True)
class CoordinatorArgs:
    """Arguments of `python -m kog_dist.workers.coordinator`. The descriptors are inherited."""

    instance: str
    folder: str  # the instance folder
    lease_fd: int  # of the instance's lease; -1: none, and then nothing but the sockets is removed
    control_fd: int
    model: str  # folder of the checkpoint
    model_name: str  # what users call it
    supervisor_pid: int
    drain_s: float  # time for the running request after a stop was asked for
    rpc_port: int | None = None  # TCP port besides the socket file; 0: a free one
    queue_limit: int = 64  # requests that may wait
    client_queue_limit: int = 16  # of them those of one connection
    rpc_host: str = "127.0.0.1"  # address of the TCP port
    rank_places: str = ""  # device and CPUs of each rank for `status`, a line each

    def to_json(self) -> str:
        """One line for the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CoordinatorArgs:
        """The inverse of `to_json`. Raises ConfigError naming what is missing, unknown or of another type."""
        try:
            values: Any = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the coordinator's argument is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"the coordinator's argument must be an object, got {type(values).__name__}")
        known = {item.name: item for item in fields(cls)}
        missing = [name for name, item in known.items() if item.default is MISSING and name not in values]
        for problem, names in (("unknown", set(values) - set(known)), ("missing", missing)):
            if names:
                raise ConfigError(f"the coordinator's argument has {problem} fields: {', '.join(sorted(names))}")
        for name, value in values.items():
            kind = str(known[name].type)
            if isinstance(value, bool) or not isinstance(value, _KINDS[kind]):
                raise ConfigError(f"the coordinator's argument {name} must be {kind}, got {value!r}")
        return cls(**values)
