"""The torch module against a slow twin that is written per lane, per head and per token straight from the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kog_dist.errors import ConfigError
from kog_dist.model.laneformer import KvCache, Laneformer
from kog_dist.model.rope import rope_frequencies
from kog_dist.model.rope_scaling import Llama3Scaling
from kog_dist.model.spec import HeadType, ModelSpec, laneformer_2b

Array = NDArray[np.float64]

BASE = ModelSpec(
    hidden_size=32, num_layers=5, num_heads=8, num_kv_heads=4, intermediate_size=48, vocab_size=40, max_context=64,
    num_lanes=4, delay=2, sliding_window=5, window_layers=(0, 1, 3),
)  # fmt: skip
SPECS = {
    "delayed": BASE,
    "delay 1": replace(BASE, delay=1),
    "delay beyond the stack": replace(BASE, delay=9),
    "early local": replace(BASE, early_comm=False),
    "attention local": replace(BASE, attention_comm=False),
    "mlp local": replace(BASE, mlp_comm=False),
    "no communication": replace(BASE, attention_comm=False, mlp_comm=False),
    "ordinary tensor parallel": replace(BASE, delay=0),
    "one lane": replace(BASE, num_lanes=1, num_kv_heads=8, delay=0),
    "one lane delayed": replace(BASE, num_lanes=1),
    "lane head": replace(BASE, head_type=HeadType.LANE),
    "vocabulary parallel": replace(BASE, head_type=HeadType.VOCAB_PARALLEL),
    "vocabulary parallel blocking": replace(BASE, head_type=HeadType.VOCAB_PARALLEL, delay=0),
    "lane head blocking": replace(BASE, head_type=HeadType.LANE, delay=0),
    "aggregate before norm": replace(BASE, pre_norm_lane_agg=True),
    "aggregate before norm blocking": replace(BASE, pre_norm_lane_agg=True, delay=0),
    "norms per lane": replace(BASE, shared_norm_scale=False),
    "norms per lane, aggregate": replace(BASE, shared_norm_scale=False, pre_norm_lane_agg=True),
    "tied": replace(BASE, tied_embeddings=True),
    "full attention": replace(BASE, sliding_window=None, window_layers=()),
    "scaled rope": replace(BASE, rope_theta=500.0, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 24)),
}


def norm(x: Array, scale: Array, eps: float) -> Array:
    return x / math.sqrt(float(np.mean(x * x)) + eps) * scale


def frequencies(spec: ModelSpec) -> list[float]:
    freqs = [float(np.float32(1.0 / spec.rope_theta ** (2 * pair / spec.head_dim))) for pair in range(spec.head_dim // 2)]
    scaling = spec.rope_scaling
    if scaling is None:
        return freqs
    assert isinstance(scaling, Llama3Scaling)
    result = []
    for freq in freqs:
        turns = scaling.original_max_position_embeddings * freq / (2 * math.pi)
        share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        share = min(max(share, 0.0), 1.0)
        result.append(float(np.float32(share * freq + (1 - share) * freq / scaling.factor)))
    return result


def turn(x: Array, position: int, freqs: list[float]) -> Array:
    pairs = x[0::2] + 1j * x[1::2]
    angles = [float(np.float32(position) * np.float32(freq)) for freq in freqs]
    turned = pairs * np.array([float(np.float32(math.cos(a))) + 1j * float(np.float32(math.sin(a))) for a in angles])
    out = np.empty_like(x)
    out[0::2], out[1::2] = turned.real, turned.imag
    return out


class Twin:
    """One token at a time, one lane at a time, float64."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Array], kv_round: Callable[[Array], Array] = np.asarray) -> None:
        self.spec, self.weights, self.kv_round = spec, weights, kv_round
        self.freqs = frequencies(spec)
        self.keys: dict[tuple[int, int], list[Array]] = {}  # (layer, kv head of the whole model) -> per position
        self.values: dict[tuple[int, int], list[Array]] = {}

    def scale(self, name: str, lane: int) -> Array:
        if name + ".weight" in self.weights:
            return self.weights[name + ".weight"]
        return np.asarray(self.weights[name + ".scale"][lane])

    def attention(self, i: int, lane: int, x: Array, position: int) -> Array:
        spec, at = self.spec, f"model.layers.{i}.attention."
        hd, group = spec.head_dim, spec.num_heads // spec.num_kv_heads
        q, k, v = (self.weights[at + f"w{c}.weight"][lane] @ x for c in "qkv")
        for j in range(spec.lane_kv_heads):
            key, value = turn(k[j * hd : (j + 1) * hd], position, self.freqs), v[j * hd : (j + 1) * hd]
            self.keys.setdefault((i, lane * 100 + j), []).append(self.kv_round(key))
            self.values.setdefault((i, lane * 100 + j), []).append(self.kv_round(value))
        window = spec.window(i) or 10**9
        mixed = []
        for head in range(spec.lane_heads):
            query = turn(q[head * hd : (head + 1) * hd], position, self.freqs)
            slot = (i, lane * 100 + head // group)
            seen = range(max(0, position - window + 1), position + 1)
            scores = np.array([float(query @ self.keys[slot][t]) / math.sqrt(hd) for t in seen])
            chances = np.exp(scores - scores.max())
            chances /= chances.sum()
            mixed.append(sum(p * self.values[slot][t] for p, t in zip(chances, seen, strict=True)))
        return np.asarray(self.weights[at + "wo.weight"][lane] @ np.concatenate(mixed))

    def mlp(self, i: int, lane: int, x: Array) -> Array:
        w1, w2, w3 = (self.weights[f"model.layers.{i}.feed_forward.w{n}.weight"][lane] for n in (1, 2, 3))
        gate = w1 @ x
        return np.asarray(w2 @ (gate / (1 + np.exp(-gate)) * (w3 @ x)))

    def token(self, token_id: int, position: int) -> Array:
        spec = self.spec
        lanes = range(spec.num_lanes)
        h = [self.weights["model.tok_embeddings.weight"][token_id].copy() for _ in lanes]
        history: dict[tuple[int, str], list[Array]] = {}
        for i in range(spec.num_layers):
            for kind, comm in (("attention", spec.attention_comm), ("mlp", spec.mlp_comm)):
                name = f"model.layers.{i}." + ("attention_norm" if kind == "attention" else "ffn_norm")
                p = []
                for lane in lanes:
                    x = norm(h[lane], self.scale(name, lane), spec.norm_eps)
                    p.append(self.attention(i, lane, x, position) if kind == "attention" else self.mlp(i, lane, x))
                history[i, kind] = p
                for lane in lanes:
                    if not comm or (i < spec.delay and not spec.early_comm):
                        h[lane] = h[lane] + math.sqrt(spec.num_lanes) * p[lane]
                    elif i >= spec.delay > 0:
                        past = history[i - spec.delay, kind]
                        h[lane] = h[lane] + p[lane] + sum(past[m] for m in lanes if m != lane)
                    else:
                        h[lane] = h[lane] + sum(p)
        return self.head(h)

    def head(self, h: list[Array]) -> Array:
        spec = self.spec
        if spec.tied_embeddings:
            w = self.weights["model.tok_embeddings.weight"]
        else:
            w = self.weights["lm_head.linear.weight" if spec.head_type is HeadType.LANE else "lm_head.weight"]
        if spec.pre_norm_lane_agg:
            return np.asarray(w @ norm(sum(h, np.zeros_like(h[0])), self.weights["model.norm.weight"], spec.norm_eps))
        normed = [norm(x, self.scale("model.norm", lane), spec.norm_eps) for lane, x in enumerate(h)]
        if spec.head_type is HeadType.LANE:
            return np.asarray(w @ np.concatenate(normed))
        if spec.head_type is HeadType.VOCAB_PARALLEL:
            return np.concatenate([w[lane] @ x for lane, x in enumerate(normed)])
        return np.asarray(w @ (sum(normed, np.zeros_like(h[0])) / spec.num_lanes))


def random_module(spec: ModelSpec) -> Laneformer:
    """Weights large enough that every term matters to the logits."""
    module = Laneformer(spec).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.3, generator=generator)
    return module


def token_ids(spec: ModelSpec, count: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(spec.vocab_size, (batch, count), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_module_equals_the_twin(name: str) -> None:
    spec = SPECS[name]
    module = random_module(spec)
    ids = token_ids(spec, 12)
    twin = Twin(spec, {key: value.numpy() for key, value in module.state_dict().items()})
    expected = np.stack([twin.token(int(token), position) for position, token in enumerate(ids[0])])
    got = module(ids)[0].numpy()
    assert np.abs(expected).max() > 0.1
    assert np.linalg.norm(got - expected) <= 1e-12 * np.linalg.norm(expected)
    single = module.float()(ids)[0].numpy()
    assert np.linalg.norm(single - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_cached_decoding_equals_the_full_sequence(name: str) -> None:
    spec = SPECS[name]
    ids = token_ids(spec, 20, batch=3)
    module = random_module(spec)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        module = module.to(dtype)
        full = module(ids)
        cache = KvCache()
        pieces = [module(ids[:, start:stop], cache) for start, stop in ((0, 1), (1, 8), (8, 15))]
        pieces += [module(ids[:, i : i + 1], cache) for i in range(15, 20)]
        assert cache.num_tokens == 20
        assert float((torch.cat(pieces, 1) - full).norm() / full.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_keys_and_values_can_be_rounded_as_a_cache_does(dtype: torch.dtype) -> None:
    module, ids = random_module(BASE), token_ids(BASE, 12)
    weights = {key: value.numpy() for key, value in module.state_dict().items()}
    twin = Twin(BASE, weights, lambda values: np.asarray(torch.from_numpy(values).to(dtype).double().numpy()))
    expected = np.stack([twin.token(int(token), position) for position, token in enumerate(ids[0])])
    exact = module(ids)[0].numpy()
    module.round_keys_and_values(dtype)
    assert np.linalg.norm(module(ids)[0].numpy() - expected) <= 1e-12 * np.linalg.norm(expected)
    assert np.linalg.norm(exact - expected) > 1e-5 * np.linalg.norm(expected)


def test_parameters_have_the_published_names_and_counts() -> None:
    for spec in SPECS.values():
        assert sum(p.numel() for p in Laneformer(spec).parameters()) == spec.num_parameters
    names = {name: tuple(value.shape) for name, value in Laneformer(BASE).state_dict().items()}
    assert names["model.layers.4.attention.wk.weight"] == (4, 4, 32)
    assert names["model.layers.0.feed_forward.w2.weight"] == (4, 32, 12)
    assert names["model.norm.weight"] == (32,)
    assert names["lm_head.weight"] == (40, 32)
    per_lane = Laneformer(SPECS["norms per lane"]).state_dict()
    assert per_lane["model.layers.1.ffn_norm.scale"].shape == per_lane["model.norm.scale"].shape == (4, 32)
    assert Laneformer(SPECS["norms per lane, aggregate"]).state_dict()["model.norm.weight"].shape == (32,)
    assert Laneformer(SPECS["lane head"]).state_dict()["lm_head.linear.weight"].shape == (40, 128)
    assert Laneformer(SPECS["vocabulary parallel"]).state_dict()["lm_head.weight"].shape == (4, 10, 32)
    with torch.device("meta"):
        two_b = sum(p.numel() for p in Laneformer(laneformer_2b(), seed=None).parameters())
    assert two_b == 2_320_069_632


def test_more_tokens_than_the_context_are_refused() -> None:
    module = Laneformer(replace(BASE, max_context=8))
    cache = KvCache()
    module(token_ids(BASE, 8), cache)
    with pytest.raises(ConfigError, match="9 positions exceed the model's context of 8"):
        module(token_ids(BASE, 1), cache)


def test_flex_windows_need_a_window() -> None:
    with pytest.raises(ConfigError, match="no sliding_window"):
        Laneformer(SPECS["full attention"]).use_flex_windows(128)


def test_unscaled_frequencies_begin_with_one_radian() -> None:
    freqs = rope_frequencies(replace(BASE, hidden_size=256, num_heads=4, num_kv_heads=4))
    assert freqs[0] == 1.0
    assert np.all(np.diff(freqs) < 0)
    assert freqs[-1] == np.float32(1e4 ** (-62 / 64))


def test_seed_decides_the_initial_weights() -> None:
    first, second, other = (Laneformer(BASE, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
