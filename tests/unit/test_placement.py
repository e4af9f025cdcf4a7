"""Which CPUs each rank gets, and how a worker takes its place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError, LaunchError, PlanError
from kog_dist.hardware.cpu_lists import format_cpu_list, parse_cpu_list
from kog_dist.hardware.cpus import CpuMap, cpu_map, read_cpu_map, share_cpus
from kog_dist.hardware.gpus import Inventory, inventory_from
from kog_dist.hardware.placement import ANYWHERE, Placement
from kog_dist.launch import gpu_choice
from kog_dist.launch.engine import EngineProcesses
from kog_dist.launch.gpu_choice import GpuChoice, choose_gpus
from kog_dist.launch.gpu_leases import GpuLeases
from kog_dist.launch.target import choose_target, model_folder, place_on_gpus
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint, planned_checkpoint
from kog_dist.rpc.client import Client
from kog_dist.rpc.transport import Access
from kog_dist.runtime.topology import RankInfo
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs
from tests.unit.eight_lanes import write_config
from tests.unit.fake_nvml import FakeGpu, node

NODE_0, NODE_1 = frozenset(range(4)) | frozenset(range(8, 12)), frozenset(range(4, 8)) | frozenset(range(12, 16))
# Eight cores of two hardware threads (c and c + 8) on two nodes.
MACHINE = cpu_map({cpu: frozenset({cpu % 8, cpu % 8 + 8}) for cpu in range(16)}, {0: NODE_0, 1: NODE_1})


def lists(shares: tuple[frozenset[int], ...]) -> list[str]:
    return [format_cpu_list(share) for share in shares]


@pytest.mark.parametrize(("text", "cpus"), [("", []), ("0", [0]), ("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11]), ("5\n", [5])])
def test_cpu_lists(text: str, cpus: list[int]) -> None:
    assert parse_cpu_list(text) == frozenset(cpus)
    assert format_cpu_list(cpus) == text.strip()
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpu_list("0-x")


def test_cores_keep_their_threads_together() -> None:
    assert lists(MACHINE.cores)[:2] == ["0,8", "1,9"]
    assert MACHINE.nodes_of({0, 9}) == (0,)
    assert MACHINE.nodes_of({0, 5}) == (0, 1)


def test_ranks_of_a_node_divide_its_cores() -> None:
    assert lists(share_cpus([NODE_0, NODE_0, NODE_1, NODE_1], MACHINE)) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert lists(share_cpus([NODE_0, NODE_1], MACHINE)) == ["0-3,8-11", "4-7,12-15"]
    assert lists(share_cpus([NODE_0] * 3, MACHINE)) == ["0,8", "1,9", "2-3,10-11"]


def test_too_few_cores_are_shared() -> None:
    assert lists(share_cpus([NODE_0] * 5, MACHINE)) == ["0-3,8-11"] * 5


def test_only_what_may_be_used_is_shared() -> None:
    narrow = cpu_map({cpu: frozenset({cpu, cpu + 8}) for cpu in (2, 3, 4)}, {0: frozenset({2, 3}), 1: frozenset({4})})
    assert lists(share_cpus([NODE_0, NODE_0, NODE_1], narrow)) == ["2", "3", "4"]
    assert lists(share_cpus([frozenset({7}), frozenset()], narrow)) == ["", ""]


def test_sets_that_overlap_are_not_divided() -> None:
    assert lists(share_cpus([NODE_0, NODE_0 | NODE_1], MACHINE)) == ["0-3,8-11", "0-15"]


def test_this_machine_has_a_map() -> None:
    machine = read_cpu_map()
    assert machine.cpus == frozenset(os.sched_getaffinity(0))
    assert sum(map(len, machine.cores)) == len(machine.cpus)


# --- GPUs of a run --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return open_checkpoint(model_folder(LaunchConfig())[0], verify=False)


@pytest.fixture
def of_eight(tmp_path: Path) -> Checkpoint:
    return planned_checkpoint(write_config(tmp_path))


@pytest.fixture
def with_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: name)


def choose(demo: Checkpoint, inventory: Inventory, **settings: object) -> GpuChoice | None:
    return choose_gpus(LaunchConfig(**settings), demo, {}, inventory)  # type: ignore[arg-type]


def inventory_with(change: str, value: object) -> Inventory:
    """Eight GPUs that differ from the usual ones in this."""

    def apply(_index: int, gpu: FakeGpu) -> None:
        setattr(gpu, change, value)

    return inventory_from(node(8, apply))


def test_a_gpu_has_the_same_cpus_whoever_uses_it(of_eight: Checkpoint) -> None:
    everything = {cpu: frozenset({cpu}) for cpu in range(96)}
    machine = cpu_map(everything, {0: frozenset(range(48)), 1: frozenset(range(48, 96))})
    inventory = inventory_from(node())
    all_of_them = choose(of_eight, inventory, gpus="all")
    assert all_of_them is not None
    placements = place_on_gpus(all_of_them, machine)
    assert [placement.cpus for placement in placements[:2]] == ["0-11", "12-23"]
    assert [placement.cpus for placement in placements[6:]] == ["72-83", "84-95"]
    some = choose(of_eight, inventory, gpus="7,1")
    assert some is not None
    assert place_on_gpus(some, machine) == (
        Placement("84-95", (inventory.gpus[7].uuid, inventory.gpus[1].uuid)),
        Placement("12-23", (inventory.gpus[7].uuid, inventory.gpus[1].uuid)),
    )
    assert {placement.cpus for placement in place_on_gpus(some, None)} == {""}


def test_what_stands_in_the_way_is_said(demo: Checkpoint, of_eight: Checkpoint, with_cupy: None) -> None:
    def obstacle(change: str, value: object, gpus: str = "1", prefill: str = "auto") -> str:
        choice = choose(demo, inventory_with(change, value), gpus=gpus, prefill=prefill)
        assert choice is not None
        return " / ".join(map(str, choice.obstacles))

    assert obstacle("name", "NVIDIA H200") == ""
    assert "has compute capability 8.0, and the kernel is for 9.0" in obstacle("compute", (8, 0))
    assert "has 0.0 GiB of free memory and a rank needs 1.0 GiB; stop what uses it" in obstacle("free", 2**20, prefill="off")
    assert re.search(
        r"a rank needs 1\.[0-9] GiB \(0\.[3-7] GiB of that for prefill, which --prefill off does without\); stop",
        obstacle("free", 2**20, prefill="on"),
    )
    assert "for prefill" not in obstacle("free", 2**20), "which is not what stands in the way"
    assert "for prefill" not in obstacle("free", 2**20, "2")
    assert "for prefill" in obstacle("free", 2**20, "2", prefill="on")
    chosen = [choose(of_eight, inventory_from(node()), gpus=count) for count in ("1", "2", "4", "8")]
    assert [choice and choice.prefill for choice in chosen] == ["auto", "auto", "auto", "off"], "with eight it has not run"
    assert choice_of_all(of_eight).obstacles == ()


def choice_of_all(checkpoint: Checkpoint) -> GpuChoice:
    choice = choose(checkpoint, inventory_from(node()), gpus="8")
    assert choice is not None
    return choice


def test_gpus_whose_words_could_be_lost_are_not_taken(demo: Checkpoint, of_eight: Checkpoint, with_cupy: None) -> None:
    """Each rank would refuse to start. The demo model is too small for eight: nobody waits for most thread blocks' attention."""
    refusal = r"^the monokernel's words cannot be used again .* may be written later .*; use fewer GPUs, or --device cpu$"
    for asked in ({"gpus": "8"}, {"gpus": "all"}, {"device": "cuda", "ranks": 8}):
        with pytest.raises(PlanError, match=refusal):
            choose(demo, inventory_from(node()), **asked)
    for checkpoint, taken in ((demo, 4), (of_eight, 8)):
        unasked = choose(checkpoint, inventory_from(node()))
        assert unasked is not None
        assert [gpu.index for gpu in unasked.gpus] == list(range(taken))
    assert choose(demo, inventory_from(node()), ranks=8) is None, "CPU ranks run it"


def test_gpus_that_cannot_reach_each_other_are_not_put_together(demo: Checkpoint, with_cupy: None) -> None:
    def halves(index: int, gpu: FakeGpu) -> None:  # as on two sockets without a way between them; GPU 0 reaches nobody
        gpu.peers_blocked = frozenset(range(1, 8) if index == 0 else range(4) if index > 3 else range(4, 8))

    inventory = inventory_from(node(8, halves))
    assert len(inventory.apart) == 7 + 3 * 4
    asked = choose(demo, inventory, gpus="2")
    assert asked is not None
    assert re.fullmatch(
        r"GPU 0 \(NVIDIA H200, GPU-00000000\) and GPU 1 \(.*\) cannot read and write each other's memory: the chipset between "
        r"them does not support it; choose others with --gpus, or look at nvidia-smi topo -p2p rw",
        str(asked.obstacles[0]),
    )
    for gpus, apart in (("1,2,3,6", True), ("4,5,6,7", False), ("2,1", False), ("0", False)):
        choice = choose(demo, inventory, gpus=gpus if "," in gpus else f"{gpus},")
        assert choice is not None
        assert bool(choice.obstacles) is apart
    unasked = choose(demo, inventory)
    assert unasked is not None
    assert [gpu.index for gpu in unasked.gpus] == [4, 5, 6, 7], "the most that reach each other"


def test_a_driver_that_hangs_does_not_lead_to_cpu_ranks_unasked(demo: Checkpoint) -> None:
    stuck = Inventory((), ("the NVIDIA driver has not answered",), driver_hangs=True)
    with pytest.raises(LaunchError, match="has not answered; --device cpu uses CPU ranks"):
        choose(demo, stuck)
    assert choose(demo, stuck, device="cpu") is None


def test_one_gpu_without_room_for_prefill_is_enough_for_all_to_go_without(demo: Checkpoint, with_cupy: None) -> None:
    def narrow(index: int, gpu: FakeGpu) -> None:
        gpu.free = round(1.2 * 2**30) if index == 2 else gpu.free

    found = [choose(demo, inventory_from(node(4, narrow)), gpus=gpus) for gpus in ("4", "0,1")]
    assert [choice and (choice.prefill, choice.obstacles) for choice in found] == [("off", ()), ("auto", ())]


@pytest.mark.parametrize("asked", [{"gpus": "1"}, {"device": "cuda"}, {"ranks": 1}])
def test_a_gpu_without_room_for_prefill_runs_without_it(demo: Checkpoint, with_cupy: None, asked: dict[str, object]) -> None:
    narrow = inventory_with("free", round(1.3 * 2**30))
    found = choose(demo, narrow, **asked)
    assert found is not None
    assert found.obstacles == ()
    assert (len(found.gpus), found.prefill) == (1, "off")
    assert re.fullmatch(r"prompts go token by token: prefill takes 0\.[3-7] GiB, which do not fit", found.note)
    roomy = choose(demo, inventory_from(node()), **asked)
    assert roomy is not None
    assert (roomy.prefill, roomy.note) == ("auto", "")
    names_the_way_out = "for prefill, which --prefill off does without"
    if "ranks" in asked:  # nobody asked for GPUs, but for prefill, which CPU ranks have not
        with pytest.raises(LaunchError, match=names_the_way_out):
            choose(demo, narrow, prefill="on", **asked)
    else:
        refused = choose(demo, narrow, prefill="on", **asked)
        assert refused is not None
        assert names_the_way_out in str(refused.obstacles[0])


def test_a_missing_package_is_said(demo: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: None)
    choice = choose(demo, inventory_from(node()), gpus="1")
    assert choice is not None
    assert "cupy-cuda13x" in str(choice.obstacles[0])


def test_gpus_that_are_not_here_can_be_planned(demo: Checkpoint, of_eight: Checkpoint) -> None:
    nothing = Inventory((), ("this machine has no NVIDIA driver",))
    for text, count in (("8", 8), ("0,2", 2), ("GPU-5,", 1)):
        choice = choose(of_eight, nothing, gpus=text)
        assert choice is not None
        assert (choice.count, choice.gpus, choice.kv_dtype) == (count, (), "bfloat16")
        assert "no NVIDIA driver" in str(choice.obstacles[0])
    with pytest.raises(LaunchError, match="no NVIDIA driver"):
        choose(demo, nothing, gpus="all")
    with pytest.raises(ConfigError, match="8 lanes cannot be spread over 3 ranks"):
        choose(demo, nothing, gpus="3")
    with pytest.raises(ConfigError, match="--ranks 4 contradicts 2 GPUs"):
        choose(demo, nothing, gpus="2", ranks=4)
    with pytest.raises(ConfigError, match="float32 KV cache"):
        choose(demo, nothing, gpus="1", kv_dtype="float32")


def test_auto_takes_as_many_gpus_as_can_run_the_model(demo: Checkpoint, of_eight: Checkpoint, with_cupy: None) -> None:
    for present, taken in ((8, 8), (7, 4), (3, 2), (1, 1)):
        found = choose(of_eight, inventory_from(node(present)))
        assert found is not None
        assert [gpu.index for gpu in found.gpus] == list(range(taken))
    two = choose(demo, inventory_from(node()), ranks=2)
    assert two is not None
    assert two.count == 2
    assert choose(demo, inventory_from(node()), device="cpu") is None
    with pytest.raises(ConfigError, match="--prefill on is for GPUs"):
        choose(demo, inventory_from(node()), device="cpu", prefill="on")
    with pytest.raises(ConfigError, match="--prefill on is for GPUs, and the model would run on CPU ranks"):
        choose(demo, inventory_from(node(0)), prefill="on")
    assert choose(demo, inventory_from(node()), ranks=3) is None, "lanes that cannot be spread"
    assert choose(demo, inventory_from(node(0))) is None
    assert choose(demo, inventory_from(node()), kv_dtype="float32") is None, "the kernel cannot run it"
    together = choose(demo, inventory_from(node()), kv_caches=2)
    assert together is not None
    assert (together.count, together.parallel, together.num_caches) == (4, 1, 2)


def test_a_gpu_of_another_engine_is_left_alone(
    demo: Checkpoint, with_cupy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    inventory = inventory_from(node(3))
    leases = GpuLeases.acquire(inventory.gpus[:1])
    found = choose(demo, inventory)
    assert found is not None
    assert [gpu.index for gpu in found.gpus] == [1, 2]
    asked = choose(demo, inventory, gpus="0,")
    assert asked is not None
    assert "GPU 0 (NVIDIA H200" in str(asked.obstacles[0])
    assert "is used by process" in str(asked.obstacles[0])
    leases.close()


def test_auto_passes_over_gpus_that_cannot_run_the_model(demo: Checkpoint, with_cupy: None) -> None:
    def change(index: int, gpu: FakeGpu) -> None:
        gpu.compute = (8, 0) if index == 0 else (9, 0)
        gpu.mig = (1, 1) if index == 1 else (0, 0)
        gpu.free = 0 if index == 2 else gpu.total

    found = choose(demo, inventory_from(node(8, change)))
    assert found is not None
    assert [gpu.index for gpu in found.gpus] == [3, 4, 5, 6]


# --- a worker takes its place ---------------------------------------------------------------------------------------------------


def test_placements_travel_with_the_arguments() -> None:
    placement = Placement("0-1,8", ("GPU-1", "GPU-2"))
    args = WorkerArgs(RankInfo(0, 1, 0, "demo"), "/model", "cuda:0", "bfloat16", True, 1.0, 1.0, placement=placement)
    assert WorkerArgs.from_json(args.to_json()) == args
    assert WorkerArgs.from_json(replace(args, placement=ANYWHERE).to_json()).placement == ANYWHERE
    broken: list[object] = [{}, [], None, {"cpus": "x", "gpus": []}, {"cpus": "", "gpus": [1]}, {"cpus": "", "gpus": [], "a": 1}]
    for bad in broken:
        text = json.dumps({**asdict(args), "placement": bad})
        with pytest.raises(ConfigError, match="placement"):
            WorkerArgs.from_json(text)


def test_a_process_takes_its_place() -> None:
    program = (
        "import json, os, sys\n"
        "from kog_dist.hardware.placement import Placement\n"
        "before = sorted(os.sched_getaffinity(0))\n"
        "Placement(f'{before[-1]},999', ('GPU-1', 'GPU-2')).apply()\n"
        "after = sorted(os.sched_getaffinity(0))\n"
        "Placement('999').apply()\n"
        "print(json.dumps([before[-1:], after, sorted(os.sched_getaffinity(0)), os.environ['CUDA_VISIBLE_DEVICES']]))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd=root)
    last, after, kept, mask = json.loads(done.stdout)
    assert after == kept == last
    assert mask == "GPU-1,GPU-2"


def test_an_empty_map_pins_nobody() -> None:
    assert share_cpus([NODE_0], CpuMap(())) == (frozenset(),)


def test_an_engine_pins_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    cpu = max(os.sched_getaffinity(0))
    settings = LaunchConfig(device="cpu", ranks=2)
    target = replace(choose_target(settings), placements=(ANYWHERE, Placement(str(cpu))))
    engine = EngineProcesses(settings, target, None, None)
    try:
        engine.start()
        pid, deadline = engine.rank_pid(1), Deadline.after(30)
        assert pid is not None
        while os.sched_getaffinity(pid) != {cpu}:
            assert not deadline.expired(), "the rank did not pin itself"
            time.sleep(0.01)
        assert os.sched_getaffinity(engine.rank_pid(0) or 0) == os.sched_getaffinity(0)
    finally:
        engine.stop(None)


def test_status_says_where_ranks_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rank cannot start here; the coordinator answers all the same."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    settings = LaunchConfig(device="cpu", ranks=1)
    gpu = inventory_from(node(1)).gpus[0]
    target = replace(choose_target(settings), device="cuda", gpus=(gpu,), placements=(Placement("0", (gpu.uuid,)),))
    engine = EngineProcesses(settings, target, None, None)
    try:
        engine.start()
        with Client(Access(engine.endpoint), connect_timeout_s=30, patient=True) as client:
            assert not client.status().prefill
            assert engine.kind == "cuda, prefill off"
            engine.control.set_prefill(0)
            report = client.status()
        assert report.prefill
        assert engine.kind == "cuda, prefill on"
        assert report.rank_places == ("GPU 0 (NVIDIA H200, GPU-00000000), pinned to CPUs 0",)
    finally:
        engine.stop(None)
