"""gate_up with SwiGLU in one kernel beside cuBLAS and swiglu, on one H200: right, then how fast, after a pause and in a row.

    cd REPOSITORY && PYTHONPATH=. timeout 60 python3 .scratch/gateup/run.py

Ends by itself after 40 s at most; a table last, all figures in $OUT/gateup.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

BEGIN_S = time.monotonic()
LIMIT_S, DEADLINE_S = 41.0, 35.0  # the process ends; nothing new is begun
HERE = Path(__file__).resolve().parent
OUT = Path(os.environ.get("OUT", str(HERE)))
FIGURES: dict = {"right": {}, "times": {}, "notes": []}


def table() -> None:
    """Print what there is, and keep it."""
    (OUT / "gateup.json").write_text(json.dumps(FIGURES, indent=1))
    print("\nright:")
    for name, what in FIGURES["right"].items():
        print(f"  {name:<28} {what}")
    for note in FIGURES["notes"]:
        print("note:", note)
    print("us per layer; clock and matrix units' share of cycles from the kernel itself in a row, NVML's clock and watts beside it")
    print(f"{'rows':>5} {'what':<30} {'pause':>8} {'in a row':>9} {'TFLOP/s':>8} {'MHz':>6} {'busy':>6} {'NVML MHz':>9} {'W':>5}")
    for key, found in FIGURES["times"].items():
        rows, name = key.split(" ", 1)
        pause, row = (statistics.median(found[mode]) if found.get(mode) else float("nan") for mode in ("pause", "row"))
        flops = 2 * int(rows) * 8 * 3072 * 3072
        last = {mode: found[mode][-1] if found.get(mode) else float("nan") for mode in ("mhz", "busy", "nvml_mhz", "watts")}
        print(
            f"{rows:>5} {name:<30} {pause:8.1f} {row:9.1f} {flops / row / 1e6:8.0f} {last['mhz']:6.0f} {last['busy']:6.3f}"
            f" {last['nvml_mhz']:9.0f} {last['watts']:5.0f}"
        )
    print(f"{time.monotonic() - BEGIN_S:.1f} s in all", flush=True)


def give_up() -> None:
    """Whatever hangs: the table, and out."""
    print("TIME IS UP", flush=True)
    try:
        table()
    finally:
        os._exit(3)


timer = threading.Timer(LIMIT_S, give_up)
timer.daemon = True
timer.start()

import ctypes  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

sys.path[:0] = [str(HERE), os.getcwd()]
from kog_dist.cuda import driver  # noqa: E402
from kog_dist.cuda.driver import Kernel, tensor_map  # noqa: E402
from kog_dist.workers.prefill.prefill_abi import PREFILL_PARAMS, threads_for  # noqa: E402
from kog_dist.workers.prefill.products import Products  # noqa: E402
from maps import PARAMS, matrix_map, order, x_map  # noqa: E402
from variants import FFN, HIDDEN, LANES, VARIANTS, Variant, build  # noqa: E402

LAUNCHES, PAUSE_S, ROW_S = 14, 0.12, 0.3


def in_time() -> bool:
    """Whether something more may be begun."""
    return time.monotonic() - BEGIN_S < DEADLINE_S


def clusters_at_once(kernel: Kernel, variant: Variant, num_sms: int) -> int:
    """How many clusters fit on the card."""
    if variant.cluster == 1:
        return num_sms
    attribute = (driver._LaunchAttribute * 1)(driver._LaunchAttribute(4, 0, (variant.cluster, 1, 1)))
    config = driver._LaunchConfig(variant.cluster, 1, 1, 384, 1, 1, variant.shared_bytes, None, attribute, 1)
    count = ctypes.c_int()
    code = driver._driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), kernel._function, ctypes.byref(config))
    if code or count.value <= 0:
        FIGURES["notes"].append(f"{variant.name}: cuOccupancyMaxActiveClusters gave {code}, {count.value}")
        return num_sms // variant.cluster
    return min(count.value, num_sms // variant.cluster)


class Ours:
    """A variant, bound to weights."""

    def __init__(self, variant: Variant, matrices: list[torch.Tensor], *, is_rearranged: bool = False, group: int = 0, reverse: int = 1, clusters: int = 1000) -> None:
        if not variant.cubin.exists():
            build(variant)
        self.variant, self.matrices, self.is_rearranged, self.group, self.reverse = variant, matrices, is_rearranged, group, reverse
        self.kernel = Kernel(variant.cubin, "gate_up", variant.shared_bytes)
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.clusters = min(clusters, clusters_at_once(self.kernel, variant, num_sms))
        self.diagnosis = torch.zeros(num_sms + 4, 2, dtype=torch.int64, device="cuda")

    def __call__(self, x: torch.Tensor, inverse_rms: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        variant, rows = self.variant, x.shape[1]
        down = rows // (variant.tile_rows * variant.cluster_rows)
        params = np.zeros((), PARAMS)
        params["x"] = tensor_map(*x_map(x.data_ptr(), LANES, rows, HIDDEN, variant.tile_rows // variant.cluster_columns))
        matrix = self.matrices[turn % len(self.matrices)]
        params["matrix"] = tensor_map(*matrix_map(matrix.data_ptr(), LANES, FFN, HIDDEN, is_rearranged=self.is_rearranged))
        params["inverse_rms"], params["out"] = inverse_rms.data_ptr(), out.data_ptr()
        params["diagnosis"] = self.diagnosis.data_ptr()
        params["rows"], params["group"], params["is_reversed"] = rows, self.group or down, self.reverse
        params["num_tiles"] = LANES * down * (FFN // (128 * variant.cluster_columns))
        num_ctas = min(self.clusters, int(params["num_tiles"])) * variant.cluster
        self.kernel.launch_grid(num_ctas, 384, params.tobytes(), torch.cuda.current_stream().cuda_stream)

    def seen(self, rows: int) -> dict[str, float]:
        """Of the last launch: the clock, and what of the longest thread block's cycles the matrix units were busy."""
        cycles, ns = (max(1, value) for value in self.diagnosis.max(0).values.tolist())
        variant = self.variant
        tiles = LANES * (rows // (variant.tile_rows * variant.cluster_rows)) * (FFN // (128 * variant.cluster_columns))
        of_each = -(-tiles // self.clusters)
        return {"mhz": cycles / ns * 1e3, "busy": of_each * variant.tile_rows * 256 * HIDDEN * 2 / 4096 / cycles}


class Theirs:
    """cuBLAS, with the project's choice of algorithms, and swiglu."""

    def __init__(self, matrices: list[torch.Tensor], products: object, *, with_swiglu: bool = True) -> None:
        self.matrices, self.with_swiglu, self.products = matrices, with_swiglu, products
        self.swiglu = Kernel(HERE / "prefill.cubin", "swiglu", 0)
        self.gate_up = torch.empty(LANES * 2048 * 2 * FFN, dtype=torch.float16, device="cuda")

    def __call__(self, x: torch.Tensor, inverse_rms: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        rows = x.shape[1]
        gate_up = self.gate_up[: LANES * rows * 2 * FFN].view(LANES, rows, 2 * FFN)
        if self.products is not None:
            self.products(x, self.matrices[turn % len(self.matrices)], gate_up)
        if not self.with_swiglu:
            return
        params = np.zeros((), PREFILL_PARAMS.dtype)
        params["size"] = rows
        params["inverse_rms_ptr"], params["gate_up_ptr"], params["activation_ptr"] = inverse_rms.data_ptr(), gate_up.data_ptr(), out.data_ptr()
        self.swiglu.launch_grid(rows * LANES, threads_for(FFN // 8), params.tobytes(), torch.cuda.current_stream().cuda_stream)


class WithDown:
    """The next product behind it, cuBLAS's: what it finds in the L2 cache matters."""

    def __init__(self, run: object, products: object, matrices: list[torch.Tensor]) -> None:
        self.run, self.products, self.matrices = run, products, matrices
        self.partial = torch.empty(LANES, 2048, HIDDEN, dtype=torch.float16, device="cuda")

    def __call__(self, x: torch.Tensor, inverse_rms: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        self.run(x, inverse_rms, out, turn)
        self.products(out, self.matrices[turn % len(self.matrices)], self.partial)


def nvml() -> object:
    """Clock and power of the card now: a function, or one that knows nothing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return lambda: (pynvml.nvmlDeviceGetClockInfo(handle, 1), pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
    except Exception as error:  # the figures do without
        FIGURES["notes"].append(f"NVML: {error}")
        return lambda: (float("nan"), float("nan"))


def captured(run, *arguments) -> torch.cuda.CUDAGraph:
    """A graph of LAUNCHES launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*arguments, 0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for turn in range(LAUNCHES):
                run(*arguments, turn)
    torch.cuda.synchronize()
    return graph


def events(count: int) -> list[torch.cuda.Event]:
    """Timing events."""
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def after_pause(graph) -> float:
    """us per launch of one replay behind a pause."""
    time.sleep(PAUSE_S)
    begin, end = events(2)
    torch.cuda._sleep(300_000)  # until the graph has been queued
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / LAUNCHES


def in_a_row(graph, read, guess_us: float) -> tuple[float, float, float]:
    """us per launch of the last two thirds of ROW_S; clock and watts near the end."""
    count = max(6, int(ROW_S * 1e6 / (guess_us * LAUNCHES)))
    begin, end = events(2)
    time.sleep(0.05)
    for i in range(count):
        if i == count // 3:
            begin.record()
        graph.replay()
    end.record()
    time.sleep(ROW_S * 0.8)
    clock, watts = read()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / LAUNCHES / (count - count // 3), clock, watts


def main() -> None:
    torch.cuda.set_stream(torch.cuda.Stream())  # graphs cannot be captured on the default one
    """All of it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(LANES, 2048, HIDDEN, device="cuda", generator=generator)
    x = (x * (1 + 0.5 * torch.rand(LANES, 1, HIDDEN, device="cuda", generator=generator))).half()
    matrices = [
        (torch.randn(LANES, 2 * FFN, HIDDEN, device="cuda", generator=generator) * 0.02).bfloat16().half() for _ in range(2)
    ]
    turned = [matrix[:, torch.as_tensor(order(FFN), device="cuda")].contiguous() for matrix in matrices]
    inverse_rms = torch.rsqrt(x.float().square().mean(-1) + 1e-5).contiguous()
    out = torch.empty(LANES, 2048, FFN, dtype=torch.float16, device="cuda")
    FIGURES["notes"].append(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")

    gate, up = ((x[3].float() @ matrices[0][3].float().T) * inverse_rms[3][:, None]).double().chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    products = Products()
    theirs = Theirs(matrices, products)
    runs: dict = {"cublas + swiglu": theirs}
    theirs(x, inverse_rms, out, 0)
    torch.cuda.synchronize()
    plain = out.clone()
    FIGURES["right"]["cublas + swiglu"] = f"error {float((out[3].double() - wanted).norm() / wanted.norm()):.2e}"
    first: list[torch.Tensor] = []
    held: list = []  # graphs have their addresses
    graphs: dict = {}
    read = nvml()

    def check(variant: Variant, **options: object) -> None:
        name = " ".join([variant.name, *(f"{option}={value}" for option, value in options.items())])
        if len(sys.argv) > 1 and variant.name not in sys.argv[1:]:
            return
        try:
            ours = Ours(variant, turned if options.get("is_rearranged") else matrices, **options)
        except Exception as error:
            FIGURES["right"][name] = f"FAILED: {error}"
            return
        out.fill_(float("nan"))
        FIGURES["right"][name] = "did not end"
        ours(x, inverse_rms, out, 0)
        torch.cuda.synchronize()
        if variant.form == 3:
            FIGURES["right"][name] = "stores nothing"
            runs[name] = ours
            return
        error = float((out[3].double() - wanted).norm() / wanted.norm())
        apart = float((out.float() - plain.float()).norm() / plain.float().norm())
        same = float((out == plain).float().mean())
        text = f"error {error:.2e}, from cublas {apart:.1e} ({100 * same:.4f} % same), {ours.clusters} clusters of {variant.cluster}"
        if not first:
            first.append(out.clone())
        text += ", bits of the first" if torch.equal(out, first[0]) else ", OTHER BITS"
        for from_row, rows in ((512, 1024), (1280, 512), (256, 256)) if not options else ():
            if rows % (variant.tile_rows * variant.cluster_rows):
                continue
            part, scales = x[:, from_row : from_row + rows].contiguous(), inverse_rms[:, from_row : from_row + rows].contiguous()
            less = torch.full((LANES, rows, FFN), float("nan"), dtype=torch.float16, device="cuda")
            ours(part, scales, less, 0)
            torch.cuda.synchronize()
            if not torch.equal(less, out[:, from_row : from_row + rows]):
                text += f", ROWS OF {rows} DIFFER"
        FIGURES["right"][name] = text if error < 1e-3 else f"WRONG: {text}"
        if error < 1e-3:
            runs[name] = ours

    def measure(rows: int, names: list[str], pauses: int) -> None:
        part, scales = x[:, :rows].contiguous(), inverse_rms[:, :rows].contiguous()
        activations = out.view(-1)[: LANES * rows * FFN].view(LANES, rows, FFN)
        held.append((part, scales))
        for name in names:
            if name not in runs or not in_time():
                continue
            key = f"{rows} {name}"
            if key not in graphs:
                graphs[key] = captured(runs[name], part, scales, activations)
                FIGURES["times"][key] = {mode: [] for mode in ("pause", "row", "mhz", "busy", "nvml_mhz", "watts")}
            found = FIGURES["times"][key]
            found["pause"] += [after_pause(graphs[key]) for _ in range(pauses)]
            us, clock, watts = in_a_row(graphs[key], read, found["pause"][-1])
            found["row"].append(us), found["nvml_mhz"].append(clock), found["watts"].append(watts)
            if isinstance(runs[name], Ours):
                for what, value in runs[name].seen(rows).items():
                    found[what].append(value)
        print(f"{rows} rows after {time.monotonic() - BEGIN_S:.1f} s", flush=True)

    by_name = {variant.name: variant for variant in VARIANTS}
    begun = ["c2 beside", "c2 behind", "c1 beside"]
    for name in begun:
        check(by_name[name])
    check(VARIANTS[0], reverse=0)
    runs["cublas"], runs["swiglu"] = Theirs(matrices, products, with_swiglu=False), Theirs(matrices, None)
    downs = [(torch.randn(LANES, HIDDEN, FFN, device="cuda", generator=generator) * 0.02).bfloat16().half() for _ in range(2)]
    for name in ("cublas + swiglu", "c2 beside", "c2 beside reverse=0"):
        if name in runs:
            runs[f"{name}, + down"] = WithDown(runs[name], products, downs)
    runs.pop("c2 beside reverse=0", None)
    print(f"the first are right after {time.monotonic() - BEGIN_S:.1f} s", flush=True)
    measure(2048, list(runs), 2)
    few = ["cublas + swiglu", "c2 beside", "c2 behind"]
    measure(1024, few[:2], 2), measure(512, few[:2], 2), measure(256, few[:2], 2)
    for variant in VARIANTS:
        if variant.name not in begun:
            check(variant)
    for options in ({"is_rearranged": True}, {"group": 1}, {"group": 4}, {"clusters": 64}):
        check(VARIANTS[0], **options)
    print(f"all checked after {time.monotonic() - BEGIN_S:.1f} s", flush=True)
    measure(2048, [name for name in runs if f"2048 {name}" not in graphs], 2)
    keys = ["cublas + swiglu", "c2 beside", "c2 behind", "cublas + swiglu, + down", "c2 beside, + down"]
    measure(2048, keys + [name for name in list(runs)[::-1] if name not in keys], 2)


try:
    main()
except BaseException as error:
    FIGURES["notes"].append(f"ended by {type(error).__name__}: {error}")
    raise
finally:
    table()
    sys.stdout.flush()
    timer.cancel()
