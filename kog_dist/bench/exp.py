"""Experiments: builds of the monokernel in turn, and places of words. python -m kog_dist.bench.exp PLAN.json OUT.json"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kog_dist.bench.rank_kernel import lane_digests, rank_kernel, rank_shape, results_of_ranks
from kog_dist.bench.report import percentile
from kog_dist.bench.shapes import SEED, named_spec

SEP = "|"


def parse(name: str) -> dict[str, Any]:
    """tweak options: a=1,b=(1;2),HUNGRY:10 -> dict"""
    options: dict[str, Any] = {}
    for part in filter(None, name.split(",")):
        if part.startswith("@"):
            continue
        if "=" in part:
            key, value = part.split("=")
            if key == "delays":
                options["poll_delays"] = tuple(int(v) for v in value.split(";"))
            else:
                options[key] = int(value)
        else:
            options["tweaks"] = (*options.get("tweaks", ()), part)
    return options


def program(name: str, shape: Any) -> Any:
    """The cubin; `@TREE` in the name: of the sources in the folder TREES/TREE."""
    from kog_dist.cuda import build as compiler
    from kog_dist.workers.cuda.build import PLAIN_SOURCE, device_sources

    sources = device_sources()
    trees = [part[1:] for part in name.split(",") if part.startswith("@")]
    if trees:
        sources = {f.name: f.read_text() for f in (Path(os.environ["TREES"]) / trees[0]).rglob("*.cu*") if f.suffix in (".cu", ".cuh")}
    return compiler.build({**sources, **shape.headers()}, PLAIN_SOURCE)


def spec_of(plan: dict[str, Any]) -> Any:
    """2b; or with `part` 2 a model of half of its lanes, which two ranks run as four run 2b."""
    spec = named_spec("2b")
    part = plan.get("part", 1)
    if part == 1:
        return spec

    class Part(type(spec)):  # type: ignore[misc]
        head_dim = 96

    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size", "num_lanes"):
        fields[name] //= part
    return Part(**fields)


def shapes_of(plan: dict[str, Any], ranks: int, rank: int = 0, world: int | None = None) -> dict[str, Any]:
    from kog_dist.workers.cuda.kernel_shape import KernelShape

    spec = spec_of(plan)
    lanes = spec.lanes_of_rank(rank, world or ranks)
    return {name: KernelShape(spec, lanes, num_ranks=ranks, **parse(name)) for name in plan["builds"]}


def body(context: Any) -> dict[str, Any]:
    import cupy

    from kog_dist.bench.latency import token_times_us
    from kog_dist.bench.scaling_run import long_run
    from kog_dist.cuda.driver import Kernel
    from kog_dist.workers.cuda.build import build
    from kog_dist.workers.cuda.device_weights import random_weights
    from kog_dist.workers.cuda.kernel_shape import SHARED_BYTES
    from kog_dist.workers.cuda.monokernel import KERNEL_NAME

    plan = json.loads(str(context.arguments["plan"]))
    cupy.cuda.Device(context.info.local_rank).use()
    world = context.info.world_size
    shapes = shapes_of(plan, world, context.info.rank)
    if plan.get("lanes"):
        from kog_dist.workers.cuda.kernel_shape import KernelShape

        shapes = {name: KernelShape(spec_of(plan), range(plan["lanes"]), **parse(name)) for name in plan["builds"]}
    names = list(shapes)
    base = shapes[names[0]]
    began = time.monotonic()
    weights = random_weights(base, SEED)
    found: dict[str, Any] = {"us": {}, "bits": {}, "long": {}, "host_s": []}
    with rank_kernel(context, base, weights) as kernel:
        kernels = {}
        for name, shape in shapes.items():
            if shape.num_words > base.num_words:
                raise ValueError(f"{name}: more words than the first build")
            kernels[name] = Kernel(program(name, shape).path, KERNEL_NAME, SHARED_BYTES)
        cupy.cuda.Device().synchronize()
        found["host_s"].append(time.monotonic() - began)

        def use(name: str) -> None:
            shape = shapes[name]
            kernel._kernel, kernel.shape = kernels[name], shape
            kernel.trace = cupy.zeros((base.num_ctas, 56, base.num_products), cupy.uint64) if shape.traced_step >= 0 else None
            kernel.kv.fill(0), kernel.words.fill(0)  # builds have their words in other places
            cupy.cuda.Device().synchronize()
            context.rendezvous.barrier(context.deadline)
            time.sleep(plan.get("pause_s", 0.04))

        first: dict[int, Any] = {}
        for rnd in range(plan["rounds"]):
            for at in plan["contexts"]:
                if at > 1000 and rnd >= plan.get("far_rounds", 3):
                    continue
                order = names if rnd % 2 == 0 else names[:1] + names[:0:-1]
                for name in order:
                    use(name)
                    times = token_times_us(kernel, at, plan["tokens"] if at < 3900 else 80)
                    found["us"].setdefault(name, {}).setdefault(str(at), []).append(percentile(times, 0.5))
                    digest = lane_digests(kernel)
                    first.setdefault(at, digest)
                    found["bits"][name] = found["bits"].get(name, True) and digest == first[at]
        for name in plan.get("long", ()):
            for _ in range(2):
                use(name)
                result = long_run(kernel, [64, 512])
                found["long"].setdefault(name, []).append(result["us"])
        for name, at in plan.get("traces", ()):
            import numpy as np

            from kog_dist.bench.latency import traced_token
            use(name)
            traced_token(kernel, at)
            traced_token(kernel, at)
            np.savez_compressed(f"{plan['out']}/trace-{name.replace(',', '_').replace('=', '').replace(':', '')}-{at}-{context.info.rank}.npz",
                                raw=kernel.trace.get(), products=np.array([(int(p.phase), p.layer, p.lane) for p in shapes[name].products]))
        if plan.get("places"):
            found["places"] = places(context, plan, kernel, use, base, names)
        use(names[0])
    found["host_s"].append(time.monotonic() - began)
    return found


def places(context: Any, plan: dict[str, Any], kernel: Any, use: Any, base: Any, names: list[str]) -> dict[str, Any]:
    """Each rank alone, with its words in several places; then all with the default, the best and the worst of each."""
    import cupy

    from kog_dist.bench.latency import token_times_us
    from kog_dist.cuda.driver import Kernel
    from kog_dist.workers.cuda.build import build
    from kog_dist.workers.cuda.kernel_shape import SHARED_BYTES
    from kog_dist.workers.cuda.monokernel import KERNEL_NAME

    name = plan["place_build"]
    use(name)
    shape = kernel.shape
    alone = replace(shape, num_ranks=1)
    solo, multi = Kernel(build(alone.headers()).path, KERNEL_NAME, SHARED_BYTES), kernel._kernel
    default_words = kernel.words
    size = max(alone.num_words, shape.num_words)
    arena = cupy.zeros((plan["places"] * (2 << 20) + 8 * size) // 8 + 1024, cupy.uint64)
    starts = [i * ((2 << 20) + 4096 * 17) // 8 // 16 * 16 for i in range(plan["places"])]
    starts = [s for s in starts if s + size <= len(arena)]
    times: list[list[float]] = [[] for _ in starts]
    default: list[float] = []

    def timed(words: Any, chosen: Any, shp: Any, together: bool) -> float:
        words.fill(0)
        kernel.kv.fill(0)
        kernel.words, kernel._kernel, kernel.shape = words, chosen, shp
        cupy.cuda.Device().synchronize()
        if together:
            context.rendezvous.barrier(context.deadline)
        time.sleep(0.02)
        return percentile(token_times_us(kernel, 64, 120), 0.5)

    for _ in range(plan.get("place_rounds", 3)):
        own = cupy.zeros(size, cupy.uint64) if not default else own  # noqa: F821
        default.append(timed(own, solo, alone, False))
        for i, start in enumerate(starts):
            times[i].append(timed(arena[start : start + size], solo, alone, False))
    context.rendezvous.barrier(context.deadline)
    medians = [percentile(t, 0.5) for t in times]
    best, worst = medians.index(min(medians)), medians.index(max(medians))
    out: dict[str, Any] = {"default": percentile(default, 0.5), "medians": medians, "best": best, "worst": worst, "together": {}}
    choices = {
        "default": default_words, "best": arena[starts[best] : starts[best] + shape.num_words],
        "worst": arena[starts[worst] : starts[worst] + shape.num_words],
    }  # fmt: skip
    for _ in range(4):
        for key, words in choices.items():
            out["together"].setdefault(key, []).append(timed(words, multi, shape, True))
    kernel.words, kernel._kernel = default_words, multi
    return out


def prebuild(plan: dict[str, Any], ranks: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from kog_dist.workers.cuda.build import build

    def one(item: tuple[str, Any]) -> None:
        name, shape = item
        log = program(name, shape).log
        spills = [line for line in log.splitlines() if "bytes spill" in line and "frame" in line and not " 0 bytes spill" in line]
        if spills:
            print("SPILLS", name, spills[0].strip(), flush=True)

    shapes = shapes_of(plan, ranks)
    if plan.get("lanes"):
        from kog_dist.workers.cuda.kernel_shape import KernelShape

        shapes = {name: KernelShape(spec_of(plan), range(plan["lanes"]), **parse(name)) for name in plan["builds"]}
    items = list(shapes.items())
    if plan.get("places"):
        items.append(("alone", replace(shapes[plan["place_build"]], num_ranks=1)))
    with ThreadPoolExecutor(min(48, os.cpu_count() or 1)) as pool:
        list(pool.map(one, items))


def main() -> None:
    plan_path, out_path, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    plan = json.loads(Path(plan_path).read_text())
    began = time.monotonic()
    prebuild(plan, ranks)
    print(f"built {len(plan['builds'])} in {time.monotonic() - began:.1f} s", flush=True)
    if len(sys.argv) > 4:
        return
    plan["out"] = str(Path(out_path).absolute().parent)
    results = results_of_ranks(ranks, "kog_dist.bench.exp:body", {"plan": json.dumps(plan)}, float(plan.get("deadline_s", 200)))
    Path(out_path).write_text(json.dumps(results))
    us, names = results[0]["us"], list(plan["builds"])
    rows = []
    for name in names:
        cells = []
        for at in map(str, plan["contexts"]):
            own, base = us[name][at], us[names[0]][at]
            cells.append((percentile(own, 0.5), percentile([a - b for a, b in zip(own, base)], 0.5), max(own) - min(own)))
        rows.append((name, cells, all(r["bits"][name] for r in results)))
    for name, cells, same in rows:
        text = "  ".join(f"{m:7.1f} {d:+6.1f} ({s:4.1f})" for m, d, s in cells)
        print(f"{text}  {'' if same else 'OTHER BITS '}{name or 'base'}")
    for name, runs in results[0]["long"].items():
        print("long", name or "base", [{k: (round(v, 1), round(1e6 / v)) for k, v in run.items()} for run in runs])
    if "places" in results[0]:
        for rank, r in enumerate(results):
            p = r["places"]
            print(f"rank {rank} alone: default {p['default']:.1f}, places {[round(m, 1) for m in p['medians']]}")
        print("together:", {k: [round(v, 1) for v in vs] for k, vs in results[0]["places"]["together"].items()})
    print("host_s", [[round(x, 1) for x in r["host_s"]] for r in results][:1], f"whole {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
