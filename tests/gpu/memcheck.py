"""A few tokens of small models, for compute-sanitizer: see memcheck.sh. Neither torch nor pytest, which would take it minutes.

Together the models have all that addresses depend on: rings that wrap, rows and columns that do not divide, both formats, 1 to 8
hosted lanes, every reduction, a planted silence with its wait record, sampling with and without processors, launches in pieces,
and the ceiling kernel.
"""

from __future__ import annotations

from dataclasses import replace

from kog_dist.bench.kernel.stream import stream_us
from kog_dist.errors import DeviceError
from kog_dist.model.spec import ModelSpec
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import LONGEST_WAIT_US, Monokernel
from kog_dist.workers.cuda.processors import ProcessedRequest
from kog_dist.workers.cuda.random_weights import random_weights
from tests.silent import make_silent

SMALL = ModelSpec(
    hidden_size=256, num_layers=4, num_heads=16, num_kv_heads=8, intermediate_size=512, vocab_size=1000, max_context=512,
    num_lanes=8, delay=2, sliding_window=128, window_layers=(0, 1),
)  # fmt: skip
ODD = replace(
    SMALL, hidden_size=192, num_heads=12, num_kv_heads=4, num_lanes=4, intermediate_size=592, vocab_size=1001, delay=1,
    sliding_window=37, shared_norm_scale=False,
)  # fmt: skip
SHAPES = {
    "8 lanes": KernelShape(SMALL, range(8)),
    "lanes 2 and 3 of 8, float16 cache": KernelShape(SMALL, range(2, 4), kv_dtype="float16"),
    "nothing divides, float16": KernelShape(ODD, range(4), weight_dtype="float16", kv_dtype="float16"),
    "one lane, sum before norm, local sums": KernelShape(
        replace(ODD, num_lanes=1, pre_norm_lane_agg=True, attention_comm=False), range(1)
    ),
    "traced": KernelShape(SMALL, range(8), traced_step=2),
}

PROCESSED = ProcessedRequest(
    SamplingParams(
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=((3, 2.0), (700, 1.0)),
        min_tokens=3,
        logprobs=20,
    )
)


def main() -> None:
    import cupy

    cupy.cuda.set_allocator(None)  # a pool would hide accesses behind an array
    for name, shape in SHAPES.items():
        kernel = Monokernel(shape, random_weights(shape, 1), wait_limit_us=LONGEST_WAIT_US, processors=True)
        prompt = [(7 * i) % shape.spec.vocab_size for i in range(150)]  # beyond the windows
        tokens = kernel.generate(prompt, 12, SamplingParams(0.8, 3), stop_ids=[5, 6], chunk=40)
        kernel.generate(prompt, 8, SamplingParams(0.8, 3), stop_ids=[5, 6], chunk=40, processed=PROCESSED)
        at_the_end = kernel.generate(prompt[:3], 4)
        kernel.begin(prompt[:1], 1, SamplingParams(), first_position=0)
        kernel.launch(1)
        kernel.finish()
        stream_us(kernel, 2)
        print(f"{name}: {len(tokens)} and {len(at_the_end)} tokens", flush=True)
    shape = SHAPES["8 lanes"]
    kernel = Monokernel(shape, random_weights(shape, 1), wait_limit_us=200_000)
    make_silent(kernel, 5)
    try:
        kernel.generate([1, 2, 3], 2)
    except DeviceError as error:
        print(f"planted silence: {error}")
    else:
        raise SystemExit("the planted silence was not noticed")


if __name__ == "__main__":
    main()
