"""A kind of layer of this test alone goes through layout, plan, proof and interpreter: what docs/layers.md says it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.decode.cpu import interpreter, lane_math
from kog_dist.decode.cpu.cursor import Cursor
from kog_dist.decode.cpu.exchange_calls import ExchangeCalls
from kog_dist.decode.cpu.groups import Finder, Group
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan import definition, product_rules, recipes
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.recipes import Recipe, Stage
from kog_dist.decode.plan.steps import Kind, Phase, Site, Value
from kog_dist.decode.plan.validate import check, validate
from kog_dist.errors import ConfigError
from kog_dist.model import layout
from kog_dist.model.layers import AttentionMixer, Ffn, LayerSpec, Norm
from kog_dist.model.layout import KindTensors, TensorLayout, lane_first, tensor_layouts
from kog_dist.model.rope import rope_table
from kog_dist.model.spec import ModelSpec
from kog_dist.model.weights import RankReader, RankWeights
from kog_dist.model.written_checkpoint import random_tensors
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape

Array = NDArray[Any]


# ---- what a kind adds: its dataclass and tensors, its recipe, its terms, its matrix, its calls ----
@dataclass(frozen=True, slots=True)
class GatedIdentity:
    """Each lane's output is x times the sigmoid of a matrix with x."""

    slope: float = 1.0

    def num_values(self, hidden_size: int) -> int:
        return 4 * hidden_size**2  # of four lanes

    def divided(self) -> dict[str, int]:
        return {}


def tensors(spec: ModelSpec, kind: GatedIdentity, prefix: str) -> Iterator[tuple[str, TensorLayout]]:
    yield f"{prefix}gate.weight", lane_first(spec, spec.hidden_size, spec.hidden_size)


def recipe(spec: ModelSpec, kind: GatedIdentity) -> Recipe:
    d = spec.hidden_size
    stage = Stage(Phase.OUT, (Kind.STREAM,), (Kind.PARTIAL,), d, d, 2, ("identity.gate",))
    return Recipe(Site.ATTENTION, (stage,), {}, spec.has_one_stream)


def terms(
    self: definition.Definition, known: definition.Known, before: definition.Known, layer: int, h: list[int]
) -> list[int]:  # fmt: skip
    outputs = [self.term("out", layer, lane, stream) for lane, stream in enumerate(h)]
    known.update({Value(Kind.PARTIAL, layer, lane, Site.ATTENTION): term for lane, term in enumerate(outputs)})
    return outputs


class IdentityCalls:
    def __init__(self, find: Finder, weights: RankWeights, cursor: Cursor, exchange: ExchangeCalls) -> None:
        self.find, self.weights, self.spec = find, weights, cursor.plan.spec
        self.makers = {Phase.OUT: self._out}

    def _out(self, group: Group) -> Any:
        (stream,), (partials,) = self.find.of(group, (Kind.STREAM,), (Kind.PARTIAL,))
        layers = [self.weights.lanes[step.lane].layers[step.layer] for step in group.steps]
        kind = self.spec.layers[group.steps[0].layer].mixer
        assert isinstance(kind, GatedIdentity)
        inverse, normed = np.empty((*stream.shape[:-1], 1), stream.dtype), np.empty_like(stream)
        multiply = lane_math.products([(layer.wo, normed, out) for layer, out in zip(layers, partials, strict=True)])

        def run() -> None:
            lane_math.rms_norm(stream, layers[0].attention_norm, self.spec.norm_eps, inverse, normed)
            multiply()
            np.multiply(partials, kind.slope, out=partials)
            lane_math.sigmoid(partials.copy(), partials)
            np.multiply(partials, normed, out=partials)

        return run


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layout.KINDS, GatedIdentity, KindTensors("identity", tensors, outputs=("gate",)))
    monkeypatch.setitem(recipes.RECIPES, GatedIdentity, recipe)
    monkeypatch.setitem(definition.SUBLAYERS, GatedIdentity, terms)
    monkeypatch.setitem(
        product_rules.MATRICES, GatedIdentity,
        lambda spec, kind, product: product_rules.Matrix(spec.hidden_size, spec.hidden_size, 1),
    )  # fmt: skip
    monkeypatch.setitem(interpreter.OF_KINDS, GatedIdentity, IdentityCalls)


# ---- the model ----
D, NORM = 24, Norm(1e-6)
ATTENTION = AttentionMixer(8, 4, 6)
LAYERS = (
    LayerSpec(ATTENTION, Ffn(32), NORM),
    LayerSpec(GatedIdentity(), Ffn(48), NORM),
    LayerSpec(GatedIdentity(2.0), Ffn(32), NORM),
    LayerSpec(replace(ATTENTION, window=3), Ffn(48), NORM),
)
SPEC = ModelSpec.of_layers(LAYERS, hidden_size=D, vocab_size=40, max_context=16, num_lanes=4)
TOKENS = [3, 17, 8, 30, 5, 11]


class Tensors:
    """A checkpoint in memory."""

    head_rounding = None
    verify = False

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.layouts = spec, tensor_layouts(spec)
        self.tensors = random_tensors(spec, seed=3)

    def stored_dtype(self, name: str) -> str:
        return "F32"

    def read_part(self, name: str, part_idx: int, out: Array, *, verify: bool) -> None:
        first, last = self.layouts[name].parts[part_idx]
        out.reshape(-1)[:] = self.tensors[name][first:last].reshape(-1)

    def read_parts(self, name: str, whole: Array, part_indices: Any, verified: Any) -> None:
        whole[...] = self.tensors[name]


def logits_of(dtype: Any, *, pass_tokens: int = 1) -> Array:
    source: Any = Tensors(SPEC)
    weights = RankReader(source, tuple(range(4)), tuple(range(4)), np.dtype(dtype)).read()
    engine = Interpreter(make_plan(SPEC, 1), 0, weights, None, dtype=dtype, kv_dtype=np.dtype(dtype).name)
    if pass_tokens > 1:
        engine.read(TOKENS[:pass_tokens], 0)
    first = pass_tokens if pass_tokens > 1 else 0
    outputs = [engine.step(TOKENS[at], at, SamplingParams(), gather_logits=True) for at in range(first, len(TOKENS))]
    return np.array([output.logits for output in outputs])


def test_it_computes_what_it_says() -> None:
    """The definition of the toy, and of attention whose window differs from layer to layer, in float64."""
    w = {name: tensor.astype(np.float64) for name, tensor in random_tensors(SPEC, seed=3).items()}

    def norm(x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[name])

    h = w[layout.EMBEDDING][TOKENS]
    for number, layer in enumerate(LAYERS):
        prefix = f"model.layers.{number}."
        x = norm(h, f"{prefix}attention_norm.weight")
        if isinstance(layer.mixer, GatedIdentity):
            gates = [layer.mixer.slope * x @ matrix.T for matrix in w[f"{prefix}identity.gate.weight"]]
            h = h + sum(x / (1 + np.exp(-gate)) for gate in gates)
        else:
            h = h + attention(w, prefix, x, layer.mixer.window)  # type: ignore[attr-defined]
        x, ffn = norm(h, f"{prefix}ffn_norm.weight"), f"{prefix}feed_forward."
        for w1, w3, w2 in zip(*(w[f"{ffn}{name}.weight"] for name in ("w1", "w3", "w2")), strict=True):
            gate = x @ w1.T
            h = h + (gate / (1 + np.exp(-gate)) * (x @ w3.T)) @ w2.T
    expected = norm(h, "model.norm.weight") @ w["lm_head.weight"].T
    assert np.abs(logits_of(np.float64) - expected).max() < 1e-6 * np.abs(expected).max()
    assert np.abs(logits_of(np.float32) - expected).max() < 1e-4 * np.abs(expected).max()


def attention(w: dict[str, Array], prefix: str, x: Array, window: int | None) -> Array:
    from tests.unit.test_interpreter import turned

    cos, sin = (table.astype(np.float64) for table in rope_table(SPEC, len(x)))
    out = np.zeros_like(x)
    for lane in range(4):
        query, key, value = (
            (x @ w[f"{prefix}attention.{name}.weight"][lane].T).reshape(len(x), -1, 6) for name in ("wq", "wk", "wv")
        )
        query, key, mixed = turned(query, cos, sin), turned(key, cos, sin), np.zeros_like(query)
        for head in range(2):
            for t in range(len(x)):
                first = max(0, t + 1 - (window or len(x)))
                scores = key[first : t + 1, 0] @ query[t, head] * 6**-0.5
                weights = np.exp(scores - scores.max())
                mixed[t, head] = weights / weights.sum() @ value[first : t + 1, 0]
        out += mixed.reshape(len(x), -1) @ w[f"{prefix}attention.wo.weight"][lane].T
    return out


def test_passes_of_several_tokens_have_the_same_bits() -> None:
    assert np.array_equal(logits_of(np.float32)[4:], logits_of(np.float32, pass_tokens=4))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_its_plan_is_proved(world_size: int) -> None:
    check(make_plan(SPEC, world_size))


def test_a_plan_that_computes_otherwise_is_refused() -> None:
    plan = make_plan(SPEC, 2)
    part = plan.ranks[0]
    steps = list(part.steps)
    of_kind = [k for k, step in enumerate(steps) if step.phase is Phase.OUT and step.layer == 1]
    earlier = steps[of_kind[0]]._replace(reads=(Value(Kind.STREAM, 1),))
    for changed in ([*steps[: of_kind[0]], *steps[of_kind[0] + 1 :]], [*steps[: of_kind[0]], earlier, *steps[of_kind[0] + 1 :]]):
        damaged = replace(plan, ranks=(replace(part, steps=tuple(changed)), plan.ranks[1]))
        assert validate(damaged)
    wide = [
        product._replace(rows=product.rows._replace(num_rows=32)) if product.op is Phase.OUT and product.layer == 1 else product
        for product in part.products
    ]
    assert validate(replace(plan, ranks=(replace(part, products=tuple(wide)), plan.ranks[1])))


def test_what_layers_cannot_be() -> None:
    with pytest.raises(ConfigError, match="contradicts 4 layers"):
        replace(SPEC, num_layers=3)
    with pytest.raises(ConfigError, match="one residual stream"):
        replace(SPEC, delay=1)
    with pytest.raises(ConfigError, match="intermediate_size 36 cannot be split over 8 lanes"):
        ModelSpec.of_layers([LayerSpec(ATTENTION, Ffn(36), NORM)], hidden_size=D, vocab_size=40, num_lanes=8)
    with pytest.raises(ConfigError, match="norms of layers"):
        replace(SPEC, mixed_layers=(*LAYERS[:3], replace(LAYERS[3], norm=Norm(1e-5))))


def test_digests_tell_layers_apart() -> None:
    other = replace(SPEC, mixed_layers=(*LAYERS[:2], LAYERS[1], LAYERS[3]))
    assert len({SPEC.digest(), other.digest(), replace(SPEC, mixed_layers=LAYERS[::-1]).digest()}) == 3
    assert make_plan(SPEC, 1).digest() != make_plan(other, 1).digest()


def test_equal_specs_share_what_is_kept_of_one() -> None:
    """Hashes are of sizes alone: specs that differ in layers are told apart all the same."""
    again = replace(SPEC, mixed_layers=tuple(replace(layer) for layer in LAYERS))
    assert again == SPEC
    assert again is not SPEC
    assert hash(again) == hash(SPEC)
    assert again.mixed_layers is SPEC.mixed_layers, "compared at once"
    assert recipes.recipes(again) is recipes.recipes(SPEC)
    other = replace(SPEC, mixed_layers=(LAYERS[0], *LAYERS[:0:-1]))
    assert hash(other) == hash(SPEC)
    assert other != SPEC
    assert [layer.mixer for layer in other.layers] != [layer.mixer for layer in SPEC.layers]
    assert recipes.recipes(other) != recipes.recipes(SPEC)
    assert other.kinds != SPEC.kinds
    assert set(other.kinds) == set(SPEC.kinds)


def test_gpus_refuse_it_by_name() -> None:
    with pytest.raises(ConfigError, match=r"it has layers of GatedIdentity; .*use --device cpu"):
        KernelShape(SPEC, range(4))


def test_parameters() -> None:
    assert SPEC.num_parameters == sum(tensor.size for tensor in random_tensors(SPEC, seed=3).values())
