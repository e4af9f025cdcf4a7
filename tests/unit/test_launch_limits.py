"""Exact limits and life cycle of the launcher: room on a GPU, ranks while this process slept, and the first Ctrl-C."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.bench.shapes import MOE
from kog_dist.collectives.cuda_abi import MAX_RANKS
from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError, KogError
from kog_dist.hardware.gpus import Gpu, Inventory, inventory_from
from kog_dist.launch import gpu_choice
from kog_dist.launch.gpu_choice import (
    BESIDES_BYTES,
    KERNEL_COMPUTE,
    PREFILLED_GPUS,
    GpuChoice,
    choose_gpus,
    gpu_rank_bytes,
    gpu_rank_shape,
)
from kog_dist.launch.inspection import dry_run
from kog_dist.launch.liveness import HELD_UP_S, Vigil
from kog_dist.launch.outcome import EXIT_TIMEOUT, Outcome
from kog_dist.launch.replicas.launch import FleetLauncher
from kog_dist.launch.replicas.scaling import Scaler
from kog_dist.launch.target import model_folder
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint, planned_checkpoint
from kog_dist.runtime.wait import Deadline
from tests.unit.eight_lanes import write_config
from tests.unit.fake_nvml import FakeGpu, node
from tests.unit.test_exiting_rank import Run


# ---- GPUs ----
@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return open_checkpoint(model_folder(LaunchConfig())[0], verify=False)


@pytest.fixture(autouse=True)
def with_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: name)


def inventory_with(free_bytes: int, num_gpus: int = 1) -> Inventory:
    def apply(_index: int, gpu: FakeGpu) -> None:
        gpu.free = free_bytes

    return inventory_from(node(num_gpus, apply))


def choose(demo: Checkpoint, free_bytes: int, num_gpus: int = 1, **settings: Any) -> GpuChoice:
    found = choose_gpus(LaunchConfig(**settings), demo, {}, inventory_with(free_bytes, num_gpus))
    assert found is not None
    return found


def test_a_gpu_with_just_the_room_is_taken(demo: Checkpoint) -> None:
    needed = sum(gpu_rank_bytes(demo, 0, 1, "bfloat16").values()) + BESIDES_BYTES
    for free_bytes, num_obstacles in ((needed, 0), (needed - 1, 1)):
        found = choose(demo, free_bytes, gpus="1", prefill="off")
        assert (len(found.gpus), len(found.obstacles)) == (1, num_obstacles)
    with_prefill = sum(gpu_rank_bytes(demo, 0, 1, "bfloat16", prefill=True).values()) + BESIDES_BYTES
    for free_bytes, prefill in ((with_prefill, "auto"), (with_prefill - 1, "off")):
        found = choose(demo, free_bytes, gpus="1")
        assert (found.prefill, found.obstacles) == (prefill, ())


@pytest.mark.parametrize("gpus", ["1", None])
def test_drafts_are_counted_and_refused_where_the_kernel_has_no_passes(
    demo: Checkpoint, tmp_path: Path, gpus: str | None
) -> None:
    """Also where nobody asked for GPUs: that they are not used would surprise. With auto such a model has none."""
    dense, free_bytes = planned_checkpoint(write_config(tmp_path)), 100 << 30
    for speculate in ("auto", "off"):
        found = choose(demo, free_bytes, gpus=gpus, speculate=speculate)
        assert (len(found.gpus), found.drafts) == (1, False)
    with pytest.raises(
        ConfigError, match=r"speculate lookup cannot be had on GPUs here: .* it has a stream of each lane.*; leave it out$"
    ):
        choose(demo, free_bytes, gpus=gpus, speculate="lookup")
    assert "drafts" not in gpu_rank_bytes(dense, 0, 1, "bfloat16")
    uses = gpu_rank_bytes(dense, 0, 1, "bfloat16", drafts=True)
    needed = sum(uses.values()) + BESIDES_BYTES
    assert uses["drafts"] > 4 * 4 * dense.spec.vocab_size
    for speculate in ("auto", "lookup"):
        settings = LaunchConfig(gpus="1", prefill="off", speculate=speculate, context=32768)
        fits, lacks = (choose_gpus(settings, dense, {}, inventory_with(room)) for room in (needed, needed - 1))
        assert fits is not None
        assert lacks is not None
        assert (fits.drafts, len(fits.obstacles), len(lacks.obstacles)) == (True, 0, 1)


def test_dense_models_have_drafts_on_any_number_of_gpus(demo: Checkpoint, tmp_path: Path) -> None:
    four = inventory_with(100 << 30, 4)
    with pytest.raises(ConfigError, match=r"it has a stream of each lane.*; leave it out$"):
        choose_gpus(LaunchConfig(gpus="2", speculate="lookup"), demo, {}, four)
    dense = planned_checkpoint(write_config(tmp_path))
    for gpus in (None, "1", "2", "4"):
        for speculate, wanted in (("lookup", True), ("auto", True), ("off", False)):
            found = choose_gpus(LaunchConfig(gpus=gpus, speculate=speculate), dense, {}, four)
            assert found is not None
            assert (found.count, found.drafts) == (int(gpus or 4), wanted)
    shapes = {drafts: gpu_rank_bytes(dense, 0, 2, "bfloat16", drafts=drafts) for drafts in (False, True)}
    spec = dense.spec
    in_boxes = 2 * 2 * spec.num_layers * 4 * spec.hidden_size * 8  # of both ranks and both sublayers, four tokens' words of a row
    assert shapes[True]["drafts"] > in_boxes
    assert {name: size for name, size in shapes[True].items() if name != "drafts"} == shapes[False]


def test_a_dry_run_says_whether_there_are_drafts(tmp_path: Path) -> None:
    settings = LaunchConfig(model=str(write_config(tmp_path)), gpus="1")
    shown = {speculate: dry_run(replace(settings, speculate=speculate)) for speculate in ("auto", "off", "lookup")}
    assert "drafts     none" in shown["off"].splitlines()
    assert " for drafts" not in shown["off"]
    for speculate in ("auto", "lookup"):
        assert f"drafts     speculate {speculate}: lookup, up to 3 in a pass" in shown[speculate].splitlines()
        assert " for drafts" in shown[speculate]
    for cause, other in (
        (
            "the CUDA kernel cannot run this model with 4 tokens in a pass: it has a cache of int4",
            replace(settings, kv_dtype="int4"),
        ),
        (
            "with these quantised weights auto has none until prose is measured there; lookup has",
            replace(settings, quantize="fp8", quantize_head="int8"),
        ),
    ):
        text = dry_run(other)
        assert f"drafts     none: {cause}" in text.splitlines()
        assert " for drafts" not in text
    coded = replace(settings, quantize="fp8", quantize_head="int8", speculate="lookup")
    assert "drafts     speculate lookup: lookup" in dry_run(coded)
    for quantize in ("fp8", "int4"):
        assert "drafts     speculate auto: lookup" in dry_run(replace(settings, quantize=quantize))


def test_experts_draft_unasked_where_prose_with_them_was_measured(tmp_path: Path) -> None:
    for name, found in (("gpt-oss-20b", {"1": True, "2": True}), ("qwen3-30b-a3b", {"1": False, "2": False})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MOE[name]))
        experts, two = planned_checkpoint(folder, context=4096), inventory_with(100 << 30, 2)
        for gpus, has_drafts in found.items():
            for speculate, has in (("auto", has_drafts), ("lookup", True)):
                choice = choose_gpus(LaunchConfig(gpus=gpus, speculate=speculate), experts, {}, two)
                assert choice is not None
                assert choice.drafts == has, (name, gpus, speculate)


def test_a_context_that_does_not_fit_is_shortened_to_what_does(demo: Checkpoint) -> None:
    spec = replace(demo.spec, max_context=400_000)
    model = replace(demo, spec=spec)

    def need(context: int, *, prefill: bool) -> int:
        shorter = replace(model, spec=spec.with_context(context))
        return sum(gpu_rank_bytes(shorter, 0, 1, "bfloat16", prefill=prefill).values()) + BESIDES_BYTES

    free = need(400_000, prefill=False)
    assert (choose(model, free, gpus="1", prefill="off").context, choose(model, free, gpus="1").prefill) == (0, "off")
    for gpus in ("1", None):  # asked for, or found
        found = choose(model, free - 1, prefill="off", gpus=gpus)
        assert (found.context, found.obstacles) == (399_360, ())
        assert found.note.startswith("context of 399360 tokens, of the model's 400000: more does not fit into the ")
    found = choose(model, need(20_000, prefill=True), gpus="1")
    assert (found.context, found.prefill) == (19_456, "auto"), "prefill rather than more of the context"
    assert choose(model, need(4096, prefill=False) - 1, gpus="1").obstacles, "too little is refused"
    asked = LaunchConfig(gpus="1", prefill="off", context=400_000)
    inventory = inventory_from(node(1, lambda _index, gpu: setattr(gpu, "free", free - 1)))
    refused = choose_gpus(asked, model, {}, inventory)
    assert refused is not None
    assert refused.obstacles, "who asks for a context gets it or is refused"


def test_windowed_layers_keep_all_positions_where_these_fit(demo: Checkpoint) -> None:
    assert gpu_rank_shape(demo, 0, 1, "bfloat16").cache.ring_positions == demo.spec.sliding_window == 256
    assert not choose(demo, 2**36, gpus="1").whole_windows, "a window that fills its ring of batches"
    with pytest.raises(ConfigError, match=r"^kv_windows whole cannot be had: windows of 256 positions fill their rings"):
        choose(demo, 2**36, gpus="1", kv_windows="whole")
    laneformer = replace(demo, spec=replace(demo.spec, sliding_window=200))
    assert not choose(laneformer, 2**36, gpus="1").whole_windows, "none has run so"
    assert choose(laneformer, 2**36, gpus="1", kv_windows="whole").whole_windows
    spec = replace(demo.spec, max_context=100_000, sliding_window=200, delay=0)
    model = replace(demo, spec=spec)

    def need(*, context: int = 100_000, whole: bool, prefill: bool = False) -> int:
        shorter = replace(model, spec=spec.with_context(context))
        uses = gpu_rank_bytes(shorter, 0, 1, "bfloat16", prefill=prefill, whole_windows=whole)
        return sum(uses.values()) + BESIDES_BYTES

    most, less = need(whole=True), need(whole=False)
    assert most - less == len(spec.window_layers) * spec.num_kv_heads * 2 * 2 * spec.head_dim * (391 - 1) * 256
    for gpus in ("1", None):  # asked for, or found
        found = choose(model, most, prefill="off", gpus=gpus)
        assert (found.whole_windows, found.note, found.spare_bytes) == (True, "", 0)
        found = choose(model, most - 1, prefill="off", gpus=gpus)
        assert (found.whole_windows, found.context, found.spare_bytes) == (False, 0, most - 1 - less)
        assert found.note.startswith(
            "no prefixes are kept, since windowed layers keep a ring of 256 positions: all of them take "
        )
        assert found.obstacles == ()
        found = choose(model, less - 1, prefill="off", gpus=gpus)
        assert (found.whole_windows, found.context) == (False, 99_328), "a longer context rather than all positions"
    found = choose(model, need(whole=False, prefill=True), gpus="1")
    assert (found.whole_windows, found.prefill) == (False, "auto"), "prefill rather than all positions"
    assert (choose(model, most, gpus="1").whole_windows, choose(model, most, gpus="1").prefill) == (True, "off")
    assert not choose(model, most, prefill="off", gpus="1", kv_windows="ring").whole_windows
    found = choose(model, need(context=20_480, whole=True), prefill="off", gpus="1", kv_windows="whole")
    assert (found.whole_windows, found.context, found.obstacles) == (True, 20_480, ()), "who asks for them gets a shorter context"
    refused = choose(model, most - 1, prefill="off", gpus="1", kv_windows="whole", context=100_000)
    assert refused.obstacles


def test_what_windowed_layers_keep_is_asked_for_where_it_means_something(demo: Checkpoint) -> None:
    plain = replace(demo, spec=replace(demo.spec, sliding_window=None, window_layers=()))
    for windows in ("ring", "whole"):
        with pytest.raises(
            ConfigError, match=rf"^kv_windows {windows} is for models with windowed layers, and this one has none"
        ):
            choose_gpus(LaunchConfig(device="cpu", kv_windows=windows), plain, {})
    with pytest.raises(ConfigError, match=r"^kv_windows ring is for GPUs, and CPU ranks keep all positions"):
        choose_gpus(LaunchConfig(device="cpu", kv_windows="ring"), demo, {})
    assert choose_gpus(LaunchConfig(device="cpu", kv_windows="whole"), demo, {}) is None


def test_prefill_is_used_by_as_many_gpus_as_have_run_it(tmp_path: Path) -> None:
    of_eight = planned_checkpoint(write_config(tmp_path))
    assert PREFILLED_GPUS == 4
    for num_gpus, prefill in ((PREFILLED_GPUS, "auto"), (2 * PREFILLED_GPUS, "off")):
        assert choose(of_eight, 2**36, 8, gpus=str(num_gpus)).prefill == prefill
    assert choose(of_eight, 2**36, 8, gpus="8", prefill="on").prefill == "on", "who asks for it gets it"


def test_as_many_gpus_as_the_kernel_knows_are_taken(demo: Checkpoint) -> None:
    inventory = inventory_from(node(8))
    need = gpu_choice._needs(LaunchConfig(prefill="off"), demo, 1, "bfloat16")[0]

    def obstacles(count: int) -> list[KogError]:
        return list(gpu_choice._obstacles(inventory, inventory.gpus[:1], count, need))

    assert obstacles(MAX_RANKS) == []
    assert f"at most {MAX_RANKS} GPUs, not on {MAX_RANKS + 1}" in str(obstacles(MAX_RANKS + 1)[0])


def test_only_the_compute_capability_of_the_kernel_fits(demo: Checkpoint) -> None:
    (gpu,) = inventory_from(node(1)).gpus
    need = gpu_choice._needs(LaunchConfig(prefill="off"), demo, 1, "bfloat16")[0]
    major, minor = KERNEL_COMPUTE
    for compute, fits in (
        (KERNEL_COMPUTE, True),
        ((major, minor + 1), False),
        ((major + 1, minor), False),
        ((major - 1, 9), False),
    ):
        other: Gpu = replace(gpu, compute=compute)
        assert (gpu_choice._unfit(other, need) == "") is fits, compute


# ---- a fleet that is asked to stop ----
class Fleet:
    """A launcher of replicas, without them."""

    def __init__(self, *, is_announced: bool) -> None:
        self.said: list[str] = []
        self.signals: Any = SimpleNamespace(count=0, last=None)
        self.report: Any = SimpleNamespace(is_draining=False)
        launcher: Any = FleetLauncher.__new__(FleetLauncher)
        launcher._signals, launcher._is_announced, launcher._drain_deadline, launcher._http = (
            self.signals,
            is_announced,
            None,
            None,
        )
        launcher._router, launcher._settings = SimpleNamespace(report=self.report), LaunchConfig(shutdown_timeout=7.0)
        launcher._events = SimpleNamespace(say=self.said.append)
        self.launcher = launcher

    def answer(self, num_signals: int, last: signal.Signals | None = signal.SIGINT) -> Outcome | None:
        self.signals.count, self.signals.last = num_signals, last if num_signals else None
        outcome: Outcome | None = self.launcher._answer_signals()
        return outcome


def test_the_first_ctrl_c_drains_and_the_second_ends() -> None:
    fleet = Fleet(is_announced=True)
    assert (fleet.answer(0), fleet.launcher._drain_deadline) == (None, None)
    assert fleet.answer(1) is None
    assert fleet.said == ["SIGINT: draining, at most 7 s"]
    assert 7.0 < fleet.launcher._drain_deadline.remaining_s() <= 8.0
    assert fleet.answer(1) is None, "the same one, seen again"
    outcome = fleet.answer(2)
    assert outcome is not None
    assert (outcome.exit_code, outcome.signal) == (130, "SIGINT")
    assert fleet.said == ["SIGINT: draining, at most 7 s"], "said once"


def test_a_fleet_that_does_not_serve_yet_ends_at_the_first_signal() -> None:
    outcome = Fleet(is_announced=False).answer(1, signal.SIGTERM)
    assert outcome is not None
    assert (outcome.exit_code, outcome.signal) == (143, "SIGTERM")
    both_at_once = Fleet(is_announced=True).answer(2)
    assert both_at_once is not None
    assert both_at_once.exit_code == 130


def test_a_client_may_ask_for_the_drain_and_ctrl_c_does_not_cut_it_short() -> None:
    fleet = Fleet(is_announced=True)
    fleet.report.is_draining = True
    assert fleet.answer(0) is None
    assert fleet.said == ["a client asked: draining, at most 7 s"]
    assert fleet.answer(1) is None
    fleet.launcher._drain_deadline = Deadline(0.0)
    outcome = fleet.answer(1)
    assert outcome is not None
    assert (outcome.exit_code, outcome.reason) == (EXIT_TIMEOUT, "drain_timeout")


# ---- how many replicas there are ----
def changes(num_replicas: int, *, num_waiting: int, num_running: int, settled: bool = True, until_s: float = 200.0) -> set[int]:
    """What a fleet of 1 to 3 replicas, which keeps one that is not needed for 60 s, decides while nothing changes."""
    scaler = Scaler(1, 3, 60.0, 0.0)
    return {
        scaler.decide(
            0.25 * quarter, num_replicas=num_replicas, num_waiting=num_waiting, num_running=num_running, is_settled=settled
        )
        for quarter in range(round(4 * until_s) + 1)
    }


def test_the_number_of_replicas_stays_within_its_limits() -> None:
    assert changes(2, num_waiting=5, num_running=2) == {0, 1}
    assert changes(3, num_waiting=5, num_running=3) == {0}
    assert changes(2, num_waiting=5, num_running=2, until_s=0.75) == {0}, "not at once"
    assert changes(2, num_waiting=5, num_running=2, until_s=1.0) == {0, 1}
    assert changes(2, num_waiting=5, num_running=2, settled=False) == {0}
    assert changes(2, num_waiting=0, num_running=1) == {0, -1}
    assert changes(2, num_waiting=0, num_running=2) == {0}
    assert changes(1, num_waiting=0, num_running=0) == {0}
    assert changes(2, num_waiting=0, num_running=0, until_s=59.75) == {0}
    assert changes(2, num_waiting=0, num_running=0, until_s=60.0) == {0, -1}
    assert changes(0, num_waiting=0, num_running=0, until_s=0.0) == {1}, "fewer than there must be"


def test_a_supervisor_that_slept_blames_nobody() -> None:
    """Ages of heartbeats grow while the machine is suspended, or this process stopped."""
    run, now_s = Run(), 100.0
    run.supervisor._vigils = [Vigil(rank, 1.0, lambda: now_s) for rank in run.ranks]
    run.control.beat_age_s = lambda rank: 1000.0
    now_s += HELD_UP_S + 0.01
    assert run.decide() is None
    assert run.aborts == []
    outcome = run.decide()
    assert outcome is not None
    assert outcome.reason == "rank_stalled", "the next look comes in time, and counts"
