"""Our processors against those of Hugging Face transformers, an independent implementation (with torch's float32 softmax)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kog_dist.decode.sampling import Sampler, adjust, in_order, masses, select, token_logprobs
from kog_dist.sampling_params import SamplingParams

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers.generation.logits_process", reason="transformers is installed with the extra 'dev'")

F32 = np.float32
NEAR = 2e-6  # of the whole mass: torch's softmax and cumsum are rounded, ours are not


def as_batch(values: NDArray[Any]) -> Any:
    return torch.from_numpy(np.ascontiguousarray(values))[None]


def processed(processor: Any, x: NDArray[np.float32], input_ids: list[int]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = processor(torch.tensor([input_ids]), as_batch(x))[0].numpy()
    return found


@st.composite
def logits(draw: st.DrawFn) -> NDArray[np.float32]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size, scale = draw(st.sampled_from([2, 9, 100, 3000])), draw(st.sampled_from([0.3, 2.0, 8.0]))
    x: NDArray[np.float32] = (rng.standard_normal(size) * scale).astype(F32)
    return x


@settings(max_examples=60, deadline=None, derandomize=True)
@given(x=logits(), penalty=st.floats(0.01, 100.0), rnd=st.randoms(use_true_random=False))
def test_repetition_penalty_has_the_same_bits(x: NDArray[np.float32], penalty: float, rnd: Any) -> None:
    context = [rnd.randrange(len(x)) for _ in range(rnd.choice([1, 5, 200]))]
    seen = np.zeros(len(x), np.bool_)
    seen[context] = True
    ours = adjust(x, SamplingParams(repetition_penalty=penalty), seen, np.zeros(len(x), np.int32))
    assert ours.tobytes() == processed(hf.RepetitionPenaltyLogitsProcessor(penalty), x, context).tobytes()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(x=logits(), rnd=st.randoms(use_true_random=False))
def test_logit_bias_has_the_same_bits(x: NDArray[np.float32], rnd: Any) -> None:
    bias = {token_id: rnd.uniform(-100, 100) for token_id in rnd.sample(range(len(x)), min(len(x), 20))}
    empty = np.zeros(len(x), np.bool_), np.zeros(len(x), np.int32)
    ours = adjust(x, SamplingParams(logit_bias=tuple(bias.items())), *empty)
    theirs = hf.SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()})
    assert ours.tobytes() == processed(theirs, x, [0]).tobytes()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(x=logits(), top_k=st.integers(1, 60))
def test_top_k_keeps_the_same_ids(x: NDArray[np.float32], top_k: int) -> None:
    theirs = np.flatnonzero(np.isfinite(processed(hf.TopKLogitsWarper(top_k), x, [0])))
    assert sorted(select(x, SamplingParams(top_k=top_k)).tolist()) == theirs.tolist()


def near_the_limit(x: NDArray[np.float32], processors: SamplingParams, ids: set[int]) -> bool:
    """Whether all `ids` stand where rounding decides: their mass before, or their probability, is at the limit."""
    mass = masses(x - x.max()).astype(np.float64)
    before = np.zeros(len(x))
    order = in_order(x)
    before[order] = np.cumsum(mass[order]) - mass[order]
    at_top_p = np.abs(before / mass.sum() - processors.top_p) < NEAR
    at_min_p = np.abs(np.exp(x - x.max()) - processors.min_p) < NEAR
    return all(at_top_p[k] or at_min_p[k] for k in ids)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(x=logits(), top_p=st.floats(0.01, 0.999))
def test_top_p_keeps_the_same_ids(x: NDArray[np.float32], top_p: float) -> None:
    theirs = set(np.flatnonzero(np.isfinite(processed(hf.TopPLogitsWarper(top_p), x, [0]))).tolist())
    ours = set(select(x, SamplingParams(top_p=top_p)).tolist())
    assert near_the_limit(x, SamplingParams(top_p=top_p), ours ^ theirs), (ours, theirs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(x=logits(), min_p=st.floats(1e-4, 1.0))
def test_min_p_keeps_the_same_ids(x: NDArray[np.float32], min_p: float) -> None:
    theirs = set(np.flatnonzero(np.isfinite(processed(hf.MinPLogitsWarper(min_p), x, [0]))).tolist())
    ours = set(select(x, SamplingParams(min_p=min_p)).tolist())
    assert near_the_limit(x, SamplingParams(min_p=min_p), ours ^ theirs), (ours, theirs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    x=logits(), temperature=st.floats(0.2, 3.0), min_p=st.sampled_from([0.0, 0.01, 0.2]), top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]), seed=st.integers(0, 2**63 - 1), rnd=st.randoms(use_true_random=False),
)  # fmt: skip
def test_all_processors_in_our_order(
    x: NDArray[np.float32], temperature: float, min_p: float, top_k: int, top_p: float, seed: int, rnd: Any
) -> None:
    """Bias, repetition, min_tokens, temperature, min-p, top-k, top-p: the token chosen is one that Hugging Face would allow."""
    context = [rnd.randrange(len(x)) for _ in range(8)]
    end_ids = [0]
    chain = [
        hf.SequenceBiasLogitsProcessor({(1,): 1.5}), hf.RepetitionPenaltyLogitsProcessor(1.2),
        hf.MinNewTokensLengthLogitsProcessor(len(context), 3, torch.tensor(end_ids)), hf.TemperatureLogitsWarper(temperature),
    ]  # fmt: skip
    # A little looser than ours, so that no rounding decides.
    chain += [hf.MinPLogitsWarper(min_p * (1 - NEAR))] if min_p else []
    chain += [hf.TopKLogitsWarper(top_k)] if top_k else []
    chain += [hf.TopPLogitsWarper(top_p + NEAR)] if top_p < 1 else []
    scores = as_batch(x)
    for processor in chain:
        scores = processor(torch.tensor([context]), scores)
    theirs = set(np.flatnonzero(np.isfinite(scores[0].numpy())).tolist())
    processors = SamplingParams(
        top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=1.2, logit_bias=((1, 1.5),), min_tokens=3
    )
    shaper = Sampler(len(x), context, replace(processors, temperature=temperature, seed=seed), end_ids)
    drawn = {shaper.choose(x, position).token_id for position in range(40)}
    assert drawn <= theirs


@settings(max_examples=30, deadline=None, derandomize=True)
@given(x=logits())
def test_logprobs_are_those_of_log_softmax(x: NDArray[np.float32]) -> None:
    theirs = torch.log_softmax(as_batch(x).double(), dim=-1)[0].numpy()
    found = token_logprobs(x, len(x) - 1, 20)
    np.testing.assert_allclose(found.chosen, theirs[-1], atol=2e-6, rtol=1e-7)
    np.testing.assert_allclose(found.top_logprobs, theirs[list(found.top_ids)], atol=2e-6, rtol=1e-7)
