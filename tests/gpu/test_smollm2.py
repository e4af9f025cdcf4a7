"""A real model, of `make model`, on a GPU: the greedy tokens of CPU ranks. `-s` prints how many prompts have a tie."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.sampling_params import SamplingParams
from tests.e2e.test_smollm2 import FOLDER, NUM_TOKENS, PROMPTS

CONTEXT = 512
TIE = 0.05  # logits: a cache of bfloat16 lets keys and values fall on different sides
pytestmark = [
    pytest.mark.gpu(1), pytest.mark.timeout(300), pytest.mark.skipif(not FOLDER.is_dir(), reason="needs `make model`"),
]  # fmt: skip


def on_cpu(ids: list[int]) -> list[tuple[int, float]]:
    """Tokens of a CPU rank, and by how much each beat the next best one."""
    checkpoint = open_checkpoint(FOLDER, context=CONTEXT)
    engine = Interpreter(make_plan(checkpoint.spec, 1), 0, checkpoint.rank_weights([0]), None, kv_dtype="bfloat16")
    for position, token in enumerate(ids[:-1]):
        engine.step(token, position, None)
    token, found = ids[-1], list[tuple[int, float]]()
    for position in range(len(ids) - 1, len(ids) - 1 + NUM_TOKENS):
        output = engine.step(token, position, SamplingParams(), gather_logits=True)
        assert output.logits is not None
        best, second = np.sort(output.logits)[:-3:-1]
        token = output.token_id
        found.append((token, float(best - second)))
    return found


def test_greedy_tokens_are_those_of_cpu_ranks() -> None:
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.load import load_weights
    from kog_dist.workers.cuda.monokernel import Monokernel

    tokenizer = Tokenizer.from_folder(FOLDER)
    assert tokenizer is not None
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    checkpoint = open_checkpoint(FOLDER, context=CONTEXT)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        waiting = pool.map(on_cpu, prompts)
        shape = KernelShape(checkpoint.spec, range(checkpoint.spec.num_lanes), weight_dtype=checkpoint.dtype)
        kernel = Monokernel(shape, load_weights(shape, checkpoint))
        found = [kernel.generate(ids, NUM_TOKENS) for ids in prompts]
        wanted = list(waiting)
    num_equal = num_ties = 0
    for prompt, ours, theirs in zip(PROMPTS, found, wanted, strict=True):
        for index, (own, (other, gap)) in enumerate(zip(ours, theirs, strict=True)):
            if own != other:  # what follows is another text
                assert gap < TIE, f"{prompt!r}, token {index}: {own} and {other}, {gap:.4f} apart"
                num_ties += 1
                break
            num_equal += 1
    print(f"{num_equal} tokens of {len(PROMPTS)} prompts are equal, {num_ties} prompts have a tie")
    assert num_ties <= len(PROMPTS) // 4
