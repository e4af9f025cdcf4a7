"""Models that decode in a millisecond: random weights, every byte a token. For benchmarks of everything but the arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kog_dist.bench.fakes.made_tokenizer import write_tokenizer
from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint

EOS_ID = 256
TINY = ModelSpec(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=32, vocab_size=EOS_ID + 1,
    max_context=256, num_lanes=4, delay=1, sliding_window=24, window_layers=(0,),
)  # fmt: skip
TINY_ON_GPUS = replace(  # head_dim a multiple of 16, as the CUDA kernel wants it
    TINY, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=8, intermediate_size=512, max_context=512, num_lanes=8,
    delay=2, sliding_window=64, window_layers=(0, 1),
)  # fmt: skip
TINY_WITH_EXPERTS = replace(  # the same for GPUs
    TINY_ON_GPUS,
    delay=0,
    sliding_window=None,
    window_layers=(),
    qkv_bias=True,
    out_bias=True,
    attention_sinks=True,
    experts=ExpertsSpec(24, 4, router_bias=True, bias=True, clamp=ClampedSwiglu(1.702, 7.0)),
)


def write_tiny_model(folder: Path, spec: ModelSpec = TINY, *, seed: int = 1) -> ModelSpec:
    """Write a checkpoint of `spec`, whose vocabulary is TINY's, with a tokenizer into a new folder."""
    write_checkpoint(folder, spec, random_tensors(spec, seed=seed))
    write_tokenizer(folder, spec.vocab_size)
    return spec
