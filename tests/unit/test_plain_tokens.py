"""The frame of one token and its text: which values it holds, and which take the general way."""

from __future__ import annotations

import pytest

from kog_dist.rpc.plain_tokens import PlainTokens

HEAD = b"\x93head"


def check_id(text: str) -> str:
    if not text.isalnum():
        raise ValueError(text)
    return text


@pytest.mark.parametrize(
    ("index", "token_id", "text"),
    [
        (0, 0, ""), (1, 5, "a"), (2**32 - 1, 2**31 - 1, "é\n"), (7, 1, "x" * 65535), (3, 2, "\u2581" * 21845), (3, 2, "\x00\xff"),
    ],
)  # fmt: skip
def test_what_is_packed_is_read(index: int, token_id: int, text: str) -> None:
    plain = PlainTokens(HEAD, check_id)
    frame = plain.pack("r1", index, token_id, text)
    assert frame is not None
    assert frame.startswith(HEAD)
    assert plain.unpack(frame) == ("r1", index, token_id, text)
    assert PlainTokens(b"\x94other", check_id).unpack(frame) is None


@pytest.mark.parametrize(("index", "text"), [(2**32, "a"), (0, "x" * 65536), (0, "\u2581" * 21846)])
def test_what_is_too_large_takes_the_general_way(index: int, text: str) -> None:
    assert PlainTokens(HEAD, check_id).pack("r1", index, 5, text) is None


def test_ids_of_requests_take_turns() -> None:
    plain = PlainTokens(HEAD, check_id)
    frames = {name: plain.pack(name, 1, 5, "a") for name in ("r1", "r2", "x" * 255)}
    for name in ("r1", "r2", "r1", "x" * 255, "r2"):
        assert plain.unpack(frames[name] or b"") == (name, 1, 5, "a")
    assert plain.unpack(PlainTokens(HEAD, str).pack("not-one", 1, 5, "a") or b"") is None


def test_no_damaged_frame_is_read() -> None:
    plain = PlainTokens(HEAD, check_id)
    frame = plain.pack("r1", 1, 2**31 - 1, "abc") or b""
    place = frame.index((2**31 - 1).to_bytes(4, "big"))
    beyond = frame[:place] + (2**31).to_bytes(4, "big") + frame[place + 4 :]
    assert plain.unpack(beyond) is None, "no token has this id"
    for cut in range(len(frame)):
        assert plain.unpack(frame[:cut]) is None
        assert plain.unpack(frame[cut + 1 :]) is None
    for place in range(len(frame)):
        found = plain.unpack(frame[:place] + bytes([frame[place] ^ 0x80]) + frame[place + 1 :])
        assert found is None or found[1:3] != (1, 2**31 - 1) or found[0] == "r1"
    assert plain.unpack(frame.replace(b"abc", b"ab\xff")) is None, "that is no text"
    assert plain.unpack(frame.replace(b"abc", b"ab")) is None
    assert plain.unpack(frame + b"a") is None
