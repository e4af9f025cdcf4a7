"""What the router process is told on its command line: one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kog_dist.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouterArgs:
    """Arguments of `python -m kog_dist.router.process`. The descriptors are inherited."""

    instance: str
    folder: str  # the instance folder
    lease_fd: int  # of the instance's lease
    orders_fd: int  # the router's end of the socket pair
    drain_s: float  # time for running requests after a stop was asked for
    rpc_port: int | None = None  # TCP port besides the socket file; 0: a free one
    rpc_host: str = "127.0.0.1"
    page_fd: int = -1  # of its ProcessPage; -1: nobody watches it, and every SIGTERM is meant

    def to_json(self) -> str:
        """One line for the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RouterArgs:
        """The inverse of `to_json`. Raises ConfigError."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the router's argument is not what this release understands: {error}") from None
