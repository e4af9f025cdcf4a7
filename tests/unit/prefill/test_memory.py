"""What prefill is said to take is what it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kog_dist.collectives.mailbox import place
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.spec import ModelSpec, laneformer_2b
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.buffers.dense import DenseBuffers, dense_buffer_bytes
from kog_dist.workers.prefill.buffers.lanes import Buffers
from kog_dist.workers.prefill.exchange.peer_exchange import mailboxes
from kog_dist.workers.prefill.memory import buffer_bytes, matrix_bytes, prefill_bytes
from tests.unit.prefill.models import SMALL, VARIANTS, Rank, layout_of


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_is_counted_beforehand(tmp_path: Path, variant: str) -> None:
    spec = ModelSpec(**{**SMALL, **VARIANTS[variant]})
    write_checkpoint(tmp_path, spec, random_tensors(spec, 1), manifest=False)
    lanes = range(max(1, spec.num_lanes // 2))
    layout = layout_of(spec, len(lanes))
    if spec.has_one_stream:
        dense = DenseBuffers(layout, np.float16, 16, "cpu")
        for size in (8, 16):
            dense.rows(size)
        dense.last_rows()
        assert dense_buffer_bytes(layout, 16) == dense.num_bytes
    else:
        buffers = Buffers(layout, np.float16, 16, "cpu")
        for size, is_exact in ((8, False), (16, False), (12, True), (1, True)):
            buffers.rows(size, is_exact=is_exact)
        assert buffer_bytes(layout, (8, 16), 12) == buffers.num_bytes
    rank = Rank(open_checkpoint(tmp_path), lanes=lanes, dtype=np.float16)
    kept = [getattr(layer, name) for layer in rank.matrices for name in layer.__slots__]
    assert matrix_bytes(spec, len(lanes)) == sum(tensor.nbytes for tensor in kept if tensor is not None)


def test_ranks_share_it() -> None:
    alone, first = (prefill_bytes(KernelShape(laneformer_2b(), range(8 // n), num_ranks=n)) for n in (1, 2))
    assert 4.2e9 < alone["prefill weights"] < 4.5e9
    assert 3.0e9 < alone["prefill"] < 4e9, "chunks of up to 4,096 tokens"
    assert first["prefill weights"] < 0.6 * alone["prefill weights"]


def test_a_short_context_needs_no_large_chunks() -> None:
    longest, short = (prefill_bytes(KernelShape(replace(laneformer_2b(), max_context=n), range(8))) for n in (4096, 1024))
    assert short["prefill"] < 0.5 * longest["prefill"]


def test_sums_of_several_ranks_are_counted() -> None:
    for num_ranks in (2, 4):
        shape = KernelShape(laneformer_2b(), range(8 // num_ranks), num_ranks=num_ranks)
        alone = prefill_bytes(KernelShape(laneformer_2b(), range(8 // num_ranks)))["prefill"]
        heap = 8 * sum(box.num_words for box in place(mailboxes(shape.spec, 4096, num_ranks), num_ranks))
        assert prefill_bytes(shape)["prefill"] == alone + heap
        assert 602e6 < heap < 608e6, "parts and totals of three layers, twice, whatever the number of ranks"
