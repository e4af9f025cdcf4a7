"""What one rank does in tests/gpu/test_ranks.py: decode with a small model, alone or with peers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kog_dist.bench.kernel.rank_kernel import lane_digests, prepare, rank_kernel, rank_shape
from kog_dist.collectives.ranks import RankContext
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.processors import ProcessedRequest
from tests.gpu.processors_reference import check, logprobs_of

if TYPE_CHECKING:
    from kog_dist.workers.cuda.monokernel import Monokernel

SPEC = ModelSpec(
    hidden_size=256, num_layers=6, num_heads=16, num_kv_heads=8, intermediate_size=512, vocab_size=1000, max_context=512,
    num_lanes=8, delay=2, sliding_window=64, window_layers=(0, 2, 3),
)  # fmt: skip
_EXPERTS = replace(
    SPEC, delay=0, qkv_bias=True, out_bias=True, attention_sinks=True,
    experts=ExpertsSpec(24, 4, router_bias=True, bias=True, clamp=ClampedSwiglu(1.702, 7.0)),
)  # fmt: skip
VARIANTS = {
    "delayed": SPEC,
    "delay 1": replace(SPEC, delay=1, vocab_size=997),
    "all blocking": replace(SPEC, delay=0),
    "all blocking, norm scales per lane": replace(SPEC, delay=0, shared_norm_scale=False),
    "biases, normed heads": replace(SPEC, delay=0, num_heads=40, own_head_dim=32, qkv_bias=True, qk_norm=True),
    "experts": _EXPERTS,
    "wide experts": replace(_EXPERTS, intermediate_size=1024),  # whole groups of 128 columns in a lane
    "late": replace(SPEC, early_comm=False),
    "attention alone": replace(SPEC, mlp_comm=False),
    "sum before norm": replace(SPEC, pre_norm_lane_agg=True),
    "norm scales per lane": replace(SPEC, shared_norm_scale=False),
    "head of all lanes": replace(SPEC, head_type=HeadType.LANE, shared_norm_scale=False, vocab_size=997),
    "head by lane": replace(SPEC, head_type=HeadType.VOCAB_PARALLEL),
    "head by lane, all blocking": replace(SPEC, head_type=HeadType.VOCAB_PARALLEL, shared_norm_scale=False, delay=0),
    "all blocking, cache of fp8": replace(SPEC, delay=0, own_head_dim=32),
    "all blocking, cache of int4": replace(SPEC, delay=0, own_head_dim=64),
}
KV_OF_VARIANT = {"all blocking, cache of fp8": "fp8", "all blocking, cache of int4": "int4"}  # others: bfloat16
PROMPT = [(7 * i + 3) % SPEC.vocab_size for i in range(40)]


# Of requests with processors, whose sums and counts go over ranks: sampling, and what is asked for besides.
PROCESSED = (
    (SamplingParams(0.9, 11), ProcessedRequest(SamplingParams(top_p=0.8, logprobs=5))),
    (
        SamplingParams(1.5, 3),
        ProcessedRequest(SamplingParams(top_k=30, top_p=0.7, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3)),
    ),
    (SamplingParams(), ProcessedRequest(SamplingParams(logit_bias=((5, 3.0), (600, 2.5)), presence_penalty=1.0, logprobs=20))),
)


def answer(context: RankContext) -> dict[str, Any]:
    """Tokens of a greedy and of a sampled answer, and SHA-256 of each of the rank's lanes' logits after them."""
    answers, digests = [], []
    with _kernel(context, processors=False) as kernel:
        prompt = [token % kernel.shape.spec.vocab_size for token in PROMPT]
        for sampling in (SamplingParams(), SamplingParams(temperature=0.9, seed=11)):
            context.rendezvous.barrier(context.deadline)
            answers.append(kernel.generate(prompt, 100, sampling, chunk=32))
            digests.append(lane_digests(kernel))
    return {"answers": answers, "digests": digests}


def processed_answers(context: RankContext) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Tokens of the `PROCESSED` answers; their log-probabilities on rank 0."""
    found = []
    with _kernel(context, processors=True) as kernel:
        prompt = [token % kernel.shape.spec.vocab_size for token in PROMPT]
        for sampling, request in PROCESSED:
            context.rendezvous.barrier(context.deadline)
            tokens = kernel.generate(prompt, 60, sampling, chunk=16, processed=request)
            found.append((tokens, logprobs_of(kernel, request, len(tokens)) if context.info.rank == 0 else []))
            if context.info.world_size == 1:
                check(kernel, prompt, tokens, found[-1][1], (sampling, request))
    return found


def _kernel(context: RankContext, *, processors: bool) -> AbstractContextManager[Monokernel]:
    """The rank's kernel with the variant's random weights."""
    from kog_dist.workers.cuda.random_weights import random_weights

    variant = VARIANTS[str(context.arguments["variant"])]
    kv_dtype = KV_OF_VARIANT.get(str(context.arguments["variant"]), "bfloat16")
    # 128 positions: answers come to attention's second part.
    shape = rank_shape(context, variant, partition_batches=1, kv_dtype=kv_dtype)
    prepare(context, [shape], processors=processors)
    return rank_kernel(context, shape, random_weights(shape, 5), processors=processors)
