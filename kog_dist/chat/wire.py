"""The client side of HTTP/1.1 and of server-sent events, without input and output: bytes in, what they mean out.

Whoever reads the socket decides when a moment is taken, so that a benchmark measures the server and not a library.
Sources: RFC 9112 (messages, chunked coding), the WHATWG HTML standard (event streams).
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping
from typing import Final

from kog_dist.errors import ConfigError, ProtocolError
from kog_dist.records import dataclass

MAX_HEAD_BYTES: Final = 1 << 16  # status line and header fields
MAX_LINE_BYTES: Final = 1 << 22  # one line of an event stream
_PLACE: Final = re.compile(rb": (\d{1,9}) before this one")
_PROMPT: Final = re.compile(rb": (\d{1,9}) of (\d{1,9}) prompt tokens")


@dataclass(frozen=True, slots=True)
class ServiceUrl:
    """Where an OpenAI-compatible service is. `prefix` is the path before `/chat/completions`, usually `/v1`."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    socket: str = ""  # path of a Unix socket, instead of host and port

    @classmethod
    def parse(cls, url: str) -> ServiceUrl:
        """Read `http://HOST:PORT`, with or without `/v1`, or `unix:PATH`. Raises ConfigError saying what is wrong with it."""
        if url.startswith("unix:/"):
            return cls("localhost", 80, False, "/v1", url.removeprefix("unix:"))
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urllib.parse.urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"the URL {url!r} cannot be read: {error}; give http://HOST:PORT") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username is not None:
            raise ConfigError(f"the URL {url!r} must be http://HOST:PORT, https://HOST:PORT or unix:/PATH, nothing else")
        path = parts.path.rstrip("/")
        prefix = path if path.endswith("/v1") else f"{path}/v1"
        if not prefix.isascii() or any(letter <= " " for letter in prefix):
            raise ConfigError(f"the path of the URL {url!r} must be plain ASCII")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix)

    @property
    def authority(self) -> str:
        """HOST:PORT, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def root(self) -> str:
        """The path under which the service has what is not part of `/v1`."""
        return self.prefix.removesuffix("/v1")

    def __str__(self) -> str:
        if self.socket:
            return f"unix:{self.socket}"
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.root}"


def request_bytes(
    url: ServiceUrl, method: str, path: str, *, body: Mapping[str, object] | None = None, api_key: str = ""
) -> bytes:
    """A whole request; `path` is absolute on the host. Raises ConfigError for an API key that no header can carry."""
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ConfigError("the API key must be printable ASCII without blanks")
    payload = b"" if body is None else json.dumps(body).encode()
    fields = [f"{method} {path} HTTP/1.1", f"Host: {url.authority}", "Accept: text/event-stream, application/json"]
    if body is not None:
        fields += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    if api_key:
        fields.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*fields, "", ""]).encode("ascii") + payload


class ResponseParser:
    """One response. `status` is 0 until its head has been read; `is_complete` once its body has ended."""

    def __init__(self) -> None:
        self.status = 0
        self.reason = ""
        self.fields: dict[str, str] = {}  # names in lower case
        self.is_complete = False
        self.may_reuse = False  # whether the connection may carry another request afterwards
        self._unread = b""
        self._remaining: int | None = None  # bytes of the body, or of its current chunk; None: until the connection closes
        self._is_chunked = False
        self._is_last = False  # the chunk of size 0 was read; trailer fields follow

    def feed(self, received: bytes) -> bytes:
        """The part of the body that is in these bytes. Raises ProtocolError if it is not HTTP/1.1."""
        self._unread = self._unread + received if self._unread else received
        if not self.status and not self._read_head():
            return b""
        if self._is_chunked:
            return self._read_chunks()
        body, self._unread = self._unread, b""
        if self._remaining is not None:
            body = body[: self._remaining]
            self._remaining -= len(body)
            self.is_complete = self._remaining == 0
        return body

    def end_of_connection(self) -> None:
        """The server closed the connection. Raises ProtocolError if the response is not complete by that."""
        if self.is_complete:
            return
        if not self.status:
            raise ProtocolError("the server closed the connection without an answer")
        if self._is_chunked or self._remaining is not None:
            raise ProtocolError("the server closed the connection in the middle of its answer")
        self.is_complete = True

    def _read_head(self) -> bool:
        head, found, rest = self._unread.partition(b"\r\n\r\n")
        if not found:
            if len(self._unread) > MAX_HEAD_BYTES:
                raise ProtocolError(f"the server sent more than {MAX_HEAD_BYTES} bytes of header fields")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status_text = first.partition(" ")
        status, _, self.reason = status_text.partition(" ")
        if not version.startswith("HTTP/1.") or not (status.isdigit() and len(status) == 3):
            raise ProtocolError(f"what answers there is not an HTTP/1.1 server: it said {first[:60]!r}")
        self._unread = rest
        if status[0] == "1":  # 100 Continue and the like: the answer itself follows
            return self._read_head()
        self.status = int(status)
        self.fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._is_chunked = "chunked" in self.fields.get("transfer-encoding", "").lower()
        self.may_reuse = version == "HTTP/1.1" and "close" not in self.fields.get("connection", "").lower()
        self._set_length()
        return True

    def _set_length(self) -> None:
        length = self.fields.get("content-length")
        if self.status in (204, 304):
            length = "0"
        if self._is_chunked:
            self._remaining = 0
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise ProtocolError(f"the server sent Content-Length {length[:30]!r}, which is no number")
            self._remaining = int(length)
            self.is_complete = self._remaining == 0
        else:
            self.may_reuse = False

    def _read_chunks(self) -> bytes:
        """All of the body that is here; `_remaining` counts the chunk's bytes and the line end after them."""
        parts = []
        while not self.is_complete:
            if self._remaining:
                part = self._unread[: self._remaining]
                self._unread = self._unread[len(part) :]
                num_after = self._remaining - len(part)
                parts.append(part[: max(0, self._remaining - 2)])
                self._remaining = num_after
                if num_after:
                    break
            line, found, rest = self._unread.partition(b"\r\n")
            if not found:
                if len(line) > MAX_HEAD_BYTES:
                    raise ProtocolError("the server sent a chunk without its size")
                break
            self._unread = rest
            if self._is_last:
                self.is_complete = not line  # trailer fields until an empty line
                continue
            self._remaining = _chunk_size(line)
            self._is_last = self._remaining == 0
            self._remaining += 2 if self._remaining else 0
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or len(digits) > 8 or digits.strip(b"0123456789abcdefABCDEF"):
        raise ProtocolError(f"the server sent a chunk of size {digits[:20]!r}, which is no number")
    return int(digits, 16)


class EventParser:
    """An event stream, cut into the payloads of its events: their `data` fields. Other fields are left out, and of comments all
    but how many requests are before this one, and how many tokens of how many of the prompt have been read (`prompt_read`), as
    our own service says it."""

    def __init__(self) -> None:
        self.num_before: int | None = None
        self.prompt_read: tuple[int, int] | None = None
        self._unread = b""
        self._fields: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """The payloads of the events that end in these bytes. Raises ProtocolError for a line that does not end."""
        lines = (self._unread + body).split(b"\n")
        self._unread = lines.pop()
        if len(self._unread) > MAX_LINE_BYTES:
            raise ProtocolError(f"the server sent more than {MAX_LINE_BYTES} bytes without a line end")
        payloads = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._fields.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line.startswith(b":"):
                place = _PLACE.fullmatch(line)
                self.num_before = int(place[1]) if place else self.num_before
                read = _PROMPT.fullmatch(line)
                self.prompt_read = (int(read[1]), int(read[2])) if read else self.prompt_read
            elif not line and self._fields:
                payloads.append(b"\n".join(self._fields))
                self._fields = []
        return payloads


def error_text(status: int, body: bytes) -> str:
    """What a refused request's answer says, as one short line: OpenAI's error object, or whatever there is."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, RecursionError):
        message = body[:300].decode("utf-8", "replace")
    line = " ".join(str(message).split())[:300]
    return f"HTTP {status}: {line}" if line else f"HTTP {status}"
