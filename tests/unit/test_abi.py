"""The shared structs: numpy, the offsets and a C compiler agree on every byte."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.runtime import abi
from kog_dist.runtime.abi import LABEL_BYTES, LINE_BYTES, RANK_CONTROL, STRUCTS, WAIT_RECORD, Field, Struct, WaitOp, WaitRecord


@pytest.mark.parametrize("compiler", ["gcc", "g++"])
def test_c_compiler_sees_the_same_layout(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    (tmp_path / "kog_abi.h").write_text(abi.c_header())
    lines = []
    for struct in STRUCTS:
        lines.append(f'    printf("%s\\"{struct.name}\\": [%zu", comma, sizeof(Kog{struct.name})); comma = ", ";')
        lines += [f'    printf(", %zu", offsetof(Kog{struct.name}, {field.name}));' for field in struct.fields]
        lines.append('    printf("]");')
    body = "\n".join(lines)
    source = tmp_path / "main.c"
    source.write_text(
        f'#include "kog_abi.h"\n#include <stdio.h>\nint main(void) {{\n    const char *comma = "";\n    printf("{{");\n{body}\n'
        '    printf("}\\n");\n    return 0;\n}\n'
    )
    command = [compiler, "-Wall", "-Werror", f"-std={'c11' if compiler == 'gcc' else 'c++17'}", "-x"]
    command += ["c" if compiler == "gcc" else "c++", str(source), "-o", str(tmp_path / "main")]
    subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
    printed = json.loads(subprocess.run([tmp_path / "main"], check=True, timeout=60, capture_output=True).stdout)
    assert printed == {s.name: [s.size_bytes, *s.offsets.values()] for s in STRUCTS}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.name)
def test_numpy_sees_the_same_layout(struct: Struct) -> None:
    assert struct.dtype.itemsize == struct.size_bytes
    assert struct.size_bytes % struct.size_multiple == 0
    assert struct.dtype.fields is not None
    ends = [0]
    for field in struct.fields:
        found, offset = struct.dtype.fields[field.name][:2]
        assert offset == struct.offsets[field.name]
        assert offset >= ends[-1], "fields overlap"
        assert offset % found.base.itemsize == 0, "not naturally aligned"
        ends.append(offset + found.itemsize)
    assert ends[-1] <= struct.size_bytes


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.name)
def test_packed_records_have_the_same_layout(struct: Struct) -> None:
    chance = np.random.default_rng(3)
    record = np.zeros(1, struct.dtype)
    for field in struct.fields:
        record[field.name] = chance.integers(1, 100, field.count)[0] if field.count == 1 else chance.integers(1, 100, field.count)
    values = [record[0][field.name].item() if field.count == 1 else record[0][field.name].tobytes() for field in struct.fields]
    assert struct.packer.pack(*values) == record.tobytes()
    assert struct.packer.unpack(record.tobytes()) == tuple(values)


def test_writers_do_not_share_cache_lines() -> None:
    header = abi.CONTROL_HEADER.offsets
    lines = [header["ring_offset"], header["abort"], header["doorbell"]]
    assert [offset // LINE_BYTES for offset in lines] == sorted({offset // LINE_BYTES for offset in lines})
    assert RANK_CONTROL.size_bytes % LINE_BYTES == 0
    assert abi.TOKEN_ENTRY.size_bytes == LINE_BYTES


def test_digest_changes_with_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {abi.abi_digest()}
    for struct in STRUCTS:
        for fields in (struct.fields[::-1], (*struct.fields, Field("more", "u64", "one more"))):
            other = Struct(struct.name, struct.doc, fields, struct.size_multiple)
            if other.offsets == struct.offsets:
                continue
            monkeypatch.setattr(abi, "STRUCTS", tuple(other if s is struct else s for s in STRUCTS))
            digests.add(abi.abi_digest())
    assert len(digests) == 1 + sum(2 if len(s.fields) > 1 else 1 for s in STRUCTS)


U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(U32, U32, U32, U32, U64, U64, U64, st.sampled_from(WaitOp), st.text("ab_é.", max_size=LABEL_BYTES // 2))
def test_wait_record_survives_packing(
    rank: int, slot: int, peer: int, missing: int, wanted: int, seen: int, elapsed: int, op: WaitOp, label: str
) -> None:
    record = WaitRecord(rank, op, 3, slot, peer, missing, wanted, seen, elapsed, label, cta=5, phase=6, stamp_ns=7)
    raw = record.pack()
    assert len(raw) == WAIT_RECORD.size_bytes
    assert WaitRecord.unpack(raw) == record


def test_wait_record_says_who_waited_for_what() -> None:
    record = WaitRecord(3, WaitOp.COLLECT, 1, 4, 6, 17, 1001, 999, 1_500_000_000, "attention.2")
    text = str(record)
    seen = "(epoch 1001 wanted, 999 seen); look at what rank 6 was doing"
    assert text == f"rank 3: mailbox 'attention.2' slot 4 waited 1.5 s for 17 words of rank 6 {seen}"
    assert str(WaitRecord(3, WaitOp.BARRIER, 1, 4, 6, 1, 1, 0, 1)).startswith(
        "rank 3: a barrier waited 0.0 s for 1 word of rank 6"
    )
    unknown = WaitRecord.unpack(WaitRecord(3, WaitOp.COLLECT, 1, 4, abi.NO_PEER, 0, 1, 0, 1).pack())
    assert "0 words of the other ranks" in str(unknown)
    assert str(unknown).endswith("look at what the other ranks were doing")


@pytest.mark.parametrize(
    ("phase", "layer", "lane", "what"),
    [
        (Phase.GATE_UP, 7, 3, "GATE_UP of layer 7, lane 3"),
        (Phase.QKV, 0, 0, "QKV of layer 0, lane 0"),
        (Phase.OUT, 2, NONE, "the sum of OUT of layer 2"),
        (Phase.HEAD, NONE, 5, "HEAD of lane 5"),
        (Phase.SAMPLE, NONE, NONE, "SAMPLE"),
        (NONE, NONE, NONE, "mailbox 1 slot 4"),
        (77, 1, 1, "mailbox 1 slot 4"),
    ],
)
def test_wait_record_names_phase_layer_and_lane(phase: int, layer: int, lane: int, what: str) -> None:
    record = WaitRecord(0, WaitOp.COLLECT, 1, 4, 1, 4, 14, 13, 2 * 10**9, cta=12, phase=phase, layer=layer, lane=lane)
    assert WaitRecord.unpack(record.pack()).phase == phase
    assert str(WaitRecord.unpack(record.pack())).startswith(
        f"rank 0, thread block 12: {what} waited 2.0 s for 4 words of rank 1 ("
    )


@pytest.mark.parametrize(("lane", "what"), [(0, "DOWN of layer 2, lane 0, expert 0"), (NONE, "SELECT of layer 2, expert 0")])
def test_wait_record_names_an_expert(lane: int, what: str) -> None:
    phase = Phase.SELECT if lane == NONE else Phase.DOWN
    record = WaitRecord(0, WaitOp.COLLECT, 1, 4, 1, 4, 14, 13, 2 * 10**9, phase=phase, layer=2, lane=lane, expert=0)
    assert f": {what} waited" in str(WaitRecord.unpack(record.pack()))
    last = WaitRecord.unpack(replace(record, lane=7, expert=255).pack())
    assert (last.layer, last.lane, last.expert) == (2, 7, 255)


def test_damaged_records_are_still_readable() -> None:
    noise = np.arange(WAIT_RECORD.size_bytes, dtype=np.uint8).tobytes()
    record = WaitRecord.unpack(noise)
    assert record.op is WaitOp.UNKNOWN
    assert str(record)
    long = WaitRecord(0, WaitOp.COLLECT, 0, 0, 0, 0, 0, 0, 0, "é" * LABEL_BYTES)
    assert WaitRecord.unpack(long.pack()).label.startswith("é" * (LABEL_BYTES // 2 - 1))


def test_every_word_is_documented_once() -> None:
    names = list(itertools.chain.from_iterable((f"{s.name}.{f.name}" for f in s.fields) for s in STRUCTS))
    assert len(names) == len(set(names))
    assert all(field.doc for struct in STRUCTS for field in struct.fields)
