"""The fused kernels of prefill on a CPU: compiled by g++ with `cuda_on_cpu.h` in the place of CUDA."""

from __future__ import annotations

import ctypes
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from kog_dist.cuda import build as compiler
from kog_dist.workers.prefill.buffers import Buffers
from kog_dist.workers.prefill.device_operations import _KERNELS, DeviceOperations
from kog_dist.workers.prefill.operations import TorchOperations
from kog_dist.workers.prefill.prefill_abi import PREFILL_PARAMS, prefill_header

LAUNCH = """
extern "C" void launch_{name}(unsigned num_ctas, unsigned num_threads, const void* params) {{
    kog::launch<KogPrefillParams>({name}, num_ctas, num_threads, params);
}}
"""


def compiled(folder: Path, header: str) -> ctypes.CDLL:
    """prefill.cu with this `prefill_shape.cuh` as a library of functions `launch_NAME`."""
    source = compiler.read_sources(("kog_dist.workers", "prefill"))["prefill.cu"]
    (folder / "ptx.cuh").write_text((Path(__file__).parent / "cuda_on_cpu.h").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "prefill_shape.cuh").write_text(header, encoding="utf-8")
    text = source + "".join(LAUNCH.format(name=name) for name in _KERNELS)
    (folder / "prefill.cpp").write_text(text, encoding="utf-8")
    library = folder / "prefill.so"
    # Products are not fused into sums: the twin's arithmetic.
    command = ["g++", "-std=c++20", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fPIC", "-shared", "-pthread"]
    done = subprocess.run(
        [*command, "-I", str(folder), "-o", str(library), str(folder / "prefill.cpp")],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class EmulatedOperations(DeviceOperations):
    """`DeviceOperations` whose kernels run here. Products and attention are those of `TorchOperations`."""

    def __init__(self, buffers: Buffers, embedding: Any, cache: Any, folder: Path, *, weight_dtype: str, kv_dtype: str) -> None:
        twin = TorchOperations(buffers, embedding, cache)
        self.buffers, self.spec, self.layout = buffers, buffers.spec, buffers.layout
        header = prefill_header(self.layout, num_positions=buffers.keys.shape[1], weight_dtype=weight_dtype, kv_dtype=kv_dtype)
        library = compiled(folder, header)
        self._bind(embedding, cache, {name: partial(_launch, getattr(library, f"launch_{name}")) for name in _KERNELS})
        self.product, self.attend = twin.product, twin.attend  # type: ignore[method-assign]


def _launch(function: Any, num_ctas: int, num_threads: int, params: bytes, _priority: int) -> None:
    assert len(params) == PREFILL_PARAMS.size_bytes
    function(ctypes.c_uint(num_ctas), ctypes.c_uint(num_threads), params)
