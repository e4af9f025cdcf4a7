"""Passes of several tokens: tokens and logits have the bits of plain decoding, whatever is drafted, and whoever drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.made_models.published import write_published
from kog_dist.bench.shapes import DENSE, SEED, named_shape, named_spec
from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import NOT_DRAFTED, Finish
from kog_dist.runtime.topology import RankInfo
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda.device_weights import DeviceWeights
from kog_dist.workers.cuda.draft_builds import MEASURED_POSITION
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import DeviceToken, Monokernel
from kog_dist.workers.cuda.random_weights import random_weights
from kog_dist.workers.engines.cuda import CudaEngine
from tests.gpu.test_engine import answer as entries_of
from tests.gpu.test_prefill import clear

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

_FEW_LAYERS = 6
WINDOWS = replace(named_spec("llama-3.2-1b@600"), num_layers=4, sliding_window=200, window_layers=(0, 2))


def coded(name: str) -> dict[str, Any]:
    """Options of KernelShape for a shape with quantised weights."""
    spec, codings = named_shape(name)
    return {"spec": spec, **codings}


def with_experts(name: str) -> dict[str, Any]:
    """The same of a shape with experts, with few of its layers."""
    spec, codings = named_shape(f"{name}@600")
    windows = tuple(layer for layer in spec.window_layers if layer < _FEW_LAYERS)
    return {"spec": replace(spec, num_layers=_FEW_LAYERS, window_layers=windows), **codings}


# Heads of 64; normed ones of 128; seven query heads for a KV head, in two sets; rings that have gone round; quantised weights;
# experts, of which the last blocks of rows are shorter, or whose lanes share groups of columns.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {"spec": named_shape("llama-3.2-1b@600")[0]},
    "qwen3-0.6b": {"spec": named_shape("qwen3-0.6b@600")[0]},
    "qwen3-0.6b, fp8": {"spec": named_shape("qwen3-0.6b@600")[0], "kv_dtype": "fp8"},
    "qwen2.5-0.5b": {"spec": named_shape("qwen2.5-0.5b@600")[0]},
    "windows": {"spec": WINDOWS},
    "windows, fp8": {"spec": WINDOWS, "kv_dtype": "fp8"},
    "whole windows": {"spec": WINDOWS, "whole_windows": True},
    "llama-3.2-1b, weights in fp8": coded("llama-3.2-1b+fp8@600"),
    "qwen3-0.6b, weights in fp8 by rows": coded("qwen3-0.6b+fp8-rows@600"),
    "llama-3.2-1b, weights in int4, head in int8": coded("llama-3.2-1b+int4+head8@600"),
    "llama-3.2-1b, weights in mxfp4": coded("llama-3.2-1b+mxfp4@600"),
    **{
        f"experts of {name}": with_experts(name)
        for name in ("qwen3-30b-a3b", "qwen3-30b-a3b+fp8", "qwen3-30b-a3b+int4", "gpt-oss-20b", "gpt-oss-120b")
    },
}
NUM_PROMPT, NUM_FED, NUM_TOKENS = 500, 30, 64  # the first positions of the cache are empty
WRONG = (range(0), (3, 4, 9, 15, 16, 17, 18, 30, 63), range(NUM_TOKENS))  # drafts that are
DRAFTING = (
    "llama-3.2-1b", "qwen3-0.6b, fp8", "qwen2.5-0.5b", "windows", "llama-3.2-1b, weights in fp8",
    "llama-3.2-1b, weights in int4, head in int8", "experts of qwen3-30b-a3b", "experts of gpt-oss-20b",
)  # fmt: skip
MEASURED = {"spec": named_shape(f"llama-3.2-1b@{4 * MEASURED_POSITION}")[0]}
SAMPLINGS = {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=0.7, seed=3)}


def options_of_builds() -> Iterator[dict[str, Any]]:
    """Of KernelShape, for all that these tests build but the engine."""
    for options in SHAPES.values():
        yield from ({**options, "tokens": tokens} for tokens in (1, 2, 4))
    for name in DRAFTING:
        yield from ({**SHAPES[name], "keeps_hashes": True, **of_build} for of_build in ({}, {"drafts": True}, {"tokens": 4}))
    yield from ({**MEASURED, **of_build} for of_build in ({}, {"drafts": True}, {"tokens": 4}))
    yield from ({**SHAPES["experts of gpt-oss-20b"], "checks_experts": True, "tokens": tokens} for tokens in (1, 2, 4))


def shape_of(name: str, **options: Any) -> KernelShape:
    spec = SHAPES[name]["spec"]
    return KernelShape(hosted_lanes=range(spec.num_lanes), **SHAPES[name], **options)


def kernel_of(shape: KernelShape, weights: DeviceWeights | None = None, **options: Any) -> Monokernel:
    return Monokernel(shape, weights if weights is not None else random_weights(shape, SEED), **options)


def prompt_of(kernel: Monokernel) -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(0, kernel.shape.spec.vocab_size, NUM_PROMPT).tolist()
    return ids


def answer(kernel: Monokernel, sampling: SamplingParams, drafts: Sequence[int] = ()) -> tuple[list[int], Any, int]:
    """Tokens, the logits of the last one, and the number of passes."""
    clear(kernel)
    if drafts:
        kernel.expect(NUM_PROMPT, drafts)
    counted = "pass_epoch" if kernel.shape.tokens > 1 else "epoch"
    before = int(kernel.state()[counted])
    kernel.begin(prompt_of(kernel), NUM_TOKENS, sampling, first_position=NUM_PROMPT - NUM_FED)
    for _ in range(2):  # a launch goes on where the one before has ended
        kernel.launch(NUM_FED)
    kernel.launch(NUM_TOKENS)
    kernel.finish()
    tokens = [kernel.token(index) for index in range(NUM_TOKENS)]
    return [token.token_id for token in tokens if token is not None], kernel.logits.get(), int(kernel.state()[counted]) - before


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", SHAPES)
def test_passes_have_the_bits_of_plain_decoding(name: str, sampling: str) -> None:
    plain_kernel = kernel_of(shape_of(name))
    tokens, logits, _ = answer(plain_kernel, SAMPLINGS[sampling])
    assert len(tokens) == NUM_TOKENS
    vocab = plain_kernel.shape.spec.vocab_size
    for per_pass in (2, 4):
        kernel = kernel_of(shape_of(name, tokens=per_pass), plain_kernel.weights)
        for wrong in WRONG:
            drafts = [(token + (index in wrong)) % vocab for index, token in enumerate(tokens)]
            found, found_logits, passes = answer(kernel, SAMPLINGS[sampling], drafts)
            assert found == tokens
            assert found_logits.tobytes() == logits.tobytes()
            if not wrong:
                assert passes == -(-(NUM_FED - 1 + NUM_TOKENS) // per_pass)


# ---- drafts that the kernel looks up ----
def drafted_answer(kernel: Monokernel, sampling: SamplingParams, prediction: Sequence[int]) -> list[DeviceToken]:
    clear(kernel)
    first = NUM_PROMPT - NUM_FED
    kernel.begin(prompt_of(kernel), NUM_TOKENS, sampling, first_position=first, prediction=prediction)
    for _ in range(NUM_FED + NUM_TOKENS):  # each gives a token at least
        kernel.launch(7)
    kernel.finish()
    return [token for token in map(kernel.token, range(NUM_TOKENS)) if token is not None]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTING)
def test_builds_that_take_turns_give_the_answer_of_plain_decoding(name: str, sampling: str) -> None:
    """Tokens and, by hashes, scores; a plain request between two with drafts is as it ever was."""
    shape = shape_of(name, keeps_hashes=True)
    plain = kernel_of(shape)
    kernel = kernel_of(shape, plain.weights, drafts=True)
    tokens, _, _ = answer(plain, SAMPLINGS[sampling])
    assert answer(kernel, SAMPLINGS[sampling])[0] == tokens
    vocab = shape.spec.vocab_size
    wrong = [(token + (index % 5 == 4)) % vocab for index, token in enumerate(tokens)]
    for prediction, least, most in ((tokens, 45, NUM_TOKENS), (wrong, 15, 60), (range(50), 0, NUM_TOKENS), ((), 0, NUM_TOKENS)):
        found = drafted_answer(kernel, SAMPLINGS[sampling], prediction)
        assert [token.token_id for token in found] == tokens
        assert least <= sum(token.drafted.num_right for token in found) <= most
        if prediction == range(50):  # of it hardly any; an answer that repeats itself has other drafts that are right
            assert sum(token.drafted.num_right for token in found if token.drafted.is_predicted) <= 20
        assert answer(kernel, SAMPLINGS[sampling])[0] == tokens
        for _ in range(2):
            answer(plain, SAMPLINGS[sampling])
        assert kernel.state()["hash"].tolist() == plain.state()["hash"].tolist()


@pytest.mark.parametrize("per_pass", [2, 4])
def test_choices_of_experts_are_kept_as_in_plain_decoding(per_pass: int) -> None:
    """By every thread block, of each token of a pass."""
    name = "experts of gpt-oss-20b"
    plain = kernel_of(shape_of(name, checks_experts=True))
    tokens, _, _ = answer(plain, SamplingParams())
    end = NUM_PROMPT + NUM_TOKENS - 1  # positions whose tokens went through the layers
    wanted = plain.choices(end - per_pass, end)
    assert (wanted == wanted[:, :, :1]).all()
    kernel = kernel_of(shape_of(name, checks_experts=True, tokens=per_pass), plain.weights)
    found, _, _ = answer(kernel, SamplingParams(), tokens)
    assert found == tokens
    np.testing.assert_array_equal(kernel.choices(end - per_pass, end), wanted)


def test_measuring_changes_no_answer() -> None:
    kernel = kernel_of(KernelShape(MEASURED["spec"], range(MEASURED["spec"].num_lanes)), drafts=True)
    tokens, _, _ = answer(kernel, SamplingParams())
    costs = kernel.measure_drafts()
    print(f"\na pass of four tokens costs {costs.extra:.3f} of one more, its edges {costs.edge:.3f}")
    assert 0 < costs.extra < 1
    assert 0 <= costs.edge < 1
    assert [token.token_id for token in drafted_answer(kernel, SamplingParams(), tokens)] == tokens
    assert answer(kernel, SamplingParams())[0] == tokens


# ---- the engine ----
ENGINE_CONTEXT = 1536
PROMPT = tuple(int(token) for token in np.random.default_rng(2).integers(0, 5000, 700))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampling": SamplingParams(temperature=0.8, seed=5)},
    "a short prompt": {"prompt": PROMPT[:2]},
    "the end of the context": {"prompt": (PROMPT * 3)[: ENGINE_CONTEXT - 20]},
    "penalties": {"sampling": SamplingParams(frequency_penalty=0.4)},
    "log-probabilities": {"sampling": SamplingParams(logprobs=2)},
    "digests": {"logit_digests": True, "max_tokens": 12},
}
WITHOUT = ("digests",)  # that have no drafts


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    write_published(folder, {**DENSE["qwen3-0.6b"], "max_position_embeddings": ENGINE_CONTEXT})
    return folder


@pytest.fixture(params=["on", "off"])
def drafting(dense_folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[CudaEngine, ControlPage]]:
    """With prefill and without."""
    control = ControlPage.create(1, ENGINE_CONTEXT)
    args = WorkerArgs(
        RankInfo(0, 1, 0, "test", 1, control.fd, control.fd), str(dense_folder), "cuda:0", "bfloat16", True, 60.0, 10.0,
        prefill=request.param, drafts=True,
    )  # fmt: skip
    engine = CudaEngine(args, control)
    engine.startup()
    yield engine, control
    engine.close()
    control.close()


def said(entries: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(entry.token_id, entry.finish, entry.digest, entry.logprobs) for entry in entries]


def test_an_engine_gives_the_same_answers_with_drafts(drafting: tuple[CudaEngine, ControlPage]) -> None:
    engine, control = drafting
    seq = 0

    def ask(**options: Any) -> list[Any]:
        nonlocal seq
        seq += 1
        engine.run(seq, DecodeRequest(**{"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, **options}))
        return entries_of(control, seq)

    for name, options in KINDS.items():
        plain = ask(**options)
        assert all(entry.drafted == NOT_DRAFTED for entry in plain)
        ids = [entry.token_id for entry in plain]
        edited = [token + (index % 7 == 3) for index, token in enumerate(ids)]
        for prediction in (ids, edited, ids[::-1], ()):
            drafted = ask(**options, drafts=True, prediction=prediction)
            assert said(drafted) == said(plain), name
            num_right = sum(entry.drafted.num_right for entry in drafted)
            print(f"{name}: {num_right} of {len(ids)} tokens were right drafts")
            assert (num_right > len(ids) // 3) if prediction is ids and name not in WITHOUT else num_right >= 0, name
            assert name not in WITHOUT or all(entry.drafted == NOT_DRAFTED for entry in drafted)
        if name == "greedy":
            cut = ask(stop_ids=(ids[41],), ignore_eos=False)
            assert said(ask(stop_ids=(ids[41],), ignore_eos=False, drafts=True, prediction=ids)) == said(cut)
            assert cut[-1].finish is Finish.STOP
            for max_tokens in range(1, 10):
                assert said(ask(max_tokens=max_tokens, drafts=True, prediction=ids)) == said(ask(max_tokens=max_tokens))
