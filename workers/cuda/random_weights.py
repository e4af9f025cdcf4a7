"""Random weights of the right scale, made on the GPU: for timing shapes that no checkpoint exists of."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import CODED_COLUMNS
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.layout import EMBEDDING, EXPERTS, tensor_layouts
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.device_weights import DeviceWeights, from_tensors, needed_rows, to_words
from kog_dist.workers.cuda.expert_weights import GpuArray
from kog_dist.workers.cuda.kernel_shape import KernelShape

_DRAWN = 1 << 24
_SUMMED = ("wo.weight", "w2.weight")  # over lanes


def random_weights(
    shape: KernelShape, seed: int, observe: Callable[[str, GpuArray], None] | None = None, *, router_skew: float = 1.0
) -> DeviceWeights:
    """Random weights of the right scale, made on the GPU: for timing shapes that no checkpoint exists of.

    `observe`: see `load_weights`. `router_skew`: of a model with experts, in each layer; so many times as large are the router's
    rows of as many of its experts as a token uses, so that those are chosen more often than others.
    """

    def tensor(name: str) -> GpuArray:
        first, last = needed_rows(shape, name)
        words = random_tensor(shape.spec, name, seed, shape.weight_dtype, router_skew=router_skew)[first:last]
        if observe is not None:
            observe(name, words)
        return words

    codes = None if shape.coding is None else partial(random_codes, shape, seed=seed)
    return from_tensors(shape, tensor, codes, repeats_experts=True)


def _generator(text: str, seed: int) -> Any:
    import cupy

    return cupy.random.default_rng(seed << 32 | zlib.crc32(text.encode()))


class _Parts:
    """What is drawn of a tensor of a layer with experts, with a generator's methods: parts of one array.

    A generator takes 0.1 s to begin, and there are thousands of tensors. Experts are the same in all layers, so that they need
    be packed once.
    """

    _drawn: ClassVar[dict[int, GpuArray]] = {}  # by seed, of the newest one

    def __init__(self, text: str, seed: int) -> None:
        if seed not in self._drawn:
            self._drawn.clear()
            self._drawn[seed] = _generator("layers", seed).standard_normal(_DRAWN, dtype=np.float32)
        of_any_layer = text.partition(EXPERTS)[2] or text
        self._values, self._first = self._drawn[seed], zlib.crc32(of_any_layer.encode()) % _DRAWN

    def standard_normal(self, shape: tuple[int, ...], dtype: DTypeLike) -> GpuArray:
        """Normally distributed values."""
        count = int(np.prod(shape))
        times = -(-(self._first + count) // _DRAWN)
        values = np.concatenate([self._values] * times) if times > 1 else self._values
        return values[self._first : self._first + count].astype(dtype).reshape(shape)

    def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: DTypeLike) -> GpuArray:
        """Evenly distributed ones below `high`: the lowest bits of values."""
        bits = self.standard_normal(shape, np.float32).view(np.uint32)
        return (bits % np.uint32(high - low) + np.uint32(low)).astype(dtype)

    def random(self, shape: tuple[int, ...], dtype: DTypeLike) -> GpuArray:
        """Values of 0 to 1."""
        return (self.integers(0, 1 << 16, shape, np.uint32) / np.float32(1 << 16)).astype(dtype)


def random_codes(shape: KernelShape, name: str, lane: int, seed: int) -> Codes:
    """A hosted lane's part of a quantised matrix; equal for equal arguments, whoever hosts the lane."""
    import cupy

    coding, spec = shape.coding, shape.spec
    assert coding is not None
    layout, hosted = tensor_layouts(spec)[name], shape.hosted_lanes[lane]
    _, rows, columns = layout.shape
    text = f"{name} {hosted - hosted % layout.sharing}"
    generator = _Parts(text, seed) if spec.experts is not None else _generator(text, seed)
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


def random_tensor(spec: ModelSpec, name: str, seed: int, dtype: str = "bfloat16", *, router_skew: float = 1.0) -> GpuArray:
    """A whole tensor of random 16-bit words, made on the GPU; equal for equal arguments.

    Scaled as `written_checkpoint.random_tensors` does it: matrices by 1 / sqrt(fan-in), norm weights around 1. `router_skew`: see
    `random_weights`.
    """
    import cupy

    layout = tensor_layouts(spec)[name]
    is_part = spec.experts is not None and name.startswith("model.layers.")
    generator = _Parts(name, seed) if is_part else _generator(name, seed)
    values = layout.of_all_lanes(generator.standard_normal(layout.drawn_shape, dtype=cupy.float32))
    if "norm." in name:  # of heads, too
        values = np.float32(1.0) + np.float32(0.1) * values
    elif name != EMBEDDING:
        fan_in = layout.shape[-1] * (spec.num_lanes if name.endswith(_SUMMED) else 1)  # those are summed over lanes
        values *= np.float32(fan_in**-0.5)
    if name.endswith("router.weight") and spec.experts is not None:
        step = spec.experts.num_experts // spec.experts.per_token
        values[: step * spec.experts.per_token : step] *= np.float32(router_skew)
    return to_words(values, dtype)
