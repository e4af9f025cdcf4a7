"""`--quantize-head`: what the LM head is rounded to, by a slow reading of the definition; alike on all ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.bench.shapes import named_shape
from kog_dist.config import LaunchConfig
from kog_dist.decode.coding import HEAD_CODING
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.steps import Phase
from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.launch.gpu_choice import gpu_rank_bytes
from kog_dist.launch.inspection import check, cpu_rank_bytes
from kog_dist.launch.target import plan_target
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.formats.head import round_in_place, rounded_rows
from kog_dist.model.layout import EMBEDDING, head_name
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.model.weight_bytes import bytes_per_token, formats, weight_bytes
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.runtime.topology import RankInfo
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.engines.agreement import common_terms
from kog_dist.workers.engines.cuda_device import kernel_shapes
from tests.unit.formats.folders import made, save
from tests.unit.formats.writers import METHODS

Values = NDArray[np.float32]
SPEC = ModelSpec(
    hidden_size=160, num_layers=2, num_heads=8, num_kv_heads=4, intermediate_size=288, vocab_size=36, num_lanes=2, delay=1
)  # fmt: skip
SPECS = {
    "replicate": SPEC,
    "lane": replace(SPEC, head_type=HeadType.LANE),
    "vocab_parallel": replace(SPEC, head_type=HeadType.VOCAB_PARALLEL),
    "tied": replace(SPEC, tied_embeddings=True),
}


def drawn() -> Values:
    """Rows of many sizes, the first ones special, exact in bfloat16 or float16."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal((96, 40), dtype=np.float32) * np.exp2(rng.integers(-30, 14, (96, 1))).astype(np.float32)
    values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    values[0] = 0
    values[1] = [127 * 1.125, *np.arange(39) / 16]  # a scale of four bits, as it is
    values[2] = [-127, *np.arange(39) / 2 - 9]  # between two codes
    values[3] = [127.0625, *np.arange(39)]
    values[4] *= np.float32(2.0**-126) / np.abs(values[4]).max()
    values[5] = [65024, *np.arange(39) * 256]
    values[6] = [127 * 2.0**-21, *np.arange(39) * 2.0**-22]
    return values.astype(np.float32)


def slow(row: Values) -> tuple[list[int], Fraction]:
    """Codes and scale of one row, one value after the other."""
    fits = (eighths * Fraction(2) ** exponent for exponent in range(-24, 24) for eighths in range(8, 16))
    largest = Fraction(float(np.abs(row).max()))
    scale = next(scale for scale in fits if largest <= 127 * scale)
    return [round(Fraction(float(value)) / scale) + 128 for value in row], scale


def test_rows_are_rounded_as_defined() -> None:
    values = drawn()
    coded = rounded_rows(values)
    for row, codes, scale in zip(values, coded.codes, coded.scales[:, 0], strict=True):
        expected, expected_scale = slow(row)
        assert codes.tolist() == expected
        assert Fraction(float(scale)) == expected_scale
    assert len({math.frexp(scale) for scale in coded.scales[:, 0]}) > 50


def test_values_of_codes_are_exact_in_binary16() -> None:
    scales = np.array([eighths * 2.0**exponent for exponent in range(-24, 7) for eighths in range(8, 16)], np.float32)
    scales = scales[scales <= 512]
    values = scales[:, None] * np.arange(-127, 128, dtype=np.float32)
    assert np.array_equal(values.astype(np.float16).astype(np.float32), values)
    assert set(rounded_rows(drawn()).scales[:, 0]) <= set(scales)
    once = values.copy()
    round_in_place(values, 0)
    assert values.tobytes() == once.tobytes(), "what is rounded is not rounded further"


def test_weights_that_binary16_does_not_reach_are_refused() -> None:
    values = drawn()
    values[7, 3] = -65280
    with pytest.raises(CheckpointError, match="the LM head has a weight beyond 65024, which quantize_head is not for"):
        rounded_rows(values)


def test_with_lane_heads_each_lanes_columns_have_a_scale() -> None:
    values = drawn()
    parts = [values[:, :20].copy(), values[:, 20:].copy()]
    round_in_place(values, 20)
    for part, found in zip(parts, (values[:, :20], values[:, 20:]), strict=True):
        round_in_place(part, 0)
        assert np.array_equal(part, found)


# ---- of a folder ----
def written(folder: Path, spec: ModelSpec, dtype: str = "bfloat16", **options: Any) -> tuple[Checkpoint, Checkpoint]:
    """The checkpoint as it is, and with its head rounded. Of a `lane` head one lane's columns are far smaller."""
    tensors = random_tensors(spec, seed=4)
    if spec.head_type is HeadType.LANE:
        tensors[head_name(spec)][:, spec.hidden_size :] *= np.float32(2.0**-14)
    write_checkpoint(folder, spec, tensors, dtype=dtype)
    return open_checkpoint(folder), open_checkpoint(folder, quantize_head="int8", **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SPECS)
def test_the_head_is_rounded_and_nothing_else(tmp_path: Path, name: str, dtype: str) -> None:
    spec = SPECS[name]
    plain, checkpoint = written(tmp_path, spec, dtype)
    before, after = (one.rank_weights(range(2)) for one in (plain, checkpoint))
    halves = checkpoint.rank_weights(range(2), keeps_halves=True)
    assert np.array_equal(before.embedding, after.embedding)
    assert np.array_equal(before.lanes[0].layers[1].w13, after.lanes[0].layers[1].w13)
    for lane in range(2):
        expected = before.heads[lane].copy()
        round_in_place(expected, spec.hidden_size)
        assert np.array_equal(after.heads[lane], expected)
        assert not np.array_equal(before.heads[lane], expected)
        assert halves.heads[lane].dtype == np.float16
        assert np.array_equal(halves.heads[lane], expected)
        alone = checkpoint.rank_weights([lane], keeps_halves=True)
        assert alone.heads[lane].tobytes() == halves.heads[lane].tobytes()
    assert np.array_equal(plain.tensor(EMBEDDING), checkpoint.tensor(EMBEDDING))


@pytest.mark.skipif(host_library.library() is None, reason="needs a C compiler")
def test_cpu_ranks_multiply_the_values_of_codes(tmp_path: Path) -> None:
    _, checkpoint = written(tmp_path, SPECS["tied"], "float16")
    found = []
    for keeps_halves in (False, True):
        weights = checkpoint.rank_weights(range(2), keeps_halves=keeps_halves)
        engine = Interpreter(make_plan(checkpoint.spec, 1), 0, weights, None)
        output = engine.step(7, 0, SamplingParams(), gather_logits=True)
        assert output.logits is not None
        found.append(output.logits.copy())
    assert np.allclose(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_bytes_per_token_count_a_code_for_each_weight_and_scales(tmp_path: Path, name: str) -> None:
    spec = SPECS[name]
    plain, checkpoint = written(tmp_path, spec)
    products = 2 if name == "lane" else 1
    saved = products * spec.vocab_size * (spec.hidden_size - 2)
    assert bytes_per_token(plain) - bytes_per_token(checkpoint) == saved
    assert weight_bytes(plain) - weight_bytes(checkpoint) == saved


def test_check_says_what_is_rounded(tmp_path: Path) -> None:
    written(tmp_path, SPEC)
    text = check(LaunchConfig(model=str(tmp_path), device="cpu", ranks=2, quantize_head="int8"), deep=True)
    per_token = bytes_per_token(open_checkpoint(tmp_path, quantize_head="int8")) / 2**20
    assert "bfloat16, LM head rounded at the start to INT8 with a scale for each row, F16 scales" in text
    assert f"({per_token:.1f} MiB per token as they are)" in text
    both = open_checkpoint(tmp_path, quantize="int4", quantize_head="int8")
    assert formats(both).startswith("INT4 in groups of 128, BF16 scales, rounded at the start, LM head rounded")
    assert formats(both).endswith("the rest bfloat16")


def test_cpu_ranks_are_said_to_keep_a_rounded_head_in_16_bit(tmp_path: Path) -> None:
    written(tmp_path, SPEC)
    target = plan_target(LaunchConfig(model=str(tmp_path), device="cpu", ranks=1, quantize_head="int8"))[0]
    kept = target.checkpoint.rank_weights(range(2), keeps_halves=host_library.library() is not None).num_bytes
    assert cpu_rank_bytes(target, 0)["weights"] <= kept <= cpu_rank_bytes(target, 0)["weights"] + 10_000


def test_workers_are_told_and_must_agree(tmp_path: Path) -> None:
    args = WorkerArgs(RankInfo(0, 1, 0, "x"), "/model", "cpu", "float32", True, 1.0, 1.0, quantize_head="int8")
    assert WorkerArgs.from_json(args.to_json()) == args
    checkpoint, _ = written(tmp_path, SPEC)
    terms = [common_terms(one, checkpoint, "") for one in (args, replace(args, quantize_head="none"))]
    assert [name for name in terms[0] if terms[0][name] != terms[1][name]] == ["rounding of weights"]
    with pytest.raises(ConfigError, match="the worker's argument quantize_head must be one of none, int8, got 'int4'"):
        replace(args, quantize_head="int4")


def test_a_published_folder_keeps_its_layers(tmp_path: Path) -> None:
    made(tmp_path, "fp8")
    plain, checkpoint = open_checkpoint(tmp_path), open_checkpoint(tmp_path, quantize_head="int8")
    before, after = (one.rank_weights(range(4)) for one in (plain, checkpoint))
    assert np.array_equal(before.lanes[1].layers[0].w2, after.lanes[1].layers[0].w2)
    assert not np.array_equal(before.heads[0], after.heads[0])
    assert "as published (fp8), LM head rounded at the start to INT8" in formats(checkpoint)


def test_a_head_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    method = METHODS["float-quantized, channel"]
    folder, tensors, _ = made(tmp_path, method)
    head = method.write(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{end}": tensor.contiguous() for end, tensor in head.tensors.items()}
    save(folder, tensors, json.loads((folder / "config.json").read_text()))
    with pytest.raises(ConfigError, match=r"quantize_head int8 is for a 16-bit LM head, and that of .* is FP8 .*; leave it out"):
        open_checkpoint(folder, quantize_head="int8")


# ---- on GPUs ----
def test_gpus_keep_codes_and_read_half_of_the_head(tmp_path: Path) -> None:
    spec = replace(SPEC, hidden_size=512, vocab_size=2048)
    plain, checkpoint = written(tmp_path, spec)
    (before,), (after,) = (kernel_shapes(one, "bfloat16", 1) for one in (plain, checkpoint))
    assert before.head_coding is None
    assert after.head_coding == HEAD_CODING
    assert before.tape.read_bytes - after.tape.read_bytes == spec.hidden_size * before.num_ctas * before.head.form.cta_rows
    tapes = [gpu_rank_bytes(one, 0, 1, "bfloat16")["tape"] for one in (plain, checkpoint)]
    assert tapes[0] - tapes[1] == before.tape.read_bytes - after.tape.read_bytes - 4 * after.num_ctas * after.head.form.cta_rows


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-4b+int4", "qwen3-30b-a3b+fp8", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_tiles_of_the_head_are_as_large_and_half_as_many(name: str) -> None:
    spec, codings = named_shape(f"{name}@8192")
    lanes = range(spec.num_lanes)
    before = KernelShape(spec, lanes, **codings)
    coded_spec, with_head = named_shape(f"{name}+head8@8192")
    after = KernelShape(coded_spec, lanes, **with_head)
    assert coded_spec == spec
    assert with_head == {**codings, "head_coding": HEAD_CODING}
    assert {**after.ops, Phase.HEAD: before.head.form} == before.ops
    assert after.head.form.tile_sizes[0] == before.head.form.tile_sizes[0]
    assert 2 * after.head.form.num_tiles == before.head.form.num_tiles * before.head.form.steps
    assert (after.ring.in_flight, after.ring.num_slots) == (before.ring.in_flight, before.ring.num_slots)
    assert after.head.form.x_steps == before.head.form.x_steps
