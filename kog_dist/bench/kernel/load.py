"""`kog-bench load`: time from a checkpoint in the page cache to weights packed on the GPU, with and without verification."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from kog_dist.bench.fakes.published_gpt_oss import folder_bytes, write_gpt_oss
from kog_dist.bench.kernel.gpu import gpu_name
from kog_dist.bench.report import finish, machine, percentile
from kog_dist.bench.shapes import MOE, model_folder, named_spec, random_checkpoint
from kog_dist.foreign_file import opened
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.formats.quantisation import read_quantisation
from kog_dist.workers.cuda.coded_source import codings_of
from kog_dist.workers.cuda.kernel_shape import KernelShape


def run(model: str | None, spec_name: str, folder: str | None, repeats: int) -> None:
    """Measure and print the report; its last line is one JSON object."""
    configuration = {"model": model or f"{spec_name}, random weights", "repeats": repeats, "gpu": gpu_name()}
    before = machine()
    figures: dict[str, Any] = {"context_s": _timed(_make_context)}
    begin_s = time.monotonic()
    made = nullcontext(Path(model)) if model else _written(spec_name, Path(folder) if folder else None)
    with made as path:
        if model is None:
            figures["write_s"] = round(time.monotonic() - begin_s, 3)
        checkpoint = open_checkpoint(path, context=0 if model else named_spec(spec_name).max_context)
        figures |= {"checkpoint_bytes": checkpoint.num_bytes, "read_s": _timed(lambda: _read(checkpoint))}
        figures["host_rss_before_mb"] = _peak_rss_mb()
        print(f"{checkpoint.num_bytes / 1e9:.3f} GB in {path}, read in {figures['read_s']:.2f} s", flush=True)
        figures["loads"] = [_measure(name, variant, repeats) for name, variant in _variants(checkpoint).items()]
        figures["host_rss_after_mb"] = _peak_rss_mb()
        figures["kernel_s"] = _timed(lambda: _make_kernel(checkpoint))
        print(f"from the checkpoint to a kernel that has decoded a token: {figures['kernel_s']:.2f} s", flush=True)
    finish("load", configuration, before, figures)


@contextmanager
def _written(spec_name: str, parent: Path | None) -> Iterator[Path]:
    """A checkpoint of random weights, removed at the end: gpt-oss as published, others in the engine's 16 bit."""
    base = spec_name.partition("@")[0]
    if read_quantisation(MOE.get(base, {})) is None:
        with random_checkpoint(named_spec(spec_name), parent) as folder:
            yield folder
        return
    with model_folder(named_spec(spec_name), parent, num_bytes=folder_bytes(MOE[base])) as folder:
        write_gpt_oss(folder, MOE[base])
        yield folder


def _variants(checkpoint: Checkpoint) -> dict[str, Checkpoint]:
    """The same checkpoint, verified more and more."""
    variants = {"not verified": replace(checkpoint, verify=False), "finite values": replace(checkpoint, manifest=None)}
    if checkpoint.manifest is not None:
        variants["finite values and SHA-256"] = checkpoint
    return variants


def _measure(name: str, checkpoint: Checkpoint, repeats: int) -> dict[str, object]:
    times_s, peak = [], 0
    for _ in range(repeats):
        seconds, peak = _load(checkpoint)
        times_s.append(seconds)
    median = percentile(times_s, 0.5)
    print(
        f"{name}: {median:.3f} s ({checkpoint.num_bytes / median / 1e9:.1f} GB/s), first {times_s[0]:.3f} s, "
        f"at most {peak / 1e9:.2f} GB on the GPU",
        flush=True,
    )
    return {"verification": name, "load_s": round(median, 4), "times_s": times_s, "peak_gpu_bytes": peak}


def _load(checkpoint: Checkpoint) -> tuple[float, int]:
    """Seconds of one load, and GPU memory that the pool took for it (it gives nothing back before the end)."""
    import cupy

    from kog_dist.workers.cuda.load import load_weights

    class Taken(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name, num_bytes = "taken", 0

        def alloc_postprocess(self, **allocation: Any) -> None:
            self.num_bytes += allocation["mem_size"]

    cupy.get_default_memory_pool().free_all_blocks()
    with Taken() as taken:
        begin_s = time.monotonic()
        load_weights(_shape(checkpoint), checkpoint)
        cupy.cuda.Device().synchronize()
        return time.monotonic() - begin_s, taken.num_bytes


def _make_kernel(checkpoint: Checkpoint) -> None:
    """What a worker does at its start, the trial token included; the cubin may come from the cache."""
    from kog_dist.workers.cuda.load import load_weights
    from kog_dist.workers.cuda.monokernel import Monokernel

    shape = _shape(checkpoint)
    Monokernel(shape, load_weights(shape, checkpoint)).generate([0], 1)


def _shape(checkpoint: Checkpoint) -> KernelShape:
    lanes = range(checkpoint.spec.num_lanes)
    codings = codings_of(checkpoint)
    return KernelShape(checkpoint.spec, lanes, weight_dtype=checkpoint.dtype, kv_dtype=checkpoint.dtype, **codings)


def _make_context() -> None:
    import cupy

    cupy.zeros(1)
    cupy.cuda.Device().synchronize()


def _read(checkpoint: Checkpoint) -> None:
    """Bring the files into the page cache."""
    buffer = bytearray(2**24)
    for file in checkpoint.files:
        with opened(file.path) as stream:
            while stream.readinto(buffer):
                pass


def _timed(work: Any) -> float:
    begin_s = time.monotonic()
    work()
    return round(time.monotonic() - begin_s, 3)


def _peak_rss_mb() -> float:
    """Largest resident memory of this process so far."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
