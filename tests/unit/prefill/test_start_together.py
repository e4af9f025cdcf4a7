"""Whether several ranks start with prefill: all, none, or not at all, where one of them has a reason. A thread for each rank."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest

from kog_dist.cuda.errors import cuda_errors
from kog_dist.errors import AbortedError, LaunchError
from kog_dist.runtime.control import RankState
from kog_dist.runtime.notes import NOTE
from kog_dist.runtime.startup import StartReport, StartStage, StartTeller
from kog_dist.runtime.wait import Deadline, WaitResult, wait
from kog_dist.workers import worker
from kog_dist.workers.cuda import load, monokernel
from kog_dist.workers.engines import cuda_peers, cuda_start, cuda_trial
from kog_dist.workers.engines.cuda import CudaEngine
from kog_dist.workers.prefill import gpu
from tests.unit.fake_cupy import CUDARuntimeError
from tests.unit.prefill.test_engine_with_prefill import ScriptedPrefill
from tests.unit.test_cuda_engine_ranks import Ranks, ranks, request, runtime

__all__ = ["ranks", "runtime"]  # fixtures
pytestmark = pytest.mark.parametrize("ranks", [2], indirect=True)


class OutOfMemoryError(Exception):
    """As cupy calls its."""


class Trial(ScriptedPrefill):
    """Prefill whose first run overflows, or raises."""

    def __init__(self, failing: str) -> None:
        super().__init__()
        self._failing = failing

    def steps(self, *arguments: Any, **options: Any) -> Generator[None, None, int]:
        if self._failing == "trial":
            raise RuntimeError("CUDA error: invalid argument")
        held = yield from super().steps(*arguments, **options)
        return 0 if self._failing == "overflow" else held


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each heap had room for."""
    found: list[int] = []
    link = cuda_peers.CudaPeers.link

    def observed(peers: Any, device: int, prefill_tokens: int = 0) -> Any:
        found.append(prefill_tokens)
        return link(peers, device, prefill_tokens)

    monkeypatch.setattr(cuda_peers.CudaPeers, "link", observed)
    return found


def start(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, failing: str = "", prefill: str = "auto",
    body: Callable[[CudaEngine], Any] = CudaEngine.startup,
) -> list[Any]:  # fmt: skip
    """What the ranks' start-ups give. Rank 1 fails in `failing`; all overflow together."""

    def is_failing(name: str, rank: int) -> bool:
        return name == failing and rank == 1

    def rank_of(shape: Any) -> int:
        return int(shape.head.vocab_rows[0] > 0)

    def obstacle(shape: Any) -> str:
        return "no cuBLASLt" if is_failing("cuBLAS", rank_of(shape)) else ""

    def make(name: str, rank: int, found: Any) -> Any:
        if is_failing(name, rank):
            raise OutOfMemoryError("2 GiB")
        return found

    monkeypatch.setattr(cuda_start, "obstacle", obstacle)
    monkeypatch.setattr(gpu, "matrices_for", lambda shape: make("matrices", rank_of(shape), ("", lambda name, words: None)))
    monkeypatch.setattr(cuda_peers.CudaPeers, "prefill_sums", lambda peers, limit_s: None)
    monkeypatch.setattr(
        gpu, "prefill_for", lambda kernel, matrices, exchange, ended, tell: make(
            "prefill", rank_of(kernel.shape), Trial(failing if failing == "overflow" or rank_of(kernel.shape) == 1 else ""),
        ),
    )  # fmt: skip
    for module in (cuda_trial, cuda_start):
        monkeypatch.setattr(module, "free_memory", lambda: None)
    monkeypatch.setattr(load, "load_weights", lambda shape, checkpoint, observe=None, on_share=None: None)
    kernel_of, failed, held = monokernel.Monokernel, list[int](), dict[int, Any]()

    def make_kernel(shape: Any, weights: Any, **options: Any) -> Any:
        rank = options["rank"]
        if is_failing("kernel", rank) and not failed:
            failed.append(rank)
            raise OutOfMemoryError("2 GiB")
        assert rank not in held or held[rank].closed, "two kernels map the same memory of the host"
        held[rank] = kernel_of(shape, weights, **options)
        return held[rank]

    monkeypatch.setattr(monokernel, "Monokernel", make_kernel)
    for engine in ranks.engines:
        engine._gpu.args = replace(engine._gpu.args, prefill=prefill)
    return ranks.on_all(body)


@pytest.mark.parametrize("prefill", ["auto", "on"])
def test_all_have_it(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, prefill: str) -> None:
    told: list[list[StartReport]] = [[], []]
    for engine, reports in zip(ranks.engines, told, strict=True):
        engine._start = StartTeller(reports.append)
    assert start(ranks, monkeypatch, prefill=prefill) == [None, None], ranks.happened
    assert ranks.page.has_prefill()
    assert len(ranks.answer(1, request(num_prompt=100, max_tokens=5))) == 5
    assert {kernel.begun[-1] for kernel in ranks.kernels.values()} == {(100, 99)}
    for reports in told:
        stages = [report.stage for report in reports]
        assert list(dict.fromkeys(stages)) == [
            StartStage.CHECKPOINT, StartStage.DEVICE, StartStage.PEERS, StartStage.WEIGHTS, StartStage.KERNEL,
            StartStage.TRIAL,
        ]  # fmt: skip
        assert stages[-2:] == [StartStage.PEERS, StartStage.TRIAL]


@pytest.mark.parametrize(("failing", "cause", "room"), [
    ("cuBLAS", "cannot start: rank 1: no cuBLASLt", 0),
    ("matrices", "cannot start: rank 1: OutOfMemoryError: 2 GiB", 0),
    ("kernel", "cannot start: rank 1: OutOfMemoryError: 2 GiB", 2048),
    ("prefill", "cannot start: rank 1: OutOfMemoryError: 2 GiB", 2048),
    ("overflow", "failed on trial: a value of two tokens leaves the range of its binary16", 2048),
])  # fmt: skip
def test_one_that_cannot_is_enough_for_all_to_go_without(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tokens: list[int],
    failing: str, cause: str, room: int,
) -> None:  # fmt: skip
    assert start(ranks, monkeypatch, failing) == [None, None], ranks.happened
    assert [engine._gpu.prefill for engine in ranks.engines] == [None, None]
    assert tokens == [room, room], "memory is mapped once"
    assert not ranks.page.has_prefill()
    said = f"{NOTE}prompts go token by token, since prefill {cause}"
    assert capfd.readouterr().err.count(said) == 2, "each in its own log"
    assert len(ranks.answer(1, request(num_prompt=100, max_tokens=5))) == 5


@pytest.mark.parametrize(("failing", "prefill"), [
    ("cuBLAS", "on"), ("matrices", "on"), ("kernel", "on"), ("prefill", "on"), ("trial", "on"), ("trial", "auto"),
])  # fmt: skip
def test_one_that_cannot_ends_the_engine_with_the_way_out(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, failing: str, prefill: str
) -> None:
    other, failed = start(ranks, monkeypatch, failing, prefill)
    assert isinstance(other, AbortedError), "it waits for the one that failed until it is told to stop"
    assert isinstance(failed, LaunchError)
    assert str(failed).startswith("prefill cannot start: ")
    assert str(failed).endswith("with --prefill off prompts go token by token")


def test_the_one_that_others_wait_for_is_seen(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ranks.page.state

    def slow(kernel: Any, matrices: Any, exchange: Any, ended: Any, tell: Any) -> Trial:
        if kernel.shape.head.vocab_rows[0] > 0:
            assert state(1) is RankState.LOADING
            deadline = Deadline.after(20.0)
            assert wait(lambda: state(0) is RankState.LINKING, aborted=ranks.page.aborted, deadline=deadline) is WaitResult.OK
        return Trial("")

    def startup(engine: CudaEngine) -> None:
        monkeypatch.setattr(gpu, "prefill_for", slow)
        engine.startup()

    assert start(ranks, monkeypatch, body=startup) == [None, None], ranks.happened


def test_one_that_has_failed_is_not_taken_for_one_that_agrees(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def live(engine: CudaEngine) -> None:
        worker.live(lambda: engine, engine._gpu.control, engine._gpu.rank)

    other, failed = start(ranks, monkeypatch, "prefill", "on", live)
    assert isinstance(other, AbortedError), "until somebody tells it why, it waits"
    assert isinstance(failed, LaunchError)
    assert "begin" not in ranks.happened, "it met the one that was leaving, and went on"


def test_memory_that_cannot_be_mapped_is_no_reason_to_go_without(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    link = cuda_peers.CudaPeers.link

    def scarce(peers: Any, device: int, prefill_tokens: int = 0) -> Any:
        if peers._rank == 1:
            with cuda_errors("allocating 1 GiB on GPU 1"):
                raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        return link(peers, device, prefill_tokens)

    monkeypatch.setattr(cuda_peers.CudaPeers, "link", scarce)
    other, failed = start(ranks, monkeypatch)
    assert isinstance(other, AbortedError)
    assert str(failed).startswith("prefill cannot start: allocating 1 GiB on GPU 1 failed: too little free GPU memory (cuda")
    assert str(failed).endswith("; stop what else uses the GPU; with --prefill off prompts go token by token")
