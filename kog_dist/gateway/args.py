"""What the gateway process is told on its command line: one JSON object, without secrets, since everybody may read it there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from kog_dist.config import API_KEY_FORM, MAX_KEY_LENGTH, is_api_key
from kog_dist.errors import ConfigError
from kog_dist.rpc.transport import Access
from kog_dist.runtime.process_arguments import JsonArguments

HTTP_FILE: Final = "http.json"  # in the instance folder, once the gateway answers; see Service.announce


@dataclass(frozen=True, slots=True)
class GatewayArgs(JsonArguments):
    """Arguments of `python -m kog_dist.gateway.process`. The descriptors are inherited."""

    reader: ClassVar[str] = "gateway"

    listen_fd: int
    host: str  # as the user gave it: decides which names a browser may call this service by
    instance_folder: str | None = None  # where the socket of the engine, or of the router, is; and where http.json is written
    key_file: str | None = None  # instead of a folder: the access file of an engine with a TCP port
    endpoint: str | None = None  # or its plain zmq address
    key_fd: int = -1  # a pipe with the API key; -1: everybody may ask
    model: str | None = None  # folder of the checkpoint, for its tokenizer and chat template
    quantize: str = "none"  # what its weights are rounded to while they are loaded
    quantize_head: str = "none"  # and its LM head
    model_name: str = ""  # what users call it, while the engine has not said so
    cors_origins: tuple[str, ...] = ()
    drain_s: float = 10.0  # for running answers after a stop was asked for
    stall_s: float = 1.0  # the limit by which the launcher calls a rank hung
    log_format: str = "text"
    log_prompts: bool = False
    unknown_fields: str = "warn"  # refuse, warn or ignore
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


def read_key_file(path: Path) -> str:
    """The API key in a file, without blanks around it. Raises ConfigError if there is none or others may read it."""
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read(MAX_KEY_LENGTH + 1).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the API key file {path} is not ASCII text") from None
    if mode & 0o077:
        raise ConfigError(f"{path} holds an API key and other users may read it (mode {mode & 0o777:o}); chmod 600 it")
    return check_key(text, f"the API key file {path}")


def check_key(key: str, where: str) -> str:
    """The key, if a client can send it as `Authorization: Bearer KEY`. Raises ConfigError that says why not, and not the key."""
    if not is_api_key(key):
        raise ConfigError(f"{where} must be {API_KEY_FORM}, got {len(key)} characters")
    return key


def write_key(key: str) -> int:
    """The reading end of a pipe with the key in it, for `key_fd`. The caller closes it once the process has started."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(write_fd, "wb") as stream:
        stream.write(key.encode("ascii"))
    return read_fd


def read_key(key_fd: int) -> str | None:
    """What `write_key` wrote, None for -1. Closes the descriptor."""
    if key_fd < 0:
        return None
    with os.fdopen(key_fd, "rb") as stream:
        return stream.read(MAX_KEY_LENGTH + 1).decode("ascii")
