"""The proof that words within a GPU may be written again: it accepts every shape that people run, and finds what is planted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.bench.shapes import named_shape
from kog_dist.decode.plan.word_check import Event, Version, WordCheck
from kog_dist.errors import PlanError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kernel_words import TokenEvents, check_words, tokens_to_check, word_findings
from kog_dist.workers.engines.cuda_device import kernel_shapes
from tests.patience import in_time
from tests.unit.test_decode_twin import SPEC
from tests.unit.test_decode_twin import VARIANTS as PLAIN
from tests.unit.test_expert_twin import VARIANTS as WITH_EXPERTS
from tests.unit.test_geometry import OF_EXPERTS, SHAPES
from tests.unit.test_kinds_twin import SPECS as STORED

REAL = SHAPES | {
    (name, lanes, ranks): replace(shape, hosted_lanes=shape.spec.lanes_of_rank(0, ranks), num_ranks=ranks)
    for (name, lanes, _), shape in OF_EXPERTS.items()
    for ranks in (1, 2, 4)
}
LONGEST_S = 20  # of the largest shape, which takes about one


def shape_of(spec: ModelSpec, num_ranks: int = 1, **options: Any) -> KernelShape:
    return KernelShape(spec, spec.lanes_of_rank(0, num_ranks), num_ranks=num_ranks, **{"max_ctas": 4, **options})


@pytest.mark.parametrize("key", REAL, ids=str)
def test_shapes_that_people_run_are_accepted_soon(key: tuple[str, int, int]) -> None:
    start = time.monotonic()
    assert word_findings(REAL[key]) == ()
    assert in_time(time.monotonic() - start, LONGEST_S)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [*PLAIN, *WITH_EXPERTS])
def test_all_forms_of_models_are_accepted(name: str, num_ranks: int) -> None:
    assert word_findings(shape_of((PLAIN | WITH_EXPERTS)[name], num_ranks)) == ()


@pytest.mark.parametrize("tokens", [2, 4])
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("dense", 1),
        ("llama-3.2-1b", 1),
        ("qwen3-4b", 1),
        ("dense", 2),
        ("dense", 4),
        ("qwen3-4b", 2),
        ("qwen3-30b-a3b", 1),
        ("qwen3-30b-a3b", 4),
    ],
)
def test_passes_of_several_tokens_are_accepted(name: str, num_ranks: int, tokens: int) -> None:
    spec = PLAIN[name] if name in PLAIN else named_shape(name)[0]
    hosted, max_ctas = spec.lanes_of_rank(0, num_ranks), 4 if name in PLAIN else 128
    shape = KernelShape(spec, hosted, max_ctas=max_ctas, tokens=tokens, num_ranks=num_ranks)
    of_one = KernelShape(spec, hosted, max_ctas=max_ctas, num_ranks=num_ranks).words.lists
    for name, (words, count) in shape.words.lists.items():  # choices and reports are of the build with processors alone
        assert (words, count) == (of_one[name][0], of_one[name][1] * (1 if name in ("Choice", "Report") else tokens)), name
    assert word_findings(shape) == ()
    # Words of tokens that are left out of some passes would be older than a pass, and so may have any tag.
    events = []
    for event in TokenEvents(shape).of(tokens_to_check(shape)):
        if event.token in (1, 2):
            event.writes = tuple(write for write in event.writes if not _is_of_last_token(write.version, tokens))
            event.reads = tuple(read for read in event.reads if not _is_of_last_token(read.version, tokens))
        events.append(event)
    assert any("tags come again" in finding for finding in WordCheck().run(events))


def _is_of_last_token(version: Version, tokens: int) -> bool:
    return version.kind.name != "candidate" and version.place[-1] == tokens - 1


def test_heads_that_are_not_followed_change_nothing() -> None:
    shape = shape_of(replace(SPEC, num_heads=8, num_kv_heads=8, own_head_dim=16))
    assert WordCheck().run(TokenEvents(shape, heads=range(shape.spec.lane_kv_heads)).of(tokens_to_check(shape))) == []


def test_an_engine_refuses_a_shape_in_one_sentence(tmp_path: Path) -> None:
    """Eight of 32 thread blocks have an item in a token: nobody waits for what the others write to unread partitions."""
    spec = replace(SPEC, num_layers=1, num_lanes=1, num_heads=1, num_kv_heads=1, max_context=400)
    shape = shape_of(spec, max_ctas=32, partition_batches=1, splits=8)
    assert (shape.num_ctas, shape.cache.num_partitions) == (32, 4)
    refusal = r"^the monokernel's words cannot be used again .* may be written later .*; use --device cpu$"
    with pytest.raises(PlanError, match=refusal):
        check_words(shape)
    check_words(shape_of(replace(spec, num_layers=4), max_ctas=32, partition_batches=1, splits=8))
    larger = replace(spec, hidden_size=256, max_context=8000)  # 128 thread blocks, of which 32 have an item
    write_checkpoint(tmp_path, larger, random_tensors(larger, 1))
    with pytest.raises(PlanError, match=refusal):
        kernel_shapes(open_checkpoint(tmp_path), "bfloat16", 1)


def test_the_demo_model_is_accepted_on_up_to_four_gpus() -> None:
    """On eight a rank's lane has so few items that most thread blocks have none in a token."""
    checkpoint = open_checkpoint(Path(str(resources.files("kog_dist"))) / "models" / "demo", verify=False)
    assert [len(kernel_shapes(checkpoint, "bfloat16", count)) for count in (1, 2, 4)] == [1, 2, 4]
    with pytest.raises(PlanError, match="empty words of unread partitions"):
        kernel_shapes(checkpoint, "bfloat16", 8)


# ---- what is planted ----
LANEFORMER, LANES_OF_TWO_RANKS = shape_of(SPEC), shape_of(replace(SPEC, num_layers=5), 2)
DENSE, EXPERTS = shape_of(PLAIN["dense"]), shape_of(WITH_EXPERTS["qwen3_moe"])
PARTED = shape_of(replace(SPEC, max_context=400), partition_batches=1)
DIRECT = shape_of(WITH_EXPERTS["qwen3_moe"], 2)
NETS, GATED = (TrialShape(STORED[name], range(4), max_ctas=4) for name in ("delta nets", "gated attention"))
assert PARTED.cache.num_partitions == 4
assert DIRECT.sends_sums_directly


def changed_versions(event: Event, kind: str, change: Callable[[Version], Version | None]) -> None:
    """Other versions in the place of those of a kind, or none."""
    for name in ("reads", "writes"):
        accesses = [
            replace(access, version=version)
            for access in getattr(event, name)
            if (version := change(access.version) if access.version.kind.name == kind else access.version) is not None
        ]
        setattr(event, name, tuple(accesses))


def of_kind(kind: str, change: Callable[[Version], Version | None], only: str = "") -> Callable[[Event], Event]:
    """A change of the events whose names begin with `only`."""

    def changed(event: Event) -> Event:
        if event.name.startswith(only):
            changed_versions(event, kind, change)
        return event

    return changed


def with_fields(kind: str, **fields: Any) -> Callable[[Event], Event]:
    return of_kind(kind, lambda version: replace(version, kind=replace(version.kind, **fields)))


def without(name: str) -> Callable[[Event], Event | None]:
    return lambda event: None if event.name.startswith(name) else event


def by_some(event: Event) -> Event:
    event.writes = tuple(replace(write, by_all=False) for write in event.writes)
    return event


def ignorant(event: Event) -> Event:
    event.reads = tuple(replace(read, of_some=False) for read in event.reads)
    return event


def one_less(version: Version) -> Version:
    return replace(version, tag=version.tag - 1)


FAULTS: dict[str, tuple[KernelShape, Callable[[Event], Event | None], str]] = {
    "a reader that is one layer late": (
        LANEFORMER, of_kind("attended", one_less, "OUT of layer 1, lane 0"),
        "waits for attended 0 0 0 with tag 1, which nobody has written by then: attended 0 0 0 with tag 2 is there",
    ),
    "a choice that takes the logits of the layer before": (
        EXPERTS, of_kind("router logit", one_less, "choice of experts and GATE_UP of layer 1"),
        "GATE_UP of layer 1, lane 0 waits for router logit 0 with tag 1, which nobody has written by then",
    ),
    "activations that are left out in one layer": (
        EXPERTS, of_kind("activation", lambda _: None, "choice of experts and GATE_UP of layer 1"),
        "waits for activation 0 0 with tag 2, which nobody has written by then: activation 0 0 with tag 1 is there",
    ),
    "tags of one bit, of experts": (
        EXPERTS, with_fields("router logit", tag_bits=1), "may take router logit 0 with tag 2 for router logit 0 with tag 4",
    ),
    "tags of one bit, of a lane": (LANEFORMER, with_fields("qkv", tag_bits=1), "their tags are equal in 1 bits"),
    "tags of exchanges that fit two slots": (LANEFORMER, with_fields("choice", tag_bits=1), "may take choice with tag"),
    "candidates of two ranks in one slot": (
        DIRECT, of_kind("candidate", lambda version: replace(version, slot=0)),
        "choice may not have read candidate 0 with tag 2 yet",
    ),
    "exchanges in one slot": (
        LANEFORMER, of_kind("choice", lambda version: replace(version, slot=0)), "choice may not have read choice with tag 2 yet",
    ),
    "sums of all layers in one slot": (
        LANES_OF_TWO_RANKS, of_kind("sum of a rank", lambda version: replace(version, place=version.place[:1])),
        "sum of a rank",
    ),
    "unread partitions that are not written": (
        PARTED, without("empty words"),
        "where what was there before all tokens may have stood for any number of tokens: tags come again",
    ),
    "unread partitions that are written for the first tokens only": (
        PARTED, lambda event: None if event.name.startswith("empty words") and event.token > 1 else event,
        "where part of attention 0 0 1 0 with tag 5 may have stood for any number of tokens: tags come again",
    ),
    "tokens that end without an exchange": (LANEFORMER, without("choice"), "may not have read"),
    "attention that OUT does not wait for": (
        DENSE, of_kind("attended", lambda _: None, "OUT of layer 0"), "KV head 0, partition 0 may not have read",
    ),
    "streams of which some thread blocks own no row": (DENSE, by_some, "may not have read"),
    "delta nets that OUT does not wait for": (
        NETS, of_kind("attended", lambda _: None, "OUT of layer 0"), "attended 0 0 0 with tag 1 may be written later",
    ),
    "squares that OUT does not wait for": (
        NETS, of_kind("squares of a delta net", lambda _: None, "OUT of layer 0"),
        "squares of a delta net 0 0 with tag 1 may be written later",
    ),
    "delta nets that learn nothing of who made their inputs": (
        NETS, ignorant, "OUT of layer 0, lane 0 may not have read attended",
    ),
    "gates of the layer before": (
        GATED, of_kind("qkv", lambda version: one_less(version) if "gate" in version.place else version, "mixing of layer 1"),
        "waits for qkv 0 0 gate 0 with tag 1, which nobody has written by then: qkv 0 0 gate 0 with tag 2 is there",
    ),
    "a sum for all that the other rank does not get": (
        DIRECT, of_kind("sum for all", lambda _: None, "OUT of layer 1"), "waits for sum for all ATTENTION with tag 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_planted_is_found(fault: str) -> None:
    shape, change, finding = FAULTS[fault]

    def changed() -> Iterator[Event]:
        for event in TokenEvents(shape).of(tokens_to_check(shape)):
            if (kept := change(event)) is not None:
                yield kept

    assert word_findings(shape) == ()
    found = WordCheck().run(changed())
    assert any(finding in one for one in found), found


def test_a_product_in_front_of_the_one_that_it_waits_for_is_found() -> None:
    shape = TrialShape.of(DENSE, max_slots=15)  # no shape that other tests have looked at
    order = list(shape.products)
    last = len(shape.layer_products) - 1
    order[0], order[last] = order[last], order[0]
    vars(shape)["products"] = tuple(order)
    assert any("which nobody has written by then: nothing was written there" in finding for finding in word_findings(shape))
