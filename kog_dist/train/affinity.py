"""Which heads and FFN columns share a lane: those that hear most of each other, since only across lanes is news late.

A *unit* is what can move between lanes without changing a model of delay 0: one KV head with its query heads, or one FFN column.
The coupling of a unit u to a unit v of a later module is the energy of what u writes in what v reads,

    C(u, v) = E || R_v diag(g) W_u a_u ||^2 ,

with W_u the unit's columns of wo or w2, a_u its activation (FFN: silu(w1 x) * w3 x; attention: its values, as if it looked at one
token), R_v the rows of wq, wk, wv or of w1, w3 that v owns, g the scale of the norm in front of them. The expectation is over
given inputs of the modules. With a delay of d, what a sublayer of layer i writes reaches other lanes at the end of the same one
of layer i + d: modules between hear it only inside the lane. `regroup` moves units, as many in every lane as before, so that the
coupling of such pairs inside lanes grows: for one module after the other it exchanges units of two lanes while that gains
(others fixed, so the sum never falls), in sweeps over all modules.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kog_dist.errors import ConfigError
from kog_dist.model.laneformer import Laneformer, LaneLayer
from kog_dist.model.spec import ModelSpec, Sublayer
from kog_dist.records import dataclass

Module = tuple[int, Sublayer]
_NUM_SWEEPS = 4


@dataclass(frozen=True)
class Regrouping:
    """`tensors` compute what they did; the shares are coupling inside lanes / all coupling, before and after."""

    tensors: dict[str, Tensor]
    share_before: float
    share_after: float


@dataclass
class _Units:
    """One module. reads (units, rows, D) with the norm's scale; writes (units, D, columns), times the root of a's covariance."""

    reads: Tensor
    writes: Tensor
    lane_of: NDArray[np.int64]  # by unit

    def gram(self, lane: int, *, of_reads: bool) -> Tensor:
        """(D, D): sum over the lane's units of R^T R or of W W^T."""
        chosen = torch.from_numpy(np.flatnonzero(self.lane_of == lane))
        if of_reads:
            flat = self.reads[chosen].flatten(0, 1)
            return flat.T @ flat
        flat = self.writes[chosen].transpose(0, 1).flatten(1)
        return flat @ flat.T

    def energies(self, gram: Tensor, *, of_reads: bool) -> Tensor:
        """(units,): the coupling of each unit, as reader or as writer, with what `gram` sums up."""
        rows = self.reads if of_reads else self.writes.transpose(1, 2)
        return ((rows @ gram) * rows).sum((1, 2))


@torch.no_grad()
def module_inputs(module: Laneformer, token_ids: Tensor) -> dict[Module, Tensor]:
    """The normalised inputs (tokens, D) of every sublayer while the model reads `token_ids` (batch, time). Needs delay 0."""
    inputs: dict[Module, Tensor] = {}
    handles = []
    for layer_idx, layer in enumerate(module.model.layers):
        assert isinstance(layer, LaneLayer)
        for sublayer, norm in ((Sublayer.ATTENTION, layer.attention_norm), (Sublayer.MLP, layer.ffn_norm)):

            def keep(_module: object, _arguments: object, x: Tensor, key: Module = (layer_idx, sublayer)) -> None:
                inputs[key] = x[0].flatten(0, 1)

            handles.append(norm.register_forward_hook(keep))
    try:
        module(token_ids)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


@torch.no_grad()
def regroup(spec: ModelSpec, tensors: Mapping[str, Tensor], inputs: Mapping[Module, Tensor], delay: int) -> Regrouping:
    """Reassign heads and FFN columns of a model of delay 0 for training with `delay`. Raises ConfigError for another model."""
    if spec.delay != 0 or not spec.shared_norm_scale:
        raise ConfigError("only a model of delay 0 with shared norm scales keeps its function when units change lanes")
    modules = [(layer_idx, sublayer) for layer_idx in range(spec.num_layers) for sublayer in Sublayer]
    units = {key: _units(spec, tensors, key, inputs[key]) for key in modules}
    pairs = [(writer, reader) for writer in modules for reader in modules if _is_late(writer, reader, delay)]
    before = _share(units, pairs, spec.num_lanes)
    for _ in range(_NUM_SWEEPS):
        moved = 0
        for key in modules:
            own = units[key]
            affinity = np.zeros((len(own.lane_of), spec.num_lanes))
            for lane in range(spec.num_lanes):
                for writer, reader in pairs:
                    if key == reader:
                        affinity[:, lane] += own.energies(units[writer].gram(lane, of_reads=False), of_reads=True).numpy()
                    elif key == writer:
                        affinity[:, lane] += own.energies(units[reader].gram(lane, of_reads=True), of_reads=False).numpy()
            moved += exchange(own.lane_of, affinity)
        if not moved:
            break
    moved_tensors = dict(tensors)
    for key in modules:
        moved_tensors.update(_reordered(spec, tensors, key, np.argsort(units[key].lane_of, kind="stable")))
    return Regrouping(moved_tensors, before, _share(units, pairs, spec.num_lanes))


def regrouped_for_delay(
    spec: ModelSpec, tensors: Mapping[str, Tensor], tokens: Tensor | NDArray[np.int32], delay: int, count: int = 4096
) -> Regrouping:
    """`regroup` by the coupling while the model reads the first `count` of `tokens` (token ids)."""
    module = Laneformer(spec, seed=None)
    module.load_state_dict(dict(tensors))
    row = min(spec.max_context, count, len(tokens))
    rows = torch.as_tensor(tokens[: min(count, len(tokens)) // row * row]).cpu().long().view(-1, row)
    return regroup(spec, tensors, module_inputs(module, rows), delay)


def exchange(lane_of: NDArray[np.int64], affinity: NDArray[np.float64]) -> int:
    """Swap units between lanes, in place, while the sum of affinity[unit, lane_of[unit]] grows. Returns the number of swaps."""
    num_lanes = affinity.shape[1]
    num_swaps, last_round = 0, -1
    while num_swaps != last_round:
        last_round = num_swaps
        for first in range(num_lanes):
            for second in range(first + 1, num_lanes):
                gain = affinity[:, second] - affinity[:, first]
                here, there = np.flatnonzero(lane_of == first), np.flatnonzero(lane_of == second)
                here, there = here[np.argsort(-gain[here], kind="stable")], there[np.argsort(gain[there], kind="stable")]
                total = gain[here] - gain[there]  # both are in falling order of gain, so the total falls too
                count = int((total > 1e-9 * np.abs(affinity).max()).sum())
                lane_of[here[:count]], lane_of[there[:count]] = second, first
                num_swaps += count
    return num_swaps


def _is_late(writer: Module, reader: Module, delay: int) -> bool:
    """Whether the reader comes after the writer and not behind the end of the writer's sublayer `delay` layers later."""
    return writer < reader <= (writer[0] + delay, writer[1])


def _share(units: Mapping[Module, _Units], pairs: list[tuple[Module, Module]], num_lanes: int) -> float:
    inside = every = 0.0
    for writer, reader in pairs:
        grams = [units[writer].gram(lane, of_reads=False) for lane in range(num_lanes)]
        by_lane = torch.stack([units[reader].energies(gram, of_reads=True) for gram in grams], dim=1)
        every += float(by_lane.sum())
        inside += float(by_lane.gather(1, torch.from_numpy(units[reader].lane_of)[:, None]).sum())
    return inside / every


def _units(spec: ModelSpec, tensors: Mapping[str, Tensor], key: Module, x: Tensor) -> _Units:
    layer_idx, sublayer = key
    prefix, d = f"model.layers.{layer_idx}.", spec.hidden_size
    x = x.double()

    def matrix(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"].double()

    if sublayer is Sublayer.MLP:
        w1, w3 = (matrix(f"feed_forward.{name}").flatten(0, 1) for name in ("w1", "w3"))
        activation = (functional.silu(x @ w1.T) * (x @ w3.T)).square().mean(0).sqrt()
        reads = torch.stack((w1, w3), dim=1)
        writes = (matrix("feed_forward.w2").transpose(1, 2).flatten(0, 1) * activation[:, None])[:, :, None]
    else:
        kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
        wq, wk, wv = (matrix(f"attention.{name}").view(kv_heads, -1, d) for name in ("wq", "wk", "wv"))
        values = torch.einsum("td,hvd->htv", x, wv)
        eigenvalues, vectors = torch.linalg.eigh(values.mT @ values / len(x))
        root = vectors * eigenvalues.clamp(min=0).sqrt()[:, None, :]  # (kv_heads, head_dim, head_dim): root @ root^T = E[v v^T]
        reads = torch.cat((wq, wk, wv), dim=1)
        by_query = matrix("attention.wo").transpose(1, 2).reshape(kv_heads, -1, head_dim, d)  # (kv, queries of it, head_dim, D)
        writes = torch.einsum("hqvd,hvw->hdqw", by_query, root).flatten(2)
    norm = "attention_norm" if sublayer is Sublayer.ATTENTION else "ffn_norm"
    lanes = np.repeat(np.arange(spec.num_lanes), len(reads) // spec.num_lanes)
    return _Units(reads * matrix(norm), writes, lanes)


def _reordered(spec: ModelSpec, tensors: Mapping[str, Tensor], key: Module, order: NDArray[np.int64]) -> dict[str, Tensor]:
    """The module's tensors with its units in another order."""
    layer_idx, sublayer = key
    chosen = torch.from_numpy(order)
    stem = f"model.layers.{layer_idx}." + ("attention." if sublayer is Sublayer.ATTENTION else "feed_forward.")
    moved = {}
    for name, outward in (
        (("wq", False), ("wk", False), ("wv", False), ("wo", True))
        if sublayer is Sublayer.ATTENTION
        else (
            ("w1", False),
            ("w3", False),
            ("w2", True),
        )
    ):
        weight = tensors[f"{stem}{name}.weight"]
        rows = weight.mT if outward else weight  # (lanes, rows of the lane's units, D)
        by_unit = rows.reshape(len(order), -1, spec.hidden_size)[chosen].reshape(rows.shape)
        moved[f"{stem}{name}.weight"] = (by_unit.mT if outward else by_unit).contiguous()
    return moved
