"""Prefill's operations on the GPU, each compared at once with its twin in array code: the first one that is wrong is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kog_dist.model.spec import ReduceMode
from kog_dist.workers.prefill.base.arrays import Array, float32_of
from kog_dist.workers.prefill.base.matrices import DenseMatrices, LayerMatrices
from kog_dist.workers.prefill.buffers.dense import DenseRows
from kog_dist.workers.prefill.buffers.lanes import Rows
from kog_dist.workers.prefill.buffers.prompt import PromptBuffers

LIMIT = 2e-3  # relative, of one operation: binary16 rounds to 2.4e-4 on average, sums in another order add to it


class Checked:
    """Operations that leave behind what the device did. `errors`: the largest relative error of each operation."""

    def __init__(self, device: Any, twin: Any, buffers: PromptBuffers) -> None:
        self.device, self.twin, self.buffers = device, twin, buffers
        self.errors: dict[str, float] = {}

    def _compare(self, name: str, outputs: dict[str, Array], run: Callable[[Any], None]) -> None:
        import cupy

        before = {key: array.copy() for key, array in outputs.items()}
        run(self.device)
        found = {key: array.copy() for key, array in outputs.items()}
        for key, array in outputs.items():
            array[...] = before[key]
        run(self.twin)
        for key, array in outputs.items():
            wanted, got = (float32_of(one).astype(cupy.float64) for one in (array, found[key]))
            error = float(_norm(got - wanted) / max(_norm(wanted), 1e-30))
            self.errors[name] = max(self.errors.get(name, 0.0), error)
            assert error < LIMIT, f"{name}: {key} is wrong by {error:.1e}"
            array[...] = found[key]


def _norm(array: Any) -> float:
    import cupy

    return float(cupy.sqrt((array**2).sum()))


class CheckedOperations(Checked):
    """`Operations`."""

    def begin(self, rows: Rows) -> None:
        outputs = {"place": rows.place, "next start": self.buffers.next_start}
        self._compare("begin", outputs, lambda do: do.begin(rows))

    def embed(self, rows: Rows, scale: Array) -> None:
        outputs = {"stream": rows.kept_stream, "1 / rms": rows.inverse_rms}
        self._compare("embed", outputs, lambda do: do.embed(rows, scale))

    def product(self, x: Array, matrix: Array, out: Array) -> None:
        self._compare("product", {"product": out}, lambda do: do.product(x, matrix, out))

    def append(self, rows: Rows, matrices: LayerMatrices, layer: int, *, queries: bool = True, others: bool = True) -> None:
        outputs = {
            "query": rows.query, "keys": self.buffers.keys[layer], "values": self.buffers.values[layer],
            "overflow": self.buffers.overflow,
        }  # fmt: skip
        wanted = {"queries": queries, "others": others}
        self._compare(f"append of layer {layer}", outputs, lambda do: do.append(rows, matrices, layer, **wanted))

    def attend(self, rows: Rows, layer: int) -> Array:
        import cupy

        mixed = cupy.empty((len(rows.stream), rows.size, rows.query.size // rows.size // len(rows.stream)), cupy.float16)

        def run(do: Any) -> None:
            mixed[...] = do.attend(rows, layer)

        self._compare(f"attention of layer {layer}", {"outputs": mixed}, run)
        found: Array = mixed
        return found

    def lane_sum(self, rows: Rows, partial: Array, own_sum: Array) -> None:
        self._compare("lane sum", {"own sum": own_sum}, lambda do: do.lane_sum(rows, partial, own_sum))

    def residual(
        self,
        rows: Rows,
        after: Rows,
        mode: ReduceMode,
        partial: Array,
        past: Array | None,
        total: Array | None,
        own_sum: Array | None,
        unscale: Array | None,
        scale: Array | None,
    ) -> None:
        outputs = {"stream": after.kept_stream, "1 / rms": rows.inverse_rms}
        if own_sum is not None:
            outputs["own sum"] = own_sum
        name = f"{mode.value} residual, " + ("sums here" if total is None else "sums given")
        self._compare(name, outputs, lambda do: do.residual(rows, after, mode, partial, past, total, own_sum, unscale, scale))

    def gate(self, rows: Rows, matrix: Array) -> None:
        self._compare("gate", {"activation": rows.activation}, lambda do: do.gate(rows, matrix))

    def take_last(self, rows: Rows, last: Rows, pasts: Sequence[tuple[Array, Array]]) -> None:
        self.device.take_last(rows, last, pasts)  # the twin's own code

    def give_streams(self, last: Rows) -> None:
        self.device.give_streams(last)

    def load_cache(self, first: int, last: int) -> None:
        outputs = {"keys": self.buffers.keys, "values": self.buffers.values, "overflow": self.buffers.overflow}
        self._compare("load cache", outputs, lambda do: do.load_cache(first, last))

    def store_cache(self, first: int, last: int) -> None:
        outputs: dict[str, Any] = {"cache": self.twin.cache}
        self._compare("store cache", outputs, lambda do: do.store_cache(first, last))


class CheckedDenseOperations(Checked):
    """`DenseOperations`."""

    def begin(self, rows: DenseRows) -> None:
        self._compare("begin", {"place": rows.place, "next start": self.buffers.next_start}, lambda do: do.begin(rows))

    def embed(self, rows: DenseRows, norm: Array) -> None:
        self._compare("embed", {"stream": rows.stream, "x": rows.x}, lambda do: do.embed(rows, norm))

    def append(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        outputs = {
            "query": rows.query, "keys": self.buffers.keys, "values": self.buffers.values, "overflow": self.buffers.overflow,
            "cache": self.twin.cache,
        }  # fmt: skip
        self._compare(f"append of layer {layer}", outputs, lambda do: do.append(rows, matrices, layer))

    def attend(self, rows: DenseRows, layer: int, sinks: Array | None = None) -> Array:
        import cupy

        mixed = cupy.empty((len(rows.partial), rows.size, rows.query.size // rows.size // len(rows.partial)), cupy.float16)

        def run(do: Any) -> None:
            mixed[...] = do.attend(rows, layer, sinks)

        self._compare(f"attention of layer {layer}", {"outputs": mixed}, run)
        found: Array = mixed
        return found

    def gate_heads(self, rows: DenseRows, mixed: Array) -> None:
        self._compare("gate heads", {"mixed": mixed}, lambda do: do.gate_heads(rows, mixed))

    def recur(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> Array:
        import cupy

        assert rows.mixed is not None
        mixed = cupy.empty(rows.mixed.shape, cupy.float16)

        def run(do: Any) -> None:
            mixed[...] = do.recur(rows, matrices, layer)

        outputs = {"mixed": mixed, "states": self.twin.buffers.states, "overflow": self.buffers.overflow}
        self._compare(f"delta net of layer {layer}", outputs, run)
        rows.mixed[...] = mixed
        found: Array = rows.mixed
        return found

    def keep_states(self) -> None:
        self._compare("keep states", {"states": self.twin.own_states}, lambda do: do.keep_states())

    def lane_sum(self, rows: DenseRows, scale: float, own_sum: Array, bias: Array | None = None) -> None:
        self._compare("lane sum", {"own sum": own_sum}, lambda do: do.lane_sum(rows, scale, own_sum, bias))

    def residual(
        self, rows: DenseRows, scale: float, total: Array | None, norm: Array | None, bias: Array | None = None
    ) -> None:  # fmt: skip
        outputs = {"stream": rows.stream, "x": rows.x}
        self._compare("residual", outputs, lambda do: do.residual(rows, scale, total, norm, bias))

    def project(self, rows: DenseRows, mixed: Array, matrices: DenseMatrices) -> None:
        self._compare("out", {"partial": rows.partial}, lambda do: do.project(rows, mixed, matrices))

    def gate(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        self._compare("gate", {"activation": rows.activation}, lambda do: do.gate(rows, matrices))

    def lower(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        self._compare("down", {"partial": rows.partial}, lambda do: do.lower(rows, matrices))

    def mix(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        self._compare(f"experts of layer {layer}", {"partial": rows.partial}, lambda do: do.mix(rows, matrices, layer))

    def add_shared(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        self._compare("shared expert", {"partial": rows.partial}, lambda do: do.add_shared(rows, matrices))

    def take_last(self, rows: DenseRows, last: DenseRows) -> None:
        outputs = {"place": last.place, "stream": last.stream, "query": last.query}
        outputs |= {} if last.mixed is None else {"mixed": last.mixed}
        self._compare("take last", outputs, lambda do: do.take_last(rows, last))

    def give_stream(self, last: DenseRows) -> None:
        self._compare("give stream", {"stream": self.buffers.last_streams}, lambda do: do.give_stream(last))
