"""Every wait of the monokernel ends in time, on a CPU (decode_twin/): when its watchdogs leave, and what they say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kog_dist.abi import WaitRecord
from kog_dist.decode.steps import Phase
from kog_dist.workers.cuda.kernel_abi import abi_header
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.silent import with_silent_cta
from tests.unit.test_context_twin import CONTEXT, HEADS, prepare
from tests.unit.test_decode_twin import Model, build_twin, twin_sources

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def test_a_thread_block_that_misses_no_words_waits_an_eighth_longer(tmp_path: Path) -> None:
    build_twin("watchdog", twin_sources({"abi.cuh": abi_header()}), tmp_path)
    done = subprocess.run(["./watchdog", "8000"], cwd=tmp_path, capture_output=True, text=True, timeout=10, check=True)
    of_one, of_none = ([int(number) for number in line.split()] for line in done.stdout.splitlines())
    assert of_one == [8005, 1, 1, 1], "a word is missing: at the limit"
    assert of_none == [9005, 1, 1, 0], "it is not for ever"


def test_all_leave_when_a_thread_block_never_publishes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, limit_us = HEADS[48], 100
    shape = KernelShape(spec, range(spec.num_lanes), max_ctas=5, copies=2, max_slots=6)
    model, ids = Model(spec, "bfloat16", monkeypatch), np.zeros(CONTEXT, np.uint32)
    prepare(shape, model, ids, tmp_path, lambda sources: with_silent_cta(sources, 2))
    (tmp_path / "kv.0.bin").write_bytes(bytes(shape.kv_bytes))
    command = ["./context", ".", str(shape.kv_bytes), str(shape.num_words), "4", str(limit_us), "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 5, "4: somebody waits for ever"
    record = WaitRecord.unpack((tmp_path / "record.bin").read_bytes())
    rows = shape.out.cta_rows
    assert (record.phase, record.num_missing) == (Phase.HEAD_INPUT, rows // 2)
    assert limit_us * 1000 < record.elapsed_ns < limit_us * 1000 * 9 // 8
