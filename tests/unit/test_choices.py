"""Choices of experts, compared: which one differs from most, and what hosts of GPU ranks make of their kernels' words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.choices import difference
from kog_dist.errors import ConfigError, LaunchError, PlanError
from kog_dist.runtime.topology import LocalRendezvous
from kog_dist.workers.cuda.kernel_header import shape_header
from kog_dist.workers.cuda.kernel_shape import CHOICE_POSITIONS, KernelShape
from kog_dist.workers.cuda.model_limits import MAX_LAYERS
from kog_dist.workers.engines.choice_check import ChoiceCheck
from tests.unit.test_cuda_engine import LAYERS, ScriptedKernel, choices_at
from tests.unit.test_decode_twin import SPEC
from tests.unit.test_expert_twin import QWEN3

REMEDY = "not compute the same; start again, and report it if it comes back"


def test_the_first_that_differs_from_most_is_named() -> None:
    assert difference([(1, 4)] * 3, 2, 9) == ""
    assert difference([(1, 4)], 2, 9) == ""
    assert difference([(0, 4), (1, 4), (1, 4)], 2, 9) == (
        f"rank 0 chose experts 0, 4 in layer 2 at position 9, but rank 1 1, 4: the ranks do {REMEDY}"
    )
    assert difference([(1, 4), (0, 4)], 2, 9).startswith("rank 1 chose experts 0, 4 in layer 2 at position 9, but rank 0 1, 4:")
    assert difference([(7,), (7,), (5,), (7,)], 0, 1, blocks_of=3) == (
        f"thread block 2 chose experts 5 in layer 0 at position 1 on rank 3, but thread block 0 7: they do {REMEDY}"
    )


class Gathering:
    """The other ranks' side of one rank's check: they give what it gives, changed."""

    def __init__(self, *changes: Callable[[bytes], bytes]) -> None:
        self.changes, self.rounds = changes, 0

    def __call__(self, own: bytes) -> list[bytes]:
        self.rounds += 1
        return [own, *(change(own) for change in self.changes)]


@pytest.fixture
def kernel() -> ScriptedKernel:
    made = ScriptedKernel()
    made.prompt, made.max_tokens, made.stop_ids, made.position, made.ended = (0,) * 20, 1, (), 0, False
    return made


def test_what_is_new_is_compared_once(kernel: ScriptedKernel) -> None:
    gather = Gathering(bytes)
    check = ChoiceCheck(0, 2, gather)
    check.compare(kernel)
    assert gather.rounds == 0
    kernel.launch(3)
    check.compare(kernel)
    check.compare(kernel)
    assert gather.rounds == 1
    check.begin(15)  # a request whose beginning is kept
    kernel.position = 15
    check.compare(kernel)
    assert gather.rounds == 1


def test_a_rank_that_differs_is_named_with_the_position(kernel: ScriptedKernel) -> None:
    def wrong(own: bytes) -> bytes:
        words = np.frombuffer(own, "<u8", offset=1).reshape(-1, LAYERS).copy()
        words[min(2, len(words) - 1) :, 1:] ^= 3
        return own[:1] + words.tobytes()

    check = ChoiceCheck(2, 2, gather := Gathering(bytes, bytes))
    kernel.launch(4)
    check.compare(kernel)
    gather.changes = (bytes, wrong)
    check.begin(10)
    kernel.position = 10
    kernel.launch(5)
    usual, other = (int(word) & 0xFF for word in (choices_at(12)[1, 0], choices_at(12)[1, 0] ^ np.uint64(3)))
    with pytest.raises(PlanError) as caught:
        check.compare(kernel)
    assert str(caught.value) == (
        f"rank 2 chose experts {other}, 9 in layer 1 at position 12, but rank 0 {usual}, 9: the ranks do {REMEDY}"
    )


@pytest.mark.parametrize("num_peers", [0, 1])
def test_a_thread_block_that_differs_is_named_on_every_rank(
    kernel: ScriptedKernel, num_peers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choices(first: int, end: int) -> Any:
        words = np.stack([choices_at(position) for position in range(first, end)])
        words[4, 2, 3] = 1 | 5 << 8
        return words

    monkeypatch.setattr(kernel, "choices", choices)
    kernel.launch(6)
    given: list[bytes] = []

    def gather(own: bytes) -> list[bytes]:
        given.append(own)
        return [own] * (1 + num_peers)

    usual = int(choices_at(4)[2, 0]) & 0xFF
    with pytest.raises(PlanError) as caught:
        ChoiceCheck(1, 2, gather).compare(kernel)
    assert str(caught.value) == (
        f"thread block 3 chose experts 1, 5 in layer 2 at position 4 on rank 1, but thread block 0 {usual}, 9: they do {REMEDY}"
    )
    monkeypatch.undo()
    with pytest.raises(PlanError) as heard:  # by a rank whose own ones agree
        ChoiceCheck(0, 2, lambda own: [own, *given]).compare(kernel)
    assert str(heard.value) == str(caught.value)


def test_nobody_waits_for_a_rank_whose_kernel_has_not_ended_well(kernel: ScriptedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish() -> None:
        raise LaunchError("a wait ran out of time")

    kernel.launch(1)
    monkeypatch.setattr(kernel, "finish", finish)
    gather = Gathering()
    with pytest.raises(LaunchError, match="ran out of time"):
        ChoiceCheck(0, 2, gather).compare(kernel)
    assert gather.rounds == 0


def test_the_kernel_keeps_choices_where_it_is_told_to_and_has_some() -> None:
    lanes = range(SPEC.num_lanes)
    plain, checked = (shape_header(KernelShape(QWEN3, lanes, checks_experts=checks)) for checks in (False, True))
    assert checked.replace(f"#define KOG_CHOICES {CHOICE_POSITIONS}\n", "") == plain
    assert "KOG_CHOICES" not in plain
    for options in ({"keeps_hashes": True}, {"traced_step": 3}):
        with pytest.raises(ConfigError, match=r"(hashes|a trace) and choices of experts to keep \(one of them\)"):
            KernelShape(QWEN3, lanes, checks_experts=True, **options)
    with pytest.raises(ConfigError, match=r"hashes and a trace to keep \(one of them\)"):
        KernelShape(QWEN3, lanes, keeps_hashes=True, traced_step=0)
    with pytest.raises(ConfigError, match=r"choices of experts to keep, and no experts"):
        KernelShape(SPEC, lanes, checks_experts=True)


def test_a_rendezvous_has_room_for_the_choices_of_any_model() -> None:
    room = inspect.signature(LocalRendezvous.create).parameters["max_payload_bytes"].default
    assert 1 + CHOICE_POSITIONS * MAX_LAYERS * np.dtype("<u8").itemsize <= room
