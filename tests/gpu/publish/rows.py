"""What `python -m tests.gpu.run --publish` measures: rows of the tables, the most telling first, for one, two or four GPUs.

A row has a name and a number of GPUs: `decode_llama-3.1-8b` on two has figures of two and of one card of one host. Times are
those of logs in docs/results (2B on four GPUs 33 to 36 s, other shapes 15, whole requests 38 to 50), or guessed where a number of
GPUs has not been measured with that row.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tests.gpu.steps import Step

NUMBERS = (1, 2, 4)  # of GPUs
# Shapes by the names that kog-bench and pages have for them; the first are README's.
SHAPES: Mapping[str, str] = {
    "llama-3.2-1b": "Llama-3.2-1B",
    "qwen3-4b": "Qwen3-4B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-8b": "Qwen3-8B",
    "gpt-oss-120b": "gpt-oss-120b, MXFP4",
    "qwen3-0.6b": "Qwen3-0.6B",
    "llama-3.1-8b+fp8": "Llama-3.1-8B, FP8 blocks",
    "llama-3.1-8b+fp8-rows": "Llama-3.1-8B, FP8 rows",
    "llama-3.1-8b+int4": "Llama-3.1-8B, INT4",
    "qwen3-4b+fp8": "Qwen3-4B, FP8 blocks",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "gpt-oss-20b": "gpt-oss-20b, MXFP4",
}
CONTEXTS = (512, 8000)
KV_FORMATS = ("bfloat16", "fp8", "int4")
LONG_CONTEXTS = (8000, 32000, 64000, 65536, 128000)
PROMPTS = (128, 512, 2048, 4000)
_TOKENS = 9216  # the caches of shapes have room for
_LARGE = {"gpt-oss-120b": 12.0, "qwen3-30b-a3b": 8.0}  # seconds more, to draw their weights
_ONE_RANK = {"qwen3-0.6b"}  # measured on one GPU alone
_DECODE_S, _DECODE_2B_S = {1: 8.0, 2: 12.0, 4: 15.0}, {1: 15.0, 2: 25.0, 4: 36.0}
_REQUESTS_S, _LOST_S, _ENDURANCE_S = {1: 50.0, 2: 46.0, 4: 38.0}, {2: 40.0, 4: 55.0}, {1: 125.0, 2: 75.0, 4: 40.0}
_CALL_S = 540.0  # a call of ten minutes has room for, with a margin
_PROGRAM_S, _CORES_PER_GPU = 20.0, 16  # core-seconds to build a device program


@dataclass(frozen=True)
class PublishedRow:
    """A benchmark that is measured for the tables."""

    name: str
    gpus: int
    step: Step

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.gpus

    @property
    def num_programs(self) -> int:
        """About: of a kernel alone two for each number of GPUs, with prefill nine."""
        groups = [(name, len(numbers.split(","))) for name, _, numbers in (group.partition(":") for group in self.step.builds)]
        return sum(count * (2 if name == "benchmarks" or name.startswith("kernel.") else 9) for name, count in groups)


def rows_on(num_gpus: int) -> list[PublishedRow]:
    """All rows that are measured with so many GPUs in the machine: 1, 2 or 4."""
    gpus = next(number for number in reversed(NUMBERS) if number <= num_gpus)
    several = [number for number in reversed(NUMBERS) if 1 < number <= gpus]
    shapes = [name for name in SHAPES if name not in _ONE_RANK]
    rows = [_decode_2b(gpus), *(_decode(name, gpus) for name in shapes)]
    rows += [_decode(name, 1) for name in SHAPES if name in _ONE_RANK]
    rows += [_requests(number) for number in (*several, 1)]
    rows += [_lanes(), _sampling(), *(_long(name) for name in KV_FORMATS)]
    rows += [_endurance(number) for number in several[:1]]
    rows += [_collectives(number) for number in several[:1]]
    rows += [_lost(number) for number in several[:1]]
    return [*rows, _prompts("gpt-oss-120b"), *([] if several else [_endurance(1)])]


def rows_left(num_gpus: int, done: Collection[tuple[str, int]]) -> list[PublishedRow]:
    return [row for row in rows_on(num_gpus) if row.key not in done]


def build_s(rows: Sequence[PublishedRow], cores: int) -> float:
    """Seconds to build the device programs of these rows, none of which is there: each machine begins bare."""
    return sum(row.num_programs for row in rows) * _PROGRAM_S / cores


def calls_of(rows: Sequence[PublishedRow], cores: int, call_s: float = _CALL_S) -> list[list[PublishedRow]]:
    """The rows of each call: as many as it has time for, with their programs."""
    calls, current = list[list[PublishedRow]](), list[PublishedRow]()
    for row in rows:
        if current and seconds_of([*current, row], cores) > call_s:
            calls.append(current)
            current = []
        current.append(row)
    return [*calls, current] if current else calls


def seconds_of(rows: Sequence[PublishedRow], cores: int) -> float:
    return build_s(rows, cores) + sum(row.step.about_s for row in rows)


def plan_lines(num_gpus: int, done: Collection[tuple[str, int]], cores: int | None = None, call_s: float = _CALL_S) -> list[str]:
    """What `--dry-run` prints."""
    cores = cores or _CORES_PER_GPU * num_gpus
    lines = [f"{'row':<30} GPUs  about s"]
    lines += [f"{name:<30} {gpus:>4}    there" for name, gpus in sorted(done)]
    calls = calls_of(rows_left(num_gpus, done), cores, call_s)
    for number, rows in enumerate(calls, 1):
        lines += [f"{row.name:<30} {row.gpus:>4} {row.step.about_s:>8.0f}  {row.step}" for row in rows]
        total = seconds_of(rows, cores)
        built = build_s(rows, cores)
        lines.append(f"== call {number}: {len(rows)} rows, about {total:.0f} s, {built:.0f} of them to build programs")
    total = sum(seconds_of(rows, cores) for rows in calls)
    return [*lines, f"about {total:.0f} s in {len(calls)} calls of at most {call_s:.0f} s, on {num_gpus} GPUs and {cores} cores"]


def _bench(name: str, gpus: int, about_s: float, arguments: str, builds: str = "") -> PublishedRow:
    command = (sys.executable, "-m", "kog_dist.bench.cli", *arguments.split())
    return PublishedRow(name, gpus, Step(gpus, about_s, _limit_s(about_s), command, r"^[^{]", builds=tuple(builds.split())))


def _limit_s(about_s: float) -> float:
    return 2 * about_s + 45


def _counts(gpus: int) -> str:
    return ",".join(str(number) for number in reversed(NUMBERS) if number <= gpus)


def _decode_2b(gpus: int) -> PublishedRow:
    more = "--long-run --yardstick --memory-alone --repeats 50"
    arguments = f"scaling --gpus {_counts(gpus)} --contexts 64,512,4000 {more}"
    return _bench("decode_2b", gpus, _DECODE_2B_S[gpus], arguments, f"benchmarks:{_counts(gpus)}")


def _decode(name: str, gpus: int) -> PublishedRow:
    contexts = ",".join(map(str, CONTEXTS))
    arguments = f"scaling --gpus {_counts(gpus)} --spec {name}@{_TOKENS} --contexts {contexts} --repeats 5 --memory-alone"
    about_s = _DECODE_S[gpus] + _LARGE.get(name, 0.0)
    return _bench(f"decode_{name}", gpus, about_s, arguments, f"kernel.{name}@{_TOKENS}:{_counts(gpus)}")


def _requests(gpus: int) -> PublishedRow:
    prompts = ",".join(map(str, PROMPTS))
    arguments = f"requests --gpus {gpus} --prefill on --spec 2b --prompts {prompts} --kept 3900"
    return _bench("requests", gpus, _REQUESTS_S[gpus], arguments, f"2b:{gpus}")


def _lanes() -> PublishedRow:
    return _bench("lanes_2b", 1, 40, "latency --random --lanes 8,4,2,1", "benchmarks:1")


def _sampling() -> PublishedRow:
    kinds = "greedy,temperature,penalties,top-p,top-p-logprobs,top-k-top-p,mask"
    return _bench("sampling", 1, 40, f"latency --random --lanes 8 --contexts 512 --tokens 400 --sampling {kinds}", "2b:1")


def _long(kv_dtype: str) -> PublishedRow:
    contexts, name = ",".join(map(str, LONG_CONTEXTS)), "qwen3-4b@131072"
    arguments = f"latency --random --lanes 8 --spec {name} --contexts {contexts} --kv-dtype {kv_dtype}"
    return _bench(f"long_{kv_dtype}", 1, 30, arguments, f"kernel.{name}/{kv_dtype}:1")


def _endurance(gpus: int) -> PublishedRow:
    about_s = _ENDURANCE_S[gpus]
    arguments = f"endurance --gpus {gpus} --tokens 100000 --deadline-s {about_s + 45:.0f}"
    return _bench("endurance", gpus, about_s, arguments, f"benchmarks:{gpus}")


def _collectives(gpus: int) -> PublishedRow:
    return _bench("collectives", gpus, 60, f"collectives --gpus {gpus} --kills 2")


def _prompts(name: str) -> PublishedRow:
    arguments = f"prefill --spec {name}@{_TOKENS} --prompts 512,2048,8192 --only-prompts --repeats 5"
    return _bench(f"prompts_{name}", 1, 40, arguments, f"{name}@{_TOKENS}:1")


def _lost(gpus: int) -> PublishedRow:
    words = ("-q", "-s", "-p", "no:cacheprovider", "tests/gpu/test_engine_ranks.py", "-k", f"lost and {gpus}]")
    command, about_s = (sys.executable, "-m", "pytest", *words), _LOST_S[gpus]
    environ = {"KILL_ROUNDS": "3", "ENGINE_PREFILL": "auto"}
    return PublishedRow("lost", gpus, Step(gpus, about_s, _limit_s(about_s), command, builds=(f"demo:{gpus}",), environ=environ))
