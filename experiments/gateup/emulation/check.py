"""gateup.cu compiled by g++: values, the same bits from all variants, in blocks of all sizes, from weights as they are and rearranged."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from maps import PARAMS, matrix_map, rearranged, x_map  # noqa: E402
from variants import VARIANTS, Variant  # noqa: E402

HIDDEN, FFN, LANES = 512, 512, 2
LAUNCH = """
extern "C" void launch(unsigned num_ctas, const void* raw) {
    using namespace kog;
    GateUpParams params;
    std::memcpy(&params, raw, sizeof(params));
    num_ranks = kCluster;
    for (unsigned first = 0; first < num_ctas; first += kCluster) {
        cluster_barrier = std::make_unique<std::barrier<>>(kThreads * kCluster);
        std::memset(memory, 0x7e, sizeof(memory)), std::memset(named, 0, sizeof(named));
        std::vector<std::thread> threads;
        for (unsigned rank = 0; rank < kCluster; ++rank) {
            block_barriers[rank] = std::make_unique<std::barrier<>>(kThreads);
            for (unsigned i = 0; i < kThreads / 32; ++i) warp_barriers[rank][i] = std::make_unique<std::barrier<>>(32);
        }
        for (unsigned rank = 0; rank < kCluster; ++rank) {
            for (unsigned i = 0; i < kThreads; ++i)
                threads.emplace_back([=, &params] {
                    threadIdx.x = i, blockIdx.x = first + rank, gridDim.x = num_ctas, my_rank = rank;
                    gate_up(params);
                });
        }
        for (std::thread& thread : threads) thread.join();
    }
}
"""


def library(variant: Variant):
    folder = HERE.parent / "build" / ("cpu " + variant.name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gateup_shape.cuh").write_text(variant.header(HIDDEN, FFN))
    (folder / "gateup_hopper.cuh").write_text((HERE / "gateup_hopper.cuh").read_text())
    (folder / "gateup.cpp").write_text((HERE.parent / "src" / "gateup.cu").read_text() + LAUNCH)
    command = ["g++", "-std=c++20", "-O2", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique", "-w", "-Wno-psabi", "-fPIC", "-shared", "-pthread"]
    subprocess.run([*command, "-I", str(folder), "-o", str(folder / "gateup.so"), str(folder / "gateup.cpp")], check=True)
    return ctypes.CDLL(str(folder / "gateup.so"))


def cpu_map(address, sizes, strides, box):
    n = 5 - len(sizes)
    return np.array([address, *sizes, *[1] * n, *strides, *[0] * n, *box, *[1] * n, 0], np.uint64)


def run(lib, variant, x, w, scales, *, is_rearranged, group, reverse, clusters):
    lanes, rows, _ = x.shape
    out = np.full((lanes, rows, FFN), np.nan, np.float16)
    params = np.zeros((), PARAMS)
    params["x"] = cpu_map(*x_map(x.ctypes.data, lanes, rows, HIDDEN, variant.tile_rows // variant.cluster_columns))
    params["matrix"] = cpu_map(*matrix_map(w.ctypes.data, lanes, FFN, HIDDEN, is_rearranged=is_rearranged))
    params["inverse_rms"], params["out"] = scales.ctypes.data, out.ctypes.data
    params["rows"], params["group"], params["is_reversed"] = rows, group, reverse
    params["num_tiles"] = lanes * (rows // (variant.tile_rows * variant.cluster_rows)) * (FFN // (128 * variant.cluster_columns))
    lib.launch(ctypes.c_uint(clusters * variant.cluster), params.tobytes())
    return out


rng = np.random.default_rng(1)
ROWS = 512
x = rng.normal(size=(LANES, ROWS, HIDDEN)).astype(np.float16)
w = (rng.normal(size=(LANES, 2 * FFN, HIDDEN)) * 0.05).astype(np.float16)
scales = (1 + 0.2 * rng.random((LANES, ROWS))).astype(np.float32)
gate_up = (x.astype(np.float32) @ w.astype(np.float32).transpose(0, 2, 1)).astype(np.float16).astype(np.float64) * scales[..., None]
gate, up = gate_up[..., :FFN], gate_up[..., FFN:]
wanted = gate / (1 + np.exp(-gate)) * up
first = None
for variant in VARIANTS:
    if len(sys.argv) > 1 and variant.name not in sys.argv[1:]:
        continue
    lib = library(variant)
    down = ROWS // (variant.tile_rows * variant.cluster_rows)
    found = run(lib, variant, x, w, scales, is_rearranged=False, group=down, reverse=1, clusters=3)
    if variant.form == 3:
        print(f"{variant.name}: ran, {np.isfinite(found).sum()} values stored")
        continue
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < 1e-3, (variant.name, error)
    first = found if first is None else first
    assert np.array_equal(found, first), variant.name
    again = run(lib, variant, x, rearranged(w), scales, is_rearranged=True, group=1, reverse=0, clusters=1)
    assert np.array_equal(again, first), (variant.name, "rearranged")
    if 256 % (variant.tile_rows * variant.cluster_rows):
        print(f"{variant.name}: error {error:.1e}, bits as the first variant's, rearranged")
        continue
    part = np.ascontiguousarray(x[:, 128:384])
    fewer = run(lib, variant, part, w, np.ascontiguousarray(scales[:, 128:384]), is_rearranged=False, group=1, reverse=1, clusters=5)
    assert np.array_equal(fewer, first[:, 128:384]), (variant.name, "rows elsewhere")
    print(f"{variant.name}: error {error:.1e}, bits as the first variant's, rearranged, in other blocks")
