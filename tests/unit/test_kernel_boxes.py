"""The mailboxes of the monokernel's ranks: the plan's slots and epochs, and a header that device code compiles with."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kog_dist.collectives.cuda_abi import abi_header
from kog_dist.collectives.mailbox import place
from kog_dist.cuda.build import build
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.steps import Phase, Site
from kog_dist.model.spec import ModelSpec, Sublayer
from kog_dist.workers.cuda.build import device_sources
from kog_dist.workers.cuda.kernel_boxes import KernelBoxes

SPEC = ModelSpec(
    hidden_size=3072, num_layers=15, num_heads=128, num_kv_heads=64, intermediate_size=12288, vocab_size=32000, max_context=512,
    num_lanes=8, delay=2,
)  # fmt: skip
# What the finaliser will do with a row tile, and the sampler with candidates: it must compile, and fit into few registers.
PROBE = """
#include "peers.cuh"
#include "peers_shape.cuh"
namespace kog {
struct Launch { KogWaits waits; KogPeers peers; u64 out_ptr; u32 token, layer, kind, cta; };
struct Memory { PeerNote notes[2]; u32 stopped; };
}
extern "C" __global__ void __launch_bounds__(64, 1) kccl_probe(const __grid_constant__ kog::Launch launch) {
    using namespace kog;
    __shared__ Memory memory;
    float* out = reinterpret_cast<float*>(launch.out_ptr);
    const u32 stopped = shared_address(&memory.stopped), past = launch.layer - 2, row = launch.cta * 24;
    const u32 slot = sum_slot(launch.kind, past), tag = sum_tag(launch.kind, launch.token, slot);
    const Mailbox box = sum_box(launch.kind);
    SumFromPeers<kRanks, 24> from;
    from.load(launch.peers, box, slot, row, 3072);
    const float own = out[laneid()];
    float sum;
    if (!from.total(launch.peers, box, own, tag, stopped, memory.notes[0], sum)) return;
    const u32 new_slot = sum_slot(launch.kind, launch.layer);
    publish_sum_to_peers<kRanks, 24>(launch.peers, box, new_slot, row, 3072, sum, sum_tag(launch.kind, launch.token, new_slot));
    const u64 streams = stream_box().row(kRanks, 0, launch.peers.rank);
    publish_vector_to_all<kRanks, 24, 4>(launch.peers, streams, kStreamCopyWords, row, 3072, sum, 7);
    const u32 token = launch.token, turn = token & 1;
    publish_candidate<kRanks, 4>(launch.peers, candidate_box(), turn, kCandidateCopyWords, launch.cta, 1, 2, token);
    u32 best = 0;
    const auto fold = [&](u32 score, u32 id) { best = max(best, score ^ id); };
    if (!collect_candidates<kRanks, 128>(launch.peers, candidate_box(), turn, kCandidateCopyWords, launch.cta & 3, token, stopped,
                                         memory.notes[1], fold)) return;
    out[laneid()] = sum + static_cast<float>(best);
}
"""


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_sums_have_the_slots_and_epochs_of_the_plan(world_size: int) -> None:
    boxes, plan = KernelBoxes(SPEC, world_size, 128, 4), make_plan(SPEC, world_size)
    by_name = {spec.name: spec for spec in boxes.specs()}
    for site in (Site.ATTENTION, Site.MLP):
        planned, summed = plan.mailbox_by_name[site.name.lower()], boxes.summed_layers(Sublayer(site))
        assert (by_name[planned.name].num_slots, by_name[planned.name].length) == (planned.num_slots, planned.length)
        assert planned.per_token == len(summed)
        steps = [step for step in plan.ranks[0].steps if step.phase is Phase.SUM and step.site == site]
        assert [step.layer for step in steps] == list(summed)
        for step in steps:
            assert step.publishes is not None
            slot = summed.index(step.layer)
            assert plan.slot(step.publishes, 5) == slot
            assert plan.epoch(step.publishes, 5) == 5 * len(summed) + slot


def test_every_lane_and_copy_has_a_place() -> None:
    boxes = KernelBoxes(SPEC, 4, 128, 4)
    streams = {box.spec.name: box for box in place(boxes.specs(), 4)}["streams"]
    assert streams.row_words == 2 * 4 * 1536
    assert KernelBoxes(SPEC, 1, 128, 4).specs() == []


def test_layers_that_nobody_sums_have_no_slot() -> None:
    boxes = KernelBoxes(SPEC, 4, 128, 4)
    assert 14 not in boxes.summed_layers(Sublayer.MLP), "its sum would arrive behind the last layer"
    header = boxes.header(place(boxes.specs(), 4))
    mask = re.search(r"summed_mask\(u32 kind\) \{ return kind == 0 \? LayerMask<15>\{(0x[0-9a-f]+)ull", header)
    assert mask is not None
    assert int(mask[1], 16) == sum(1 << layer for layer in boxes.summed_layers(Sublayer.ATTENTION))


def test_boxes_of_several_tokens_lie_behind_those_of_one() -> None:
    spec = replace(SPEC, delay=0, num_layers=2)
    boxes, of_one = KernelBoxes(spec, 4, 128, 2, tokens=4), KernelBoxes(spec, 4, 128, 2)
    placed, placed_of_one = place(boxes.specs(), 4), place(of_one.specs(), 4)
    assert placed[: len(placed_of_one)] == placed_of_one, "one heap is for both builds"
    by_name = {box.spec.name: box for box in placed}
    for name in ("attention", "mlp", "candidates"):
        own, alone = by_name[boxes.name_of(name)], by_name[name]
        assert own is not alone
        assert (own.spec.num_slots, own.row_words) == (alone.spec.num_slots, 4 * alone.row_words)
        assert f"Mailbox{{{own.first_word}, {own.row_words}, " in boxes.header(placed)
        assert f"Mailbox{{{alone.first_word}, {alone.row_words}, " in of_one.header(placed)
        assert boxes.label_of(own.index) == of_one.label_of(alone.index) == name


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("world_size", "registers"), [(1, 56), (4, 56)])
def test_what_the_finaliser_calls_fits_into_its_registers(tmp_path: Path, world_size: int, registers: int) -> None:
    boxes = KernelBoxes(SPEC, world_size, 128, 4)
    sources = {**device_sources(), "abi.cuh": abi_header(), "probe.cu": PROBE}
    cubin = build({**sources, "peers_shape.cuh": boxes.header(place(boxes.specs(), world_size))}, "probe.cu", folder=tmp_path)
    used = re.search(r"Used (\d+) registers", cubin.log)
    assert used is not None
    assert int(used[1]) <= registers, cubin.log
    assert "0 bytes spill stores" in cubin.log
    assert "warning" not in cubin.log, cubin.log
