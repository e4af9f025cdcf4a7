"""`kog-bench scaling` and `endurance` without a GPU: what they make of what ranks found, and that an error costs no figures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.kernel import endurance, scaling_run
from kog_dist.bench.kernel.rank_kernel import first_difference
from kog_dist.bench.shapes import named_spec
from kog_dist.errors import ConfigError, KogError
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kv_blocks import block_tokens

PLAN = scaling_run.ScalingPlan("2b", (64, 512), tokens=200, repeats=3, long_run=True, yardstick=True)


def rank_of(count: int, us: float, *, bits: str = "b", tokens: tuple[int, ...] = (5, 6, 7), differ: int = 0) -> dict[str, Any]:
    def by_context(value: Any) -> dict[str, Any]:
        return {"64": value, "512": value}

    digests = by_context([bits] * (8 // count))
    found = {
        "us": by_context([us] * 199), "bits": digests, "repeated_bits": digests,
        "repeats": by_context(differ), "long": {"tokens": list(tokens), "us": by_context(us)},
    }  # fmt: skip
    return found if count == 1 else found | {"rounds": by_context([[us, us - 1.5], [us + 9, us + 8], [us, us - 1.25]])}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """By number of GPUs what its ranks found, or the error."""
    found: dict[int, Any] = {}

    def results(count: int, body: str, *_: object) -> Any:
        if isinstance(found[count], KogError):
            raise found[count]
        return [rank["cost"] for rank in found[count]] if body.endswith(":cost_on_ranks") else found[count]

    for module in (scaling_run, endurance):
        monkeypatch.setattr(module, "require_gpus", lambda count: "played")
        monkeypatch.setattr(module, "gpu_name", lambda: "played")
        monkeypatch.setattr(module, "results_of_ranks", results)
    return found


def figures_of(capsys: pytest.CaptureFixture[str]) -> tuple[str, list[dict[str, Any]]]:
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)["figures"]


def test_four_gpus_beside_one(ranks: dict[int, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ranks |= {4: [rank_of(4, 280.0)] * 4, 1: [rank_of(1, 1000.0)]}
    assert scaling_run.run(PLAN, (4, 1))
    text, figures = figures_of(capsys)
    assert "3571.4 tokens/s (wanted 3700), bits the same, 0 of 3 repeats differ" in text
    assert "512: delayed sums cost +1.2 us (wanted 2): 280.0 - 278.5, 289.0 - 288.0, 280.0 - 278.8" in text
    assert "one launch of 3 tokens: 3571.4 at 64 (wanted 3700), 3571.4 at 512 (wanted 3600) tokens/s; tokens the same" in text
    assert figures[3]["exposed_us"] == 1.25
    assert [figure["gpus"] for figure in figures] == [4, 4, 4, 4, 4, 1, 1, 1]


@pytest.mark.parametrize(
    ("others", "words"),
    [({"bits": "c"}, "bits OTHERS"), ({"tokens": (5, 6, 8)}, "tokens OTHERS from token 2 on"), ({"differ": 1}, "1 of 3 repeats")],
)
def test_what_differs_is_told(
    ranks: dict[int, Any], capsys: pytest.CaptureFixture[str], others: dict[str, Any], words: str
) -> None:  # fmt: skip
    ranks |= {2: [rank_of(2, 520.0), rank_of(2, 520.0, **others)]}
    ranks |= {1: [rank_of(1, 1000.0)]}
    assert not scaling_run.run(PLAN, (1, 2))
    assert words in figures_of(capsys)[0]


def test_an_error_on_four_gpus_costs_the_others_nothing(ranks: dict[int, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ranks |= {4: KogError("rank 3: planted"), 2: [rank_of(2, 520.0)] * 2, 1: [rank_of(1, 1000.0)]}
    assert not scaling_run.run(PLAN, (4, 2, 1))
    text, figures = figures_of(capsys)
    assert "rank 3: planted" in text
    assert [figure.get("us_per_token") for figure in figures if "context" in figure] == [520.0, 520.0, 1000.0, 1000.0]


def test_other_builds_stand_beside_the_kernel(ranks: dict[int, Any], capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [[280.0, 277.0], [281.0, 278.0], [282.0, 290.0]]
    found = rank_of(4, 280.0) | {"builds": dict.fromkeys(("64", "512"), (rounds, [True, True]))}
    ranks |= {4: [found] * 3 + [found | {"builds": dict.fromkeys(("64", "512"), (rounds, [True, False]))}]}
    assert not scaling_run.run(replace(PLAN, builds=({"max_slots": 8},)), (4,)), "rank 3 had other bits"
    text = figures_of(capsys)[0]
    assert "as it is:    281.0 us (280.0, 281.0, 282.0), bits the same" in text
    assert "max_slots=8:    278.0 us (277.0, 278.0, 290.0), bits OTHERS" in text


def test_weights_alone_stand_beside_the_slowest_rank(ranks: dict[int, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ranks |= {2: [rank_of(2, 520.0) | {"alone_us": us, "memory_us": {"64": us + 1, "512": us + 8}} for us in (410.0, 416.0)]}
    plan = replace(PLAN, memory_alone=True, kv_dtype="fp8", yardstick=False, long_run=False)
    assert scaling_run.run(plan, (2,))
    text, figures = figures_of(capsys)
    assert "1923.1 tokens/s (wanted 1880), weights alone 416.0 us (80.0 %), bits the same" in text
    assert [(figure["alone_us"], figure["memory_us"]) for figure in figures] == [(416.0, 417.0), (416.0, 424.0)]


def test_ranks_are_asked_for_what_the_plan_says(monkeypatch: pytest.MonkeyPatch, ranks: dict[int, Any]) -> None:
    asked: list[dict[str, Any]] = []

    def decode(count: int, arguments: dict[str, Any]) -> Any:
        asked.append(arguments)
        return ranks[count]

    ranks |= {2: [rank_of(2, 520.0) | {"alone_us": 400.0, "memory_us": {"64": 401.0, "512": 408.0}}] * 2}
    monkeypatch.setattr(scaling_run, "decode", decode)
    assert scaling_run.run(replace(PLAN, memory_alone=True, kv_dtype="int4", filled=True), (2,))
    first, again = asked
    assert (first["kv_dtype"], first["filled"], first["memory_alone"]) == ("int4", True, True)
    assert (again["kv_dtype"], again["filled"], again.get("memory_alone")) == ("int4", True, None)


class PlayedKernel:
    """A kernel whose tokens leave the number of their row in the first batch of each row of its cache."""

    def __init__(self, shape: KernelShape) -> None:
        self.shape, self.kv, self.num_tokens = shape, np.zeros(shape.cache.num_bytes, np.uint8), 0

    def begin(self, ids: list[int], *_: Any) -> None:
        self.num_tokens = len(ids)

    def launch(self, num_steps: int) -> None:
        assert num_steps == self.num_tokens == block_tokens(self.shape), "the first batch of each split, and no more"
        rows = self.kv.reshape(-1, self.shape.cache.full_batches * self.shape.cache.batch_bytes)
        rows[:, : self.shape.cache.batch_bytes] = 1 + np.arange(len(rows))[:, None] % 255

    def finish(self) -> None:
        pass


def test_a_filled_cache_repeats_what_was_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    spec = named_spec("qwen3-0.6b@1024")
    kernel: Any = PlayedKernel(KernelShape(spec, range(spec.num_lanes), kv_dtype="fp8"))
    scaling_run.fill_cache(kernel)
    cache = kernel.shape.cache
    rows = kernel.kv.reshape(-1, cache.full_batches * cache.batch_bytes)
    assert cache.full_batches > 1
    assert (rows == 1 + np.arange(len(rows))[:, None] % 255).all()


def test_a_cache_with_a_ring_is_not_filled() -> None:
    spec = named_spec("gpt-oss-20b")
    kernel: Any = SimpleNamespace(shape=KernelShape(spec, range(spec.num_lanes)))
    with pytest.raises(ConfigError, match="ring"):
        scaling_run.fill_cache(kernel)


def test_an_interrupt_leaves_what_was_measured(
    ranks: dict[int, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(count: int, _: object) -> Any:
        if count == 1:
            raise KeyboardInterrupt
        return [rank_of(2, 520.0)] * 2

    monkeypatch.setattr(scaling_run, "decode", decode)
    with pytest.raises(KeyboardInterrupt):
        scaling_run.run(PLAN, (2, 1))
    assert len(figures_of(capsys)[1]) == 5


def test_hashes_of_all_ranks_are_compared(ranks: dict[int, Any], capsys: pytest.CaptureFixture[str]) -> None:
    hashes = ["a1", "b2", "c3"]
    rounds = [[101.0, 100.0], [100.2, 100.0], [100.0, 100.0]]
    rank = {"cost": rounds, "hashes": hashes, "took_s": 1.0}
    ranks |= {4: [rank] * 4, 2: [rank, {**rank, "hashes": ["a1", "b2", "d3"]}], 1: KogError("no GPU")}
    assert endurance.run("2b", (4,), 3 * 64, 10.0)
    text, (hashed, cost) = figures_of(capsys)
    assert "3 hashes of 3, all 4 ranks have the same, the last c3\n4 GPUs: 100.0 us per token, 100.0 with hashes (+0.20 %" in text
    assert (cost["cost"], hashed["last_hash"]) == (0.002, ["c3"])
    assert not endurance.run("2b", (4,), 4 * 64, 10.0), "a hash is missing"
    assert not endurance.run("2b", (1, 4, 2), 3 * 64, 10.0)
    text = figures_of(capsys)[0]
    assert "1 GPUs: no GPU" in text
    assert "ranks have OTHERS from hash 2 on" in text


def test_first_difference() -> None:
    assert first_difference([[1, 2], [1, 2]], [1, 2]) is None
    assert first_difference([[1, 2, 3], [1, 4, 3], [1, 2, 4]], [1, 2, 3]) == 1
    assert first_difference([[1, 2]], [1, 2, 3]) == 2


def test_what_is_wanted_of_the_2b_shape_is_said_of_no_other(ranks: dict[int, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ranks |= {2: [rank_of(2, 370.0)] * 2, 1: [rank_of(1, 650.0)]}
    assert scaling_run.run(replace(PLAN, spec="llama-3.2-1b:2"), (2, 1))
    text, _ = figures_of(capsys)
    assert "2702.7 tokens/s, bits the same" in text
    assert "wanted" not in text
