"""Whether an engine starts with prefill, without it, or not at all. What it is made of is played by Python."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.shapes import named_shape
from kog_dist.cuda import cublas_lt
from kog_dist.cuda.driver import DriverError
from kog_dist.errors import AbortedError, CheckpointError, CompileError, ConfigError, LaunchError
from kog_dist.model.spec import laneformer_2b
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.notes import NOTE
from kog_dist.runtime.startup import NOBODY, StartReport, StartStage, StartTeller
from kog_dist.runtime.topology import RankInfo
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda import load, monokernel
from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.engines import cuda_start, cuda_trial
from kog_dist.workers.engines.cuda import CudaEngine
from kog_dist.workers.engines.cuda_device import translated_errors
from kog_dist.workers.engines.cuda_start import Start
from kog_dist.workers.engines.cuda_trial import StartTrial
from kog_dist.workers.prefill import gpu
from kog_dist.workers.prefill.base.matrices import Matrices
from kog_dist.workers.prefill.buffers.prompt import misfit
from tests.unit.test_cuda_engine import MAX_CONTEXT, ScriptedKernel


class OutOfMemoryError(Exception):
    """As cupy calls its."""


class Parts:
    """What a start calls, in order; `failing` names what raises `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.told: list[StartReport] = []
        self.failing = ""
        self.error: Exception = RuntimeError("CUDA error: no kernel image is available")
        self.gpu_says = ""
        self.kernels: list[ScriptedKernel] = []
        monkeypatch.setattr(load, "load_weights", self.load_weights)
        monkeypatch.setattr(monokernel, "Monokernel", self.monokernel)
        monkeypatch.setattr(gpu, "matrices_for", lambda shape: (self.called("matrices"), lambda name, words: self.called("take")))
        monkeypatch.setattr(gpu, "prefill_for", self.prefill)
        monkeypatch.setattr(gpu, "obstacle_on_gpu", lambda: self.gpu_says)
        for module in (cuda_trial, cuda_start):
            monkeypatch.setattr(module, "free_memory", lambda: self.called("free"))

    def called(self, name: str) -> str:
        self.calls.append(name)
        if name == "free":
            self.failing = ""  # there is more room now
        if name == self.failing:
            raise self.error
        return name

    def load_weights(self, shape: Any, checkpoint: Any, observe: Any = None, *, on_share: Callable[[float], None]) -> str:
        on_share(0.5)
        if observe is not None:
            observe("a tensor", None)
        return self.called("weights")

    def prefill(
        self, kernel: Any, matrices: Any, *, exchange: Any, ended: Callable[[str], None], tell: StartTeller
    ) -> str:  # fmt: skip
        tell.begin(StartStage.GRAPHS)
        ended("products, 0 of 40 tried,")
        return self.called("prefill")

    def monokernel(self, shape: Any, weights: str, **options: Any) -> ScriptedKernel:
        self.called("kernel")
        self.kernels.append(ScriptedKernel())
        return self.kernels[-1]

    def start(self, prefill: str, world_size: int = 1) -> tuple[Any, Any]:
        args = WorkerArgs(RankInfo(0, world_size, 0, "test"), "model", "cuda:0", "bfloat16", True, 1.0, 1.0, prefill=prefill)
        shape: Any = type("Shape", (), {"spec": laneformer_2b(), "coding": None, "kv_dtype": "bfloat16"})
        nothing: Any = None
        tell = StartTeller(self.told.append)
        return Start(args, shape, nothing, (), 1000, link=lambda tokens: None, sums=None, tell=tell).load()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


WITH = ["matrices", "take", "weights", "kernel", "prefill"]
WITHOUT = ["weights", "kernel"]


@pytest.mark.parametrize(("prefill", "world_size", "calls"), [
    ("on", 1, WITH), ("on", 2, WITH), ("auto", 1, WITH), ("auto", 2, WITH), ("off", 1, WITHOUT), ("off", 2, WITHOUT),
])  # fmt: skip
def test_who_has_prefill(
    parts: Parts, capfd: pytest.CaptureFixture[str], prefill: str, world_size: int, calls: list[str]
) -> None:  # fmt: skip
    kernel, made = parts.start(prefill, world_size)
    assert parts.calls == calls
    assert kernel is parts.kernels[0]
    assert made == ("prefill" if calls == WITH else None)
    stages = [StartStage.WEIGHTS, StartStage.WEIGHTS, StartStage.KERNEL]  # the second one tells its share
    assert [one.stage for one in parts.told] == ([*stages, StartStage.GRAPHS] if calls == WITH else stages)
    names = ("cuBLAS", "weights", "kernel", "products, 0 of 40 tried,")
    steps = r"note: started prefill in [\d.]+ s \(" + ", ".join(rf"{name} [\d.]+" for name in names) + r"\)\n"
    assert (re.fullmatch(steps, capfd.readouterr().err) is not None) == (made is not None)


FAILURES = [
    ("matrices", RuntimeError("CUDA error: no kernel image"), "RuntimeError: CUDA error: no kernel image"),
    ("take", OutOfMemoryError("2 GiB"), "OutOfMemoryError: 2 GiB"),
    ("kernel", OutOfMemoryError("1 GiB"), "OutOfMemoryError: 1 GiB"),
    ("prefill", CompileError("prefill.cu did not compile", "line 1"), "CompileError: prefill.cu did not compile line 1"),
]


@pytest.mark.parametrize(("failing", "error", "cause"), FAILURES)
def test_auto_goes_on_without_prefill(
    parts: Parts, capfd: pytest.CaptureFixture[str], failing: str, error: Exception, cause: str
) -> None:
    parts.failing, parts.error = failing, error
    kernel, made = parts.start("auto")
    assert made is None
    assert parts.calls == [*WITH[: WITH.index(failing) + 1], "free", *(() if failing == "prefill" else WITHOUT)]
    (only,) = parts.kernels
    assert kernel is only
    assert not only.closed
    assert capfd.readouterr().err == f"{NOTE}prompts go token by token, since prefill cannot start: {cause}\n"


@pytest.mark.parametrize(("failing", "error", "cause"), FAILURES)
def test_on_is_refused_with_the_way_out(parts: Parts, failing: str, error: Exception, cause: str) -> None:
    parts.failing, parts.error = failing, error
    with pytest.raises(LaunchError) as caught:
        parts.start("on")
    assert str(caught.value) == f"prefill cannot start: {cause}; with --prefill off prompts go token by token"


def test_no_cublas_is_no_prefill(parts: Parts, capfd: pytest.CaptureFixture[str]) -> None:
    parts.gpu_says = "libcublasLt.so.13 cannot be loaded"
    assert parts.start("auto")[1] is None
    assert parts.calls == ["free", *WITHOUT]
    assert "since prefill cannot start: libcublasLt.so.13 cannot be loaded" in capfd.readouterr().err
    with pytest.raises(LaunchError, match="cannot be loaded; with --prefill off"):
        parts.start("on")


@pytest.mark.parametrize("prefill", ["auto", "on"])
def test_what_is_not_prefills_fault_is_raised(parts: Parts, prefill: str) -> None:
    parts.failing, parts.error = "weights", CheckpointError("model.safetensors is damaged")
    with pytest.raises(CheckpointError):
        parts.start(prefill)
    assert parts.calls == ["matrices", "take", "weights"]


@pytest.mark.parametrize(("capability", "said"), [
    ("90", ""), ("89", "the GPU has compute capability 8.9, and prefill is made for 9.0"),
    ("100", "the GPU has compute capability 10.0, "),
])  # fmt: skip
def test_prefill_is_made_for_one_kind_of_gpu(monkeypatch: pytest.MonkeyPatch, capability: str, said: str) -> None:
    monkeypatch.setattr(cublas_lt, "library", lambda: None)
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device)))
    assert gpu.obstacle_on_gpu().startswith(said)
    assert bool(gpu.obstacle_on_gpu()) == bool(said)

    def missing() -> None:
        raise LaunchError("libcublasLt.so.13 cannot be loaded")

    monkeypatch.setattr(cublas_lt, "library", missing)
    assert gpu.obstacle_on_gpu().startswith(said or "libcublasLt.so.13 cannot be loaded")


def test_heads_that_attention_cannot_take() -> None:
    spec = laneformer_2b()
    assert misfit(spec) == ""
    wide = replace(spec, num_heads=8, num_kv_heads=8)
    assert misfit(wide) == f"{spec.hidden_size // 8} values in a head (at most 128)"


@pytest.mark.parametrize(("head_dim", "is_taken"), [(2, False), (10, False), (24, False), (64, True), (128, True), (256, False)])
def test_normed_heads_that_append_cannot_take(head_dim: int, is_taken: bool) -> None:
    spec = replace(laneformer_2b(), own_head_dim=head_dim, delay=0)
    assert (misfit(spec) == "") == (head_dim <= 128)
    assert (misfit(replace(spec, qk_norm=True)) == "") == is_taken
    assert "in lanes with streams of their own" in misfit(replace(spec, qk_norm=True, delay=1))


def test_experts_that_prefill_cannot_read_are_refused_before_anything_is_compiled() -> None:
    spec, codings = named_shape("qwen3-30b-a3b+fp8")
    coding = codings["coding"]
    assert coding is not None
    kernel: Any = SimpleNamespace(shape=KernelShape(spec, range(spec.num_lanes), **codings))
    object.__setattr__(kernel.shape, "coding", replace(coding, scales=0))  # which no kernel is made for
    with pytest.raises(ConfigError, match=r"experts in E4M3 with one scale .* go token by token"):
        gpu.runner_for(kernel, Matrices(spec, np.float16))


def test_an_error_of_the_driver_is_a_sentence() -> None:
    with pytest.raises(LaunchError, match=r"cuda:0 failed: launching a graph failed: X \(719\); start the engine again"):  # noqa: SIM117
        with translated_errors("cuda:0"):
            raise DriverError("launching a graph failed: X (719)")
    with pytest.raises(RuntimeError, match="ours"), translated_errors("cuda:0"):
        raise RuntimeError("ours")


# ---- the trial ----
def reaching(position: int) -> Callable[..., Generator[None, None, int]]:
    """Steps of prefill that come so far."""

    def steps(*_: Any, **__: Any) -> Generator[None, None, int]:
        yield from ()
        return position

    return steps


class Failing:
    """Prefill whose first run raises."""

    streams = LastStreams(0, 0)

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error or RuntimeError("CUDA error: invalid argument")

    def steps(self, *_: Any, **__: Any) -> Generator[None, None, int]:
        yield from ()
        raise self._error

    def next_end(self, start: int, num_tokens: int) -> int:
        return num_tokens

    def forget(self, position: int, cache: int = 0) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    page = ControlPage.create(1, MAX_CONTEXT)
    info = RankInfo(0, 1, 0, "test", 1, page.fd, page.fd)
    yield CudaEngine(WorkerArgs(info, "model", "cuda:0", "bfloat16", True, 10.0, 10.0, prefill="auto"), page)
    page.close()


def trial(engine: CudaEngine) -> StartTrial:
    return StartTrial(engine._gpu, engine._drafting, NOBODY)


def test_a_trial_that_fails(parts: Parts, engine: CudaEngine, capfd: pytest.CaptureFixture[str]) -> None:
    engine._gpu.loaded, engine._gpu.prefill = ScriptedKernel(), Failing()
    trial(engine).run()
    left: Any = engine._gpu.prefill
    assert left is None
    assert not engine._gpu.control.has_prefill()
    assert parts.calls == ["free"]
    assert "since prefill failed on trial: RuntimeError: CUDA error: invalid argument" in capfd.readouterr().err
    engine._gpu.args, engine._gpu.prefill = replace(engine._gpu.args, prefill="on"), Failing()
    with pytest.raises(LaunchError, match="invalid argument; with --prefill off"):
        trial(engine).run()


def test_a_trial_whose_graphs_the_driver_cannot_launch(
    parts: Parts, engine: CudaEngine, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    refused = LaunchError("launching a graph failed: CUDA_ERROR_OUT_OF_MEMORY (2)")
    engine._gpu.loaded, engine._gpu.prefill = ScriptedKernel(), Failing(refused)
    trial(engine).run()
    assert not engine._gpu.control.has_prefill()
    assert "since prefill failed on trial: launching a graph failed: CUDA_ERROR_OUT_OF_MEMORY" in capfd.readouterr().err
    engine._gpu.args, engine._gpu.prefill = replace(engine._gpu.args, prefill="on"), Failing(refused)
    with pytest.raises(LaunchError, match="prefill cannot start: launching a graph failed"):
        trial(engine).run()
    engine._gpu.args, engine._gpu.prefill = replace(engine._gpu.args, prefill="auto"), Failing(AbortedError("stopped"))
    with pytest.raises(AbortedError, match="stopped"):
        trial(engine).run()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_trial_that_does_not_reach_its_end_is_not_announced(
    parts: Parts, engine: CudaEngine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:  # fmt: skip
    monkeypatch.setattr(Failing, "steps", reaching(0))
    monkeypatch.setattr(engine._gpu.control, "aborted", lambda: is_aborted)
    left = trial(engine)._tried(Failing())
    assert not engine._gpu.control.has_prefill()
    told = capfd.readouterr().err
    if is_aborted:
        assert left is not None
        assert "prefill" not in told
        return
    assert left is None
    assert "since prefill failed on trial: a value of two tokens leaves the range of its binary16" in told
    engine._gpu.args = replace(engine._gpu.args, prefill="on")
    with pytest.raises(LaunchError, match="prefill cannot start: a value of two tokens"):
        trial(engine)._tried(Failing())


def test_a_trial_that_succeeds_is_said(
    engine: CudaEngine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(Failing, "steps", reaching(2))
    engine._gpu.loaded, engine._gpu.prefill = ScriptedKernel(), Failing()
    trial(engine).run()
    assert "prompts go through prefill" in capfd.readouterr().err
    assert engine._gpu.control.has_prefill()
