"""What the router process is told on its command line: one JSON object."""

from __future__ import annotations

from typing import ClassVar

from kog_dist.records import dataclass
from kog_dist.runtime.process_arguments import JsonArguments


@dataclass(frozen=True, slots=True)
class RouterArgs(JsonArguments):
    """Arguments of `python -m kog_dist.router.process`. The descriptors are inherited."""

    reader: ClassVar[str] = "router"

    instance: str
    folder: str  # the instance folder
    lease_fd: int  # of the instance's lease
    orders_fd: int  # the router's end of the socket pair
    drain_s: float  # time for running requests after a stop was asked for
    rpc_port: int | None = None  # TCP port besides the socket file; 0: a free one
    rpc_host: str = "127.0.0.1"
    page_fd: int = -1  # of its ProcessPage; -1: nobody watches it, and every SIGTERM is meant
