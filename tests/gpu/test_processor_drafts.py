"""Drafts of requests with grammars, penalties, filters and log-probabilities: with them every answer is the one without."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.shapes import DENSE
from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.masks import MaskWords, num_words
from kog_dist.runtime.ring import NO_TOKEN, NOT_DRAFTED, Finish
from kog_dist.runtime.topology import RankInfo
from kog_dist.runtime.wait import Deadline
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.processors import ProcessedRequest
from kog_dist.workers.engines.cuda import CudaEngine
from tests.gpu.processors_reference import logprobs_of
from tests.gpu.test_engine import answer as entries_of
from tests.gpu.test_passes import ENGINE_CONTEXT, PROMPT, dense_folder, kernel_of, said, shape_of
from tests.gpu.test_processors import CASES

__all__ = ["dense_folder"]  # a fixture

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(600)]

SHAPES = (
    "qwen3-0.6b", "qwen2.5-0.5b", "windows, fp8", "llama-3.2-1b, weights in int4, head in int8", "experts of gpt-oss-20b",
)  # fmt: skip
NUM_TOKENS, WAIT_S = 60, 20.0
COUNTED = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=4)
ENGINE_CASES: dict[str, dict[str, Any]] = {
    "penalties": {"sampling": SamplingParams(frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.1)},
    "log-probabilities": {"sampling": SamplingParams(logprobs=2)},
    "filters": {"sampling": SamplingParams(temperature=0.8, seed=5, top_k=40, top_p=0.9, min_p=0.01)},
    "everything": {"sampling": replace(COUNTED, temperature=1.5, seed=7, top_p=0.8, logit_bias=((5, 2.0),), min_tokens=9)},
    "the end of the context": {"prompt": (PROMPT * 3)[: ENGINE_CONTEXT - 20], "sampling": SamplingParams(logprobs=0)},
}


class Grammar:
    """What a grammar process knows: which ids each token of an answer may have. Runs of which there is only one are forced."""

    def __init__(self, vocab_size: int, num_tokens: int, seed: int = 3) -> None:
        chance, self._vocab_size = np.random.default_rng(seed), vocab_size
        self.allowed = list[Any]()  # an array for each token
        while len(self.allowed) < num_tokens:
            self.allowed += [chance.integers(0, vocab_size, 2000) for _ in range(int(chance.integers(1, 4)))]
            self.allowed += [*chance.integers(0, vocab_size, (int(chance.integers(1, 10)), 1))]

    def mask(self, index: int) -> MaskWords:
        bits = np.zeros(32 * num_words(self._vocab_size), np.uint8)
        bits[self.allowed[index]] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def forced(self, index: int) -> list[int]:
        found = list[int]()
        for ids in self.allowed[index:]:
            if len(ids) != 1:
                break
            found += ids.tolist()
        return found

    def put(self, page: ControlPage, epoch: int, index: int) -> None:
        """Say what token `index` may be, and what it must be."""
        page.forced.put(epoch + index, self.forced(index))
        page.masks.put(epoch + index, self.mask(index))


# ---- the kernel ----
class Kernel:
    """One with all builds, and the page that it reads masks from."""

    def __init__(self, name: str) -> None:
        shape = shape_of(name)
        self.page = ControlPage.create(1, shape.spec.max_context, vocab_size=shape.spec.vocab_size)
        self.kernel: Monokernel = kernel_of(
            shape, processors=True, masks=(self.page.masks,), drafts=True, forced=(self.page.forced,)
        )
        self.prompt = [(7 * i + 3) % shape.spec.vocab_size for i in range(20)]
        self.epoch = 1

    def close(self) -> None:
        self.kernel.close()
        self.page.close()

    def answer(
        self, sampling: SamplingParams, asked: SamplingParams, prediction: Sequence[int] | None, grammar: Grammar | None = None
    ) -> tuple[list[int], list[Any], int]:
        """Tokens, log-probabilities, and how many drafts were right. No `prediction`: without drafts."""
        kernel, epoch = self.kernel, 0
        if grammar is not None:
            epoch, self.epoch = self.epoch, self.epoch + 2 * kernel.shape.spec.max_context
        processed = ProcessedRequest(asked, epoch)
        kernel.begin(self.prompt, NUM_TOKENS, sampling, processed=processed, prediction=prediction)
        for _ in range(2 * NUM_TOKENS):  # each of one pass of each build at least
            kernel.launch(len(self.prompt) + NUM_TOKENS)
        found, num_right = list[int](), 0
        for index in range(NUM_TOKENS):
            if grammar is not None:
                grammar.put(self.page, epoch, index)
            entry = self._entry(index)
            num_right += entry.drafted.num_right
            found += [entry.token_id] if entry.token_id != NO_TOKEN else []
            if entry.finish is not Finish.NONE:
                break
        kernel.finish()
        return found, logprobs_of(kernel, processed, len(found)), num_right

    def _entry(self, index: int) -> Any:
        deadline_s = time.monotonic() + WAIT_S
        while (entry := self.kernel.token(index)) is None:
            assert time.monotonic() < deadline_s, f"token {index} does not come"
            time.sleep(0)
        return entry


@pytest.fixture(scope="module", params=SHAPES)
def made(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    one = Kernel(request.param)
    yield one
    one.close()


def edited(token_ids: Sequence[int]) -> list[int]:
    return [token + (index % 7 == 3) for index, token in enumerate(token_ids)]


def test_drafts_change_neither_tokens_nor_log_probabilities(made: Kernel) -> None:
    for name, (sampling, processed) in CASES.items():
        asked = processed.sampling
        plain = made.answer(sampling, asked, None)
        assert plain[2] == 0
        for prediction in (plain[0], edited(plain[0]), plain[0][::-1], ()):
            found = made.answer(sampling, asked, prediction)
            assert found[:2] == plain[:2], name
            assert prediction is not plain[0] or found[2] > NUM_TOKENS // 2, name


@pytest.mark.parametrize("asked", [SamplingParams(), COUNTED], ids=["masks alone", "penalties, log-probabilities"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.3, 11)], ids=["greedy", "seeded"])
def test_what_a_grammar_forces_comes_several_at_a_time(made: Kernel, sampling: SamplingParams, asked: SamplingParams) -> None:
    grammar = Grammar(made.kernel.shape.spec.vocab_size, NUM_TOKENS)
    plain = made.answer(sampling, asked, None, grammar)
    found = made.answer(sampling, asked, (), grammar)
    assert found[:2] == plain[:2]
    assert found[2] > NUM_TOKENS // 4
    right = made.answer(sampling, asked, plain[0], grammar)
    assert right[:2] == plain[:2]
    assert right[2] >= found[2]
    for prediction in (edited(plain[0]), plain[0][::-1]):
        assert made.answer(sampling, asked, prediction, grammar)[:2] == plain[:2]


# ---- the engine ----
class Engine:
    """An engine, and a grammar process's thread for each request that has a grammar."""

    def __init__(self, folder: Path, prefill: str) -> None:
        vocab_size = int(DENSE["qwen3-0.6b"]["vocab_size"])
        self.control = ControlPage.create(1, ENGINE_CONTEXT, vocab_size=vocab_size)
        info = RankInfo(0, 1, 0, "test", 1, self.control.fd, self.control.fd)
        args = WorkerArgs(info, str(folder), "cuda:0", "bfloat16", True, 60.0, 10.0, prefill=prefill, drafts=True)
        self.engine, self.grammar, self._seq = CudaEngine(args, self.control), Grammar(vocab_size, 200), 0
        self.engine.startup()

    def close(self) -> None:
        self.engine.close()
        self.control.close()

    def ask(self, *, has_grammar: bool = False, **options: Any) -> list[Any]:
        self._seq += 1
        epoch = self._seq * 2 * ENGINE_CONTEXT if has_grammar else 0
        asked = {"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, **options}
        request = DecodeRequest(**asked, mask_epoch=epoch)
        follower = threading.Thread(target=self._follow, args=(self._seq, epoch))
        if has_grammar:
            follower.start()
        since_s = time.monotonic()
        self.engine.run(self._seq, request)
        self.seconds = time.monotonic() - since_s
        if has_grammar:
            follower.join(WAIT_S)
            assert not follower.is_alive()
        return entries_of(self.control, self._seq)

    def _follow(self, seq: int, epoch: int) -> None:
        for index in range(len(self.grammar.allowed)):
            self.grammar.put(self.control, epoch, index)
            entry = self.control.ring.wait(seq, index, Deadline.after(WAIT_S), poll_s=50e-6)
            if entry is None or entry.finish is not Finish.NONE:
                return


@pytest.fixture(params=["on", "off"])
def engine(dense_folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """With prefill and without."""
    made = Engine(dense_folder, request.param)
    yield made
    made.close()


def test_an_engine_gives_the_same_answers_with_drafts(engine: Engine) -> None:
    for name, options in ENGINE_CASES.items():
        plain = engine.ask(**options)
        assert all(entry.drafted == NOT_DRAFTED for entry in plain)
        ids = [entry.token_id for entry in plain]
        for prediction in (ids, edited(ids), ids[::-1], ()):
            drafted = engine.ask(**options, drafts=True, prediction=prediction)
            assert said(drafted) == said(plain), name
            num_right = sum(entry.drafted.num_right for entry in drafted)
            assert prediction is not ids or num_right > len(ids) // 3, name
    ids = [entry.token_id for entry in engine.ask(sampling=COUNTED)]
    cut: dict[str, Any] = {"sampling": COUNTED, "stop_ids": (ids[41],), "ignore_eos": False}
    assert said(engine.ask(**cut, drafts=True, prediction=ids)) == said(engine.ask(**cut))
    for max_tokens in range(1, 10):
        few: dict[str, Any] = {"sampling": COUNTED, "max_tokens": max_tokens}
        assert said(engine.ask(**few, drafts=True, prediction=ids)) == said(engine.ask(**few))


@pytest.mark.parametrize("sampling", [SamplingParams(), replace(COUNTED, temperature=0.9, seed=2)], ids=["greedy", "counted"])
def test_an_engine_drafts_what_a_grammar_forces(engine: Engine, sampling: SamplingParams) -> None:
    plain = engine.ask(has_grammar=True, sampling=sampling)
    without_s, ids = engine.seconds, [entry.token_id for entry in plain]
    for prediction in ((), ids, edited(ids)):
        drafted = engine.ask(has_grammar=True, sampling=sampling, drafts=True, prediction=prediction)
        assert said(drafted) == said(plain)
        num_right = sum(entry.drafted.num_right for entry in drafted)
        assert num_right > len(ids) // 4
        times = f"{engine.seconds * 1e3:.1f} ms, without drafts {without_s * 1e3:.1f} ms"
        print(f"{num_right} of {len(ids)} tokens were right drafts; {times}")
