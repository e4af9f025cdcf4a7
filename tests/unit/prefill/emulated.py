"""The fused kernels of prefill on a CPU: compiled by g++ with `cuda_on_cpu.h` in the place of CUDA."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.cuda import build as compiler
from kog_dist.workers.prefill.base.compiled import SOURCE_FOLDERS
from kog_dist.workers.prefill.buffers.dense import DenseBuffers
from kog_dist.workers.prefill.buffers.lanes import Buffers
from kog_dist.workers.prefill.delta.delta_abi import DELTA_PREFILL_PARAMS, delta_header
from kog_dist.workers.prefill.delta.device import DELTA_KERNELS, RULE_KERNELS, DeltaKernels
from kog_dist.workers.prefill.dense.dense_abi import DENSE_PARAMS, dense_header
from kog_dist.workers.prefill.dense.device import GATES_KERNELS, KERNELS, DenseDeviceOperations
from kog_dist.workers.prefill.dense.gates_abi import GATES_PARAMS, gates_header
from kog_dist.workers.prefill.dense.operations import PlainDenseOperations
from kog_dist.workers.prefill.experts.plain import PlainExperts
from kog_dist.workers.prefill.lanes.device import _KERNELS, DeviceOperations
from kog_dist.workers.prefill.lanes.operations import PlainOperations
from kog_dist.workers.prefill.lanes.prefill_abi import PREFILL_PARAMS, prefill_header
from tests.unit.cpu_compiler import build

LAUNCH = """
extern "C" void launch_{name}(unsigned num_ctas, unsigned num_threads, const void* params) {{
    kog::launch<{params}>({name}, num_ctas, num_threads, params, {cluster});
}}
"""


HERE = Path(__file__).parent


def compiled(
    folder: Path, stem: str, header: str, kernels: Iterable[str], params: str, optimize: str = "-O0", cluster: int = 1,
    clusters: Mapping[str, int] | None = None,
) -> Path:  # fmt: skip
    """`stem`.cu with this `stem`_shape.cuh as a library of functions `launch_NAME`, which take a `params`. `cluster`: of the
    thread blocks of each, unless `clusters` says otherwise of a kernel.

    Its kernels run one at a time; who wants several at once loads copies of the library.
    """
    sources = compiler.read_sources(*SOURCE_FOLDERS)
    sources["ptx.cuh"] = (HERE / "cuda_on_cpu.h").read_text(encoding="utf-8")
    sources["e4m3_on_cpu.h"] = (HERE.parent / "e4m3_on_cpu.h").read_text(encoding="utf-8")
    sources["hopper.cuh"] = (HERE / "hopper_on_cpu.h").read_text(encoding="utf-8")
    sources["system.h"] = (HERE / "system.h").read_text(encoding="utf-8")
    for name, text in {**sources, f"{stem}_shape.cuh": header}.items():
        (folder / name).write_text(text, encoding="utf-8")
    of_kernel = clusters or {}
    calls = [LAUNCH.format(name=name, params=params, cluster=of_kernel.get(name, cluster)) for name in kernels]
    text = sources[f"{stem}.cu"] + "".join(calls)
    (folder / f"{stem}.cpp").write_text(text, encoding="utf-8")
    # A copy of the library has variables of its own.
    flags = (optimize, "-fno-strict-aliasing", "-fno-gnu-unique", "-fPIC", "-shared", "-pthread")
    return build(folder / f"{stem}.cpp", f"{stem}.so", *flags)


def launcher(library: Any, kernel: str, params_bytes: int) -> Callable[[int, int, bytes, bool], None]:
    """Launches a kernel of such a library: thread blocks, threads of each, parameters, whether it may begin early."""

    def launch(num_ctas: int, num_threads: int, params: bytes, early: bool) -> None:
        assert len(params) == params_bytes
        getattr(library, f"launch_{kernel}")(ctypes.c_uint(num_ctas), ctypes.c_uint(num_threads), params)

    return launch


def map_on_cpu(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> NDArray[np.uint64]:
    """A tensor map as hopper_on_cpu.h reads it."""
    padded = [*sizes, *[1] * (5 - len(sizes))], [*strides, *[0] * (5 - len(sizes))], [*box, *[1] * (5 - len(box))]
    return np.array([address, *itertools.chain(*padded), 0], np.uint64)


class EmulatedOperations(DeviceOperations):
    """`DeviceOperations` whose kernels run here. Products and attention are those of `PlainOperations`."""

    def __init__(self, buffers: Buffers, embedding: Any, cache: Any, folder: Path, *, weight_dtype: str, kv_dtype: str) -> None:
        twin = PlainOperations(buffers, embedding, cache)
        self.buffers, self.spec, self.layout = buffers, buffers.spec, buffers.layout
        header = prefill_header(self.layout, num_positions=buffers.keys.shape[1], weight_dtype=weight_dtype, kv_dtype=kv_dtype)
        library = ctypes.CDLL(str(compiled(folder, "prefill", header, _KERNELS, "KogPrefillParams")))
        self._bind(embedding, cache, {name: launcher(library, name, PREFILL_PARAMS.size_bytes) for name in _KERNELS})
        self._tiles = {}
        self.product, self.attend = twin.product, twin.attend  # type: ignore[method-assign]


class EmulatedDenseOperations(DenseDeviceOperations):
    """The same for models with one residual stream. Experts are the twin's, too."""

    def __init__(
        self, buffers: DenseBuffers, embedding: Any, cache: Any, folder: Path, *, weight_dtype: str, kv_dtype: str,
        of_layers: Sequence[PlainExperts] = (), states: Any = None,
    ) -> None:  # fmt: skip
        twin = PlainDenseOperations(buffers, embedding, cache, of_layers, states)
        self.tape = None
        self.buffers, self.spec, self.layout = buffers, buffers.spec, buffers.layout
        header = dense_header(self.layout, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
        library = ctypes.CDLL(str(compiled(folder, "dense", header, KERNELS, "KogDenseParams", "-Og")))
        self._bind(embedding, cache, {name: launcher(library, name, DENSE_PARAMS.size_bytes) for name in KERNELS})
        self.product, self.attend, self.mix = twin.product, twin.attend, twin.mix  # type: ignore[method-assign]
        gates = None
        if self.spec.mixed_layers:
            header = gates_header(self.spec, self.layout.num_lanes, buffers.delta)
            library = ctypes.CDLL(str(compiled(folder, "gates", header, GATES_KERNELS, "GatesParams", "-Og")))
            gates = {name: launcher(library, name, GATES_PARAMS.size_bytes) for name in GATES_KERNELS}
        self._bind_mixers(gates, None if buffers.delta is None else emulated_delta(buffers, states, folder))


def emulated_delta(buffers: DenseBuffers, states: Any, folder: Path) -> DeltaKernels:
    """delta.cu and rule.cu on a CPU."""
    assert buffers.delta is not None
    header = delta_header(buffers.delta, buffers.spec.norm_eps)
    launchers: dict[str, Any] = {}
    for stem, kernels in (("delta", DELTA_KERNELS), ("rule", RULE_KERNELS)):
        (folder / stem).mkdir()
        library = ctypes.CDLL(str(compiled(folder / stem, stem, header, kernels, "DeltaParams", "-Og")))
        launchers |= {name: launcher(library, name, DELTA_PREFILL_PARAMS.size_bytes) for name in kernels}
    return DeltaKernels(buffers, states, launchers)
