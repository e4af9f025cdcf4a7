"""API keys: where they come from, their way into the gateway's process, and whose caches a request with one of them may use.

Used by the launcher, too, so it imports next to nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kog_dist.config import API_KEY_FORM, LaunchConfig, is_api_key
from kog_dist.errors import ConfigError
from kog_dist.foreign_file import opened, read_rest

MAX_KEYS: Final = 256  # each request is compared with all of them
MAX_FILE_BYTES: Final = 64 << 10
_SCOPE: Final = b"kog_dist: whose caches requests with this API key may use"  # what is signed for nothing else


class ApiKeys:
    """The keys of a service, of which it keeps digests only. Without any, everybody may ask."""

    def __init__(self, keys: Sequence[str] = (), *, share_prefixes: bool = False) -> None:
        """With `share_prefixes`, or with one key, all have one scope."""
        self.are_separate = len(keys) > 1 and not share_prefixes
        self._known = [(_digest(key.encode()), _scope_of(key) if self.are_separate else "") for key in keys]

    def __len__(self) -> int:
        return len(self._known)

    def scope_of(self, given: bytes) -> str | None:
        """Whose caches a request with this key may use, "" where all share them; None if it is no key of this service.

        It is compared with all keys, whichever it is, so that the time tells nothing about them.
        """
        digest, found = _digest(given), None
        for known, scope in self._known:
            if hmac.compare_digest(digest, known):
                found = scope
        return found


def _digest(key: bytes) -> bytes:
    """Equal lengths, so that comparing tells nothing about the key."""
    return hashlib.sha256(key).digest()


def _scope_of(key: str) -> str:
    """The same at every start, since engines outlive gateways; it does not lead back to a key that cannot be guessed."""
    return hmac.new(key.encode(), _SCOPE, hashlib.sha256).hexdigest()


# ---- where they come from ----
def keys_of(settings: LaunchConfig) -> tuple[str, ...]:
    """Those of the settings: of the file, or the one that is given. Raises ConfigError."""
    if settings.api_key_file is not None:
        return read_key_file(Path(settings.api_key_file))
    return () if settings.api_key is None else (settings.api_key,)


def read_key_file(path: Path) -> tuple[str, ...]:
    """The API keys in a file: one per line, without blanks around it. Empty lines and lines that begin with # are left out.

    Raises ConfigError, which never shows a key: a line is no key or is there twice, there is none, others may read the file.
    """
    try:
        with opened(path) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = read_rest(stream, path, MAX_FILE_BYTES).decode("ascii")
    except OSError as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the API key file {path} is not ASCII text") from None
    if mode & 0o077:
        raise ConfigError(f"{path} holds API keys and other users may read it (mode {mode & 0o777:o}); chmod 600 it")
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        check_key(key, f"line {number} of the API key file {path}")
        if key in line_of:
            raise ConfigError(f"line {number} of the API key file {path} repeats the key of line {line_of[key]}; remove one")
        line_of[key] = number
    if not line_of:
        raise ConfigError(f"the API key file {path} has no key; write one per line, and comments behind #")
    if len(line_of) > MAX_KEYS:
        raise ConfigError(f"the API key file {path} has {len(line_of)} keys, at most {MAX_KEYS} are taken")
    return tuple(line_of)


def check_key(key: str, where: str) -> str:
    """The key, if a client can send it as `Authorization: Bearer KEY`. Raises ConfigError that says why not, and not the key."""
    if not is_api_key(key):
        raise ConfigError(f"{where} must be {API_KEY_FORM}, got {len(key)} characters")
    return key


# ---- their way into the process ----
def write_keys(keys: Sequence[str]) -> int:
    """A descriptor with the keys in memory, for `GatewayArgs.key_fd`; -1 for none. The caller closes it once the process has
    started.
    """
    if not keys:
        return -1
    fd = os.memfd_create("api-keys", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as stream:
        stream.write("\n".join(keys).encode("ascii"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read_keys(key_fd: int) -> tuple[str, ...]:
    """What `write_keys` wrote, none for -1. Closes the descriptor."""
    if key_fd < 0:
        return ()
    with os.fdopen(key_fd, "rb") as stream:
        return tuple(stream.read().decode("ascii").split("\n"))
