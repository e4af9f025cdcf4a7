"""Requests that take turns on one GPU have the answers that they have alone, with all their bits."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from kog_dist.bench.made_models.published import write_published
from kog_dist.bench.shapes import DENSE
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.topology import RankInfo
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines.cuda import CudaEngine
from tests.unit.asked_together import PATIENCE_S
from tests.unit.test_cuda_turns import PARALLEL, Served, compare, drawn

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]
CONTEXT, READY_S = 1536, 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dense")
    write_published(made, {**DENSE["llama-3.2-1b"], "num_hidden_layers": 4, "max_position_embeddings": CONTEXT})
    return made


def served(folder: Path, prefill: str, parallel: int) -> Served:
    spec = open_checkpoint(folder, verify=False).spec
    control = ControlPage.create(1, CONTEXT, vocab_size=spec.vocab_size, parallel=parallel)
    info = RankInfo(0, 1, 0, "turns", control_fd=control.fd, rendezvous_fd=control.fd)
    args = WorkerArgs(
        info, str(folder), "cuda:0", "bfloat16", True, PATIENCE_S, 10.0, prefill=prefill, drafts=True, parallel=parallel,
        num_kv_caches=parallel + 1, kept_bytes=1 << 30,
    )  # fmt: skip
    engine = CudaEngine(args, control)
    return Served(engine, control, spec.vocab_size, None, engine.startup, READY_S)


@pytest.mark.parametrize("prefill", ["on", "off"])
def test_every_answer_is_that_of_the_request_alone(prefill: str, folder: Path) -> None:
    """Without kept prefixes: where prefill has read a beginning in other chunks, its rows round differently."""
    chance = random.Random(7)
    asked = drawn(chance, 40, 128_000)
    with closing(served(folder, prefill, PARALLEL)) as engine:
        engine.run(asked, chance, reuse_kv=prefill == "off")
    with closing(served(folder, prefill, 1)) as engine:
        compare(engine, asked, reuse_kv=prefill == "off")
    assert {one.entries[-1].finish for one in asked} >= {Finish.LENGTH, Finish.CANCELLED}
