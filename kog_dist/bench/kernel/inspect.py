"""`kog-bench inspect`: every phase of a layer on the GPU beside the interpreter's, to find the first one that is wrong.

The kernel is built for the first layers of the model only (a layer limit, without anything for it in the kernel), decodes a few
tokens, and leaves all that its last layer published (as if stopped after each phase).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from kog_dist.bench.kernel.gpu import gpu_name
from kog_dist.bench.report import finish, machine
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.cpu.lane_math import round_to
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.recipes import stream_lanes
from kog_dist.decode.plan.schedule import partial, stream, total
from kog_dist.decode.plan.steps import Kind, Site, Value
from kog_dist.decode.sampling import sample
from kog_dist.errors import ConfigError
from kog_dist.late_numpy import Array
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.spec import ModelSpec, ReduceMode, Sublayer
from kog_dist.model.weights import LaneWeights, RankWeights
from kog_dist.records import dataclass
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.published import Published, Vector

PHASES = ("qkv", "attend", "out", "gate_up", "down")
# Relative errors above these are no rounding any more; a cache of 8 significant bits lets values fall on different sides.
LIMITS = {"bfloat16": 1e-2, "float16": 2e-3}


@dataclass(frozen=True)
class PhaseComparison:
    """One phase of one lane (-1: of all) on the GPU and in the interpreter."""

    phase: str
    lane: int
    error: float  # |found - wanted| / |wanted|
    num_wrong_tags: int = 0
    replicas_agree: bool = True

    def is_suspicious(self, limit: float) -> bool:
        """Whether it cannot be rounding."""
        return not self.error < limit or self.num_wrong_tags > 0 or not self.replicas_agree


def run(model: Path, layers: tuple[int, ...], num_tokens: int, kv_dtype: str | None) -> bool:
    """Compare the given layers (empty: the last one); prints a table each, then one JSON object. Whether all is well."""
    configuration: dict[str, object] = {"model": str(model), "gpu": gpu_name(), "num_tokens": num_tokens}
    before = machine()
    checkpoint = open_checkpoint(model)
    spec = checkpoint.spec
    kv_dtype = kv_dtype or checkpoint.dtype
    for layer in layers:
        if not 0 <= layer < spec.num_layers:
            raise ConfigError(f"--layers {layer}: the model has layers 0 to {spec.num_layers - 1}")
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, num_tokens).tolist()
    figures, all_well = [], True
    for layer in layers or (spec.num_layers - 1,):
        findings = inspect_layer(checkpoint, layer, ids, kv_dtype)
        print(table(findings, layer, LIMITS[kv_dtype]), flush=True)
        all_well = all_well and first_suspicious(findings, LIMITS[kv_dtype]) is None
        figures += [{"layer": layer, "phase": f.phase, "lane": f.lane, "error": f.error} for f in findings]
    finish("inspect", configuration, before, figures)
    return all_well


def inspect_layer(checkpoint: Checkpoint, layer: int, ids: list[int], kv_dtype: str) -> list[PhaseComparison]:
    """Run the first layers up to `layer` on the GPU and in the interpreter, and compare what the last token left."""
    from kog_dist.workers.cuda.load import load_weights
    from kog_dist.workers.cuda.monokernel import Monokernel

    spec = limited(checkpoint.spec, layer + 1)
    shape = KernelShape(spec, range(spec.num_lanes), weight_dtype=checkpoint.dtype, kv_dtype=kv_dtype)
    kernel = Monokernel(shape, load_weights(shape, checkpoint))
    kernel.generate(ids, 1)
    published = Published(shape, kernel.words.get(), int(kernel.state()["epoch"]) - 1)
    weights = limited_weights(checkpoint.rank_weights(range(spec.num_lanes)), layer + 1)
    return compare(published, kernel.logits.get(), Expected(spec, weights, ids, kv_dtype), kv_dtype)


def limited(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The model of the first layers alone."""
    return replace(spec, num_layers=num_layers, window_layers=tuple(i for i in spec.window_layers if i < num_layers))


def limited_weights(weights: RankWeights, num_layers: int) -> RankWeights:
    """Its weights."""
    return replace(weights, lanes={lane: LaneWeights(whole.layers[:num_layers]) for lane, whole in weights.lanes.items()})


class Expected:
    """What the interpreter has for the last layer after the last of `ids`, as the kernel publishes it. All lanes on one rank."""

    def __init__(self, spec: ModelSpec, weights: RankWeights, ids: list[int], kv_dtype: str) -> None:
        self.spec, self.layer, self.position = spec, spec.num_layers - 1, len(ids) - 1
        engine = Interpreter(make_plan(spec, 1), 0, weights, None, kv_dtype=kv_dtype)
        for position, token_id in enumerate(ids[:-1]):
            engine.step(token_id, position, None)
        logits = engine.step(ids[-1], self.position, SamplingParams(), gather_logits=True).logits
        assert logits is not None
        self.logits, self._memory = logits, engine.memory

    def qkv(self, lane: int) -> Array:
        """Keys and values are rounded to the cache's type. The values alone if heads are normed, which attention does."""
        query = self._memory.row(Value(Kind.QUERY, self.layer, lane)) * np.float32(math.sqrt(self.spec.head_dim))
        cached = [cache[self.layer][0][lane, :, self.position] for cache in (self._memory.keys, self._memory.values)]
        if self.spec.qk_norm:
            return np.asarray(cached[1].reshape(-1))
        return np.concatenate([query.reshape(-1), *(part.reshape(-1) for part in cached)])

    def attended(self, lane: int) -> Array:
        """Output of the lane's heads."""
        return self._memory.row(Value(Kind.MIXED, self.layer, lane)).reshape(-1)

    def activation(self, lane: int) -> Array:
        """silu(gate) * up."""
        return self._memory.row(Value(Kind.ACTIVATION, self.layer, lane))

    def stream(self, lane: int) -> Array:
        """The residual stream after the layer."""
        return self._memory.row(stream(2 * self.spec.num_layers, stream_lanes(self.spec, (lane,))[0]))

    def middle(self, lane: int) -> Array:
        """The residual stream after attention: that after the layer without what the MLP added."""
        row, site, spec = self._memory.row, Site.MLP, self.spec
        mode, past = spec.reduce_mode(self.layer, Sublayer.MLP), self.layer - spec.delay
        if mode is ReduceMode.BLOCKING:
            added = row(total(site, self.layer))
        elif mode is ReduceMode.LOCAL:
            added = row(partial(site, self.layer, lane)) * np.float32(math.sqrt(spec.num_lanes))
        else:
            others = row(total(site, past)) - row(partial(site, past, lane))
            added = row(partial(site, self.layer, lane)) + others
        return np.asarray(self.stream(lane) - added)


def compare(published: Published, logits: Array, expected: Expected, kv_dtype: str) -> list[PhaseComparison]:
    """Findings in the order of phases, then of lanes; at last the logits and the token that the kernel chose from them."""
    spec = expected.spec

    def rounded_qkv(lane: int) -> Vector:
        found = published.qkv(lane)
        values, num_query = found.values.copy(), spec.lane_heads * spec.head_dim
        round_to(values[num_query:], kv_dtype)
        if spec.qk_norm:
            values = values[num_query + spec.lane_kv_heads * spec.head_dim :]
        return replace(found, values=values)

    sources: dict[str, tuple[Callable[[int], Vector], Callable[[int], Array]]] = {
        "qkv": (rounded_qkv, expected.qkv),
        "attend": (published.attended, expected.attended),
        "out": (published.middle, expected.middle),
        "gate_up": (published.activation, expected.activation),
        "down": (published.stream, expected.stream),
    }
    findings = []
    for phase in PHASES:
        found_of, wanted_of = sources[phase]
        for lane in range(spec.num_lanes):
            found = found_of(lane)
            error = relative_error(found.values, wanted_of(lane))
            findings.append(PhaseComparison(phase, lane, error, found.num_wrong_tags, found.replicas_agree))
    findings.append(PhaseComparison("head", -1, relative_error(logits, expected.logits)))
    _, token_id, wrong = published.best_candidate()
    finite = bool(np.isfinite(logits).all())
    is_best = finite and token_id == sample(np.asarray(logits), expected.position, SamplingParams())
    findings.append(PhaseComparison("sample", -1, 0.0 if is_best else 1.0, wrong))
    return findings


def relative_error(found: Array, wanted: Array) -> float:
    """|found - wanted| / |wanted|; NaN if a value is not finite."""
    difference = found.astype(np.float64) - wanted.astype(np.float64)
    return float(np.linalg.norm(difference) / max(float(np.linalg.norm(wanted.astype(np.float64))), 1e-30))


def first_suspicious(findings: list[PhaseComparison], limit: float) -> PhaseComparison | None:
    """The earliest phase that is wrong; what follows it may be wrong for that reason alone."""
    return next((finding for finding in findings if finding.is_suspicious(limit)), None)


def table(findings: list[PhaseComparison], layer: int, limit: float) -> str:
    """Relative errors by phase and lane; `!` marks what is suspicious, `t` wrong tags, `r` replicas that differ."""
    lines = [f"layer {layer}: relative errors by lane"]
    for phase in dict.fromkeys(finding.phase for finding in findings):
        cells = []
        for finding in findings:
            if finding.phase == phase:
                marks = (
                    "!" * finding.is_suspicious(limit) + "t" * (finding.num_wrong_tags > 0) + "r" * (not finding.replicas_agree)
                )
                cells.append(f"{finding.error:8.1e}{marks:3}")
        lines.append(f"  {phase:8} {' '.join(cells)}".rstrip())
    wrong = first_suspicious(findings, limit)
    if wrong is None:
        lines.append(f"  all below {limit:g}")
    else:
        where = f", lane {wrong.lane}" if wrong.lane >= 0 else ""
        lines.append(
            f"  first suspicious: {wrong.phase}{where} (error {wrong.error:.1e}, {wrong.num_wrong_tags} words with another tag)"
        )
    return "\n".join(lines)
