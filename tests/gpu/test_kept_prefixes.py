"""Kept prefixes on a GPU: three conversations take turns, and what they left comes from the block pool, the host's part too.

Of a dense model, and of one with experts whose windowed layers keep all positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, which RPC speaks")

from kog_dist.bench.engine.session import engine_session
from kog_dist.bench.fakes.made_tokenizer import write_tokenizer
from kog_dist.bench.shapes import named_spec
from kog_dist.decode.request import KvCopy, KvCopyKind, KvUse
from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, Tokens
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kv_blocks import KvBlocks, block_bytes, block_tokens
from kog_dist.workers.cuda.pinned import pinned

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(200)]
SPECS = {
    "dense": ModelSpec(
        hidden_size=512, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=1024, vocab_size=512, max_context=4096,
        num_lanes=4, delay=0, qk_norm=True,
    ),
    "gpt-oss": ModelSpec(
        hidden_size=512, num_layers=4, num_heads=16, num_kv_heads=8, own_head_dim=64, intermediate_size=256, vocab_size=512,
        max_context=4096, num_lanes=4, delay=0, qkv_bias=True, out_bias=True, attention_sinks=True, sliding_window=128,
        window_layers=(0, 2), experts=ExpertsSpec(8, 4, router_bias=True, bias=True, clamp=ClampedSwiglu(1.702, 7.0)),
    ),
}  # fmt: skip
SLOTS, HOST_SLOTS = 4, 6  # three conversations need more than the GPU's
NUM_TOKENS = 24
READY_S = 120.0
COPIED = 8  # blocks
ROUNDS = 5
LEAST_OF_LINK = 0.5  # of the rate of one plain copy: rows of a block lie apart in the cache


def ids(count: int, seed: int) -> list[int]:
    return [(seed + 7 * idx * idx + 31 * idx) % 500 for idx in range(count)]


def ask(client: Client, prompt: list[int], **options: Any) -> tuple[list[Tokens], Done]:
    events = [*client.generate(
        prompt_ids=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=60.0, logit_digests=True, **options
    )]  # fmt: skip
    assert isinstance(events[-1], Done)
    return [event for event in events if isinstance(event, Tokens)], events[-1]


def tokens(events: list[Tokens]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def digests(events: list[Tokens]) -> list[str]:
    return [digest for event in events for digest in event.digests]


@pytest.mark.parametrize(
    ("name", "prefill", "kv_dtype"),
    [
        *(("dense", prefill, kv_dtype) for prefill in ("off", "on") for kv_dtype in ("bfloat16", "fp8", "int4")),
        ("gpt-oss", "off", "bfloat16"), ("gpt-oss", "off", "fp8"), ("gpt-oss", "on", "bfloat16"),
    ],
)  # fmt: skip
def test_conversations_take_turns(tmp_path: Path, name: str, prefill: str, kv_dtype: str) -> None:
    spec = SPECS[name]
    shape = KernelShape(spec, range(4), kv_dtype=kv_dtype, whole_windows=bool(spec.window_layers))
    block = block_tokens(shape)
    assert 0 < block < 1000, "or nothing is copied"
    write_checkpoint(tmp_path, spec, random_tensors(spec, seed=3))
    write_tokenizer(tmp_path, spec.vocab_size)
    gib_of_block = block_bytes(shape) / 2**30
    room = (f"--prefix-cache={gib_of_block * (SLOTS + 0.5)}", f"--prefix-host={gib_of_block * (HOST_SLOTS + 0.5)}")
    shared = ids(block + 40, 1)
    held = [shared + ids(block, 10), shared + ids(block // 2, 20), ids(block + 9, 30)]
    with engine_session() as session:
        session.launch(str(tmp_path), "--gpus=1", f"--prefill={prefill}", f"--kv-dtype={kv_dtype}", *room)
        with session.connect(READY_S) as client:
            caches = []
            for turn in range(9):
                prompt = held[turn % 3]
                events, done = ask(client, prompt)
                caches.append(done.num_cached_tokens)
                anew, of_anew = ask(client, prompt, reuse_kv=False, cache_salt="by itself")
                assert of_anew.num_cached_tokens == 0
                assert len(digests(events)) == NUM_TOKENS
                if prefill == "off" or turn < 3:  # else decoded and prefilled positions round otherwise
                    assert (tokens(events), digests(events)) == (tokens(anew), digests(anew))
                held[turn % 3] = prompt + tokens(events) + ids(5, turn)
            status = client.status()
    print(name, prefill, kv_dtype, caches, status.kept_used, status.kept_host_used)
    assert (status.kept_block_tokens, status.kept_slots, status.kept_host_slots) == (block, SLOTS, HOST_SLOTS)
    assert status.kept_ring == 0
    assert caches[1] >= block, "what two begin with"
    assert status.kept_host_used > 0
    assert sum(count >= block for count in caches[3:]) >= 3, "what has moved to the host came back"


def test_a_ring_of_positions_gives_the_same_answers(tmp_path: Path) -> None:
    """Windowed layers keep all positions, or the newest: a prompt, what goes on behind it, and a step back over a ring."""
    spec, answers = SPECS["gpt-oss"], []
    write_checkpoint(tmp_path, spec, random_tensors(spec, seed=3))
    write_tokenizer(tmp_path, spec.vocab_size)
    first = ids(700, 1)
    for windows, ring in (("whole", 0), ("ring", 256)):
        with engine_session() as session:
            session.launch(str(tmp_path), "--gpus=1", f"--kv-windows={windows}")
            with session.connect(READY_S) as client:
                events, _ = ask(client, first)
                behind, done = ask(client, [*first, *tokens(events)[:-1], 5, 6])
                assert done.num_cached_tokens >= len(first)
                back, stepped = ask(client, [*first[:400], *ids(90, 2)])
                assert stepped.num_cached_tokens == (0 if ring else 400)
                assert client.status().kept_ring == ring
        answers.append([(tokens(one), digests(one)) for one in (events, behind, back)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8", "int4"])
def test_blocks_come_back_at_the_rate_of_the_link(kv_dtype: str) -> None:
    """From the host's part of the pool into a KV cache of Qwen3-4B's shape, next to one copy of as many page-locked bytes."""
    import cupy
    from cupy.cuda import runtime

    shape = KernelShape(spec := named_spec("qwen3-4b@32768"), range(spec.num_lanes), kv_dtype=kv_dtype)
    num_bytes = COPIED * block_bytes(shape)
    cache, whole = cupy.full(shape.cache.num_bytes, 7, cupy.uint8), cupy.zeros(num_bytes, cupy.uint8)
    blocks, plain = KvBlocks(shape, cache.data.ptr, 1, COPIED), pinned(num_bytes)
    stream = cupy.cuda.Stream(non_blocking=True)
    save, load = (
        KvUse(copies=tuple(KvCopy(kind, 1 + idx, idx) for idx in range(COPIED))) for kind in (KvCopyKind.SAVE, KvCopyKind.LOAD)
    )
    cupy.cuda.Device().synchronize()
    blocks.copy(save, stream.ptr)
    stream.synchronize()
    cache.fill(0)
    cupy.cuda.Device().synchronize()

    def copy_plainly() -> None:
        runtime.memcpyAsync(whole.data.ptr, plain.ctypes.data, num_bytes, runtime.memcpyHostToDevice, stream.ptr)

    def copy_blocks() -> None:
        blocks.copy(load, stream.ptr)

    best_s: list[float] = []
    for copy in (copy_blocks, copy_plainly):
        times_s = []
        for _ in range(ROUNDS):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            copy()
            end.record(stream)
            end.synchronize()
            times_s.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        best_s.append(min(times_s))
    assert int(cupy.count_nonzero(cache)) == num_bytes, "what was saved is back"
    blocks.close()
    of_blocks, of_link = (num_bytes / seconds / 1e9 for seconds in best_s)
    print(
        f"{kv_dtype}: {COPIED} blocks of {block_tokens(shape)} tokens, {num_bytes / 1e6:.0f} MB, come back at "
        f"{of_blocks:.1f} GB/s, a plain copy at {of_link:.1f} GB/s: {of_blocks / of_link:.2f}"
    )
    assert of_blocks > LEAST_OF_LINK * of_link
