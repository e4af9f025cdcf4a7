"""What runs on GPUs: the tests of this folder and the benchmarks that docs/results.md quotes, in steps with time limits."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kog_dist.bench.shapes import named_shape

_OF_TESTS = r"passed|failed|no tests|FAILED|ERROR|SKIPPED|^E  |GPUs, (SIG|memory)"
_OF_REQUESTS = r"first token after|by the bare kernel|tokens/s|cancels? .*during|aborted during|[Ee]rror"
_OF_GPUS = r"GPUs?[,:]|wanted|[Ee]rror"
_OF_AGENTS = r"first token, median|^ttft|requests answered|[Ee]rror"
_OF_CHAINS = r"tokens/s|passes with drafts|[Ee]rror"
_OF_COLLECTIVES = r"KCCL|best of|wanted|one word|nccl|torch|killed|[Ee]rror"
_TABLE = r"^[^{]"


@dataclass(frozen=True)
class Step:
    """A command and what it needs; `{out}` in it is the folder of the logs.

    `about_s`: on H200s with device programs built, measured or, where nobody has yet, guessed. `alone`: nothing runs
    beside it, since it measures or promises times. `shown`: lines of its log that are. `builds`: groups of prebuild.py.
    """

    gpus: int
    about_s: float
    limit_s: float
    command: tuple[str, ...]
    shown: str = _OF_TESTS
    alone: bool = True
    builds: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    group: str = ""  # that it is one of, instead of those that need so many GPUs

    def __str__(self) -> str:
        words = [*(f"{name}={value}" for name, value in self.environ.items()), shlex.join(self.command)]
        return " ".join(words).replace(sys.executable, "python")


def _tests(
    gpus: int, about_s: float, limit_s: float, name: str, select: str = "", builds: str = "", *, alone: bool = False,
    ranks_per_gpu: int = 1,
) -> Step:  # fmt: skip
    """A file of this folder, or what `pytest -k` selects of it. `ranks_per_gpu`: see sharing.py."""
    chosen = ("-k", select) if select else ()
    command = (sys.executable, "-m", "pytest", "-q", "--maxfail=3", "-p", "no:cacheprovider", f"tests/gpu/{name}.py", *chosen)
    environ = {"RANKS_PER_GPU": f"{ranks_per_gpu}"} if ranks_per_gpu > 1 else {}
    return Step(gpus, about_s, limit_s, command, alone=alone, builds=tuple(builds.split()), environ=environ)


def _engines(gpus: int, about_s: float, limit_s: float, select: str, prefill: str = "auto") -> Step:
    step = _tests(gpus, about_s, limit_s, "test_engine_ranks", select, builds=f"demo:1,{gpus}", alone=True)
    environ = {"KILL_ROUNDS": "3", "ENGINE_PREFILL": prefill}
    return Step(gpus, about_s, limit_s, (*step.command, "-s"), builds=step.builds, environ=environ)


def _rate_of_the_link() -> Step:
    step = _tests(1, 20, 90, "test_kept_prefixes", "rate_of_the_link", alone=True)
    return replace(step, command=(*step.command, "-s"), shown=rf"GB/s|{_OF_TESTS}", group="agents")


def _bench(
    gpus: int, about_s: float, limit_s: float, arguments: str, shown: str, builds: str = "", group: str = ""
) -> Step:  # fmt: skip
    command = (sys.executable, "-m", "kog_dist.bench.cli", *arguments.split())
    return Step(gpus, about_s, limit_s, command, shown, builds=tuple(builds.split()), group=group)


def _module(gpus: int, about_s: float, limit_s: float, words: str, shown: str, builds: str = "", group: str = "") -> Step:
    """A module of this folder and its arguments."""
    return Step(gpus, about_s, limit_s, (sys.executable, "-m", *words.split()), shown, builds=tuple(builds.split()), group=group)


def _lanes(name: str) -> int:
    """All of the shape."""
    return named_shape(name)[0].num_lanes


_REQUESTS = "--spec 2b --prompts 128,512,2048,4000 --kept 3900"
_SCALING = "--contexts 64,512,4000 --long-run --yardstick --repeats"
_LATENCY = "latency --random --lanes 8"
_SAMPLING = "--contexts 512 --tokens 400 --sampling greedy,temperature,penalties,top-p,top-p-logprobs,top-k-top-p,mask"
_NOT_ON_2 = "1] or 3] or 4] or missing_epoch or dead_rank"

# Shapes of docs/results.md, formats.md and moe.md, random weights.
_MODELS = (
    "qwen3-0.6b", "llama-3.2-1b", "qwen3-4b", "llama-3.1-8b", "qwen3-8b", "llama-3.1-8b+fp8", "llama-3.1-8b+int4",
    "qwen3-30b-a3b", "qwen3-30b-a3b+fp8", "qwen3-30b-a3b+int4", "gpt-oss-20b", "gpt-oss-120b",
)  # fmt: skip

_ALSO_ON_2 = ("llama-3.1-8b+head8", "llama-3.1-8b+int4+head8", "llama-3.1-8b+fp8-rows")
_MODELS_ON_4 = tuple(name for name in _MODELS if _lanes(name) % 4 == 0)
_TOKENS = 9216  # their caches have room for, on one GPU


def _latency_of(name: str) -> Step:
    arguments = f"latency --random --spec {name}@{_TOKENS} --lanes {_lanes(name)} --contexts 512,8000"
    return _bench(1, 30, 120, arguments, _TABLE, f"{name}@{_TOKENS}:1", group="models")


def _prompts_of(name: str) -> Step:
    arguments = f"prefill --spec {name}@{_TOKENS} --prompts 512,2048,8192 --only-prompts --repeats 5"
    return _bench(1, 40, 150, arguments, _TABLE, f"{name}@{_TOKENS}:1", group="models")


def _scaling_of(name: str) -> Step:
    arguments = f"scaling --gpus 2,1 --spec {name} --contexts 512 --repeats 5"
    return _bench(2, 50, 150, arguments, _OF_GPUS, f"{name}:1,2", group="models")


def _prompts_on_2(name: str) -> Step:
    arguments = f"prefill --gpus 2 --spec {name}@{_TOKENS} --prompts 512,2048,8192 --repeats 5"
    return _bench(2, 40, 150, arguments, _TABLE, f"{name}@{_TOKENS}:2", group="models")


def _scaling_on_4(name: str) -> Step:
    arguments = f"scaling --gpus 4,2,1 --spec {name}@{_TOKENS} --contexts 512,8000 --repeats 5"
    return _bench(4, 15, 150, arguments, _OF_GPUS, f"{name}@{_TOKENS}:1,2,4", group="models_4")


def _prompts_on_4(name: str) -> Step:
    arguments = f"prefill --gpus 4,2 --spec {name}@{_TOKENS} --prompts 512,2048,8192 --repeats 5"
    return _bench(4, 25, 150, arguments, _TABLE, f"{name}@{_TOKENS}:2,4", group="models_4")


_LONG, _KV_FORMATS = "qwen3-4b@131072", ("bfloat16", "fp8", "int4")
_FAR = 32768  # tokens
_WITH_EXPERTS = ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b")
_REQUESTS_OF_AGENTS = "--prompts 500,20000,32000 --kept 20600 --new 500 --repeats 4 --aborts decode"


def _long_of(kv_dtype: str) -> Step:
    arguments = f"{_LATENCY} --spec {_LONG} --contexts 8000,32000,64000,65536,128000 --kv-dtype {kv_dtype}"
    return _bench(1, 30, 150, arguments, _TABLE, f"{_LONG}/{kv_dtype}:1", group="long")


def _long_coded_of(kv_dtype: str) -> Step:
    name = f"qwen3-4b+fp8@{_TOKENS}"
    arguments = f"latency --random --spec {name} --lanes 4 --contexts 512,8000 --kv-dtype {kv_dtype}"
    return _bench(1, 25, 120, arguments, _TABLE, f"{name}/{kv_dtype}:1", group="long")


def _long_on_2(kv_dtype: str) -> Step:
    arguments = f"scaling --gpus 2,1 --spec {_LONG} --contexts 8000,64000,128000 --repeats 5 --kv-dtype {kv_dtype}"
    return _bench(2, 60, 250, f"{arguments} --memory-alone --filled", _OF_GPUS, f"{_LONG}/{kv_dtype}:1,2", group="long_2")


def _skew_of(name: str, skew: int) -> Step:
    arguments = f"latency --random --spec {name} --lanes {_lanes(name)} --contexts 512 --router-skew {skew}"
    return _bench(1, 30, 120, arguments, _TABLE, f"{name}:1", group="skew")


def _bytes_of(name: str) -> Step:
    return _module(1, 45, 250, f"tests.gpu.counted_bytes {name}", r"ratio|[Ee]rror|ncu", f"{name}:1", group="bytes")


_PASS_BUILDS = "pass_ranks:{0} drafts.few_layers:{0}"
_DRAFTING = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-4b")
_CODED_DRAFTING = ("llama-3.1-8b+fp8", "llama-3.1-8b+int4")  # of layers that --quantize can round
_PASS_CONTEXT = 8300  # tokens, of docs/passes.md


def _passes_of(name: str, per_pass: int) -> Step:
    arguments = (
        f"latency --random --spec {name}@{_PASS_CONTEXT} --lanes {_lanes(name)} --contexts 512,8000 --pass-tokens {per_pass}"
    )
    return _bench(1, 20, 120, arguments, _TABLE, f"drafts.{name}@{_PASS_CONTEXT}:1", group="drafts")


def _chains_of(name: str) -> Step:
    """Of a name of `named_shape`, whose format of layers `--quantize` rounds to."""
    base, plus, form = name.partition("+")
    arguments = f"tests.gpu.chains --spec {base}" + (f" -- --gpus=1 --quantize={form}" if plus else "")
    return _module(1, 120, 300, arguments, _OF_CHAINS, f"drafts.{base}@8192{plus and '!'}{form}:1", group="drafts")


STEPS = {
    # ---- one GPU ----
    "monokernel": _tests(1, 45, 200, "test_monokernel", builds="one_gpu:1"),
    "monokernel_2b": _tests(1, 85, 240, "test_monokernel_2b", builds="benchmarks:1"),
    "passes": _tests(1, 100, 300, "test_passes", "not experts", builds="passes:1 drafts.qwen3-0.6b@1536:1"),
    "passes_experts": _tests(1, 120, 400, "test_passes", "experts", builds="passes:1"),
    "prefill": _tests(1, 200, 360, "test_prefill", builds="one_gpu:1 2b:1"),
    "attention": _tests(1, 10, 100, "test_prefill_attention"),
    "tiles": _tests(1, 10, 100, "test_prefill_tiles"),
    "families": _tests(1, 115, 300, "test_families"),
    "quantised": _tests(1, 110, 300, "test_quantised", "not values_of_codes and not of_folders"),
    "quantised_forms": _tests(1, 110, 300, "test_quantised", "values_of_codes or of_folders", builds="forms:1"),
    "experts": _tests(1, 375, 560, "test_experts"),
    "delta_nets": _tests(1, 150, 560, "test_delta_nets"),
    "delta_prefill": _tests(1, 240, 560, "test_delta_prefill", "not token_by_token"),
    "delta_prefill_widths": _tests(1, 330, 560, "test_delta_prefill", "token_by_token"),
    "delta_engine": _tests(1, 120, 400, "test_delta_engine", "not two_gpus"),
    "delta_passes": _tests(1, 200, 560, "test_delta_passes", "not A3B and not Next and not experts", builds="delta_passes:1"),
    "delta_passes_experts": _tests(1, 200, 560, "test_delta_passes", "A3B or Next or experts", builds="delta_passes:1"),
    "delta_company": _tests(1, 60, 400, "test_delta_company", "has_what_it_has_alone", builds="delta_company:1"),
    "delta_company_engine": _tests(1, 200, 560, "test_delta_company", "not has_what_it_has_alone"),
    "soak_delta": _bench(1, 100, 300, "soak --delta-nets --gpus 1 --requests 1000", _TABLE),
    "prefill_quantised": _tests(1, 80, 240, "test_prefill_quantised"),
    "kept": _tests(1, 160, 300, "test_kept_prefixes", "not rate_of_the_link"),
    "kept_rate": _rate_of_the_link(),
    "kv_formats": _tests(1, 100, 220, "test_kv_formats"),
    "processors": _tests(1, 10, 90, "test_processors"),
    "processor_drafts": _tests(1, 240, 900, "test_processor_drafts"),
    "engine": _tests(1, 10, 120, "test_engine", builds="demo:1"),
    "turns": _tests(1, 60, 250, "test_turns", builds="drafts.few_layers:1"),
    "smollm2": _tests(1, 70, 200, "test_smollm2"),  # with `make model`
    "same_tokens": _tests(1, 30, 150, "test_same_tokens", builds="demo:1"),
    "build_paths": _tests(1, 15, 150, "test_build_paths"),
    "checked_1": _tests(1, 35, 240, "test_check_experts", "1] or block", builds="checked:1"),
    "ranks_1": _tests(1, 20, 90, "test_ranks", "1]", builds="ranks:1"),
    "train": _tests(1, 120, 400, "test_train", "not two_gpus"),
    "memcheck": Step(1, 240, 900, ("sh", "tests/gpu/memcheck.sh"), r"tokens|=====", False, environ={"PYTHON": sys.executable}),
    "launch": _tests(1, 100, 300, "test_launch", builds="demo:1 tiny:1", alone=True),
    "kccl_1": _tests(1, 10, 60, "test_kccl", "1]", alone=True),
    "latency": _bench(1, 40, 120, f"{_LATENCY},4,2,1", _TABLE, "benchmarks:1"),
    "baseline": _bench(1, 200, 500, f"{_LATENCY} --baseline lanes,dense", _TABLE, "benchmarks:1"),
    "sampling": _bench(1, 40, 150, f"{_LATENCY} {_SAMPLING}", _TABLE, "2b:1"),
    "load": _bench(1, 40, 150, "load --spec 2b", _TABLE, "2b:1"),
    "prompts": _bench(1, 30, 120, "prefill --spec 2b --only-prompts", _TABLE, "2b:1"),
    "requests_1": _bench(1, 50, 110, f"requests --gpus 1 {_REQUESTS}", _OF_REQUESTS, "2b:1"),
    "soak": _bench(1, 100, 300, "soak --gpus 1 --requests 1000", _TABLE, "tiny:1"),
    "soak_long": _bench(1, 40, 150, "soak --long --gpus 1 --requests 2000 --clients 4", _TABLE),
    "endurance_1": _bench(1, 125, 175, "endurance --gpus 1 --tokens 100000 --deadline-s 150", _OF_GPUS, "benchmarks:1"),
    **{f"latency_{name}": _latency_of(name) for name in _MODELS},
    **{f"prompts_{name}": _prompts_of(name) for name in _MODELS},
    **{f"long_{kv_dtype}": _long_of(kv_dtype) for kv_dtype in _KV_FORMATS},
    **{f"long_coded_{kv_dtype}": _long_coded_of(kv_dtype) for kv_dtype in ("bfloat16", "fp8")},
    "long_experts": _bench(
        1, 40, 150, f"latency --random --spec gpt-oss-120b@{_FAR} --lanes 4 --contexts 512,8000,32000 --whole-windows", _TABLE,
        group="long",
    ),
    "long_prompt": _bench(
        1, 50, 180, f"prefill --spec gpt-oss-120b@{_FAR} --prompts 32000 --only-prompts --repeats 3", _TABLE,
        f"gpt-oss-120b@{_FAR}:1", group="long",
    ),
    "load_experts": _bench(1, 150, 400, "load --spec gpt-oss-120b --repeats 1", _TABLE, group="long"),
    **{f"skew_{skew}_{name}": _skew_of(name, skew) for name in _WITH_EXPERTS for skew in (1, 2, 4)},
    **{f"bytes_{name}": _bytes_of(name) for name in _WITH_EXPERTS},
    "agents_http": _module(1, 60, 240, "tests.gpu.agents", _OF_AGENTS, f"drafts.qwen3-4b@{_FAR}:1", group="agents"),
    "agents_together": _module(
        1, 60, 240, "tests.gpu.agents --at-once 4", _OF_AGENTS, f"drafts.qwen3-4b@{_FAR}:1", group="agents"
    ),
    "together": _module(1, 110, 250, "tests.gpu.together", "at once|alone|Error", "drafts.llama-3.1-8b@9216:1", group="agents"),
    "agents_rpc": _bench(
        1, 100, 240, f"requests --gpus 1 --spec qwen3-4b@{_FAR} {_REQUESTS_OF_AGENTS}", _OF_REQUESTS, f"qwen3-4b@{_FAR}:1",
        group="agents",
    ),
    **{f"drafts_{name}": _chains_of(name) for name in (*_DRAFTING, *_CODED_DRAFTING)},
    **{
        f"passes_{per_pass}_{name}": _passes_of(name, per_pass)
        for name in (*_DRAFTING, *_CODED_DRAFTING, *_WITH_EXPERTS)
        for per_pass in (1, 2, 4)
    },
    "pass_ranks_1": _tests(1, 320, 560, "test_pass_ranks", "2]", builds=_PASS_BUILDS.format("1,2"), ranks_per_gpu=2),
    # ---- two GPUs ----
    "pass_ranks_2": _tests(2, 155, 400, "test_pass_ranks", "2]", builds=_PASS_BUILDS.format("1,2")),
    "pass_ranks_4_on_2": _tests(2, 440, 560, "test_pass_ranks", "4]", builds=_PASS_BUILDS.format("1,4"), ranks_per_gpu=2),
    "ranks_2": _tests(2, 70, 200, "test_ranks", "2]", builds="ranks:1,2 benchmarks:1,2"),
    "prefill_ranks_2": _tests(2, 250, 420, "test_prefill_ranks", "2] or peer", builds="ranks:1,2 2b:1,2"),
    "checked_2": _tests(2, 30, 240, "test_check_experts", "2]", builds="checked:2"),
    "ranks_4_on_2": _tests(2, 145, 350, "test_ranks", "4]", builds="ranks:1,4 benchmarks:1,4", ranks_per_gpu=2),
    "ranks_8_on_2": _tests(2, 240, 500, "test_ranks", "8]", builds="ranks:1,8 benchmarks:1,8", ranks_per_gpu=4),
    "prefill_ranks_4_on_2": _tests(2, 140, 320, "test_prefill_ranks", "4]", builds="ranks:1,4 2b:1,4", ranks_per_gpu=2),
    "delta_engine_2": _tests(2, 120, 400, "test_delta_engine", "two_gpus"),
    "train_2": _tests(2, 60, 200, "test_train", "two_gpus"),
    "kccl_2": _tests(2, 60, 180, "test_kccl", f"not ({_NOT_ON_2})", alone=True),
    "engines_2": _engines(2, 150, 400, "2]"),
    "drafting_2": _engines(2, 60, 200, "draft and 2]"),
    "lost_2_off": _engines(2, 40, 150, "lost and 2]", prefill="off"),
    "soak_2": _bench(2, 80, 250, "soak --gpus 2 --drafts --requests 1000 --clients 4", _TABLE, "tiny:2"),
    "together_2": _module(
        2, 90, 250, "tests.gpu.together -- --gpus=2", "at once|alone|Error", "drafts.llama-3.1-8b@9216:2", group="agents_2"
    ),
    "agents_together_2": _module(
        2, 40, 240, "tests.gpu.agents --at-once 4 -- --gpus=2", _OF_AGENTS, f"drafts.qwen3-4b@{_FAR}:2", group="agents_2"
    ),
    "requests_2": _bench(2, 46, 110, f"requests --gpus 2 --prefill on {_REQUESTS}", _OF_REQUESTS, "2b:2"),
    **{f"scaling_{name}": _scaling_of(name) for name in _MODELS if name != "qwen3-0.6b"},
    **{f"scaling_{name}": _scaling_of(name) for name in _ALSO_ON_2},
    "prompts_2_llama-3.1-8b+int4": _prompts_on_2("llama-3.1-8b+int4"),
    **{f"long_2_{kv_dtype}": _long_on_2(kv_dtype) for kv_dtype in _KV_FORMATS},
    # ---- four GPUs ----
    "pass_ranks_4": _tests(4, 190, 400, "test_pass_ranks", "4]", builds=_PASS_BUILDS.format("1,4")),
    "ranks_4": _tests(4, 120, 220, "test_ranks", "4]", builds="ranks:1,4 benchmarks:1,4"),
    "checked_4": _tests(4, 30, 240, "test_check_experts", "4]", builds="checked:4"),
    "prefill_ranks_4": _tests(4, 215, 400, "test_prefill_ranks", "4]", builds="ranks:1,4 2b:1,4"),
    "kccl_4": _tests(4, 60, 150, "test_kccl", "3] or 4] or missing_epoch or dead_rank", alone=True),
    "answers": _engines(4, 30, 90, "answers and off-4"),
    "answers_prefill": _engines(4, 25, 110, "answers and on-4"),
    "cancels": _engines(4, 45, 110, "cancel and 4]"),
    "mpi": _engines(4, 40, 110, "mpirun and 4]"),
    "mpi_off": _engines(4, 20, 80, "mpirun and 4]", prefill="off"),
    "killed": _engines(4, 55, 120, "lost and killed-4"),
    "stopped": _engines(4, 60, 130, "lost and stopped-4"),
    "drafting_4": _engines(4, 60, 200, "draft and 4]"),
    "killed_off": _engines(4, 25, 80, "lost and killed-4", prefill="off"),
    "stopped_off": _engines(4, 30, 80, "lost and stopped-4", prefill="off"),
    "scaling": _bench(4, 35, 170, f"scaling --gpus 4,2,1 {_SCALING} 200 --trace {{out}}", _OF_GPUS, "benchmarks:4,2,1"),
    "scaling_short": _bench(4, 20, 60, f"scaling --gpus 4 {_SCALING} 20", _OF_GPUS, "benchmarks:4"),
    "endurance": _bench(4, 40, 100, "endurance --gpus 4 --tokens 100000 --deadline-s 85", _OF_GPUS, "benchmarks:4"),
    "collectives": _bench(4, 60, 120, "collectives --gpus 4 --kills 2 --out {out}/collectives", _OF_COLLECTIVES),
    **{f"scaling_4_{name}": _scaling_on_4(name) for name in _MODELS_ON_4},
    **{f"prompts_4_{name}": _prompts_on_4(name) for name in _MODELS_ON_4},
    "requests_4": _bench(4, 38, 110, f"requests --gpus 4 --prefill on {_REQUESTS}", _OF_REQUESTS, "2b:4"),
}  # fmt: skip
