"""What the gateway process is told on its command line: one JSON object, without secrets, since everybody may read it there."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kog_dist.errors import ConfigError
from kog_dist.records import dataclass
from kog_dist.rpc.transport import Access
from kog_dist.runtime.process_arguments import JsonArguments


@dataclass(frozen=True, slots=True)
class GatewayArgs(JsonArguments):
    """Arguments of `python -m kog_dist.gateway.process`. The descriptors are inherited."""

    reader: ClassVar[str] = "gateway"

    listen_fd: int
    host: str  # as the user gave it: decides which names a browser may call this service by
    instance_folder: str | None = None  # where the socket of the engine, or of the router, is; and where http.json is written
    key_file: str | None = None  # instead of a folder: the access file of an engine with a TCP port
    endpoint: str | None = None  # or its plain zmq address
    key_fd: int = -1  # of the API keys, see keys.write_keys; -1: everybody may ask
    share_prefixes: bool = False  # with several keys: what is kept of one key's requests serves those of others
    model: str | None = None  # folder of the checkpoint, for its tokenizer and chat template
    quantize: str = "none"  # what its weights are rounded to while they are loaded
    quantize_head: str = "none"  # and its LM head
    served_names: tuple[str, ...] = ()  # what requests may call it besides
    model_name: str = ""  # what users call it, while the engine has not said so
    cors_origins: tuple[str, ...] = ()
    drain_s: float = 10.0  # for running answers after a stop was asked for
    stall_s: float = 1.0  # the limit by which the launcher calls a rank hung
    log_format: str = "text"
    log_prompts: bool = False
    reasoning_parser: str = "auto"
    tool_parser: str = "auto"
    unknown_fields: str = "warn"  # refuse, warn or ignore
    special_tokens_in_content: str = "text"  # or allow
    terminal_fd: int = -1  # of a terminal, where somebody reads a line about each request; -1: nobody
    page_fd: int = -1  # of its ProcessPage; -1: nobody watches it, and every SIGTERM is meant
    ends_with_engine: bool = False  # a stopping gateway also waits for the engine: until then it says that it is stopping

    def access(self) -> Access:
        """How the engine is reached; read anew each time, since the keys of a TCP port change with every start."""
        if self.key_file is not None:
            return Access.from_file(Path(self.key_file))
        if self.endpoint is not None:
            return Access(self.endpoint)
        if self.instance_folder is None:
            raise ConfigError("the gateway was not told where its engine is")
        return Access.from_folder(Path(self.instance_folder))
