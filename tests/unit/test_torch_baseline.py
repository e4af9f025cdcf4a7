"""The decoder that the monokernel is compared with is the model: its logits are the oracle's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kog_dist.bench.kernel.torch_baseline import PRODUCTS, TorchDecoder
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.spec import HeadType, ModelSpec

BASE = ModelSpec(
    hidden_size=32, num_layers=5, num_heads=8, num_kv_heads=4, intermediate_size=48, vocab_size=40, max_context=64,
    num_lanes=4, delay=2, sliding_window=5, window_layers=(0, 1, 3),
)  # fmt: skip
SPECS = {
    "delayed": BASE,
    "delay 1, early local": replace(BASE, delay=1, early_comm=False),
    "attention local": replace(BASE, attention_comm=False),
    "dense twin": replace(BASE, num_lanes=1, delay=0),
    "aggregate before norm": replace(BASE, pre_norm_lane_agg=True),
    "norms per lane": replace(BASE, shared_norm_scale=False),
    "tied": replace(BASE, tied_embeddings=True),
    "head of all lanes": replace(BASE, head_type=HeadType.LANE),
    "head of all lanes, all blocking": replace(BASE, head_type=HeadType.LANE, delay=0),
    "head by lane": replace(BASE, head_type=HeadType.VOCAB_PARALLEL, shared_norm_scale=False),
}
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def logits_of(step: Step, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([step(ids[i : i + 1], torch.tensor([i])) for i in range(len(ids))])


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_logits_are_those_of_the_oracle(name: str, product: str) -> None:
    spec = SPECS[name]
    oracle = Laneformer(spec, seed=3)
    ids = torch.randint(spec.vocab_size, (20,), generator=torch.Generator().manual_seed(3))
    found = logits_of(TorchDecoder(spec, oracle.state_dict().__getitem__, 24, product), ids)
    wanted = oracle.double()(ids[None])[0]
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6


@torch.no_grad()
def test_the_step_is_one_graph() -> None:
    weights = Laneformer(BASE, seed=3).state_dict().__getitem__
    ids = torch.arange(8)
    compiled = torch.compile(TorchDecoder(BASE, weights, 16), fullgraph=True, dynamic=False, backend="eager")
    assert torch.equal(logits_of(compiled, ids), logits_of(TorchDecoder(BASE, weights, 16), ids))
