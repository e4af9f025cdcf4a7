"""What the coordinator process is told on its command line: one JSON object, checked field by field."""

from __future__ import annotations

from typing import ClassVar

from kog_dist.records import dataclass
from kog_dist.runtime.process_arguments import JsonArguments


@dataclass(frozen=True, slots=True)
class CoordinatorArgs(JsonArguments):
    """Arguments of `python -m kog_dist.workers.coordinator.process`. The descriptors are inherited."""

    reader: ClassVar[str] = "coordinator"

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
    context: int = 0  # tokens of prompt and answer together; 0: as many as the model can
    speculate: str = ""  # a Speculation, for requests that do not say; empty: the ranks have no drafts
    rank_places: str = ""  # device and CPUs of each rank for `status`, a line each
