"""The interpreter against an obvious float64 twin and the torch oracle, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.decode.cpu import interpreter as interpreter_module
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import Plan, make_plan
from kog_dist.decode.plan.steps import Phase
from kog_dist.errors import ConfigError, PlanError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.rope import rope_table
from kog_dist.model.rope_scaling import Llama3Scaling
from kog_dist.model.spec import HeadType, ModelSpec, ReduceMode, Sublayer
from kog_dist.model.weights import RankWeights
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.sampling_params import SamplingParams
from tests.unit.staggered import staggered_plan

Array = NDArray[Any]
GREEDY = SamplingParams()

BASE = ModelSpec(
    hidden_size=48, num_layers=5, num_heads=12, num_kv_heads=4, intermediate_size=80, vocab_size=72, max_context=40,
    num_lanes=4, delay=2, sliding_window=6, window_layers=(0, 2),
)  # fmt: skip
SPECS = {
    "laneformer": BASE,
    "pre_norm": replace(BASE, pre_norm_lane_agg=True, shared_norm_scale=False),
    "lane_head": replace(BASE, head_type=HeadType.LANE, early_comm=False),
    "vocab_parallel": replace(BASE, head_type=HeadType.VOCAB_PARALLEL, shared_norm_scale=False),
    "tied_uneven_vocab": replace(BASE, tied_embeddings=True, vocab_size=71),
    "no_mlp_comm": replace(BASE, mlp_comm=False, delay=3),
    "no_comm": replace(BASE, attention_comm=False, mlp_comm=False),
    "ordinary": replace(BASE, num_lanes=1, delay=0, sliding_window=None, window_layers=()),
    "delay_0": replace(BASE, delay=0),
    "delay_1": replace(BASE, delay=1, window_layers=(0, 1, 2, 3, 4), sliding_window=1),
    "delay_exceeds_layers": replace(BASE, delay=8, early_comm=False),
    "rope_scaling": replace(BASE, rope_theta=500.0, rope_scaling=Llama3Scaling(4.0, 1.0, 4.0, 16)),
}


# ---- the twin: whole sequences in float64, one loop per thing that LANEFORMER names ----
def twin_logits(spec: ModelSpec, tensors: dict[str, NDArray[np.float32]], tokens: list[int], kv_round: Any = None) -> Array:
    """Logits (time, vocab) of a sequence."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    time, lanes = len(tokens), range(spec.num_lanes)

    def norm(stem: str, lane: int, x: Array) -> Array:
        weight = w[f"{stem}.weight"] if f"{stem}.weight" in w else w[f"{stem}.scale"][lane]
        return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + spec.norm_eps) * weight)

    h = [w["model.tok_embeddings.weight"][tokens] for _ in lanes]
    outputs: dict[tuple[int, Sublayer], list[Array]] = {}
    for layer in range(spec.num_layers):
        stem = f"model.layers.{layer}"
        for sublayer in Sublayer:
            if sublayer is Sublayer.ATTENTION:
                p = [
                    twin_attention(spec, w, layer, lane, norm(f"{stem}.attention_norm", lane, h[lane]), kv_round)
                    for lane in lanes
                ]
            else:
                p = [twin_mlp(w, layer, lane, norm(f"{stem}.ffn_norm", lane, h[lane])) for lane in lanes]
            outputs[layer, sublayer] = p
            mode = spec.reduce_mode(layer, sublayer)
            if mode is ReduceMode.BLOCKING:
                h = [h[lane] + sum(p) for lane in lanes]
            elif mode is ReduceMode.LOCAL:
                h = [h[lane] + spec.num_lanes**0.5 * p[lane] for lane in lanes]
            else:
                past = outputs[layer - spec.delay, sublayer]
                h = [h[lane] + p[lane] + sum(past[other] for other in lanes if other != lane) for lane in lanes]
    assert all(x.shape == (time, spec.hidden_size) for x in h)
    if spec.head_type is HeadType.VOCAB_PARALLEL:
        return np.concatenate([norm("model.norm", lane, h[lane]) @ w["lm_head.weight"][lane].T for lane in lanes], axis=-1)
    if spec.head_type is HeadType.LANE:
        return np.concatenate([norm("model.norm", lane, h[lane]) for lane in lanes], axis=-1) @ w["lm_head.linear.weight"].T
    head = w["model.tok_embeddings.weight" if spec.tied_embeddings else "lm_head.weight"]
    if spec.pre_norm_lane_agg:
        return np.asarray(norm("model.norm", 0, np.sum(h, axis=0)) @ head.T)
    return np.asarray(np.mean([norm("model.norm", lane, h[lane]) for lane in lanes], axis=0) @ head.T)


def twin_attention(spec: ModelSpec, w: dict[str, Array], layer: int, lane: int, x: Array, kv_round: Any) -> Array:
    time, dim = len(x), spec.head_dim
    stem = f"model.layers.{layer}.attention"
    query, key, value = ((x @ w[f"{stem}.{name}.weight"][lane].T).reshape(time, -1, dim) for name in ("wq", "wk", "wv"))
    cos, sin = (table.astype(np.float64) for table in rope_table(spec, time))
    query, key = (turned(part, cos, sin) for part in (query, key))
    if kv_round is not None:
        key, value = kv_round(key), kv_round(value)
    mixed = np.zeros_like(query)
    for head in range(spec.lane_heads):
        shared = head // (spec.lane_heads // spec.lane_kv_heads)
        for t in range(time):
            first = max(0, t + 1 - (spec.window(layer) or time))
            scores = key[first : t + 1, shared] @ query[t, head] * dim**-0.5
            weights = np.exp(scores - scores.max())
            mixed[t, head] = weights / weights.sum() @ value[first : t + 1, shared]
    return np.asarray(mixed.reshape(time, -1) @ w[f"{stem}.wo.weight"][lane].T)


def turned(x: Array, cos: Array, sin: Array) -> Array:
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)[:, None]
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def twin_mlp(w: dict[str, Array], layer: int, lane: int, x: Array) -> Array:
    stem = f"model.layers.{layer}.feed_forward"
    gate, up = (x @ w[f"{stem}.{name}.weight"][lane].T for name in ("w1", "w3"))
    return np.asarray((gate / (1 + np.exp(-gate)) * up) @ w[f"{stem}.w2.weight"][lane].T)


# ---- running the interpreter alone ----
def save(spec: ModelSpec, folder: Path, seed: int = 5) -> Path:
    write_checkpoint(folder, spec, random_tensors(spec, seed), dtype="float32")
    return folder


def engine(folder: Path, *, dtype: Any = np.float32, kv_dtype: str = "float32") -> Interpreter:
    checkpoint = open_checkpoint(folder)
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes), dtype=dtype)
    return Interpreter(make_plan(checkpoint.spec, 1), 0, weights, None, dtype=dtype, kv_dtype=kv_dtype)


def logits_of(model: Interpreter, tokens: list[int], start: int = 0) -> Array:
    rows = []
    for position, token in enumerate(tokens, start=start):
        output = model.step(token, position, GREEDY, gather_logits=True)
        assert output.logits is not None
        assert output.finite
        assert output.token_id == int(output.logits.argmax())
        rows.append(output.logits)
    return np.stack(rows)


def tokens_of(spec: ModelSpec, count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, spec.vocab_size, count)]


def error(found: Array, wanted: Array) -> float:
    """Largest difference of a row, relative to the row's largest value."""
    return float((np.abs(found - wanted).max(axis=1) / np.abs(wanted).max(axis=1)).max())


@pytest.mark.parametrize("name", SPECS)
def test_logits_equal_the_twin_and_the_oracle(name: str, tmp_path: Path) -> None:
    import torch

    from kog_dist.model.laneformer import Laneformer

    spec = SPECS[name]
    folder = save(spec, tmp_path / "model")
    tokens = tokens_of(spec, 16)
    twin = twin_logits(spec, random_tensors(spec, 5), tokens)
    found = logits_of(engine(folder), tokens)
    assert error(found, twin) < 1e-5
    assert (found.argmax(axis=1) == twin.argmax(axis=1)).all()
    assert error(logits_of(engine(folder, dtype=np.float64, kv_dtype="float64"), tokens), twin) < 1e-13
    oracle = Laneformer.from_checkpoint(folder, torch.float64)
    with torch.no_grad():
        exact = oracle(torch.tensor([tokens]))[0].numpy()
    assert error(twin, exact) < 1e-12


def test_layers_of_random_models_are_not_alike(tmp_path: Path) -> None:
    """The comparisons above could not see a mix-up of layers, lanes or positions if logits hardly depended on them."""
    spec = BASE
    tokens, tensors = tokens_of(spec, 8), random_tensors(spec, 5)
    twin = twin_logits(spec, tensors, tokens)
    for stem in ("attention.wo", "feed_forward.w2", "attention.wk"):
        for lane in range(spec.num_lanes):
            changed = dict(tensors)
            changed[f"model.layers.2.{stem}.weight"] = tensors[f"model.layers.2.{stem}.weight"].copy()
            changed[f"model.layers.2.{stem}.weight"][lane] *= -1
            assert error(twin_logits(spec, changed, tokens), twin) > 1e-3, (stem, lane)


def round_bfloat16(values: Array) -> Array:
    """Nearest bfloat16, ties to even, by scaling to whole numbers of the last place."""
    mantissa, exponent = np.frexp(values.astype(np.float32).astype(np.float64))
    return np.asarray(np.ldexp(np.rint(mantissa * 256), exponent - 8))


@pytest.mark.parametrize(
    ("kv_dtype", "kv_round"),
    [("float16", lambda x: x.astype(np.float16).astype(np.float64)), ("bfloat16", round_bfloat16)],
)
def test_the_kv_cache_is_rounded_when_it_is_written(kv_dtype: str, kv_round: Any, tmp_path: Path) -> None:
    spec = BASE
    folder, tokens = save(spec, tmp_path / "model"), tokens_of(spec, 12)
    model = engine(folder, kv_dtype=kv_dtype)
    found = logits_of(model, tokens)
    for (cache,) in (*model.memory.keys, *model.memory.values):
        written = cache[:, :, : len(tokens)].astype(np.float64)
        assert (kv_round(written) == written).all()
        assert not cache[:, :, len(tokens) :].any()
    exact = twin_logits(spec, random_tensors(spec, 5), tokens)
    rounded = twin_logits(spec, random_tensors(spec, 5), tokens, kv_round)
    # A value next to a rounding boundary may fall on the other side in float32, so this is looser than 1e-5.
    assert error(found, rounded) < error(exact, rounded) / 3


def test_bfloat16_rounding_keeps_what_is_not_finite(tmp_path: Path) -> None:
    from kog_dist.decode.cpu.lane_math import round_to

    bits = np.array([0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x3F808001], np.uint32)
    values = bits.view(np.float32).copy()
    round_to(values, "bfloat16")
    assert np.isnan(values[0])
    assert [hex(b) for b in values[1:].view(np.uint32)] == ["0x7f800000", "0xff800000", "0x3f800000", "0x3f820000", "0x3f810000"]


def test_the_same_request_twice_has_the_same_bits(tmp_path: Path) -> None:
    model = engine(save(BASE, tmp_path / "model"))
    tokens = tokens_of(BASE, 20)
    first = logits_of(model, tokens)
    model.use_cache(0, 0, 0)
    assert model.num_positions == 0
    assert logits_of(model, tokens).tobytes() == first.tobytes()


@pytest.mark.parametrize("name", ["laneformer", "no_mlp_comm", "no_comm", "delay_1", "pre_norm"])
def test_a_staggered_plan_has_the_same_bits(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    weights, tokens = weights_of(spec, tmp_path / "model"), tokens_of(spec, 8)
    plans = [make_plan(spec, 1), staggered_plan(spec, 1)]
    assert plans[0] != plans[1]
    plain, staggered = (logits_of(Interpreter(plan, 0, weights, None), tokens) for plan in plans)
    assert plain.tobytes() == staggered.tobytes()


def test_a_step_back_drops_the_later_positions(tmp_path: Path) -> None:
    """A request that extends the last one keeps the common prefix."""
    model = engine(save(BASE, tmp_path / "model"))
    first, other = tokens_of(BASE, 14), tokens_of(BASE, 6, seed=9)
    logits_of(model, first)
    continued = logits_of(model, other, start=8)
    assert model.num_positions == 14
    fresh = logits_of(engine(tmp_path / "model"), first[:8] + other)
    assert continued.tobytes() == fresh[8:].tobytes()


def test_prompt_tokens_have_no_logits_and_change_nothing(tmp_path: Path) -> None:
    folder = save(BASE, tmp_path / "model")
    tokens = tokens_of(BASE, 9)
    model = engine(folder)
    for position, token in enumerate(tokens[:-1]):
        output = model.step(token, position, None)
        assert (output.token_id, output.logits, output.finite) == (-1, None, True)
    last = model.step(tokens[-1], 8, GREEDY, gather_logits=True)
    assert last.logits is not None
    assert last.logits.tobytes() == logits_of(engine(folder), tokens)[-1].tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_reported(value: float, tmp_path: Path) -> None:
    spoilt = weights_of(BASE, tmp_path / "model")
    spoilt.heads[3][-1, 0] = value
    broken = Interpreter(make_plan(BASE, 1), 0, spoilt, None)
    for sampling in (GREEDY, SamplingParams(1.0, 3)):
        broken.use_cache(0, 0, 0)
        assert not broken.step(1, 0, sampling).finite
    assert broken.step(1, 1, None).finite, "a prompt token has no logits that could be wrong"


# ---- what is refused ----
def weights_of(spec: ModelSpec, folder: Path) -> RankWeights:
    return open_checkpoint(save(spec, folder)).rank_weights(range(spec.num_lanes))


def test_calls_that_cannot_follow_are_refused(tmp_path: Path) -> None:
    model = engine(save(BASE, tmp_path / "model"))
    with pytest.raises(PlanError, match="position 1 cannot follow: the KV cache holds 0 positions"):
        model.step(0, 1, None)
    for token in (-1, BASE.vocab_size):
        with pytest.raises(PlanError, match="outside the vocabulary"):
            model.step(token, 0, None)
    for position in range(BASE.max_context):
        model.step(1, position, None)
    with pytest.raises(PlanError, match="exceeds the model's context of 40"):
        model.step(1, BASE.max_context, None)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    weights = weights_of(BASE, tmp_path / "model")
    plan = make_plan(BASE, 1)
    with pytest.raises(ConfigError, match="kv_dtype 'int8' is not supported"):
        Interpreter(plan, 0, weights, None, kv_dtype="int8")
    with pytest.raises(ConfigError, match="kv_dtype float64 needs dtype float64"):
        Interpreter(plan, 0, weights, None, kv_dtype="float64")
    with pytest.raises(ConfigError, match="float32 or float64, not float16"):
        Interpreter(plan, 0, weights, None, dtype=np.float16)
    with pytest.raises(PlanError, match="rank 0 of 2 needs its own communicator, got none"):
        Interpreter(make_plan(BASE, 2), 0, weights, None)
    with pytest.raises(ConfigError, match="float64 needs world size 1"):
        Interpreter(make_plan(BASE, 2), 0, weights, None, dtype=np.float64)


def disordered(plan: Plan) -> list[Plan]:
    """The plan with each pair of neighbouring steps of different phases the other way round."""
    part = plan.ranks[0]
    found = []
    for at in range(len(part.steps) - 1):
        steps = list(part.steps)
        if steps[at].phase is not steps[at + 1].phase:
            steps[at], steps[at + 1] = steps[at + 1], steps[at]
            found.append(replace(plan, ranks=(replace(part, steps=tuple(steps)),)))
    return found


def test_a_wrong_plan_is_refused_before_it_runs(tmp_path: Path) -> None:
    weights = weights_of(BASE, tmp_path / "model")
    plan = make_plan(BASE, 1)
    steps = plan.ranks[0].steps
    with pytest.raises(PlanError, match="the plan cannot be run"):
        Interpreter(replace(plan, ranks=(replace(plan.ranks[0], steps=steps[::-1]),)), 0, weights, None)


def test_every_dependency_is_checked_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the validator out of the way, a plan in a wrong order still ends in an error and never in a wrong token."""
    monkeypatch.setattr(interpreter_module, "check", lambda plan: None)
    spec = replace(BASE, num_lanes=2, num_layers=3, window_layers=(0,))
    weights = weights_of(spec, tmp_path / "model")
    plan = make_plan(spec, 1)
    right = Interpreter(plan, 0, weights, None)
    wanted = [right.step(3, 0, GREEDY).token_id, right.step(4, 1, GREEDY).token_id]
    refused = 0
    for wrong in disordered(plan):
        try:
            model = Interpreter(wrong, 0, weights, None)
            found = [model.step(3, 0, GREEDY).token_id, model.step(4, 1, GREEDY).token_id]
        except PlanError:
            refused += 1
        else:
            assert found == wanted, "the order did not matter, then neither may the token"
    assert refused >= 12


def test_a_step_left_out_or_done_twice_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_module, "check", lambda plan: None)
    spec = replace(BASE, num_lanes=2, num_layers=2, window_layers=())
    weights = weights_of(spec, tmp_path / "model")
    plan = make_plan(spec, 1)
    part = plan.ranks[0]
    for at, step in enumerate(part.steps):
        without = (*part.steps[:at], *part.steps[at + 1 :])
        if step.phase not in (Phase.GATHER, Phase.SAMPLE):  # nothing reads what these write
            with pytest.raises(PlanError):
                run_two(replace(plan, ranks=(replace(part, steps=without),)), weights)
        if step.phase in (Phase.QKV, Phase.RESIDUAL):  # the others write the same values again
            twice = (*part.steps[: at + 1], step, *part.steps[at + 1 :])
            with pytest.raises(PlanError):
                run_two(replace(plan, ranks=(replace(part, steps=twice),)), weights)


def run_two(plan: Plan, weights: RankWeights) -> None:
    model = Interpreter(plan, 0, weights, None)
    for position in range(2):
        model.step(1, position, GREEDY)
