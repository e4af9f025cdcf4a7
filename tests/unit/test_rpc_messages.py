"""The RPC codec: every message survives the wire, and nothing else gets through."""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from array import array
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kog_dist.errors import ProtocolError
from kog_dist.rpc import messages
from kog_dist.rpc.messages import (
    EVENTS,
    MAGIC,
    MAX_FLOAT32,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    REQUESTS,
    BadMessage,
    Cancel,
    Done,
    EngineState,
    Error,
    ErrorCode,
    FinishReason,
    Generate,
    Tokens,
    build_hash,
    decode_event,
    decode_request,
    encode,
)
from kog_dist.runtime.stages import STAGES
from kog_dist.sampling_params import DEFAULTS, LIMITS, SamplingParams
from kog_dist.speculation import Speculation

HEAD = MAGIC + bytes((PROTOCOL_VERSION,))
texts = st.text(st.characters(codec="utf-8"), max_size=40)
names = st.text(alphabet="abcXYZ019-_.:", min_size=1, max_size=64)
counts = st.integers(0, 2**53)
seconds = st.floats(0, 1e9, allow_nan=False)
by_type: dict[Any, st.SearchStrategy[Any]] = {
    "str": texts,
    "str | None": st.none() | texts,
    "int": counts,
    "int | None": st.none() | st.integers(1, 2**31 - 1),
    "float": seconds,
    "float | None": st.none() | seconds,
    "bool": st.booleans(),
    "tuple[int, ...]": st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    "tuple[float, ...]": st.lists(seconds, max_size=5).map(tuple),
    "tuple[int | None, ...]": st.lists(st.none() | st.integers(0, 2**53), max_size=5).map(tuple),
    "tuple[float | None, ...]": st.lists(st.none() | seconds, max_size=5).map(tuple),
    "tuple[str, ...]": st.lists(texts, max_size=5).map(tuple),
    "EngineState": st.sampled_from(EngineState),
    "FinishReason": st.sampled_from(FinishReason),
    "ErrorCode": st.sampled_from(ErrorCode),
    "Speculation | None": st.none() | st.sampled_from(Speculation),
    "Sequence[int] | None": st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=5).map(lambda ids: array("I", ids)),
}
by_name: dict[str, st.SearchStrategy[Any]] = {
    "request_id": names,
    "running": st.none() | names,
    "waiting": st.lists(names, max_size=4).map(tuple),
    "also_running": st.lists(names, max_size=4).map(tuple),
    "digests": st.lists(st.text("0123456789abcdef", min_size=64, max_size=64), max_size=3).map(tuple),
    "conversation": st.none() | names,
    "deadline_s": st.none() | st.floats(0.001, 1e9),
    "stop": st.lists(st.text("ab", min_size=1, max_size=9), max_size=16).map(tuple),
    "logprobs": st.lists(st.floats(-MAX_FLOAT32, 0), max_size=5).map(tuple),
    "stages_s": st.just(()) | st.tuples(*[st.none() | seconds] * len(STAGES)),
    "top_logprobs": st.lists(st.floats(-MAX_FLOAT32, 0), max_size=5).map(tuple),
}
sampling: dict[str, st.SearchStrategy[Any]] = {
    name: st.integers(int(low), int(high)) if isinstance(low, int) else st.floats(low, high)
    for name, (low, high) in LIMITS.items()
} | {
    "temperature": st.just(0.0) | st.floats(0.001, 100),
    "logprobs": st.none() | st.integers(0, 20),
    "logit_bias": st.dictionaries(st.integers(-(2**63), 2**63 - 1), st.floats(-100, 100), max_size=5),
}


def any_message(cls: type[Any]) -> st.SearchStrategy[Any]:
    kinds = {item.name: item.type for item in dataclasses.fields(cls) if item.name not in ("prompt_ids", "sampling")}
    strategies = {name: by_name[name] if name in by_name else by_type[kind] for name, kind in kinds.items()}
    if cls is Error:
        strategies |= {"message": texts.filter(bool), "request_id": st.none() | names}
    if cls is Done:
        strategies |= {"stop_string": st.none() | texts.filter(bool)}
    if cls is Generate:
        strategies |= {"prompt": texts, "sampling": st.builds(SamplingParams, **sampling)}
        filled = st.none() | texts.filter(bool)
        strategies |= {"json_schema": filled, "regex": st.none(), "cache_salt": filled, "prompt_logprobs": st.just(False)}
        strategies |= {"grammar": st.none(), "thought_end": st.integers(0, 2**31 - 1)}
    return st.builds(cls, **strategies)


@settings(max_examples=20)
@given(st.data())
@pytest.mark.parametrize("cls", [*REQUESTS.values(), *EVENTS.values()], ids=lambda cls: cls.__name__)
def test_every_message_survives_the_wire(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_message(cls))
    decode = decode_request if cls in REQUESTS.values() else decode_event
    assert decode(encode(message)) == message


@pytest.mark.parametrize("ids", [(), (0, 5, 31_999), (2**32 - 1,), (2**32, 5), (-1, 5)])
def test_token_ids_survive_the_wire(ids: tuple[int, ...]) -> None:
    message = Generate("a", prompt_ids=ids)
    found = decode_request(encode(message))
    assert found == message
    assert isinstance(found, Generate)
    assert tuple(found.prompt_ids or ()) == ids


def test_token_ids_may_come_as_integers_or_as_the_bytes_of_words() -> None:
    wanted = Generate("a", prompt_ids=(1, 258))
    for ids in ([1, 258], b"\1\0\0\0\2\1\0\0"):
        assert decode_request(HEAD + msgpack.packb(["generate", {"request_id": "a", "prompt_ids": ids}])) == wanted
    assert b"\1\0\0\0\2\1\0\0" in encode(wanted)


def mutated(frame: bytes, position: int, value: int) -> bytes:
    position %= len(frame)
    return frame[:position] + bytes((value,)) + frame[position + 1 :]


@settings(max_examples=400)
@given(st.binary(max_size=300) | st.binary(max_size=300).map(HEAD.__add__))
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    for decode in (decode_request, decode_event):
        try:
            decode(frame)
        except BadMessage:
            pass


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("top_k", -1), ("top_k", 2**31), ("top_p", 0.0), ("top_p", 1.5), ("top_p", float("nan")), ("min_p", -0.5), ("min_p", 2),
        ("repetition_penalty", 0), ("repetition_penalty", float("inf")), ("presence_penalty", 2.5), ("frequency_penalty", -3),
        ("min_tokens", -1), ("logprobs", -1), ("logprobs", 21),
    ],
)  # fmt: skip
def test_values_out_of_range_are_invalid_requests_that_name_them(name: str, bad: float) -> None:
    with pytest.raises(BadMessage, match=f"^generate: {name} must be between") as caught:
        decode_request(HEAD + msgpack.packb(["generate", {"request_id": "a", "prompt": "b", "sampling": {name: bad}}]))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_one_grammar_at_a_time() -> None:
    assert decode_request(encode(Generate("a", "b", regex="[a-z]+"))) == Generate("a", "b", regex="[a-z]+")
    with pytest.raises(BadMessage, match="json_schema and regex exclude each other") as caught:
        Generate("a", "b", json_schema="{}", regex="a")
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    for name, size in (("json_schema", 65_537), ("regex", 4_097), ("regex", 0), ("cache_salt", 1_025), ("cache_salt", 0)):
        with pytest.raises(BadMessage, match=f"{name} must have 1 to"):
            Generate("a", "b", **{name: "x" * size})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("biases", "finding"),
    [
        ([1, 1.0, 2], "ids and biases in turn"), ({"1": 1.0}, "in turn"), ([1, 1.0, 1, 2.0], "names an id twice"),
        ([1, 101.0], "logit_bias must be"), ([1, float("nan")], "logit_bias must be"), ([[1, 1.0]], "in turn"),
        ([1.5, 1.0], "pairs of an id and a number"), ([1, 0.5] * 1025, "at most 1024 ids"),
    ],
)  # fmt: skip
def test_biases_that_make_no_sense_are_refused(biases: Any, finding: str) -> None:
    body = {"request_id": "a", "prompt": "b", "sampling": {"logit_bias": biases}}
    with pytest.raises(BadMessage, match=finding):
        decode_request(HEAD + msgpack.packb(["generate", body]))


VALID = [
    encode(Generate("id-1", "prompt text", None, 5, SamplingParams(0.5, 3, logit_bias=((7, 1.0),)), ("a", "b"), True, False)),
    encode(Tokens("id-1", 3, (1, 2), "text", (0.5, 0.6), ("0" * 64,))),
    encode(Done("id-1", FinishReason.STOP, 1, 2, 0.1, 0.2)),
]


@settings(max_examples=400)
@given(st.sampled_from(VALID), st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_is_a_message_or_a_protocol_error(frame: bytes, position: int, value: int) -> None:
    for decode in (decode_request, decode_event):
        try:
            decode(mutated(frame, position, value))
        except ProtocolError:
            pass


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | texts | st.binary(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=300)
@given(
    st.sampled_from([*REQUESTS]), st.dictionaries(st.sampled_from(["request_id", "prompt", "sampling", "stop", "x"]), json_like)
)
def test_any_values_are_a_message_or_a_protocol_error(tag: str, body: dict[str, Any]) -> None:
    try:
        message = decode_request(HEAD + msgpack.packb([tag, body]))
    except ProtocolError:
        return
    assert encode(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("request_id", "x" * 65),
        ("request_id", "a/b"),
        ("request_id", "é"),
        ("request_id", None),
        ("prompt", ["text"]),
        ("prompt_ids", [1.0]),
        ("prompt_ids", [True]),
        ("prompt_ids", [[1]]),
        ("prompt_ids", 5),
        ("prompt_ids", b"\0\0\0"),
        ("prompt_ids", [b"\0\0\0\0"]),
        ("prompt", b"text"),
        ("seed", b"\0\0\0\0"),
        ("stop", b"text"),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", 1.0),
        ("sampling", 5),
        ("sampling", {"best_of": 2}),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "0"),
        ("temperature", True),
        ("seed", -1),
        ("seed", 1.0),
        ("stop", "text"),
        ("stop", [""]),
        ("stop", ["x" * 257]),
        ("stop", ["a"] * 17),
        ("ignore_eos", 1),
        ("logit_digests", "yes"),
        ("best_of", 2),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    given = {"sampling": {field: value}} if field in DEFAULTS else {field: value}
    body = {"request_id": "a", "prompt": "x"} | ({"prompt": None} if field == "prompt_ids" else {}) | given
    with pytest.raises(BadMessage, match=field) as refused:
        decode_request(HEAD + msgpack.packb(["generate", body]))
    assert refused.value.request_id == (None if field == "request_id" else "a")


@pytest.mark.parametrize("value", [-1, -1e-9, 100.5, float("nan"), float("inf")])
def test_every_temperature_out_of_range_has_one_code_and_the_limits_of_the_engines(value: float) -> None:
    with pytest.raises(BadMessage, match="temperature must be between 0 and 100, got") as refused:
        decode_request(HEAD + msgpack.packb(["generate", {"request_id": "a", "prompt": "x", "sampling": {"temperature": value}}]))
    assert (refused.value.code, refused.value.request_id) == ("invalid_request", "a")
    with pytest.raises(ValueError, match="between 0 and 100"):
        SamplingParams(value)


def test_temperature_may_be_an_integer_and_has_no_sign_of_zero() -> None:
    body = {"request_id": "a", "prompt": "x", "sampling": {"temperature": 1}}
    message = decode_request(HEAD + msgpack.packb(["generate", body]))
    assert isinstance(message, Generate)
    assert str(message.sampling.temperature) == "1.0"
    assert str(SamplingParams(temperature=-0.0).temperature) == "0.0"


def test_fields_with_a_default_may_be_left_out() -> None:
    assert decode_request(HEAD + msgpack.packb(["generate", {"request_id": "a", "prompt": "x"}])) == Generate("a", "x")
    with pytest.raises(BadMessage, match="request_id"):
        decode_request(HEAD + msgpack.packb(["cancel", {}]))


def test_defaults_are_left_out_of_requests_and_are_in_events() -> None:
    _, body = msgpack.unpackb(encode(Generate("id", prompt="x", max_tokens=4))[len(HEAD) :])
    assert body == {"request_id": "id", "prompt": "x", "max_tokens": 4}
    _, body = msgpack.unpackb(encode(Done("id", FinishReason.LENGTH, 1, 1, 0.0, 0.0))[len(HEAD) :])
    assert list(body) == [item.name for item in dataclasses.fields(Done)]


def test_stages_are_all_or_none() -> None:
    with pytest.raises(BadMessage, match="stages_s must have 12 elements or none, got 2"):
        Done("id", FinishReason.LENGTH, 1, 1, 0.0, 0.0, stages_s=(0.1, None))


def test_another_version_names_both() -> None:
    frame = MAGIC + bytes((PROTOCOL_VERSION + 1,)) + encode(Cancel("a"))[4:]
    for decode in (decode_request, decode_event):
        with pytest.raises(BadMessage, match=f"version {PROTOCOL_VERSION + 1}.*version {PROTOCOL_VERSION}") as refused:
            decode(frame)
        assert refused.value.code is ErrorCode.PROTOCOL_VERSION


def test_sizes_are_limited_on_both_sides() -> None:
    with pytest.raises(BadMessage, match="at most"):
        encode(Generate("a", "x" * MAX_MESSAGE_BYTES))
    with pytest.raises(BadMessage, match="at most"):
        decode_request(b"x" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(BadMessage, match="at most 262144"):
        Generate("a", prompt_ids=(1,) * 262_145)


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * (MAX_MESSAGE_BYTES - 4),
        b"\x92\xa6status\x81\xa1a" + b"\xdc\xff\xff" + (b"\xdc\xff\xfa" + b"\x80" * 0xFFFA) * 15,
        b"\xdd\x7f\xff\xff\xff",
        b"\xdf\x7f\xff\xff\xff",
        b"\xdb\x7f\xff\xff\xff",
        b"\x81" * 100_000,
    ],
    ids=["nested", "empty maps", "long array", "long map", "long text", "nested maps"],
)
def test_a_small_message_cannot_become_a_large_heap(body: bytes) -> None:
    tracemalloc.start()
    started_s = time.thread_time()
    with pytest.raises(BadMessage):
        decode_request(HEAD + body)
    spent_s = time.thread_time() - started_s
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 << 20
    assert spent_s < 1.0, "an amplification takes many seconds of this thread's own time"


def test_build_hash_is_stable_within_a_build() -> None:
    assert build_hash() == build_hash()
    assert build_hash().startswith("0.")


def test_every_message_has_one_tag() -> None:
    assert not set(REQUESTS) & set(EVENTS)
    classes = {item for item in vars(messages).values() if isinstance(item, type) and dataclasses.is_dataclass(item)}
    assert classes == {*REQUESTS.values(), *EVENTS.values()}


# ---- a token and its text: the short way ----
EMPTY = {"stamps_s": (), "digests": (), "logprobs": (), "top_ids": (), "top_logprobs": ()}


@given(
    request_id=names, index=counts, token_id=st.integers(0, 2**31 - 1), text=st.text(st.characters(codec="utf-8"), max_size=400)
)
def test_the_short_way_is_the_same_message(request_id: str, index: int, token_id: int, text: str) -> None:
    body = {"request_id": request_id, "index": index, "token_ids": (token_id,), "text": text, **EMPTY}
    general = HEAD + msgpack.packb(["tokens", body])
    event = Tokens.one(request_id, index, token_id, text)
    assert event == Tokens(**body) == decode_event(general) == decode_event(encode(event))  # type: ignore[arg-type]
    assert msgpack.unpackb(encode(event)[len(HEAD) :]) == msgpack.unpackb(general[len(HEAD) :]), "any msgpack library reads it"


@given(
    place=st.integers(0, 1000), byte=st.binary(min_size=1, max_size=3), width=st.integers(0, 3),
    text=st.sampled_from(["", "x", "\N{SNOWMAN}" * 9]),
)  # fmt: skip
def test_the_short_way_refuses_what_the_general_one_refuses(place: int, byte: bytes, width: int, text: str) -> None:
    frame = encode(Tokens.one("a-1", 5, 7, text))
    place %= len(frame)
    damaged = frame[:place] + byte + frame[place + width :]
    try:
        event = decode_event(damaged)
    except BadMessage:
        return
    assert decode_event(encode(event)) == event
    if isinstance(event, Tokens):
        Tokens(**{item.name: getattr(event, item.name) for item in dataclasses.fields(event)})


def test_long_texts_and_large_numbers_take_the_general_way() -> None:
    for event in (Tokens.one("a", 2**40, 7, "x"), Tokens.one("a", 1, 7, "x" * 70_000)):
        assert decode_event(encode(event)) == event
