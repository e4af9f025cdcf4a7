"""Every wait of the monokernel ends in time, on a CPU (decode_twin/): when its watchdogs leave, and what they say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.runtime.abi import WaitRecord
from kog_dist.workers.cuda.kernel_abi import abi_header
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.silent import LAST_DOWN, with_silent_cta
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_context_twin import CONTEXT, HEADS, prepare
from tests.unit.test_decode_twin import Model, build_twin, twin_sources

pytestmark = needs_compiler


def test_a_thread_block_that_misses_no_words_waits_an_eighth_longer(tmp_path: Path) -> None:
    build_twin("watchdog", twin_sources({"abi.cuh": abi_header()}), tmp_path)
    done = subprocess.run(["./watchdog", "8000"], cwd=tmp_path, capture_output=True, text=True, timeout=10, check=True)
    of_one, of_none, of_ended, of_peers, of_ranks = (
        [int(number) for number in line.split()] for line in done.stdout.splitlines()
    )
    assert of_one == [8005, 1, 1, 1], "a word is missing: at the limit"
    assert of_none == [9005, 1, 1, 0], "it is not for ever"
    assert of_ended == [0, 9], "the note is of a later wait: its words are not looked at"
    assert of_peers == [1, 9], "a row of two words, of which the second is late"
    assert of_ranks == [2, 3, 8], "the first rank that is late, all late words of others, and what stands in the first of them"


LIMIT_US = 300  # enough for the 1,024 looks after which a warp notes what it waits for


def stalled(silence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[WaitRecord, KernelShape]:
    """What is recorded when thread block 2 never publishes its rows at `silence`."""
    spec = HEADS[48]
    shape = TrialShape(spec, range(spec.num_lanes), max_ctas=5, copies=2, max_slots=6)
    model, ids = Model(spec, "bfloat16", monkeypatch), np.zeros(CONTEXT, np.uint32)
    prepare(shape, model, ids, tmp_path, lambda sources: with_silent_cta(sources, 2, silence))
    (tmp_path / "kv.0.bin").write_bytes(bytes(shape.cache.num_bytes))
    command = ["./context", ".", str(shape.cache.num_bytes), str(shape.words.num_words), "4", str(LIMIT_US), "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 5, "4: somebody waits for ever"
    return WaitRecord.unpack((tmp_path / "record.bin").read_bytes()), shape


def test_all_leave_when_a_thread_block_never_publishes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, shape = stalled(LAST_DOWN, tmp_path, monkeypatch)
    rows = shape.ops[Phase.OUT].cta_rows
    assert (record.phase, record.layer, record.num_missing) == (Phase.HEAD, NONE, rows // 2)
    assert LIMIT_US * 1000 < record.elapsed_ns < LIMIT_US * 1000 * 9 // 8


def test_the_record_names_phase_layer_and_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, shape = stalled("kind == 0 && layer == 1 && lane_idx == 1", tmp_path, monkeypatch)
    assert record.cta in range(shape.num_ctas)
    num_words = shape.ops[Phase.OUT].cta_rows // 2
    what = f"GATE_UP of layer 1, lane 1 waited 0.0 s for {num_words} words of rank 0"
    assert str(record).startswith(f"rank 0, thread block {record.cta}: {what} (epoch "), str(record)
