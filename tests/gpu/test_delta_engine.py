"""Engines on GPUs with gated delta nets: answers are those of CPU ranks, and the same in turns, behind what is kept, behind a
cancel and a fault, on one GPU and two. A small model, with heads as wide as those of published ones. Bits are compared with
prompts that go token by token, and with those that prefill reads from scratch: it rounds differently behind decoded tokens.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("zmq", reason="needs pyzmq, which RPC speaks")

from kog_dist.bench.engine.session import engine_session
from kog_dist.bench.fakes.tiny_delta_model import WITH_EXPERTS, write_tiny_delta_model
from kog_dist.decode.request import DecodeRequest, KvCopyKind
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, Tokens
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.topology import RankInfo
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.coordinator import kept_states
from kog_dist.workers.engines.cuda import CudaEngine
from tests.unit.asked_together import PATIENCE_S, Asked
from tests.unit.test_cuda_turns import PARALLEL, Served, compare, drawn

pytestmark = pytest.mark.timeout(500)
VOCAB, CONTEXT, READY_S, STEP = 512, 8192, 300.0, 64
NUM_TOKENS, TIE = 64, 0.02  # of two logits, whose spread is about 1: closer ones may change places
TIE_OF_CHOICES = 0.2  # where an expert may change places with another one, which changes logits by more
SIZES: dict[str, Any] = {
    "torch_dtype": "bfloat16", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
}  # fmt: skip
one_gpu = pytest.mark.gpu(1)
# In codes, too: whole groups of columns, and a number chosen that engines take.
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("delta")
    write_tiny_delta_model(made, **SIZES)
    return made


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With experts beside a shared one."""
    made = tmp_path_factory.mktemp("mixture")
    write_tiny_delta_model(made, **SIZES, **WITH_EXPERTS | EXPERTS)
    return made


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the books of this process."""
    monkeypatch.setattr(kept_states, "STEP", STEP)


def served(
    folder: Path, parallel: int = 1, *, kept_bytes: int = 1 << 29, kept_host_bytes: int = 0, prefill: str = "off",
    quantize: str = "none",
) -> Served:  # fmt: skip
    """With drafts, but for experts beside a shared one, which have none."""
    control = ControlPage.create(1, CONTEXT, vocab_size=VOCAB, parallel=parallel)
    info = RankInfo(0, 1, 0, "delta", control_fd=control.fd, rendezvous_fd=control.fd)
    drafts = open_checkpoint(folder, verify=False).spec.experts is None
    args = WorkerArgs(
        info, str(folder), "cuda:0", "bfloat16", True, PATIENCE_S, 10.0, prefill=prefill, drafts=drafts, parallel=parallel,
        num_kv_caches=parallel + 1, kept_bytes=kept_bytes, kept_host_bytes=kept_host_bytes, quantize=quantize,
    )  # fmt: skip
    engine = CudaEngine(args, control)
    return Served(engine, control, VOCAB, None, engine.startup, READY_S, is_recurrent=True)


def ids(count: int, seed: int) -> list[int]:
    return cast(list[int], np.random.default_rng(seed).integers(0, VOCAB, count).tolist())


def asked(prompt: Sequence[int], num_tokens: int = NUM_TOKENS, *, digests: bool = False) -> Asked:
    return Asked(DecodeRequest(prompt, num_tokens, ignore_eos=True, logit_digests=digests))


def num_missed(engine: Served) -> int:
    states = engine.engine._caches.states
    assert states is not None
    return states.num_missed


def said(one: Asked) -> list[int]:
    return [entry.token_id for entry in one.entries]


@one_gpu
@pytest.mark.parametrize(
    ("kind", "tie", "prefill", "quantize"),
    [
        ("folder", TIE, "off", "none"),
        ("folder", TIE, "on", "none"),
        ("folder", TIE, "off", "fp8"),
        ("folder", TIE, "off", "int4"),
        ("mixture", TIE_OF_CHOICES, "off", "none"),
        ("mixture", TIE_OF_CHOICES, "off", "fp8"),
        ("mixture", TIE_OF_CHOICES, "off", "int4"),
    ],
)
def test_greedy_tokens_are_those_of_cpu_ranks(
    kind: str, tie: float, prefill: str, quantize: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    prompts = [ids(count, count) for count in ((1, 5, 40, 130) if prefill == "off" else (130, 400, 1000))]
    job = {"model": str(folder), "kv_dtype": "bfloat16", "prompts": prompts, "num_tokens": NUM_TOKENS, "quantize": quantize}
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(Path(__file__).with_name("cpu_answers.py"))]
    done = subprocess.run(command, input=json.dumps(job), env=environ, stdout=subprocess.PIPE, text=True, check=True)
    wanted, num_same = json.loads(done.stdout), 0
    with closing(served(folder, prefill=prefill, quantize=quantize)) as engine:
        found = [asked(prompt) for prompt in prompts]
        engine.run(found, random.Random(1))
    for one, answer in zip(found, wanted, strict=True):
        pairs = enumerate(zip(said(one), answer["token_ids"], strict=True))
        at = next((at for at, (own, other) in pairs if own != other), NUM_TOKENS)
        assert at == NUM_TOKENS or answer["gaps"][at] < tie, f"{len(one.request.prompt)} tokens, token {at}: {answer['gaps'][at]}"
        num_same += at
    print(f"{num_same} of {len(prompts) * NUM_TOKENS} tokens, until the first that differs of each answer")
    assert num_same > len(prompts) * NUM_TOKENS / 2


@one_gpu
def test_who_goes_on_behind_what_is_kept_says_what_it_says_from_scratch(folder: Path) -> None:
    """Bits of logits: the next turn, one that leaves the answer, another answer to the same prompt, one that leaves that."""
    first = ids(500, 1)
    with closing(served(folder)) as engine:
        turns = [asked(first, 150, digests=True)]
        engine.run(turns, random.Random(1))
        answer = said(turns[0])
        for prompt in ([*first, *answer, 7], [*first, *answer[:100], 8, 9], first, [*first[:300], *ids(50, 3)]):
            turns.append(asked(prompt, 40, digests=True))
            engine.run(turns[-1:], random.Random(1))
        slots = engine.slots
        assert slots.kept_states.num_used > 8
        assert num_missed(engine) == 0
    with closing(served(folder, kept_bytes=0)) as engine:
        compare(engine, turns, reuse_kv=False)
        compare(engine, turns[:1], reuse_kv=False)


@one_gpu
@pytest.mark.parametrize(("kind", "parallel"), [("folder", 1), ("folder", PARALLEL), ("mixture", 1)])
def test_prefill_gives_the_bits_of_a_request_that_reads_all(kind: str, parallel: int, request: pytest.FixtureRequest) -> None:
    """Whatever is kept of prompts, wherever they part, and whoever runs beside it. Nobody goes on behind an answer."""
    folder, chance, long = request.getfixturevalue(kind), random.Random(9), ids(900, 4)
    prompts = [long, *(long[:count] for count in (400, 833, 832, 831, 64, 2)), [*long[:700], *ids(200, 5)], long, [*long, 3]]
    mixed = [asked(prompt, 20, digests=True) for prompt in prompts] + drawn(chance, 30, VOCAB)
    with closing(served(folder, parallel, prefill="on")) as engine:
        engine.run(mixed, chance)
        assert num_missed(engine) == 0
        assert engine.slots.kept_states.num_used > 10
    with closing(served(folder, kept_bytes=0, prefill="on")) as engine:
        compare(engine, mixed, reuse_kv=False)


@one_gpu
def test_copies_come_back_from_the_host(folder: Path) -> None:
    """A conversation that others have driven out of the GPU's pool says bit for bit what it says from scratch."""
    first = asked(ids(900, 1), 100, digests=True)
    others = [asked(ids(600, seed), 2) for seed in range(2, 12)]
    with closing(served(folder, kept_bytes=64 << 20, kept_host_bytes=1 << 30)) as engine:
        for one in (first, *others):
            engine.run([one], random.Random(1))
        again = asked([*first.request.prompt, *said(first), 7], 40, digests=True)
        use = engine.slots.submit(engine.slots.slots[0], again.request, reuse_kv=True).kv
        while engine.slots.busy:
            engine.hear([again], Deadline.after(PATIENCE_S))
        slots = [copy.slot for copy in use.copies if copy.kind is KvCopyKind.LOAD_STATE]
        assert use.num_cached == 999
        assert slots[0] >= engine.slots.kept_states.num_slots, "of the host"
        assert num_missed(engine) == 0
    with closing(served(folder, kept_bytes=0)) as engine:
        compare(engine, [again], reuse_kv=False)


@one_gpu
def test_prefill_goes_on_behind_what_is_kept(folder: Path) -> None:
    """A prompt, the next turn, one that leaves the answer, another answer to the same prompt, one that leaves that: states are
    where they are looked for, and tokens are mostly those from scratch; bits are, unless an answer is kept of the prompt.
    """
    first = ids(500, 1)
    with closing(served(folder, prefill="on")) as engine:
        turns = [asked(first, 150)]
        engine.run(turns, random.Random(1))
        answer = said(turns[0])
        for prompt in ([*first, *answer, 7], [*first, *answer[:100], 8, 9], first, [*first[:300], *ids(300, 3)]):
            turns.append(asked(prompt, 40))
            engine.run(turns[-1:], random.Random(1))
        assert num_missed(engine) == 0
        assert engine.slots.kept_states.num_used > 8
    with closing(served(folder, kept_bytes=0, prefill="on")) as engine:
        twice = [asked(first, digests=True) for _ in range(2)]
        for one in twice:
            engine.run([one], random.Random(1), reuse_kv=False)
        assert twice[0].answer() == twice[1].answer()
        num_same = num_tokens = 0
        for number, one in enumerate(turns):
            anew = asked(one.request.prompt, one.request.max_tokens)
            engine.run([anew], random.Random(1), reuse_kv=False)
            assert number in (1, 2) or said(one) == said(anew)
            pairs = enumerate(zip(said(one), said(anew), strict=True))
            num_tokens += one.request.max_tokens
            num_same += next((at for at, (own, other) in pairs if own != other), one.request.max_tokens)
    print(f"{num_same} of {num_tokens} tokens, until the first that differs of each answer")
    assert num_same > num_tokens / 4


@one_gpu
def test_a_cancel_ends_a_prompt_that_prefill_reads(folder: Path) -> None:
    long, nobody = asked(ids(8000, 5), 20), asked(ids(1, 1), 1)
    with closing(served(folder, 2, prefill="on")) as engine:
        deadline, slots = Deadline.after(PATIENCE_S), engine.slots.slots
        engine.run([asked(ids(300, 9), 2)], random.Random(1))
        for delay_s in (0.001, 0.004):
            engine.slots.submit(slots[0], long.request, reuse_kv=True)
            engine.hear([long, nobody], deadline, delay_s)
            slots[0].cancel()
            while slots[0].busy:
                engine.hear([long, nobody], deadline, 0.001)
            long.entries.clear()
        again = asked(long.request.prompt, 20)
        engine.run([again], random.Random(1))
        assert num_missed(engine) == 0
    with closing(served(folder, kept_bytes=0, prefill="on")) as engine:
        anew = asked(long.request.prompt, 20)
        engine.run([anew], random.Random(1))
    assert said(again)[0] == said(anew)[0]


@one_gpu
@pytest.mark.parametrize("kept_bytes", [1 << 29, 64 << 20])
def test_every_answer_is_that_of_the_request_alone(folder: Path, kept_bytes: int) -> None:
    """Requests of four slots take turns, some with grammars, penalties, cancels, digests; with many copies of states, and few."""
    chance = random.Random(7)
    mixed = drawn(chance, 40, VOCAB)
    with closing(served(folder, PARALLEL, kept_bytes=kept_bytes)) as engine:
        engine.run(mixed, chance)
        assert num_missed(engine) == 0
        assert engine.slots.kept_states.num_used > (2 if kept_bytes < 1 << 29 else 10)
    with closing(served(folder, kept_bytes=0)) as engine:
        compare(engine, mixed, reuse_kv=False)
    assert {one.entries[-1].finish for one in mixed} >= {Finish.LENGTH, Finish.CANCELLED}


@one_gpu
def test_a_cancel_ends_a_prompt_that_goes_token_by_token(folder: Path) -> None:
    """Another request is served meanwhile; what was read by then counts."""
    long, short = asked(ids(7000, 5), 20), asked(ids(9, 6), 20)
    with closing(served(folder, 2)) as engine:
        deadline, slots = Deadline.after(PATIENCE_S), engine.slots.slots
        engine.slots.submit(slots[0], long.request, reuse_kv=True)
        while slots[0].position < 200:
            engine.hear([long, short], deadline, 0.001)
        engine.slots.submit(slots[1], short.request, reuse_kv=True)
        while slots[1].busy:
            engine.hear([long, short], deadline, 0.001)
        assert not long.entries, "7,000 tokens take longer"
        asked_s = time.monotonic()
        slots[0].cancel()
        while slots[0].busy:
            engine.hear([long, short], deadline, 0.001)
        took_s = time.monotonic() - asked_s
        assert (long.entries[-1].finish, long.entries[-1].token_id) == (Finish.CANCELLED, NO_TOKEN)
        books = engine.slots._caches
        assert books is not None
        read = max(len(kept.tokens) for kept in books._kept)
        assert 200 <= read < 7000
        again = asked(long.request.prompt, 20)
        use = engine.slots.submit(slots[0], again.request, reuse_kv=True).kv
        while engine.slots.busy:
            engine.hear([again, short], deadline)
        assert use.num_cached == read, "it goes on where the cancel has left it"
        assert num_missed(engine) == 0
    print(f"cancelled after {took_s * 1e3:.1f} ms, behind {read} tokens")
    assert took_s < 0.5
    with closing(served(folder, kept_bytes=0)) as engine:
        compare(engine, [again, short], reuse_kv=False)


@one_gpu
@pytest.mark.parametrize("parallel", [1, 2])
def test_nobody_goes_on_behind_a_state_that_is_not_finite(folder: Path, parallel: int) -> None:
    """A state that something has spoilt is found at the first token; the next request begins anew."""
    import cupy

    prompt = ids(300, 8)
    with closing(served(folder, parallel)) as engine:
        first = asked(prompt)
        engine.run([first], random.Random(1))
        kernel = cast(Any, engine.engine._gpu.kernel)
        kernel.stream.synchronize()
        kernel.nets.fill(255)  # of any float32 that is no number
        cupy.cuda.Device().synchronize()
        spoilt = asked([*prompt, *said(first)], 20)
        engine.run([spoilt], random.Random(1))
        assert [entry.finish for entry in spoilt.entries] == [Finish.NUMERICAL_FAULT]
        assert engine.slots.kept_states.num_used == 0
        again, behind = asked(prompt), asked([*prompt, *said(first)], 20)
        engine.run([again], random.Random(1))
        engine.run([behind], random.Random(1))
        assert again.answer() == first.answer()
    with closing(served(folder, kept_bytes=0)) as engine:
        compare(engine, [behind], reuse_kv=False)


def answer(client: Client, prompt: Sequence[int], **options: Any) -> tuple[list[int], list[str], int]:
    *events, done = client.generate(prompt_ids=prompt, max_tokens=40, ignore_eos=True, timeout_s=60.0, **options)
    assert isinstance(done, Done)
    told = [event for event in events if isinstance(event, Tokens)]
    ids = [token for event in told for token in event.token_ids]
    return ids, [digest for event in told for digest in event.digests], done.num_cached_tokens


def conversation(folder: Path, *flags: str) -> list[tuple[list[int], list[str]]]:
    """What `kog-launch` serves: a prompt, its next turn, another conversation, and the first one again."""
    first, other, found = ids(700, 11), ids(90, 12), []
    with engine_session() as session:
        session.launch(str(folder), "--parallel=2", "--kv-caches=2", "--prefill=off", *flags)
        with session.connect(READY_S) as client:
            found.append(answer(client, first, logit_digests=True))
            turn = [*first, *found[0][0], 5]
            found += [answer(client, prompt, logit_digests=True) for prompt in (turn, other)]
            found.append(answer(client, [*turn, *found[1][0], 6], logit_digests=True))
            found.append(answer(client, other, temperature=0.8, seed=3, top_p=0.9, logprobs=2))
            status = client.status()
    assert [num_cached for *_, num_cached in found[:4]] == [0, 739, 0, 780]
    assert found[4][2] == len(other) - 1
    assert status.kept_states > status.kept_states_used > 2
    return [(tokens, digests) for tokens, digests, _ in found]


@one_gpu
def test_kog_launch_serves_it(folder: Path) -> None:
    """As asked for, and with flags that no answer depends on."""
    plain = conversation(folder, "--gpus=1", "--prefix-cache=0.5")
    assert conversation(folder, "--gpus=1", "--speculate=lookup", "--prefix-cache=1") == plain


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", ["folder", "mixture"])
def test_two_gpus_say_what_one_says(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    assert conversation(folder, "--gpus=2") == conversation(folder, "--gpus=1")
