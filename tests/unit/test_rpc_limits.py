"""Exact limits of RPC: of messages, of their fields, of who may read an instance folder, and of what waits for a slow client."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from kog_dist.errors import LaunchError
from kog_dist.rpc import listener as listener_module
from kog_dist.rpc.fields import identifier, text
from kog_dist.rpc.listener import Delivery, RpcListener, error_event
from kog_dist.rpc.messages import (
    MAGIC,
    MAX_MESSAGE_BYTES,
    MAX_PROMPT_IDS,
    PROTOCOL_VERSION,
    BadMessage,
    Cancel,
    ErrorCode,
    Generate,
    decode_request,
    encode,
)
from kog_dist.rpc.messages.codec import _unpack
from kog_dist.rpc.messages.limits import (
    LEAST_DEADLINE_S,
    MAX_ARRAY,
    MAX_CONTAINERS,
    MAX_FIELDS,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SECONDS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
)
from kog_dist.sampling_params import DEFAULTS, LIMITS, MAX_LOGIT_BIAS, SamplingParams

HEAD = MAGIC + bytes((PROTOCOL_VERSION,))


def generate(**fields: Any) -> Generate:
    return Generate(**{"request_id": "a", "prompt": "x", **fields})


# ---- whole messages ----
def test_a_message_may_be_as_long_as_it_may() -> None:
    rest = len(encode(generate(prompt="x" * 100_000))) - 100_000
    frame = encode(generate(prompt="x" * (MAX_MESSAGE_BYTES - rest)))
    assert len(frame) == MAX_MESSAGE_BYTES
    assert isinstance(decode_request(frame), Generate)
    with pytest.raises(BadMessage, match=f"the message has {MAX_MESSAGE_BYTES + 1} bytes") as caught:
        encode(generate(prompt="x" * (MAX_MESSAGE_BYTES - rest + 1)))
    assert caught.value.request_id == "a"
    with pytest.raises(BadMessage, match=f"the message has {MAX_MESSAGE_BYTES + 1} bytes"):
        decode_request(frame + b"x")


@pytest.mark.parametrize("frame", [b"", b"KOG", b"KOX" + bytes((PROTOCOL_VERSION,)), HEAD])
def test_a_frame_without_a_head_or_a_body_is_no_message(frame: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_request(frame)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_is_told_apart(version: int) -> None:
    with pytest.raises(BadMessage, match=f"speaks protocol version {version}") as caught:
        decode_request(MAGIC + bytes((version,)) + encode(Cancel("a"))[4:])
    assert caught.value.code is ErrorCode.PROTOCOL_VERSION


def unpacks(value: object) -> bool:
    try:
        _unpack(msgpack.packb(value))
    except BadMessage:
        return False
    return True


def test_parts_of_a_message_have_limits() -> None:
    """So that a small message does not become a large heap; the tag's array and the map of fields count."""
    for count, is_good in ((MAX_CONTAINERS - 3, True), (MAX_CONTAINERS - 2, False)):
        assert unpacks(["t", {"a": [[]] * count}]) is is_good, count
    for count, is_good in ((MAX_FIELDS, True), (MAX_FIELDS + 1, False)):
        assert unpacks(["t", {f"f{place}": 0 for place in range(count)}]) is is_good, count
    for count, is_good in ((MAX_ARRAY, True), (MAX_ARRAY + 1, False)):
        assert unpacks(["t", {"a": [0] * count}]) is is_good, count
    for count, is_good in ((4 * MAX_PROMPT_IDS, True), (4 * MAX_PROMPT_IDS + 1, False)):
        assert unpacks(["t", {"a": bytes(count)}]) is is_good, count
    twice = msgpack.packb(["t", None])[:-1] + b"\x82" + 2 * (msgpack.packb("a") + msgpack.packb(1))
    with pytest.raises(BadMessage, match="a field is given twice"):
        _unpack(twice)


# ---- fields ----
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("request_id", ["a", "a" * 64], ["", "a" * 65, "a b", "a\n"]),
        ("max_tokens", [1, 2**31 - 1, None], [0, 2**31, True, 1.0]),
        ("deadline_s", [LEAST_DEADLINE_S, MAX_SECONDS, None],
         [math.nextafter(LEAST_DEADLINE_S, 0), math.nextafter(MAX_SECONDS, math.inf), 0, math.nan]),
        ("stop", [("x" * MAX_STOP_BYTES,) * MAX_STOP_STRINGS],
         [("x" * (MAX_STOP_BYTES + 1),), ("x",) * (MAX_STOP_STRINGS + 1), ("",)]),
        ("stop", [("é" * (MAX_STOP_BYTES // 2),)], [("é" * (MAX_STOP_BYTES // 2) + "x",)]),
        ("json_schema", ["{" * MAX_SCHEMA_BYTES], ["{" * (MAX_SCHEMA_BYTES + 1), ""]),
        ("regex", ["a" * MAX_REGEX_BYTES], ["a" * (MAX_REGEX_BYTES + 1), ""]),
        ("conversation", ["c" * 64, None], ["", "c" * 65]),
    ],
)  # fmt: skip
def test_a_field_takes_its_limits_and_nothing_beyond(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        generate(**{name: value})
    for value in bad:
        with pytest.raises(BadMessage):
            generate(**{name: value})


SAMPLING_LIMITS: dict[str, tuple[float, float]] = {  # as docs/sampling.md has them
    "temperature": (0.0, 100.0), "seed": (0, 2**64 - 1), "top_k": (0, 2**31 - 1), "top_p": (1e-6, 1.0), "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
    "logit_bias": (-100.0, 100.0), "min_tokens": (0, 2**31 - 1), "logprobs": (0, 20),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SAMPLING_LIMITS if name != "logit_bias"])
def test_a_sampling_parameter_takes_its_limits_and_nothing_beyond(name: str) -> None:
    """Where it is made, and on its way: a client of another make does not check what it sends."""
    low, high = SAMPLING_LIMITS[name]
    step = (lambda value, to: value + int(math.copysign(1, to))) if isinstance(low, int) else math.nextafter
    ends: list[Any] = [low, high]
    for value in ends:
        assert getattr(SamplingParams(**{name: value}), name) == value
        assert getattr(generate(sampling={name: value}).sampling, name) == value
    beyond: list[Any] = [step(low, -math.inf), step(high, math.inf), math.nan, *[0] * (low > 0)]
    for value in beyond:
        with pytest.raises(ValueError, match=f"^{name} must be "):
            SamplingParams(**{name: value})
        with pytest.raises(BadMessage, match=f"generate: {name} must be ") as caught:
            generate(sampling={name: value})
        assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("params", "has_processors", "needs_all_logits"),
    [
        (SamplingParams(), False, False),
        (SamplingParams(0.5, 7), False, False),
        (SamplingParams(0.5, top_k=1), True, True),
        (SamplingParams(0.5, top_p=0.9), True, True),
        (SamplingParams(0.5, min_p=0.1), True, True),
        (SamplingParams(top_k=1, top_p=0.9, min_p=0.1), False, False),  # greedy
        (SamplingParams(repetition_penalty=1.1), True, True),
        (SamplingParams(presence_penalty=-0.1), True, True),
        (SamplingParams(frequency_penalty=0.1), True, True),
        (SamplingParams(logit_bias=((1, 1.0),)), True, True),
        (SamplingParams(min_tokens=1), True, True),
        (SamplingParams(logprobs=0), False, True),
    ],
)
def test_each_parameter_alone_is_enough(params: SamplingParams, has_processors: bool, needs_all_logits: bool) -> None:
    assert (params.has_processors, params.needs_all_logits) == (has_processors, needs_all_logits)


def test_the_limits_of_sampling_are_the_documented_ones() -> None:
    assert dict(LIMITS) == SAMPLING_LIMITS
    assert DEFAULTS.keys() == LIMITS.keys()
    for value in (0, 0.0, -0.0, 5e-324, 1e-8, math.nextafter(0.001, 0)):
        kept = SamplingParams(temperature=value).temperature
        assert (kept, math.copysign(1, kept)) == (0.0, 1.0), "greedy"
        assert generate(sampling={"temperature": value}).sampling.temperature == 0.0
    assert SamplingParams(temperature=0.001).temperature == 0.001
    with pytest.raises(ValueError, match="seed must be between 0 and 2\\*\\*64 - 1, got 18446744073709551616"):
        SamplingParams(seed=2**64)


@pytest.mark.parametrize("name", SAMPLING_LIMITS)
def test_a_sampling_parameter_has_its_type(name: str) -> None:
    wrong: list[Any] = [True, "1", b"1", [1], *[None] * (name != "logprobs")]
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{name} must be "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["seed", "top_k", "min_tokens", "logprobs"])
def test_a_count_is_no_fraction(name: str) -> None:
    whole: Any = 1.0
    with pytest.raises(ValueError, match=rf"^{name} must be an integer, got float 1\.0"):
        SamplingParams(**{name: whole})


def test_biases_have_a_limit_each_and_together() -> None:
    def biased(count: int, bias: float = 1.0) -> Generate:
        return generate(sampling={"logit_bias": [value for token_id in range(count) for value in (token_id, bias)]})

    assert len(biased(MAX_LOGIT_BIAS).sampling.logit_bias) == MAX_LOGIT_BIAS == 1024
    assert biased(1, -100.0).sampling.logit_bias == ((0, -100.0),)
    assert SamplingParams(logit_bias={7: 1}).logit_bias == ((7, 1.0),)  # type: ignore[arg-type]
    for wrong in ((MAX_LOGIT_BIAS + 1, 1.0), (1, math.nextafter(100.0, 200.0)), (1, math.nan)):
        with pytest.raises(BadMessage):
            biased(*wrong)
    with pytest.raises(BadMessage, match="names an id twice"):
        generate(sampling={"logit_bias": [7, 1.0, 7, 1.0]})
    for wrong_pair in ((True, 1.0), (1.0, 1.0), (1, True), (1, "1")):
        with pytest.raises(BadMessage, match="logit_bias must be pairs of an id and a number"):
            generate(sampling={"logit_bias": list(wrong_pair)})
    for flat in ([7, 1.0, 8], "", ((7, 1.0),), [7]):
        with pytest.raises(BadMessage, match="must have logit_bias as an array of ids and biases in turn"):
            generate(sampling={"logit_bias": flat})


def test_a_prompt_of_ids_may_fill_the_longest_context() -> None:
    """262,144 tokens, which the other end reads, with a schema of the largest size besides; as an array on the wire fewer."""
    most, schema = MAX_PROMPT_IDS, "{" * MAX_SCHEMA_BYTES
    for ids in (array("I", [1]) * most, bytes(4 * most), [1] * most):
        sent = decode_request(encode(Generate("a", prompt_ids=ids, json_schema=schema)))
        assert isinstance(sent, Generate)
        assert len(sent.prompt_ids or ()) == most == 262_144
    for wrong in (array("I", [1]) * (most + 1), bytes(4 * most + 4), bytes(5), [1] * (most + 1), [True], [1.0]):
        with pytest.raises(BadMessage):
            Generate("a", prompt_ids=wrong)  # type: ignore[arg-type]
    for count, is_good in ((MAX_ARRAY, True), (MAX_ARRAY + 1, False)):
        frame = HEAD + msgpack.packb(["generate", {"request_id": "a", "prompt_ids": [1] * count}])
        if is_good:
            assert isinstance(decode_request(frame), Generate)
        else:
            with pytest.raises(BadMessage, match="max_array_len"):
                decode_request(frame)


def test_checks_count_bytes_and_not_characters() -> None:
    assert text(0, 4)("🎉") == "🎉"
    assert identifier(2)("a:") == "a:"
    for check, wrong in (
        (text(0, 3), "🎉"),
        (text(5, 9), "🎉"),
        (text(0, 9), "\ud800"),
        (identifier(2), "é"),
        (identifier(2), "a\n"),
    ):
        with pytest.raises(ValueError, match="must"):
            check(wrong)
    short = error_event(ErrorCode.INTERNAL_ERROR, "é" * 3000)
    assert short.message == "é" * 2048
    assert error_event(ErrorCode.INTERNAL_ERROR, "").message == "internal_error"


# ---- who may look, and how long somebody may not ----
@pytest.mark.parametrize("mode", [0o700, 0o500, 0o710, 0o720, 0o740, 0o701, 0o702, 0o704, 0o777])
def test_an_instance_folder_is_its_owner_s_alone(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "i"
    folder.mkdir()
    folder.chmod(mode)
    try:
        if mode & 0o077:
            with pytest.raises(LaunchError, match=f"must belong to this user with mode 0700.* with mode {mode:04o}"):
                RpcListener(folder)
            assert list(folder.iterdir()) == []
        elif mode == 0o700:
            RpcListener(folder).close()
            assert list(folder.iterdir()) == []
    finally:
        folder.chmod(0o700)


def test_outboxes_have_one_bound_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    listener = RpcListener(tmp_path)
    delivery = Delivery.FULL
    monkeypatch.setattr(listener, "_try_send", lambda peer, frame: delivery)
    monkeypatch.setattr(listener_module, "OUTBOXES_BYTES", 100)
    try:
        for peer, count in ((b"a", 50), (b"b", 49), (b"c", 1)):
            assert listener.send_frame(peer, b"x" * count) is Delivery.TAKEN
        assert listener.flush() == [], "as much as may wait"
        assert listener.send_frame(b"c", b"x") is Delivery.TAKEN
        assert listener.flush() == [b"a"], "for whom most waits"
        delivery = Delivery.TAKEN
        assert listener.flush() == []
        assert not listener.has_backlog
        delivery = Delivery.FULL
        assert listener.send_frame(b"c", b"x" * 100) is Delivery.TAKEN, "what was delivered does not wait"
        assert listener.flush() == []
    finally:
        listener.close()


def test_an_outbox_has_a_limit_of_events_and_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    listener = RpcListener(tmp_path)
    monkeypatch.setattr(listener, "_try_send", lambda peer, frame: Delivery.FULL)
    monkeypatch.setattr(listener_module, "OUTBOX_EVENTS", 3)
    monkeypatch.setattr(listener_module, "OUTBOX_BYTES", 100)
    try:
        assert [listener.send_frame(b"many", b"x") for _ in range(4)] == [Delivery.TAKEN] * 3 + [Delivery.FULL]
        assert [listener.send_frame(b"large", b"x" * 50) for _ in range(3)] == [Delivery.TAKEN] * 2 + [Delivery.FULL]
        sent: list[bytes] = []

        def take(_peer: bytes, frame: bytes) -> Delivery:
            sent.append(frame)
            return Delivery.TAKEN

        monkeypatch.setattr(listener, "_try_send", take)
        assert listener.flush() == []
        assert sorted(sent, key=len) == [b"x"] * 3 + [b"x" * 50] * 2, "all that was taken, once"
        assert not listener.is_behind(b"many")
        assert listener.send_frame(b"large", b"x" * 101) is Delivery.TAKEN, "nothing waits: the limit is of what does"
    finally:
        listener.close()
