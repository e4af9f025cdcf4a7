"""One safetensors file: hostile headers, and rounding to bfloat16."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kog_dist.errors import CheckpointError
from kog_dist.model.safetensors_file import SafetensorsFile, narrow, widen


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def raw_file(header: bytes, num_data_bytes: int = 0) -> bytes:
    return struct.pack("<Q", len(header)) + header + b"\0" * num_data_bytes


near_ties = st.builds(lambda high, low: high << 16 | low, st.integers(0, 2**16 - 1), st.sampled_from([0, 0x7FFF, 0x8000, 0x8001]))


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**32 - 1) | near_ties, min_size=1, max_size=64))
def test_bfloat16_rounds_like_torch(patterns: list[int]) -> None:
    single = np.array(patterns, np.uint32).view(np.float32)
    ours = narrow(single, "BF16")
    theirs = torch.from_numpy(single.copy()).to(torch.bfloat16)
    back = np.empty(len(ours), np.float32)
    widen(ours, "BF16", back)
    assert np.array_equal(back, theirs.float().numpy(), equal_nan=True)
    assert np.array_equal(np.signbit(back), np.signbit(single))


def entry(**changes: object) -> dict[str, Any]:
    return {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]} | changes


@pytest.mark.parametrize(
    ("header", "num_data_bytes", "cause"),
    [
        (b"", 0, "a header of 0 bytes"),
        (b"{}", 1, "followed by bytes that belong to nothing"),
        (b" {}", 0, "not a JSON object"),
        (b"[]", 0, "not a JSON object"),
        (b"3 ", 0, "not a JSON object"),
        (b'{"a":', 0, "not valid JSON"),
        (b'{"a\xff": 1}', 0, "not valid JSON"),
        (b"{" * 3000, 0, "not valid JSON"),
        (b'{"a":' * 2000 + b"1" + b"}" * 2000, 0, "not valid JSON"),
        (b'{"a":1' + b"0" * 5000 + b"}", 0, "not valid JSON"),
        (b"{" * 70_000, 0, "more than 65536 tensors"),
        (b"{" + b"[" * 140_000, 0, "more than 65536 tensors"),
        (b'{"a":[' + b"0," * (2**20 + 1), 0, "more than 65536 tensors"),
        (json.dumps({"a": entry()}).encode()[:-1] + b"," + json.dumps({"a": entry()}).encode()[1:], 4, "key 'a' stands twice"),
        (b'{"a":{"dtype":"BF16","dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4, "key 'dtype' stands twice"),
        (json.dumps({"a": 3}).encode(), 0, "tensor 'a': an entry must have exactly"),
        (json.dumps({"a": entry(extra=1)}).encode(), 4, "an entry must have exactly"),
        (json.dumps({"a": entry(dtype=["BF16"])}).encode(), 4, "is not supported"),
        (json.dumps({"a": entry(dtype="x" * 10**6)}).encode(), 4, "is not supported"),
        (json.dumps({"a": entry(shape=[-2])}).encode(), 4, "not a list of at most 8 sizes"),
        (json.dumps({"a": entry(shape=[2.0])}).encode(), 4, "not a list of at most 8 sizes"),
        (json.dumps({"a": entry(shape=[True, 2])}).encode(), 4, "not a list of at most 8 sizes"),
        (json.dumps({"a": entry(shape=[1] * 9)}).encode(), 2, "not a list of at most 8 sizes"),
        (json.dumps({"a": entry(shape=[2**63])}).encode(), 4, "not a list of at most 8 sizes"),
        (json.dumps({"a": entry(shape=[2**62] * 4)}).encode(), 4, "needs another number of bytes"),
        (json.dumps({"a": entry(shape=[3])}).encode(), 4, "needs another number of bytes"),
        (json.dumps({"a": entry(data_offsets=[4, 0])}).encode(), 4, "not two ascending offsets"),
        (json.dumps({"a": entry(data_offsets=[-4, 0])}).encode(), 4, "not two ascending offsets"),
        (json.dumps({"a": entry(data_offsets=[0, 4, 8])}).encode(), 4, "not two ascending offsets"),
        (json.dumps({"a": entry(data_offsets=[1, 5])}).encode(), 5, "leaves a hole before it"),
        (json.dumps({"a": entry(), "b": entry(data_offsets=[2, 6])}).encode(), 6, "overlaps the tensor before it"),
        (json.dumps({"a": entry(), "b": entry()}).encode(), 4, "overlaps the tensor before it"),
        (json.dumps({"a": entry(), "b": entry(data_offsets=[6, 10])}).encode(), 10, "leaves a hole before it"),
        (json.dumps({"a": entry(shape=[2**40], data_offsets=[0, 2**41])}).encode(), 4, "is truncated, copy it again"),
        (json.dumps({"a": entry(shape=[0], data_offsets=[9, 9])}).encode(), 0, "leaves a hole"),
        (b'{"__metadata__":{"a":1}}', 0, "__metadata__"),
        (b'{"__metadata__":[]}', 0, "__metadata__"),
    ],
)  # fmt: skip
def test_hostile_headers_are_refused_with_the_cause(tmp_path: Path, header: bytes, num_data_bytes: int, cause: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_file(header, num_data_bytes))
    message = refusal(lambda: SafetensorsFile.open(path))
    assert cause in message
    assert str(path) in message
    assert len(message) < 800


def test_a_tensor_has_eight_dimensions_at_most(tmp_path: Path) -> None:
    path, shape = tmp_path / "model.safetensors", [1] * 7 + [2]
    path.write_bytes(raw_file(json.dumps({"a": entry(shape=shape)}).encode(), 4))
    assert SafetensorsFile.open(path).tensors["a"].shape == tuple(shape)


@pytest.mark.parametrize("length", [0, 1, 2**24 + 1, 2**63, 2**64 - 1])
def test_absurd_header_lengths_are_refused_before_anything_is_allocated(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    os.truncate(path, 2**25)  # sparse
    assert f"a header of {length} bytes is announced" in refusal(lambda: SafetensorsFile.open(path))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["BF16", "F32"]),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["BF16", "F16", "F32"]) | json_values,
        "shape": st.lists(st.integers(0, 5), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | json_values,
        "more": json_values,
    },
)


def spans_or_refusal(path: Path) -> list[tuple[int, int]] | str:
    """Byte ranges of the tensors, ascending; or the message with which the file is refused."""
    try:
        file = SafetensorsFile.open(path)
    except CheckpointError as error:
        return str(error)
    return sorted((tensor.begin, tensor.end) for tensor in file.tensors.values())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "c", "__metadata__"]) | st.text(max_size=6), entries | json_values, max_size=4
    )
    | json_values,
    num_data_bytes=st.integers(0, 48),
    cut=st.integers(0, 8),
)
def test_any_header_is_refused_or_describes_the_file_exactly(
    tmp_path_factory: pytest.TempPathFactory, header: object, num_data_bytes: int, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    raw = raw_file(json.dumps(header).encode(), num_data_bytes)
    path.write_bytes(raw[: len(raw) - cut] if cut < 3 else raw)
    found = spans_or_refusal(path)
    if isinstance(found, str):
        assert str(path) in found
    else:
        covered = [offset for begin, end in found for offset in range(begin, end)]
        assert covered == list(range(8 + int.from_bytes(raw[:8], "little"), path.stat().st_size))


def test_a_valid_header_is_among_those_accepted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"b": entry(data_offsets=[4, 8]), "__metadata__": {"format": "pt"}, "a": entry()}).encode() + b"  "
    path.write_bytes(raw_file(header, 8))
    start = 8 + len(header)
    assert spans_or_refusal(path) == [(start, start + 4), (start + 4, start + 8)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(raw=st.binary(max_size=64))
def test_any_bytes_are_refused_or_an_empty_file(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.safetensors"
    for content in (raw, struct.pack("<Q", max(0, len(raw) - 8)) + raw, raw_file(raw)):
        path.write_bytes(content)
        found = spans_or_refusal(path)
        assert found == [] or str(path) in found
