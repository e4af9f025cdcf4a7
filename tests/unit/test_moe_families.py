"""Families with experts against transformers in float64: logits, oracle, which experts are chosen, folders that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import DTypeLike, NDArray
from safetensors.torch import load_file, save_file

from kog_dist.bench.shapes import MOE, QUANTISED, named_shape, named_spec
from kog_dist.config import LaunchConfig
from kog_dist.decode.coding import Coding
from kog_dist.decode.cpu import host_library, lane_math
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.steps import Kind, Value
from kog_dist.decode.plan.validate import validate
from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.hardware.gpus import inventory_from
from kog_dist.launch import gpu_choice
from kog_dist.launch.inspection import check as inspection_check
from kog_dist.launch.inspection import cpu_rank_bytes, dry_run
from kog_dist.launch.prediction import kv_bytes
from kog_dist.launch.target import plan_target
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.published_config import read_config
from kog_dist.model.weight_bytes import bytes_per_token, weight_bytes
from kog_dist.runtime import memfd
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.coded_source import coding_of
from kog_dist.workers.cuda.kernel_plan import kernel_plan
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.model_limits import untried, untried_in_prefill
from tests.unit import moe_models
from tests.unit.fake_nvml import node
from tests.unit.formats.writers import METHODS
from tests.unit.moe_models import CONFIGS, Reference

TOLERANCE = 1e-5  # of the largest logit, in float64: rotary tables are float32
SINGLE = 2e-5  # in float32
MARGIN = 1e-4  # between router logits, above all that float32 rounds
PROMPT = np.random.default_rng(3).integers(0, moe_models.VOCAB, 300).tolist()
SHORT = PROMPT[:40]


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Reference]:
    """A folder as transformers writes it, the model in float64, and what that makes of PROMPT."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    model = moe_models.made(request.param, folder)
    return folder, model, moe_models.reference(model, PROMPT)


class Run:
    """One rank's engine on a folder; of each position the logits, and of each layer the router's and the choice."""

    def __init__(self, folder: Path, dtype: DTypeLike = np.float64, *, keeps_halves: bool = False) -> None:
        checkpoint = open_checkpoint(folder)
        lanes = range(checkpoint.spec.num_lanes)
        weights = checkpoint.rank_weights(lanes, dtype=dtype, keeps_halves=keeps_halves)
        self.engine = Interpreter(make_plan(checkpoint.spec, 1), 0, weights, None, dtype=dtype, kv_dtype=np.dtype(dtype).name)
        self.num_layers = checkpoint.spec.num_layers

    def tokens(self, prompt: list[int]) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Logits, router logits (layers, E), chosen experts (layers, K) at each position."""
        memory = self.engine.memory
        for position, token in enumerate(prompt):
            output = self.engine.step(token, position, SamplingParams(), gather_logits=True)
            assert output.logits is not None
            router, choice = (
                np.stack([memory.row(Value(kind, layer)) for layer in range(self.num_layers)])
                for kind in (Kind.ROUTER_LOGITS, Kind.CHOICE)
            )
            yield output.logits.copy(), router, choice[:, 0]


def relative_error(logits: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def test_logits_and_choices_are_those_of_transformers_at_every_position(case: tuple[Path, Any, Reference]) -> None:
    folder, _, expected = case
    for position, (logits, router, chosen) in enumerate(Run(folder).tokens(PROMPT)):
        assert relative_error(logits, expected.logits[position]) < TOLERANCE
        assert np.abs(router - np.stack([rows[position] for rows in expected.router])).max() < TOLERANCE * 100
        assert np.array_equal(chosen, np.stack([rows[position] for rows in expected.chosen]))


def test_the_oracle_agrees(case: tuple[Path, Any, Reference]) -> None:
    folder, _, expected = case
    oracle = Laneformer.from_checkpoint(folder, torch.float64)
    with torch.no_grad():
        assert relative_error(oracle(torch.tensor([PROMPT]))[0].numpy(), expected.logits) < TOLERANCE


def is_clear(router: NDArray[Any], num_chosen: int) -> bool:
    """Whether in every layer the chosen ones of `router` (layers, E) stand off the others by more than rounding."""
    ordered = np.sort(router, axis=1)[:, ::-1]
    return num_chosen == router.shape[1] or bool((ordered[:, num_chosen - 1] - ordered[:, num_chosen]).min() > MARGIN)


@pytest.mark.parametrize("keeps_halves", [False, True])
def test_in_float32_choices_are_the_same_where_the_margin_exceeds_rounding(
    case: tuple[Path, Any, Reference], keeps_halves: bool
) -> None:
    if keeps_halves and host_library.library() is None:
        pytest.skip("needs a C compiler")
    folder, _, expected = case
    clear = 0
    for position, (logits, _, chosen) in enumerate(Run(folder, np.float32, keeps_halves=keeps_halves).tokens(PROMPT)):
        wanted = np.stack([rows[position] for rows in expected.chosen])
        if is_clear(np.stack([rows[position] for rows in expected.router]), wanted.shape[1]):
            clear += 1
            assert np.array_equal(chosen, wanted)
        if np.array_equal(chosen, wanted):
            assert relative_error(logits, expected.logits[position]) < SINGLE
    assert clear > 0.9 * len(PROMPT)


def force_choices(monkeypatch: pytest.MonkeyPatch, expected: Reference) -> list[int]:
    """Let SELECT take the choices of transformers, position by position, layer by layer; how often it did, as it goes on."""
    calls = [0]

    def forced(logits: NDArray[Any], scores: NDArray[Any], is_normalised: bool, choice: NDArray[Any]) -> None:
        position, layer = divmod(calls[0], len(expected.chosen))
        calls[0] += 1
        chosen = expected.chosen[layer][position]
        np.exp(logits - logits.max(), out=scores)
        choice[0] = chosen
        choice[1] = scores[chosen] / (scores[chosen].sum() if is_normalised else scores.sum())

    monkeypatch.setattr(lane_math, "select", forced)
    return calls


def test_with_transformers_choices_logits_agree_whatever_the_margin(
    case: tuple[Path, Any, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teacher-forced routing: other experts would be another model."""
    folder, _, expected = case
    calls = force_choices(monkeypatch, expected)
    errors = [
        relative_error(logits, expected.logits[position])
        for position, (logits, _, _) in enumerate(Run(folder, np.float32).tokens(PROMPT))
    ]
    assert calls == [len(PROMPT) * len(expected.chosen)]
    assert max(errors) < SINGLE


# ---- folders ----
def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rewritten(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


def test_missing_extra_and_misshapen_tensors_are_refused_by_their_own_names(
    case: tuple[Path, Any, Reference], tmp_path: Path
) -> None:
    folder, _, _ = case
    tensors = tensors_of(folder)
    victims = [name for name in tensors if ".mlp." in name and "layers.1." in name]
    for name in (victims[0], victims[-1]):
        rewritten(folder, tmp_path, {key: value for key, value in tensors.items() if key != name})
        with pytest.raises(CheckpointError, match=f"lacks tensor {name}, which its config.json asks for"):
            open_checkpoint(tmp_path)
        rewritten(folder, tmp_path, tensors | {name: tensors[name][:-1].contiguous()})
        with pytest.raises(CheckpointError, match=f"tensor {name} has shape .* but config.json asks for"):
            open_checkpoint(tmp_path)
    extra = "model.layers.0.mlp.shared_expert.gate_proj.weight"
    rewritten(folder, tmp_path, tensors | {extra: torch.ones(3, 3, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=f"has a tensor '{extra}' that a model of this config"):
        open_checkpoint(tmp_path)


def test_specs_with_experts_travel_as_configs(case: tuple[Path, Any, Reference]) -> None:
    spec = open_checkpoint(case[0]).spec
    assert spec.experts is not None
    assert spec.num_lanes == min(spec.num_kv_heads, 8)
    assert read_config(json.loads(json.dumps(spec.to_config()))) == spec


def test_memory_is_what_all_experts_take_and_tokens_read_fewer(case: tuple[Path, Any, Reference]) -> None:
    folder, _, _ = case
    target = plan_target(LaunchConfig(model=str(folder), device="cpu", ranks=2))[0]
    checkpoint, spec = target.checkpoint, target.checkpoint.spec
    assert spec.num_parameters == sum(layout.num_values for layout in checkpoint.layouts.values())
    keeps_halves = host_library.library() is not None
    for rank in range(2):
        kept = checkpoint.rank_weights(spec.lanes_of_rank(rank, 2), keeps_halves=keeps_halves).num_bytes
        small = 8 * sum(layout.num_values for layout in checkpoint.layouts.values() if len(layout.shape) < 2)  # biases, norms
        said = cpu_rank_bytes(target, rank)
        assert kept - small <= said["weights"] <= kept + small
        if spec.num_ffns_read < spec.num_ffns:
            assert said["read"] < said["weights"] - 4 * spec.vocab_size * spec.hidden_size
    mib = bytes_per_token(checkpoint) / 2**20
    assert f" ({mib:.1f} MiB per token as they are)" in inspection_check(LaunchConfig(model=str(folder), device="cpu", ranks=1))


# ---- configs ----
PARAMETERS = {"qwen3-30b-a3b": 30_532_122_624, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672}
PER_TOKEN_MB = {"qwen3-30b-a3b": 6_084, "gpt-oss-20b": 3_708, "gpt-oss-120b": 5_003}  # without keys and values


@pytest.mark.parametrize("name", MOE)
def test_published_shapes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "available_bytes", lambda: 2**40)
    spec = read_config(MOE[name])
    assert (spec.num_parameters, spec.num_lanes) == (PARAMETERS[name], 4)
    assert named_spec(f"{name}:2@1024").num_lanes == 2
    (tmp_path / "config.json").write_text(json.dumps(MOE[name]))
    settings = LaunchConfig(model=str(tmp_path), device="cpu", ranks=4)
    per_token = bytes_per_token(plan_target(settings, needs_weights=False)[0].checkpoint)
    assert per_token / 1e6 == pytest.approx(PER_TOKEN_MB[name], rel=0.001)
    text = dry_run(settings)
    assert spec.experts is not None
    assert f"{spec.experts.num_experts} experts, {spec.experts.per_token} of them chosen, of {spec.intermediate_size}" in text
    assert f"{spec.num_layers} route, {spec.num_layers} select" in text
    needed = weight_bytes(plan_target(settings, needs_weights=False)[0].checkpoint) + 2 * spec.vocab_size * spec.hidden_size
    assert f"1 GPU  at least {(needed + kv_bytes(spec, spec.max_context)) / 2**30:5.1f} GiB each" in text
    assert "GPUs do not run" not in text


def test_gpus_whose_choices_are_compared_take_prompts_token_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with --prefill off, in the memory plan as well; who asks for prefill, too, is told that it cannot be had."""
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: name)
    monkeypatch.setattr(memfd, "available_bytes", lambda: 2**40)
    inventory = inventory_from(node(2))
    monkeypatch.setattr(gpu_choice, "read_inventory", lambda: inventory)
    (tmp_path / "config.json").write_text(json.dumps(MOE["gpt-oss-20b"]))
    settings = LaunchConfig(model=str(tmp_path), gpus="2", parallel=1, pin=False, check_experts=True)
    shown = dry_run(settings).splitlines()
    assert plan_target(settings, needs_weights=False)[0].prefill == "off"
    note = "note       prompts go token by token: --check-experts compares what is chosen for each"
    assert note in shown
    without = dry_run(replace(settings, check_experts=False, prefill="off")).splitlines()
    assert [line for line in shown if line != note] == without
    assert dry_run(replace(settings, prefill="off")).splitlines() == without, "nobody wonders why"
    assert plan_target(replace(settings, gpus=None), needs_weights=False)[0].prefill == "off"
    for gpus in ("2", None):
        with pytest.raises(ConfigError, match=r"^--prefill on contradicts --check-experts, which .*; leave one out$"):
            plan_target(replace(settings, gpus=gpus, prefill="on"), needs_weights=False)


def test_gpt_oss_120b_keeps_prefixes_on_one_h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its whole context, and prefill; where 2.5 GiB are taken windowed layers keep a ring, and it is said."""
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: name)
    monkeypatch.setattr(memfd, "available_bytes", lambda: 2**40)
    (tmp_path / "config.json").write_text(json.dumps(MOE["gpt-oss-120b"]))
    shown = {}
    for free in (78, 75.5):
        inventory = inventory_from(node(1, lambda _index, gpu, free=free: setattr(gpu, "free", int(free * 2**30))))  # type: ignore[misc]
        monkeypatch.setattr(gpu_choice, "read_inventory", lambda inventory=inventory: inventory)
        settings = LaunchConfig(model=str(tmp_path), gpus="1", pin=False)
        target, obstacles = plan_target(settings, needs_weights=False)
        assert (obstacles, target.prefill, target.checkpoint.spec.max_context) == ((), "auto", 131072)
        shown[target.whole_windows] = dry_run(settings)
        assert (target.kept_bytes > 0, target.kept_host_bytes) == (target.whole_windows, 2**32 if target.whole_windows else 0)
    assert "9.0 GiB bfloat16 KV cache (all positions of windowed layers, too)" in shown[True]
    assert "4.0 GiB of the host for kept prefixes" in shown[True]
    assert "4.5 GiB bfloat16 KV cache (of windowed layers a ring of positions)" in shown[False]
    assert (
        "note       no prefixes are kept, since windowed layers keep a ring of 240 positions: all of them take 4.5 GiB"
        in shown[False]
    )
    assert "for kept prefixes" not in shown[False]


@pytest.mark.parametrize("name", MOE)
def test_a_gpu_reads_little_more_than_the_chosen_experts(name: str) -> None:
    spec, codings = named_shape(name)
    for count in (1, 2, 4):
        shape = KernelShape(spec, spec.lanes_of_rank(0, count), num_ranks=count, **codings)
        # On four a thread block has eleven rows of gpt-oss's QKV, which come in pairs; and every rank reads the router.
        assert shape.tape.read_bytes * count < (1.04 if count < 4 else 1.1) * PER_TOKEN_MB[name] * 1e6


@pytest.mark.parametrize(
    ("num_experts", "per_token", "options", "reason"),
    [
        (513, 8, {}, "513 experts .at most 512."),
        (512, 10, {}, ""),
        (512, 10, {"checks_experts": True}, "choices of experts to keep, of 10 of 512 .at most 8 of 256."),
        (512, 10, {"tokens": 4}, ""),
        (128, 8, {"tokens": 4, "max_ctas": 100}, "with 4 tokens in a pass: it has 8 experts for each token in shares .with a"),
        (128, 1, {}, ""),
    ],
)
def test_gpus_refuse_experts_beyond_the_limits(num_experts: int, per_token: int, options: dict[str, Any], reason: str) -> None:
    spec = named_spec("qwen3-30b-a3b")
    assert spec.experts is not None
    spec = replace(spec, experts=replace(spec.experts, num_experts=num_experts, per_token=per_token))
    with pytest.raises(ConfigError, match=reason) if reason else nullcontext():
        KernelShape(spec, spec.lanes_of_rank(0, 1), **options)


def test_engines_refuse_experts_that_no_gpu_has_run() -> None:
    spec = named_spec("qwen3-30b-a3b")
    six = replace(spec, experts=ExpertsSpec(512, 6))
    fp8 = Coding("E4M3", 1, "BF16")
    assert untried(six, fp8) == "6 quantised experts for each token (1, 2, 4, 8 or 10)"
    assert untried_in_prefill(six) == "6 experts of 512"
    assert untried(six, None) == untried(spec, fp8) == untried_in_prefill(spec) == ""


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shares_of_experts_that_do_not_divide_thread_blocks_have_no_padding(num_ranks: int) -> None:
    """Ten of 512 of Qwen3-Coder-Next's width: no thread block has more gate and up rows than it must."""
    spec = replace(named_spec("qwen3-30b-a3b"), experts=ExpertsSpec(512, 10), intermediate_size=512)
    shape = KernelShape(spec, spec.lanes_of_rank(0, num_ranks), num_ranks=num_ranks)
    experts = shape.experts
    assert experts is not None
    rows = 2 * 512 // num_ranks
    assert experts.shares * experts.gate_up.cta_rows == rows * 10 // 128
    assert experts.ctas * experts.gate_up.cta_rows == rows
    assert experts.num_values == 3 * 512 // num_ranks * spec.hidden_size
    shapes = [KernelShape(spec, spec.lanes_of_rank(rank, num_ranks), num_ranks=num_ranks) for rank in range(num_ranks)]
    assert validate(kernel_plan(shapes)) == []


@pytest.mark.parametrize(
    ("name", "weight_dtype", "reason"),
    [
        ("qwen3-30b-a3b+fp8-rows:2", "bfloat16", "quantised experts with one scale for each row .for groups of columns."),
        ("qwen3-30b-a3b+fp8:4", "bfloat16", "lanes with 192 columns of an expert .whole groups of 128."),
        ("gpt-oss-20b", "float16", "experts in E2M1 beside a router in float16 .bfloat16."),
        ("qwen3-30b-a3b+fp8", "float16", ""),
    ],
)
def test_gpus_refuse_experts_that_no_kernel_reads(name: str, weight_dtype: str, reason: str) -> None:
    spec, codings = named_shape(name)
    with pytest.raises(ConfigError, match=reason) if reason else nullcontext():
        KernelShape(spec, range(spec.num_lanes), weight_dtype, **codings)


def test_a_gpu_reads_quantised_experts_attention_and_little_more(tmp_path: Path) -> None:
    spec, codings = named_shape("qwen3-30b-a3b+fp8")
    (tmp_path / "config.json").write_text(json.dumps({**MOE["qwen3-30b-a3b"], "quantization_config": QUANTISED["fp8"]}))
    settings = LaunchConfig(model=str(tmp_path), device="cpu", ranks=1)
    assert coding_of(plan_target(settings, needs_weights=False)[0].checkpoint) == codings["coding"] == Coding("E4M3", 1, "BF16")
    values = PER_TOKEN_MB["qwen3-30b-a3b"] * 1e6 / 2
    head = spec.vocab_size * spec.hidden_size
    read = KernelShape(spec, range(spec.num_lanes), **codings).tape.read_bytes
    assert values - head < read - 2 * head < 1.05 * (values - head)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], which is not supported"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, only 1 is supported"),
        ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size is 512"),
        ("qwen3-30b-a3b", {"num_local_experts": 64}, "num_experts 128 contradicts num_local_experts 64"),
        ("qwen3-30b-a3b", {"num_experts": None}, "num_experts is missing"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok must be between 1 and the 128 experts, got 129"),
        ("qwen3-30b-a3b", {"num_experts": 1025}, "the number of experts must be between 1 and 1024, got 1025"),
        ("qwen3-30b-a3b", {"num_experts": 1024}, "48 times 1024 experts must be at most 32768"),
        ("qwen3-30b-a3b", {"norm_topk_prob": 1}, "norm_topk_prob must be bool"),
        ("qwen3-30b-a3b", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("qwen3-30b-a3b", {"n_group": 2}, "n_group is 2, only 1 is supported"),
        ("qwen3-30b-a3b", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3-30b-a3b", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4 is supported for gpt_oss alone"),
        (
            "gpt-oss-20b",
            {"quantization_config": {"quant_method": "fp8"}},
            "quant_method fp8 of gpt_oss is not",
        ),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "mxfp4", "rotation": 4}}, "rotation 4 is not supported"),
        ("gpt-oss-20b", {"experts_per_token": 2}, "num_experts_per_tok 4 contradicts experts_per_token 2"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23}, "for each of 24 layers"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "must be sliding_attention or full_attention"),
        ("gpt-oss-20b", {"swiglu_limit": -7.0}, "swiglu_limit must be between"),
        ("gpt-oss-20b", {"attention_bias": "yes"}, "attention_bias"),
        ("gpt-oss-20b", {"num_local_experts": None}, "num_local_experts is missing, .* of a layer: gpt-oss-20b has 32"),
        ("gpt-oss-20b", {"num_local_experts": 0}, "the number of experts must be between 1 and 1024"),
        ("gpt-oss-20b", {"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5, only 1 is supported"),
    ],
)
def test_what_is_not_run_is_named(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_config({**MOE[name], **changes})


def test_the_published_config_of_gpt_oss() -> None:
    """With the keys that its file has, some of them twice."""
    published = {
        **MOE["gpt-oss-20b"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4,
        "hidden_act": "silu", "initial_context_length": 4096, "initializer_range": 0.02, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "output_router_logits": False, "pad_token_id": 199999,
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
            "truncate": False,
        },
        "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    }  # fmt: skip
    spec = read_config(published)
    assert spec == read_config(MOE["gpt-oss-20b"])
    assert (spec.sliding_window, spec.window_layers) == (128, tuple(range(0, 24, 2)))
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.magnitude == pytest.approx(1.3466, abs=1e-4)
    assert read_config({**published, "quantization_config": None}).num_lanes == 8


# ---- quantised ----
def in_fp8(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """The folder with all matrices of the layers in FP8, as Qwen publishes it; and the values that they have then."""
    method, tensors, values = METHODS["fp8"], tensors_of(folder), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        written = method.write(tensors.pop(name))
        values[name] = written.values
        tensors |= {f"{name.removesuffix('.weight')}.{end}": tensor.contiguous() for end, tensor in written.tensors.items()}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": method.config}
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return values


def test_experts_in_fp8(tmp_path: Path) -> None:
    """Sizes are whole blocks, so that lanes are."""
    config = moe_models.qwen3_moe(hidden_size=128, moe_intermediate_size=256, head_dim=64)
    plain, quantised = tmp_path / "plain", tmp_path / "fp8"
    quantised.mkdir()
    model = moe_models.written(CONFIGS["qwen3_moe"][0], config, plain)
    values = in_fp8(plain, quantised)
    checkpoint = open_checkpoint(quantised)
    assert checkpoint.spec.num_lanes == 4
    with torch.no_grad():
        for layer_idx, layer in enumerate(model.model.layers):
            prefix = f"model.layers.{layer_idx}"
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer.self_attn, name).weight.copy_(values[f"{prefix}.self_attn.{name}.weight"])
            for idx in range(config.num_experts):
                gate, up, down = (values[f"{prefix}.mlp.experts.{idx}.{n}_proj.weight"] for n in ("gate", "up", "down"))
                layer.mlp.experts.gate_up_proj[idx].copy_(torch.cat((gate, up)))
                layer.mlp.experts.down_proj[idx].copy_(down)
    expected = moe_models.reference(model, SHORT)
    for position, (logits, _, chosen) in enumerate(Run(quantised).tokens(SHORT)):
        assert relative_error(logits, expected.logits[position]) < TOLERANCE
        assert np.array_equal(chosen, np.stack([rows[position] for rows in expected.chosen]))


def test_experts_of_one_layer_must_be_quantised_alike(tmp_path: Path) -> None:
    config = moe_models.qwen3_moe(hidden_size=128, moe_intermediate_size=256, head_dim=64)
    plain, quantised = tmp_path / "plain", tmp_path / "fp8"
    quantised.mkdir()
    moe_models.written(CONFIGS["qwen3_moe"][0], config, plain)
    in_fp8(plain, quantised)
    tensors, name = load_file(quantised / "model.safetensors"), "model.layers.1.mlp.experts.3.up_proj"
    del tensors[f"{name}.weight_scale_inv"]
    tensors[f"{name}.weight"] = tensors_of(plain)[f"{name}.weight"]
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name}\.weight is not quantised, but .*gate_proj.* must be alike"):
        open_checkpoint(quantised)


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_experts_are_quantised_at_the_start(quantize: str, tmp_path: Path) -> None:
    """Each matrix of each lane by itself; routers stay as they are."""
    moe_models.made("qwen3_moe", tmp_path)
    checkpoint, plain = open_checkpoint(tmp_path, quantize=quantize), open_checkpoint(tmp_path)
    name = "model.layers.1.feed_forward.experts.4.w2.weight"
    values, exact = checkpoint.tensor(name), plain.tensor(name)
    assert 0 < np.abs(values - exact).max() < 0.2 * np.abs(exact).max()
    router = "model.layers.1.feed_forward.router.weight"
    assert np.array_equal(checkpoint.tensor(router), plain.tensor(router))
    assert bytes_per_token(checkpoint) < bytes_per_token(plain)
