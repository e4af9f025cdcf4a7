"""Passes with tokens of several requests on a CPU (decode_twin/company.cpp): each has what it has alone, whoever is beside it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.decode.coding import Coding
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.ring import Finish
from kog_dist.workers.cuda.kernel_abi import DECODE_STATE
from kog_dist.workers.cuda.kernel_header import headers
from tests.sweeps import cases
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_coded_twin import FORMS, CodedModel
from tests.unit.test_decode_twin import Model, build_twin, command_of, twin_sources
from tests.unit.test_delta_codes_twin import CodedNets
from tests.unit.test_delta_passes_twin import CODED
from tests.unit.test_delta_passes_twin import CODED_SPEC as CODED_NETS
from tests.unit.test_delta_passes_twin import SPECS as OF_NETS
from tests.unit.test_expert_twin import MXFP4, SPLITS, VARIANTS, CodedExperts
from tests.unit.test_kinds_twin import StoredModel
from tests.unit.test_passes_twin import CODED_SPEC, DENSE, NORMED, SETS, WINDOWS, arrays_of

pytestmark = needs_compiler
NOBODY, OTHERS_WAIT = -1, -2
FP8_NETS, INT4_NETS = (CODED[name][1] for name in ("FP8, blocks", "INT4"))


@dataclass(frozen=True)
class Request:
    """`temperature`: 0 = greedy. Its cache is empty in front of `first`, the position of the first token that is decoded."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    first: int = 0

    @property
    def line(self) -> str:
        """As company.cpp reads it."""
        inverse = int(np.float32(1 / self.temperature).view(np.uint32)) if self.temperature else 0
        numbers = (self.first, len(self.prompt), *self.prompt, self.max_tokens, self.seed, inverse, len(self.stop_ids))
        return " ".join(map(str, (*numbers, *self.stop_ids)))


@dataclass(frozen=True)
class Launch:
    """At most so many passes, of the requests in `seats`. `cancels`: the request that is cancelled before it, or OTHERS_WAIT."""

    passes: int
    seats: tuple[int, ...]
    cancels: int = NOBODY


@dataclass(frozen=True)
class Found:
    """What is left of a request on a rank. `scores`: the hash of all tokens and scores. `cache`: all rows. `nets`: states."""

    tokens: list[int]
    finish: Finish
    next_token: int
    position: int
    scores: bytes
    cache: bytes
    nets: bytes

    def on(self, other: Found) -> Found:
        """The same with what is kept of the request's positions on another number of ranks."""
        return replace(self, cache=other.cache, nets=other.nets)


class Twin:
    """A program for so many seats, on so many ranks; of one seat it is the plain build."""

    def __init__(self, model: Model, seats: int, folder: Path, options: Mapping[str, Any], num_ranks: int = 1) -> None:
        shapes = [
            TrialShape(
                model.spec, model.spec.lanes_of_rank(rank, num_ranks), tokens=seats, company=seats > 1, num_ranks=num_ranks,
                **{"max_ctas": 4, "copies": 2, "max_slots": 6, "keeps_hashes": True, **options},
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        self.shape, self.num_ranks, self.seats, self.folder = shapes[0], num_ranks, seats, folder
        folder.mkdir()
        build_twin("company", twin_sources(headers(self.shape)), folder, "-O1")
        for rank, shape in enumerate(shapes):
            for name, array in arrays_of(model.weights(shape), rank).items():
                array.tofile(folder / f"{name}.bin")

    def run(
        self, requests: Sequence[Request], launches: Sequence[Launch], environ: Mapping[str, str] | None = None
    ) -> list[list[Found]]:
        """Of each request, on each rank."""
        (self.folder / "requests.txt").write_text("\n".join(request.line for request in requests))
        lines = [f"{one.passes} {one.cancels} {' '.join(map(str, one.seats))}" for one in launches]
        (self.folder / "launches.txt").write_text("\n".join(lines))
        _, there, _, *sizes = command_of(self.shape)
        done = subprocess.run(
            ["./company", there, *sizes], cwd=self.folder, env={**os.environ, **(environ or {})}, capture_output=True,
            timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, "see company.cpp"
        return [[self._found(request, rank) for rank in range(self.num_ranks)] for request in range(len(requests))]

    def _found(self, request: int, rank: int) -> Found:
        name = f"{request}.{rank}.bin"
        ring = np.fromfile(self.folder / f"ring.{name}", np.uint64).reshape(-1, 2)
        ring = ring[ring[:, 0] != 0]
        assert set((ring >> np.uint64(32)).ravel().tolist()) <= {request + 7}, "its tag"
        state = np.fromfile(self.folder / f"state.{name}", DECODE_STATE.dtype, count=1)[0]
        tokens = [int(word) & 0xFFFFFFFF for word in ring[:, 0]]
        endings = [int(word) & 0xFFFFFFFF for word in ring[:, 1]]
        assert endings == [*[0] * (len(endings) - 1), int(state["finish"])][: len(endings)]
        return Found(
            tokens, Finish(int(state["finish"])), int(state["token"]), int(state["position"]), state["hash"].tobytes(),
            (self.folder / f"kv.{name}").read_bytes(), (self.folder / f"nets.{name}").read_bytes(),
        )  # fmt: skip

    @property
    def passes(self) -> int:
        """So many there were in the last run with company."""
        return int(np.fromfile(self.folder / "passes.0.bin", DECODE_STATE.dtype, count=1)[0]["epoch"])


# By name: what makes the model, options of its shape, and numbers of seats and ranks.
Case = tuple[Callable[[pytest.MonkeyPatch], Model], dict[str, Any], tuple[tuple[int, int], ...]]


def _of(spec: ModelSpec, kv_dtype: str = "") -> Callable[[pytest.MonkeyPatch], Model]:
    context = 152 if spec is WINDOWS else 24
    return lambda monkeypatch: Model(replace(spec, max_context=context), "bfloat16", monkeypatch, kv_dtype)


def _of_nets(spec: ModelSpec) -> Callable[[pytest.MonkeyPatch], Model]:
    return lambda monkeypatch: StoredModel(replace(spec, max_context=24), "bfloat16", monkeypatch)


def _coded_nets(form: WeightFormat) -> Callable[[pytest.MonkeyPatch], Model]:
    return lambda monkeypatch: CodedNets(replace(CODED_NETS, max_context=24), "bfloat16", form, monkeypatch)


def _coded(form: str) -> Callable[[pytest.MonkeyPatch], Model]:
    spec = replace(CODED_SPEC, num_layers=1, intermediate_size=1280, max_context=24)
    return lambda monkeypatch: CodedModel(spec, "bfloat16", FORMS[form], monkeypatch)


MODELS: dict[str, Case] = {
    "normed heads of 128, fp8": (_of(replace(NORMED, own_head_dim=128), "fp8"), {"kv_dtype": "fp8"}, ((4, 1),)),
    "heads of 64": (_of(replace(DENSE, own_head_dim=64)), {}, ((2, 1), (4, 1))),
    "sets of heads": (_of(SETS), {}, ((2, 1),)),
    "windows, fp8": (_of(WINDOWS, "fp8"), {"kv_dtype": "fp8"}, ((4, 1),)),
    "whole windows": (_of(WINDOWS), {"whole_windows": True}, ((2, 1),)),
    "FP8 weights": (_coded("FP8, blocks"), {"coding": Coding.of(FORMS["FP8, blocks"])}, ((4, 1),)),
    "INT4 weights": (_coded("INT4"), {"coding": Coding.of(FORMS["INT4"])}, ((2, 1),)),
    "delta nets": (_of_nets(OF_NETS["odd shapes"][1]), {}, ((2, 1), (4, 1))),
    "delta nets, published heads": (_of_nets(OF_NETS["published heads"][1]), {}, ((4, 1),)),
    "delta nets in FP8": (_coded_nets(FP8_NETS), {"coding": Coding.of(FP8_NETS)}, ((4, 1),)),
    "delta nets in INT4": (_coded_nets(INT4_NETS), {"coding": Coding.of(INT4_NETS)}, ((2, 1), (4, 1))),
    "delta nets on two ranks": (_of_nets(OF_NETS["small nets on two ranks"][1]), {}, ((4, 2),)),
    "two ranks": (_of(DENSE), {}, ((4, 2),)),
    "experts on two ranks": (_of(VARIANTS["qwen3_moe"]), {}, ((2, 2),)),
    "experts": (_of(VARIANTS["qwen3_moe"]), {}, ((2, 1), (4, 1))),
    "experts, windows, sinks and biases": (
        _of(VARIANTS["gpt_oss"]), {"splits": SPLITS["gpt_oss"]}, ((4, 1),)
    ),
    "experts in MXFP4": (CodedExperts, {"coding": Coding.of(MXFP4, is_of_experts=True)}, ((2, 1),)),
}  # fmt: skip
SWEPT = set(MODELS) - {"normed heads of 128, fp8", "experts on two ranks", "delta nets"}
A, B, C, D, E = range(5)
# Of each number of seats. Requests come at the edge of a launch, wait for a while, and change seats; seats are empty, or of a
# request that has ended. Behind the last launch that has something to do comes one more.
LAUNCHES: dict[int, tuple[Launch, ...]] = {
    2: (
        Launch(3, (NOBODY, A)), Launch(4, (B, A)), Launch(7, (C, A)), Launch(8, (C, E)), Launch(99, (B, E), cancels=E),
        Launch(99, (D, C)), Launch(99, (A, D)), Launch(9, (A, D)),
    ),
    4: (
        Launch(4, (A, NOBODY, B, NOBODY)), Launch(5, (A, C, B, NOBODY)), Launch(8, (C, E, D, A)),
        Launch(99, (C, E, D, A), cancels=E), Launch(9, (C, NOBODY, D, A)),
    ),
}  # fmt: skip


def requests_of(spec: ModelSpec, first: int) -> list[Request]:
    """The third ends with the context, the others earlier."""
    before = (1,) * first
    return [
        Request((*before, 3, 70, 11, 5, 42, 9), 12, first=first),
        Request((*before, 8, 33, 21), 5, 0.5, 5, first=first),
        Request((*before[3:], 61, 2, 2, 17, 30, 44, 5, 9, 9), spec.max_context, 2.0, (1 << 40) + 11, first=max(first - 3, 0)),
        Request((*before, 12), 9, 1.25, 5, first=first),
        Request((*before, 70, 3), 16, 0.75, 77, first=first),
    ]


def passes_of(launches: Sequence[Launch], tokens: Sequence[int]) -> int:
    """So many it takes where each request decodes so many tokens: no launch goes on when all of its requests have ended."""
    left, passes = list(tokens), 0
    for launch in launches:
        made = {number: min(launch.passes, left[number]) for number in launch.seats if number != NOBODY}
        for number, tokens_made in made.items():
            left[number] -= tokens_made
        passes += max(made.values())
    assert not any(left)
    return passes


def alone(twin: Twin, requests: Sequence[Request]) -> list[Found]:
    """Each by itself, in the plain build."""
    first = Launch(1, (0,))  # in which nobody is patient
    launches = [Launch(twin.shape.spec.max_context, (number,)) for number in range(len(requests))]
    return [on_ranks[0] for on_ranks in twin.run(requests, [first, *launches])]


@pytest.mark.parametrize("name", cases(MODELS, SWEPT))
def test_each_request_has_what_it_has_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, scores and rows of its cache. They end by length, context, stop id and cancel; warps may be far behind others."""
    make, options, forms = MODELS[name]
    model = make(monkeypatch)
    plain = Twin(model, 1, tmp_path / "plain", options)
    requests = requests_of(model.spec, 126 if model.spec.max_context > 126 else 0)
    free = alone(plain, [requests[D]])[0].tokens  # without a stop id
    stop = next(i for i in range(2, len(free)) if free[i] not in free[:i])
    requests[D] = replace(requests[D], stop_ids=(model.spec.vocab_size - 1, free[stop]))
    wanted = alone(plain, requests)
    assert [one.finish for one in wanted] == [*[Finish.LENGTH] * 3, Finish.STOP, Finish.LENGTH]
    assert [len(one.tokens) for one in wanted[:4]] == [12, 5, model.spec.max_context - len(requests[C].prompt), stop + 1]
    for seats, num_ranks in forms:
        twin = Twin(model, seats, tmp_path / f"{seats} {num_ranks}", options, num_ranks)
        for environ in ({}, {"UNREST": "3"}) if (seats, num_ranks) == forms[-1] else ({},):
            found = twin.run(requests, LAUNCHES[seats], environ)
            assert twin.passes == passes_of(
                LAUNCHES[seats], [one[0].position - of.first for one, of in zip(found, requests, strict=True)]
            )
            for number, on_ranks in enumerate(found):
                if num_ranks == 1 and number != E:
                    assert on_ranks[0] == wanted[number], f"request {number} of {seats} seats"
                for one in on_ranks:
                    assert one.on(on_ranks[0]) == on_ranks[0]
                    if number != E:
                        assert one.on(wanted[number]) == wanted[number]
            cancelled = found[E][0]
            assert cancelled.finish is Finish.CANCELLED
            assert 1 < len(cancelled.tokens) < len(wanted[E].tokens)
            assert cancelled.tokens == [*wanted[E].tokens[: len(cancelled.tokens) - 1], 0xFFFFFFFF]


@pytest.mark.parametrize(("seats", "num_ranks"), [(2, 2), (4, 1)])
def test_a_launch_ends_early_where_others_wait(
    seats: int, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Behind the same pass on all ranks, and another one goes on there."""
    model = _of(DENSE)(monkeypatch)
    twin = Twin(model, seats, tmp_path / "twin", {}, num_ranks)
    requests, all_seats = requests_of(model.spec, 0)[:seats], tuple(range(seats))
    early, whole = Launch(24, all_seats, OTHERS_WAIT), Launch(24, all_seats)
    wanted = twin.run(requests, [whole])
    found = twin.run(requests, [early])
    assert {one.finish for on_ranks in found for one in on_ranks} == {Finish.NONE}
    assert {one.position for on_ranks in found for one in on_ranks} <= set(range(1, 4))
    assert len({one.position for on_ranks in found for one in on_ranks}) == 1
    assert twin.run(requests, [early, early, whole]) == wanted
