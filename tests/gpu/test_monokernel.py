"""The monokernel against the float64 oracle, and its promises: the same bits every time, and no wait without an end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.decode.plan.steps import Phase
from kog_dist.decode.sampling import sample
from kog_dist.errors import DeviceError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from tests.silent import make_silent

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

DEMO: dict[str, Any] = {
    "hidden_size": 256, "num_layers": 6, "num_heads": 16, "num_kv_heads": 8, "intermediate_size": 1024, "vocab_size": 4096,
    "max_context": 1024, "num_lanes": 8, "delay": 2, "sliding_window": 64, "window_layers": (0, 1, 2, 3),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "demo": {},
    "sum before norm": {"pre_norm_lane_agg": True},
    "norm scales per lane": {"shared_norm_scale": False},
    "no attention communication": {"attention_comm": False, "early_comm": False},
    "one lane, all blocking": {"num_lanes": 1, "delay": 0},
    "one stream": {"delay": 0},
    "one stream, biases, five normed heads of their own size": {
        "delay": 0, "num_lanes": 4, "num_heads": 20, "num_kv_heads": 4, "own_head_dim": 64, "qkv_bias": True, "qk_norm": True,
    },
    "one stream, seven heads of 128": {
        "delay": 0, "num_lanes": 2, "num_heads": 14, "num_kv_heads": 2, "own_head_dim": 128, "qk_norm": True,
    },
    "65 layers": {"delay": 0, "num_lanes": 2, "num_layers": 65, "window_layers": (0, 63, 64)},
    "nothing divides": {
        "hidden_size": 192, "num_heads": 12, "num_kv_heads": 4, "num_lanes": 4, "intermediate_size": 592, "vocab_size": 1001,
        "delay": 1, "sliding_window": 37,
    },
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "of all lanes": {"head_type": HeadType.LANE, "vocab_size": 4001, "shared_norm_scale": False},
    "of all lanes, all blocking": {"head_type": HeadType.LANE, "num_lanes": 4, "delay": 0},
    "of one lane": {"head_type": HeadType.LANE, "num_lanes": 1, "delay": 0},
    "by lane": {"head_type": HeadType.VOCAB_PARALLEL, "shared_norm_scale": False},
    "by lane, all blocking": {"head_type": HeadType.VOCAB_PARALLEL, "num_lanes": 4, "delay": 0},
    "by lane, thread blocks left over": {
        "hidden_size": 640, "num_heads": 40, "num_kv_heads": 40, "intermediate_size": 608, "vocab_size": 1000,
        "head_type": HeadType.VOCAB_PARALLEL,
    },
}  # fmt: skip
DTYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float16"), ("float16", "float16")]  # of weights and cache
LIMITS = {"bfloat16": 2e-3, "float16": 5e-4}  # the oracle rounds keys and values, too, but not everything falls on the same side


def attention_options(spec: ModelSpec) -> dict[str, Any]:
    """Of KernelShape: attention's partitions are 128 or 256 positions, so that these contexts have several."""
    return {"partition_batches": 1, "splits": 16 if spec.has_one_stream else 8}


class Prepared:
    """A random model: oracle in float64, weights and shape of the kernel."""

    def __init__(self, folder: Path, overrides: dict[str, Any], dtype: str, kv_dtype: str, **options: Any) -> None:
        spec = ModelSpec(**{**DEMO, **overrides})
        write_checkpoint(folder, spec, random_tensors(spec, 7), dtype=dtype, manifest=False)
        self.spec = spec
        self.oracle = Laneformer.from_checkpoint(folder, torch.float64).cuda().eval()
        self.oracle.round_keys_and_values(getattr(torch, kv_dtype))
        options = {**attention_options(spec), **options}
        self.shape = KernelShape(spec, range(spec.num_lanes), weight_dtype=dtype, kv_dtype=kv_dtype, **options)
        self.weights = load_weights(self.shape, open_checkpoint(folder))
        self.ids: list[int] = np.random.default_rng(1).integers(0, spec.vocab_size, spec.max_context).tolist()

    def kernel(self, **options: Any) -> Monokernel:
        return Monokernel(self.shape, self.weights, **options)

    def oracle_logits(self, num_tokens: int) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            logits = self.oracle(torch.tensor([self.ids[:num_tokens]], device="cuda"))[0]
        return np.asarray(logits.cpu().numpy())


@pytest.fixture
def demo(tmp_path: Path) -> Prepared:
    return Prepared(tmp_path, {}, "bfloat16", "float16")


def logits_of(kernel: Monokernel) -> np.ndarray[Any, Any]:
    return np.asarray(kernel.logits.get())


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_the_oracle(tmp_path: Path, variant: str, dtype: str, kv_dtype: str) -> None:
    compare_with_oracle(
        Prepared(tmp_path, VARIANTS[variant], dtype, kv_dtype), f"{variant}, {dtype} weights, {kv_dtype} cache", kv_dtype
    )


@pytest.mark.parametrize("head", HEADS)
def test_logits_of_all_heads_match_the_oracle(tmp_path: Path, head: str) -> None:
    compare_with_oracle(Prepared(tmp_path, HEADS[head], "float16", "float16"), head, "float16")


@pytest.mark.parametrize(("variant", "splits"), [("demo", 16), ("demo", 32), ("one stream, seven heads of 128", 32)])
def test_logits_with_more_splits_match_the_oracle(tmp_path: Path, variant: str, splits: int) -> None:
    prepared = Prepared(tmp_path, VARIANTS[variant], "bfloat16", "float16", splits=splits)
    compare_with_oracle(prepared, f"{variant}, {splits} splits", "float16")


def compare_with_oracle(prepared: Prepared, name: str, kv_dtype: str) -> None:
    kernel = prepared.kernel()
    wanted = prepared.oracle_logits(700)
    limit = LIMITS[kv_dtype] * max(1.0, (prepared.spec.num_layers / 16) ** 0.5)  # what each layer rounds adds up
    for position in (0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 300, 699):
        (token,) = kernel.generate(prepared.ids[: position + 1], 1)
        found = logits_of(kernel)
        error = np.linalg.norm(found.astype(np.float64) - wanted[position]) / np.linalg.norm(wanted[position])
        print(f"{name}, position {position}: relative error {error:.2e}")
        assert error < limit, f"position {position}: relative error {error:.2e}"
        assert token == sample(found, position, SamplingParams())


def test_tokens_are_those_of_the_definition(demo: Prepared) -> None:
    kernel = demo.kernel()
    for sampling in (SamplingParams(), SamplingParams(0.7, 5), SamplingParams(1.3, 2**63 - 11)):
        for position in (0, 40, 200):
            (token,) = kernel.generate(demo.ids[: position + 1], 1, sampling)
            assert token == sample(logits_of(kernel), position, sampling)


def test_chunks_do_not_change_the_answer(demo: Prepared) -> None:
    kernel = demo.kernel()
    whole = kernel.generate(demo.ids[:9], 100, chunk=200)
    assert len(whole) == 100
    assert kernel.generate(demo.ids[:9], 100, chunk=7) == whole
    assert demo.kernel().generate(demo.ids[:9], 100, chunk=64) == whole


def test_same_bits_every_time_at_long_context(demo: Prepared) -> None:
    kernel = demo.kernel()
    kernel.generate(demo.ids[:900], 1)
    first = logits_of(kernel)
    for _ in range(300):
        kernel.begin(demo.ids[:900], 1, SamplingParams(), first_position=899)
        kernel.launch(1)
        kernel.finish()
        assert np.array_equal(logits_of(kernel).view(np.uint32), first.view(np.uint32))


def test_stop_token_ends_the_answer(demo: Prepared) -> None:
    kernel = demo.kernel()
    answer = kernel.generate(demo.ids[:5], 20)
    first_place = answer.index(answer[6])
    assert kernel.generate(demo.ids[:5], 20, stop_ids=[answer[6]]) == answer[: first_place + 1]
    entry = kernel.token(first_place)
    assert entry is not None
    assert entry.finish is Finish.STOP


def test_answer_ends_at_the_last_position(demo: Prepared) -> None:
    kernel = demo.kernel()
    assert len(kernel.generate(demo.ids[:1020], 100)) == demo.spec.max_context - 1020


def test_cancel_ends_the_answer(demo: Prepared) -> None:
    kernel = demo.kernel()
    kernel.begin(demo.ids[:5], 1000, SamplingParams())
    kernel.cancel()
    kernel.launch(1000)
    kernel.finish()
    ends = [entry for index in range(1000) if (entry := kernel.token(index)) is not None and entry.finish is not Finish.NONE]
    assert [(entry.token_id, entry.finish) for entry in ends] == [(NO_TOKEN, Finish.CANCELLED)]


def test_missing_epoch_ends_in_a_device_error_that_names_it(tmp_path: Path) -> None:
    faulty = Prepared(tmp_path, {}, "bfloat16", "float16")
    kernel = faulty.kernel(wait_limit_us=100_000, rank=3)
    make_silent(kernel, 5)
    with pytest.raises(DeviceError) as caught:
        kernel.generate(faulty.ids[:3], 4)
    record = caught.value.record
    assert (record.rank, record.phase, record.num_missing) == (3, Phase.HEAD, 1), str(
        record
    )  # the LM head waits for one pair of rows
    assert record.epoch_wanted == record.epoch_seen + 1, str(record)  # what stands there is of the layer before
    assert 0.1 <= record.elapsed_ns / 1e9 < 1.0


def test_kernel_works_again_after_an_abort(tmp_path: Path) -> None:
    demo = Prepared(tmp_path, {}, "bfloat16", "float16")
    kernel = demo.kernel()
    answer = kernel.generate(demo.ids[:5], 8)
    kernel.begin(demo.ids[:5], 1000, SamplingParams())
    kernel.abort()
    kernel.launch(1000)
    kernel.finish()
    kernel.recover()
    assert kernel.generate(demo.ids[:5], 8) == answer
