"""Random weights of the right scale, made on the GPU: for timing shapes that no checkpoint exists of."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import CODED_COLUMNS
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.layout import EMBEDDING, EXPERTS, tensor_layouts
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.device_weights import DeviceWeights, GpuArray, from_tensors, needed_rows, to_words
from kog_dist.workers.cuda.kernel_shape import KernelShape

_SUMMED = ("wo.weight", "w2.weight")  # over lanes


def random_weights(shape: KernelShape, seed: int, observe: Callable[[str, GpuArray], None] | None = None) -> DeviceWeights:
    """Random weights of the right scale, made on the GPU: for timing shapes that no checkpoint exists of.

    `observe`: see `load_weights`.
    """

    def tensor(name: str) -> GpuArray:
        first, last = needed_rows(shape, name)
        words = random_tensor(shape.spec, name, seed, shape.weight_dtype)[first:last]
        if observe is not None:
            observe(name, words)
        return words

    if shape.coding is None:
        return from_tensors(shape, tensor)
    return from_tensors(shape, tensor, lambda name, lane: random_codes(shape, name, lane, seed))


def _generator(name: str, text: str, seed: int) -> Any:
    """One for a tensor of this name. Those of experts are many: a generator that begins at once."""
    import cupy

    own_seed = seed << 32 | zlib.crc32(text.encode())
    return cupy.random.Generator(cupy.random.Philox4x3210(own_seed)) if EXPERTS in name else cupy.random.default_rng(own_seed)


def random_codes(shape: KernelShape, name: str, lane: int, seed: int) -> Codes:
    """A hosted lane's part of a quantised matrix; equal for equal arguments, whoever hosts the lane."""
    import cupy

    coding, spec = shape.coding, shape.spec
    assert coding is not None
    _, rows, columns = tensor_layouts(spec)[name].shape
    generator = _generator(name, f"{name} {shape.hosted_lanes[lane]}", seed)
    values = NUMBERS[coding.number].values
    few = np.arange(len(values)) & 0xBF  # of 8 bits those below 2: no NaN
    codes = generator.integers(0, len(values), (rows, columns), cupy.uint8) & cupy.uint8(0xBF)
    num_groups = -(-columns // CODED_COLUMNS) * coding.scales or 1
    fan_in = columns * (spec.num_lanes if name.endswith(_SUMMED) else 1)
    largest = np.float32(fan_in**-0.5 / np.sqrt(np.mean(np.square(values[few]))))
    scales = largest * (np.float32(1) + generator.random((rows, num_groups), cupy.float32)) / np.float32(2)
    kept = {"BF16": 0xFFFF0000, "E8M0": 0x7F800000, "F16": 0xFFFFE000}.get(coding.scale, 0xFFFFFFFF)
    scales = (scales.view(np.uint32) & np.uint32(kept)).view(np.float32)
    zeros = generator.integers(6, 11, (rows, num_groups), cupy.uint8) if coding.has_zeros else None
    return Codes(codes, scales, zeros)


def random_tensor(spec: ModelSpec, name: str, seed: int, dtype: str = "bfloat16") -> GpuArray:
    """A whole tensor of random 16-bit words, made on the GPU; equal for equal arguments.

    Scaled as `checkpoint.random_tensors` does it: matrices by 1 / sqrt(fan-in), norm weights around 1.
    """
    import cupy

    shape = tensor_layouts(spec)[name].shape
    generator = _generator(name, name, seed)
    values = generator.standard_normal(shape, dtype=cupy.float32)
    if "norm." in name:  # of heads, too
        values = np.float32(1.0) + np.float32(0.1) * values
    elif name != EMBEDDING:
        fan_in = shape[-1] * (spec.num_lanes if name.endswith(_SUMMED) else 1)  # those are summed over lanes
        values *= np.float32(fan_in**-0.5)
    return to_words(values, dtype)
