"""Passes that requests of models with gated delta nets share, on a GPU: each has what it has alone, to the bit, with its keys,
values and states, at the width of real models; and so has whoever asks an engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("zmq", reason="needs pyzmq, which RPC speaks")

from kog_dist.bench.fakes.tiny_delta_model import write_tiny_delta_model
from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.coordinator import kept_states
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_weights
from tests.gpu.test_delta_engine import SIZES, STEP, VOCAB, ids, num_missed, said, served
from tests.gpu.test_delta_nets import SEED
from tests.gpu.test_delta_passes import SHAPES, options_of, shape_of
from tests.unit.asked_together import Asked
from tests.unit.delta_configs import CONFIGS
from tests.unit.test_cuda_turns import PARALLEL, Served, compare, drawn

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(600)]
DENSE = [name for name, (model, _, _) in SHAPES.items() if "num_experts" not in CONFIGS[model].get("text_config", CONFIGS[model])]
NOT_THERE = 0xFF  # of states before the first token, of which nobody may read anything


@dataclass(frozen=True)
class Request:
    """`slot`: its decode slot and KV cache."""

    slot: int
    num_prompt: int
    num_tokens: int
    sampling: SamplingParams

    def prompt(self, vocab_size: int) -> list[int]:
        return cast(list[int], np.random.default_rng(self.slot).integers(0, vocab_size, self.num_prompt).tolist())


@dataclass(frozen=True)
class Kept:
    """Of a request that has ended: its tokens, and what its KV cache and its delta nets hold."""

    tokens: list[int]
    finish: Finish
    position: int
    cache: bytes
    nets: bytes


REQUESTS = (
    Request(0, 61, 40, SamplingParams()),
    Request(1, 1, 70, SamplingParams(temperature=0.7, seed=3)),
    Request(2, 33, 12, SamplingParams()),
    Request(3, 7, 96, SamplingParams(temperature=1.2, seed=1 << 40)),
)
# Slots in the seats of a launch, and its passes at most: who comes later, changes seats, waits or has ended, and empty seats.
LAUNCHES: dict[int, tuple[tuple[tuple[int, ...], int], ...]] = {
    2: (((0,), 5), ((0, 1), 9), ((1, 0), 30), ((2, 3), 20), ((3, 2), 200), ((0, 1), 200), ((1, 2), 9)),
    4: (((1, 0), 6), ((0, 1, 2), 11), ((3, 2, 1, 0), 25), ((1, 3, 0, 2), 200), ((0, 1, 2, 3), 9)),
}


def options_of_builds() -> Iterator[dict[str, Any]]:
    """Of KernelShape, for all that these tests build but engines."""
    for name in DENSE:
        yield options_of(name)
        yield from ({**options_of(name), "tokens": size, "company": True} for size in SHAPES[name][2])


def begun(kernel: Monokernel, requests: Sequence[Request]) -> None:
    """All of them, in caches and with states that hold nothing yet."""
    import cupy

    kernel.finish()
    assert kernel.nets is not None
    kernel.kv.fill(0)
    kernel.nets.fill(NOT_THERE)
    cupy.cuda.Device().synchronize()
    for one in requests:
        kernel.use(one.slot)
        kernel.begin(one.prompt(kernel.shape.spec.vocab_size), one.num_tokens, one.sampling, cache=one.slot)


def kept(kernel: Monokernel, one: Request) -> Kept:
    """Of a request that has ended."""
    kernel.finish()
    kernel.use(one.slot)
    entries = [entry for index in range(one.num_tokens) if (entry := kernel.token(index)) is not None]
    state, shape = kernel.state(), kernel.shape
    assert kernel.nets is not None
    assert shape.delta is not None
    cache, nets = (
        held[one.slot * num_bytes : (one.slot + 1) * num_bytes].get().tobytes()
        for held, num_bytes in ((kernel.kv, shape.cache.num_bytes), (kernel.nets, shape.delta.num_bytes))
    )
    return Kept([entry.token_id for entry in entries], Finish(int(state["finish"])), int(state["position"]), cache, nets)


@pytest.mark.parametrize("name", DENSE)
def test_each_request_has_what_it_has_alone(name: str) -> None:
    shape, sizes = shape_of(name), SHAPES[name][2]
    kernel = Monokernel(shape, random_weights(shape, SEED), num_slots=4, num_caches=4, company=sizes)
    alone = []
    for one in REQUESTS:
        begun(kernel, [one])
        kernel.launch(one.num_prompt + one.num_tokens)
        alone.append(kept(kernel, one))
        assert len(alone[-1].tokens) == one.num_tokens
        assert alone[-1].finish is Finish.LENGTH
    for size in sizes:
        for _ in range(2):
            begun(kernel, REQUESTS)
            for slots, num_passes in LAUNCHES[size]:
                kernel.launch_together(slots, num_passes, least_seats=size)
            for one, wanted in zip(REQUESTS, alone, strict=True):
                assert kept(kernel, one) == wanted, f"request {one.slot} of {size} seats"
    kernel.close()


# ---- engines ----
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("delta")
    write_tiny_delta_model(made, **SIZES)
    return made


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the books of this process."""
    monkeypatch.setattr(kept_states, "STEP", STEP)


def num_shared(engine: Served) -> int:
    """Passes of builds for several requests."""
    kernel = cast(Any, engine.engine._gpu.kernel)
    return sum(int(build.state(kernel.stream)["epoch"]) for build in kernel._company)


@contextmanager
def sharing(folder: Path, **options: Any) -> Iterator[Served]:
    """An engine whose requests share passes; in the end they have, and each state was where it was looked for."""
    with closing(served(folder, PARALLEL, **options)) as engine:
        yield engine
        assert num_missed(engine) == 0
        assert num_shared(engine) > 20


@pytest.mark.parametrize(
    ("prefill", "quantize", "kept_bytes"),
    [
        ("off", "none", 1 << 29),
        ("off", "none", 64 << 20),
        ("on", "none", 1 << 29),
        ("off", "fp8", 1 << 29),
        ("off", "int4", 1 << 29),
    ],
)
def test_every_answer_is_that_of_the_request_alone(prefill: str, quantize: str, kept_bytes: int, folder: Path) -> None:
    """Mixed ones: some with grammars, penalties, drafts, cancels and digests. Prefill reads all prompts from scratch."""
    chance = random.Random(7)
    mixed = drawn(chance, 40, VOCAB)
    with sharing(folder, prefill=prefill, quantize=quantize, kept_bytes=kept_bytes) as engine:
        engine.run(mixed, chance, reuse_kv=prefill == "off")
    with closing(served(folder, kept_bytes=0, prefill=prefill, quantize=quantize)) as engine:
        compare(engine, mixed, reuse_kv=False)
    assert {one.entries[-1].finish for one in mixed} >= {Finish.LENGTH, Finish.CANCELLED}


def test_copies_that_are_made_in_company_are_gone_on_behind(folder: Path) -> None:
    """The next turns of four conversations, and others that leave the answers in their midst."""
    prompts = [ids(100 + 30 * number, number) for number in range(PARALLEL)]
    with sharing(folder) as engine:
        turns = [Asked(DecodeRequest(prompt, 200, ignore_eos=True)) for prompt in prompts]
        engine.run(turns, random.Random(1))
        assert engine.slots.kept_states.num_used > 2 * PARALLEL
        answers = [said(one) for one in turns]
        for end in (200, 110):
            longer = [[*prompt, *answer[:end], 7] for prompt, answer in zip(prompts, answers, strict=True)]
            behind = [Asked(DecodeRequest(prompt, 60, ignore_eos=True)) for prompt in longer]
            engine.run(behind, random.Random(1))
            turns += behind
    with closing(served(folder, kept_bytes=0)) as engine:
        compare(engine, turns, reuse_kv=False)


def test_a_cancel_ends_one_of_those_that_share_passes(folder: Path) -> None:
    """The others go on; behind what the cancel has left the next request goes on."""
    asked = [Asked(DecodeRequest(ids(20 + number, number), 2000, ignore_eos=True)) for number in range(3)]
    asked[1].cancel_at = 50
    with sharing(folder) as engine:
        engine.run(asked, random.Random(1))
        assert [one.entries[-1].finish for one in asked] == [Finish.LENGTH, Finish.CANCELLED, Finish.LENGTH]
        tokens = [token for token in said(asked[1]) if token != NO_TOKEN]
        assert 50 <= len(tokens) < 1500
        again = Asked(DecodeRequest([*asked[1].request.prompt, *tokens, 9], 40, ignore_eos=True))
        engine.run([again], random.Random(1))
    with closing(served(folder, kept_bytes=0)) as engine:
        compare(engine, [*asked, again], reuse_kv=False)
