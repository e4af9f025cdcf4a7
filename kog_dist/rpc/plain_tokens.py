"""The frame of a `tokens` event with one token and nothing but its text, written and read in one go.

There is such a frame for each token of almost every answer. It is msgpack like any other, with lengths and numbers in forms of
fixed size, so that fields have fixed places; what does not look like that takes the general way (rpc/messages/codec.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

_BEGIN: Final = b"\x92\xa6tokens\x89\xaarequest_id\xd9"  # [tag, {9 fields; then a text with its length in 8 bits
_INDEX, _TOKEN_IDS, _TEXT = b"\xa5index\xce", b"\xa9token_ids\x91\xce", b"\xa4text\xda"
_END: Final = b"\xa8stamps_s\x90\xa7digests\x90\xa8logprobs\x90\xa7top_ids\x90\xactop_logprobs\x90"  # empty arrays
_MIDDLE: Final = struct.Struct(f">{len(_INDEX)}sI{len(_TOKEN_IDS)}sI{len(_TEXT)}sH")
_MAX_TEXT_BYTES: Final = 0xFFFF
_MAX_INTEGER: Final = 0xFFFFFFFF
_MAX_TOKEN_ID: Final = 0x7FFFFFFF


class PlainTokens:
    """Both directions, for frames that begin with `head`. `check_id` raises ValueError for what is no request id."""

    def __init__(self, head: bytes, check_id: Callable[[str], str]) -> None:
        self._begin = head + _BEGIN
        self._id_place = len(self._begin)
        self._check_id = check_id
        self._last_id = (b"", "")  # a stream's events come one after the other

    def pack(self, request_id: str, index: int, token_id: int, text: str) -> bytes | None:
        """The frame; None if it needs the general way. The values must be those of a message: request_id is ASCII."""
        packed = text.encode()
        if len(packed) > _MAX_TEXT_BYTES or index > _MAX_INTEGER:
            return None
        middle = _MIDDLE.pack(_INDEX, index, _TOKEN_IDS, token_id, _TEXT, len(packed))
        return b"%b%c%b%b%b%b" % (self._begin, len(request_id), request_id.encode(), middle, packed, _END)

    def unpack(self, frame: bytes) -> tuple[str, int, int, str] | None:
        """request_id, index, token id and text; None if it needs the general way."""
        if not (frame.startswith(self._begin) and frame.endswith(_END)):
            return None
        id_begin = self._id_place + 1
        middle = id_begin + frame[self._id_place]
        text_begin, text_end = middle + _MIDDLE.size, len(frame) - len(_END)
        if text_begin > text_end:
            return None
        index_name, index, ids_name, token_id, text_name, num_bytes = _MIDDLE.unpack_from(frame, middle)
        is_plain = index_name == _INDEX and ids_name == _TOKEN_IDS and text_name == _TEXT
        if not is_plain or num_bytes != text_end - text_begin or token_id > _MAX_TOKEN_ID:
            return None
        try:
            packed_id, request_id = self._last_id
            if frame[id_begin:middle] != packed_id:
                packed_id = frame[id_begin:middle]
                request_id = self._check_id(packed_id.decode("ascii"))
                self._last_id = packed_id, request_id
            return request_id, index, token_id, frame[text_begin:text_end].decode()
        except ValueError:  # also of bytes that are no text
            return None
