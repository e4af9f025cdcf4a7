"""ZMTP 3.1 (ZMQ RFC 37) on a Unix socket: what zmq puts on the wire, without zmq's threads.

Between two processes a message through zmq wakes two threads besides those that want it, and each of them waits for a core. So
engine, gateway and clients speak the protocol on the socket itself; another end may be any zmq library. Spoken is what a DEALER
and a ROUTER need without encryption (mechanism NULL): greeting, READY, messages, and an answer to PING.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kog_dist.errors import ProtocolError

DEALER, ROUTER = b"DEALER", b"ROUTER"
_GREETING_BYTES: Final = 64
_GREETING: Final = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_PARTNERS: Final = {DEALER: (ROUTER,), ROUTER: (DEALER, ROUTER, b"REQ")}  # a REQ's messages have a frame too many: told so later
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_MAX_COMMAND_BYTES: Final = 512
_PING_CONTEXT_BYTES: Final = 16
_MAX_FRAMES: Final = 64  # of a message; more than one is refused anyway
_COMMANDS_PER_CALL: Final = 64


class ZmtpMessage(NamedTuple):
    """What has come. `frame` is its content if it has one frame, else empty."""

    num_frames: int
    num_bytes: int
    frame: bytes


def framed(body: bytes) -> bytes:
    """A message of one frame, as it goes over the wire."""
    if len(body) < 256:
        return b"\0%c%b" % (len(body), body)
    return b"\x02" + len(body).to_bytes(8, "big") + body


def only_message(data: bytes) -> bytes | None:
    """The content if `data`, at the beginning of a frame, is exactly one message of one frame, as a token is. Else None."""
    if len(data) > 1 and not data[0] and data[1] == len(data) - 2:
        return data[2:]
    if len(data) > 9 and data[0] == _LONG and int.from_bytes(data[1:9], "big") == len(data) - 9:
        return data[9:]
    return None


def opening(socket_type: bytes) -> bytes:
    """What each end says first, without waiting for the other."""
    properties = [(b"Socket-Type", socket_type), (b"Identity", b"")]
    ready = b"\x05READY" + b"".join(b"%c%b%b%b" % (len(k), k, len(v).to_bytes(4, "big"), v) for k, v in properties)
    return _GREETING + b"\x04%c%b" % (len(ready), ready)


class Wire:
    """The receiving half of one connection: bytes in, messages out. It keeps at most one frame and what was fed last.

    No call of `next` takes long, whatever was fed: it ends after a message, 64 frames, or 64 commands.
    """

    def __init__(self, socket_type: bytes, max_bytes: int) -> None:
        """`socket_type` is this end's; a message above `max_bytes`, all its frames together, is an error."""
        self.is_ready = False  # the other end has introduced itself
        self.is_paused = False  # the last `next` ended because of many commands: call it again before feeding more
        self.num_missing = 0  # bytes that complete the frame that is coming; 0 if its size is not known
        self.replies = b""  # to be written: answers to PING; whoever writes them empties it
        self._partners = _PARTNERS[socket_type]
        self._max_bytes = max_bytes
        self._held = bytearray()
        self._greeted = False
        self._num_frames = self._num_bytes = 0  # of the message that is coming

    @property
    def num_held(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._held)

    @property
    def is_between(self) -> bool:
        """Whether nothing is held: what comes next is the beginning of a frame, and of a message."""
        return self.is_ready and not self._held and not self._num_frames

    def feed(self, data: bytes) -> None:
        """Add what was received. Call `next` until it returns None, and is not paused, before feeding more."""
        self._held += data

    def next_of(self, data: bytes) -> ZmtpMessage | None:
        """`feed` and `next`, in one go where `data` is just one message."""
        if self.is_between and len(data) <= self._max_bytes and (frame := only_message(data)) is not None:
            return ZmtpMessage(1, len(frame), frame)
        self.feed(data)
        return self.next()

    def next(self) -> ZmtpMessage | None:
        """The next complete message; None if there is none yet, or `is_paused`.

        Raises ProtocolError for what is not ZMTP, too large, or not for this end.
        """
        self.is_paused = False
        if not self._greeted and not self._read_greeting():
            return None
        num_commands = 0
        while (taken := self._next_frame()) is not None:
            flags, body = taken
            if flags & _COMMAND:
                self._obey(body)
                num_commands += 1
                if num_commands == _COMMANDS_PER_CALL and self._held:
                    self.is_paused = True
                    return None
                continue
            if not self.is_ready:
                raise ProtocolError("the other end sent a message before it introduced itself")
            self._num_frames += 1
            self._num_bytes += len(body)
            if flags & _MORE:
                if self._num_frames == _MAX_FRAMES:
                    raise ProtocolError(f"a message has more than {_MAX_FRAMES} frames")
                continue
            message = ZmtpMessage(self._num_frames, self._num_bytes, body if self._num_frames == 1 else b"")
            self._num_frames = self._num_bytes = 0
            return message
        return None

    def _next_frame(self) -> tuple[int, bytes] | None:
        held = self._held
        self.num_missing = 0
        if len(held) < 2:
            return None
        flags = held[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ProtocolError(f"a frame has flags {flags:#x}, which mean nothing")
        begin = 9 if flags & _LONG else 2
        if len(held) < begin:
            return None
        num_bytes = int.from_bytes(held[1:begin], "big")
        limit = _MAX_COMMAND_BYTES if flags & _COMMAND else self._max_bytes - self._num_bytes
        if num_bytes > limit:
            raise ProtocolError(f"a frame of {num_bytes} bytes was announced, at most {limit} are taken")
        self.num_missing = max(0, begin + num_bytes - len(held))
        if self.num_missing:
            return None
        body = bytes(held[begin : begin + num_bytes])
        del held[: begin + num_bytes]
        return flags, body

    def _read_greeting(self) -> bool:
        held = self._held
        signature = bytes(held[:1] + held[9:11])
        if not b"\xff\x7f\x03".startswith(signature):
            raise ProtocolError("the other end does not speak ZMTP 3")
        if len(held) < _GREETING_BYTES:
            return False
        mechanism = bytes(held[12:32]).rstrip(b"\0")
        if mechanism != b"NULL":
            raise ProtocolError(f"the other end wants the mechanism {mechanism[:20]!r}; a socket file has none")
        del held[:_GREETING_BYTES]
        self._greeted = True
        return True

    def _obey(self, body: bytes) -> None:
        name = body[1 : 1 + body[0]] if body else b""
        content = body[1 + len(name) :]
        if name == b"READY" and not self.is_ready:
            found = _properties(content).get(b"socket-type")
            if found not in self._partners:
                raise ProtocolError(f"the other end is a {found!r}, which cannot talk to this one")
            self.is_ready = True
        elif name == b"PING" and self.is_ready:
            pong = b"\x04PONG" + content[2:][:_PING_CONTEXT_BYTES]
            self.replies = b"\x04%c%b" % (len(pong), pong)  # the newest is enough
        elif name != b"PONG" or not self.is_ready:
            raise ProtocolError(f"the other end sent the command {name[:20]!r}, which has no place here")


def _properties(content: bytes) -> dict[bytes, bytes]:
    """Name (lower case) and value of each property of a READY."""
    found, place = {}, 0
    while place < len(content):
        name_end = place + 1 + content[place]
        value_begin = name_end + 4
        value_end = value_begin + int.from_bytes(content[name_end:value_begin], "big")
        if value_end > len(content) or value_begin > len(content):
            raise ProtocolError("the other end introduced itself with a property that is cut off")
        found[content[place + 1 : name_end].lower()] = content[value_begin:value_end]
        place = value_end
    return found
