"""What one rank does in tests/gpu/test_pass_ranks.py: passes of several tokens, and drafts, alone or with peers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from kog_dist.bench.kernel.rank_kernel import lane_digests, prepare, rank_kernel, rank_shape
from kog_dist.bench.shapes import named_shape, named_spec
from kog_dist.collectives.ranks import RankContext
from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.topology import LocalRendezvous, RankInfo
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from tests.gpu.test_engine import answer as entries_of
from tests.unit.delta_configs import few_layers

if TYPE_CHECKING:
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel

SEED = 5
_LLAMA, _QWEN = (replace(named_spec(f"{name}@600"), num_layers=4) for name in ("llama-3.2-1b", "qwen3-4b"))
_GPT_OSS, _CODINGS = named_shape("gpt-oss-20b@600")
# Few layers of real shapes, since ranks that share a GPU take turns at each sum. Rings of the windows go round.
VARIANTS: dict[str, dict[str, Any]] = {
    "heads of 64": {"spec": _LLAMA},
    "normed heads of 128, fp8": {"spec": _QWEN, "kv_dtype": "fp8"},
    "windows": {"spec": replace(_LLAMA, sliding_window=40, window_layers=(0, 2))},
    "delta nets": {"spec": few_layers("Qwen3.5-4B")},
    "experts in mxfp4": {"spec": replace(_GPT_OSS, num_layers=4, window_layers=(0, 2)), **_CODINGS},
}
NUM_PROMPT, NUM_TOKENS = 40, 60
WRONG = (range(0), (3, 4, 9, 15, 16, 17, 18, 30, 59), range(NUM_TOKENS))  # drafts that are
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.7, seed=3))
STEPS = 7  # of a launch with drafts: launches end now and then while passes of a kind go on


def options_of_builds() -> Iterator[dict[str, Any]]:
    """Of KernelShape, for all that the kernels of these tests are built of."""
    for options in VARIANTS.values():
        yield from ({**options, "keeps_hashes": True, **one} for one in ({}, {"drafts": True}, {"tokens": 2}, {"tokens": 4}))


def passes(context: RankContext) -> dict[str, list[Any]]:
    """By tokens of a pass, of each sampling and kind of drafts: the answer's tokens, SHA-256 of its last logits by lane, a hash
    of all scores so far, the number of passes.
    """
    from kog_dist.workers.cuda.random_weights import random_weights

    shapes = {tokens: _shape(context, tokens=tokens) for tokens in (1, 2, 4)}
    prepare(context, list(shapes.values()))
    weights, found, plain = random_weights(shapes[1], SEED), dict[str, list[Any]](), list[list[int]]()
    for tokens, shape in shapes.items():
        with rank_kernel(context, shape, weights) as kernel:
            answers = found[f"{tokens}"] = []
            for number, sampling in enumerate(SAMPLINGS):
                for wrong in WRONG:  # in plain decoding as often: the hash is of all answers so far
                    if tokens > 1:
                        drafts = [(token + (index in wrong)) % shape.spec.vocab_size for index, token in enumerate(plain[number])]
                        kernel.expect(NUM_PROMPT, drafts)
                    answers.append(_answer(context, kernel, sampling))
                plain.append(answers[-1]["tokens"])
    return found


def drafts(context: RankContext) -> dict[str, list[Any]]:
    """Answers without drafts, with them, and without them again, as `passes` has them; what was drafted, and was right."""
    from kog_dist.workers.cuda.draft_builds import draft_headers
    from kog_dist.workers.cuda.random_weights import random_weights

    shape = _shape(context)
    prepare(context, [shape], others=[lambda: _build(draft_headers(shape))])
    found: dict[str, list[Any]] = {"plain": [], "drafted": [], "after": []}
    with rank_kernel(context, shape, random_weights(shape, SEED), drafts=True) as kernel:
        for sampling in SAMPLINGS:
            plain = _answer(context, kernel, sampling)
            found["plain"].append(plain)
            tokens = plain["tokens"]
            wrong = [(token + (index % 5 == 4)) % shape.spec.vocab_size for index, token in enumerate(tokens)]
            for prediction in (tokens, wrong, list(range(50)), []):
                found["drafted"].append(_answer(context, kernel, sampling, prediction))
                found["after"].append(_answer(context, kernel, sampling))
    return found


def _shape(context: RankContext, **options: Any) -> KernelShape:
    return rank_shape(context, keeps_hashes=True, **VARIANTS[str(context.arguments["variant"])], **options)


def _build(generated: Sequence[dict[str, str]]) -> None:
    from kog_dist.workers.cuda.build import build

    for one in generated:
        build(one)


def _answer(
    context: RankContext, kernel: Monokernel, sampling: SamplingParams, prediction: Sequence[int] | None = None
) -> dict[str, Any]:
    """From an empty cache. With a prediction the kernel drafts."""
    import cupy

    prompt: list[int] = np.random.default_rng(1).integers(0, kernel.shape.spec.vocab_size, NUM_PROMPT).tolist()
    kernel.finish()
    kernel.kv.fill(0)
    cupy.cuda.Device().synchronize()
    before = kernel.state()
    context.rendezvous.barrier(context.deadline)
    kernel.begin(prompt, NUM_TOKENS, sampling, prediction=prediction)
    for _ in range(2 if prediction is None else NUM_PROMPT + NUM_TOKENS):  # with drafts each gives a token at least
        kernel.launch(NUM_PROMPT + NUM_TOKENS if prediction is None else STEPS)
    kernel.finish()
    state, entries = kernel.state(), [token for token in map(kernel.token, range(NUM_TOKENS)) if token is not None]
    return {
        "tokens": [entry.token_id for entry in entries],
        "finish": str(entries[-1].finish),
        "digests": lane_digests(kernel) if prediction is None else [],
        "scores": state["hash"].tolist(),
        "passes": [int(state[name]) - int(before[name]) for name in ("epoch", "pass_epoch")],
        "drafted": [sum(entry.drafted.num_tokens for entry in entries), sum(entry.drafted.num_right for entry in entries)],
    }


# ---- the engine ----
CONTEXT = 1536
ENGINE_SPEC = replace(named_spec(f"llama-3.2-1b@{CONTEXT}"), num_layers=4)
_PROMPT = tuple(int(token) for token in np.random.default_rng(2).integers(0, 5000, 300))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampling": SamplingParams(temperature=0.8, seed=5)},
    "a short prompt": {"prompt": _PROMPT[:2]},
    "penalties": {"sampling": SamplingParams(frequency_penalty=0.4), "max_tokens": 12},
    "digests": {"logit_digests": True, "max_tokens": 12},
}


def engine(context: RankContext) -> dict[str, Any]:
    """By kind of request: answers without drafts and with various predictions, on rank 0. `costs` are those that it goes by."""
    from kog_dist.workers.engines.cuda import CudaEngine

    found: dict[str, Any] = {}
    with _pages(context) as (info, control):
        args = WorkerArgs(
            info, str(context.arguments["model"]), f"cuda:{context.gpu}", "bfloat16", True, 100.0, 10.0,
            prefill=str(context.arguments["prefill"]), drafts=True,
        )  # fmt: skip
        made, seq = CudaEngine(args, control), 0
        made.startup()
        kernel: Any = made._gpu.kernel
        found["costs"] = [kernel._draft_builds.costs.extra, kernel._draft_builds.costs.edge]

        def ask(**options: Any) -> list[Any]:
            nonlocal seq
            seq += 1
            context.rendezvous.barrier(context.deadline)
            made.run(seq, DecodeRequest(**{"prompt": _PROMPT, "max_tokens": 60, "ignore_eos": True, **options}))
            context.rendezvous.barrier(context.deadline)
            return entries_of(control, seq)

        for name, options in KINDS.items():
            plain = ask(**options)
            ids = [entry.token_id for entry in plain]
            edited = [token + (index % 7 == 3) for index, token in enumerate(ids)]
            drafted = [ask(**options, drafts=True, prediction=prediction) for prediction in (ids, edited, ids[::-1], ())]
            found[name] = [_said(entries) for entries in (plain, *drafted)]
            found[f"{name}, right"] = sum(entry.drafted.num_right for entry in drafted[0])
        context.rendezvous.barrier(context.deadline)
        made.close()
    return found


def _said(entries: Sequence[Any]) -> list[list[Any]]:
    return [[entry.token_id, str(entry.finish), entry.digest and entry.digest.hex()] for entry in entries]


@contextmanager
def _pages(context: RankContext) -> Iterator[tuple[RankInfo, ControlPage]]:
    """A control page with room for an engine's context, and a meeting of its own; rank 0 makes them for all ranks."""
    from kog_dist.collectives.cuda import CudaCommunicator

    info, made = context.info, list[Any]()
    if info.rank == 0:
        made = [ControlPage.create(info.world_size, CONTEXT), LocalRendezvous.create(info.world_size)]
    own = f"{os.getpid()} {' '.join(f'{one.fd}' for one in made)}"
    pid, *files = context.rendezvous.all_gather_bytes(own.encode(), context.deadline)[0].decode().split()
    control_fd, meeting_fd = (os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR) for file in files)
    control = ControlPage.from_fd(control_fd)
    create = partial(CudaCommunicator.create, shares_gpus=context.shares_gpus)
    with patch.object(CudaCommunicator, "create", create):
        yield RankInfo(info.rank, info.world_size, info.rank, "ranks", control_fd=control.fd, rendezvous_fd=meeting_fd), control
    control.close()
    for one in made:
        one.close()
