"""No wait of the monokernel takes words or counts of the token before for new ones, on a CPU (decode_twin/waits.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.collectives.mailbox import place
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_header import headers
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_decode_twin import build_twin, twin_sources

pytestmark = needs_compiler

# Every thread of a warp has a part of each vector, and some have two: a small model's words would leave half of them out.
SPEC = ModelSpec(
    hidden_size=1536, num_layers=2, num_heads=8, num_kv_heads=2, own_head_dim=64, intermediate_size=1184, vocab_size=7200,
    max_context=64, num_lanes=2, delay=0, shared_norm_scale=True, experts=ExpertsSpec(40, 4),
)  # fmt: skip

PAIR, VALUE, QUAD = 4, 4, 2  # bits of a tag that are asked about
ASKED = {
    "counter": 15, "barrier": 3, "hidden": 768 * PAIR, "attended": 128 * PAIR, "sums": 2 * 768 * PAIR, "streams": 2 * 768 * PAIR,
    "peers": 3 * 28 * VALUE, "activations": 4 * 296 * PAIR, "router": 40 * PAIR, "part": 64 * PAIR + 32 * VALUE,
    "parts": 128 * PAIR + 64 * VALUE, "query": 4 * 32 * PAIR + 2 * 32 * PAIR, "blocks": 3 * 3, "products": 3 * 8,
    "mask": 3 * VALUE, "first pairs": 2 * 96 * QUAD,
    "second pairs": 2 * 96 * QUAD, "largest logits": 2 * 48 * VALUE, "report": 96 * VALUE, "list": 64 * VALUE,
    "candidates": 2 * 96 * VALUE, "late logit": 1,
}  # fmt: skip


def test_every_wait_looks_at_every_bit_of_every_tag(tmp_path: Path) -> None:
    shape = TrialShape(SPEC, range(1), num_ranks=2, max_ctas=48, copies=2, max_slots=6)
    build_twin("waits", twin_sources(headers(shape)), tmp_path)
    heap_words = sum(box.num_words for box in place(shape.words.boxes.specs(), shape.num_ranks))
    command = ["./waits", str(shape.words.num_words), str(heap_words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = dict[str, tuple[int, int, int]]()
    for line in done.stdout.splitlines():
        *name, is_complete, asked, ended_well = line.split()
        found[" ".join(name)] = (int(is_complete), int(asked), int(ended_well))
    assert found == {name: (1, asked, 0) for name, asked in ASKED.items()}
