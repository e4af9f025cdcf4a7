"""Quantised matrices as the libraries write them, and the values that these libraries, or slow readings, find in them.

`compressed-tensors` and transformers write FP8, packed INT4 and MXFP4, and read them again. AutoAWQ and AutoGPTQ cannot be
installed beside them: their tensors are written here, one code at a time, from what they document, and read by
compressed-tensors' converter (AWQ) or one code at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Written(NamedTuple):
    """The tensors of a module by the ends of their names, and the values (rows, columns) that they stand for, in float32."""

    tensors: Tensors
    values: torch.Tensor


class Method(NamedTuple):
    """A `quantization_config`, and what writes a matrix accordingly."""

    config: Config
    write: Callable[[torch.Tensor], Written]


# ---- transformers: FP8 in blocks ----
def fp8_blocks(rows: int, columns: int, scale_fmt: str = "float", scales: torch.dtype = torch.float32) -> Method:
    config: Any = FineGrainedFP8Config(weight_block_size=(rows, columns), scale_fmt=scale_fmt)
    quantizer = SimpleNamespace(quantization_config=config)
    quantise: Any = Fp8Quantize
    dequantise: Any = Fp8Dequantize

    def write(weight: torch.Tensor) -> Written:
        tensors = quantise(quantizer).convert({"weight": weight})
        if scale_fmt == "float":
            tensors["weight_scale_inv"] = tensors["weight_scale_inv"].to(scales)
        values = dequantise(quantizer)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], torch.float32)
        return Written(tensors, values)

    block = {"weight_block_size": [rows, columns], "fmt": "e4m3", "activation_scheme": "dynamic"}
    more = {"scale_fmt": "ue8m0"} if scale_fmt == "ue8m0" else {}
    return Method({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]} | block | more, write)


# ---- compressed-tensors ----
def compressed(kind: str, dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> Method:
    """`kind`: the library's name of the format, `dtype` of scales."""
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor: Any = BaseCompressor.get_value_from_registry(kind)

    def write(weight: torch.Tensor) -> Written:
        low, high = _extremes(weight.float(), args)
        scale, zero = calculate_qparams(low, high, args)
        state: Tensors = {"weight": weight.float(), "weight_scale": scale.to(dtype)}
        if args.symmetric is False:
            state["weight_zero_point"] = zero.to(torch.int8)
        tensors = compressor.compress(state, scheme)
        exact = dict(tensors)
        if kind != "mxfp4-pack-quantized":
            exact["weight_scale"] = exact["weight_scale"].float()
        return Written(tensors, compressor.decompress(exact, scheme)["weight"].float())

    weights = {key: value for key, value in args.model_dump().items() if value is not None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"], "quantization_status": "compressed",
              "config_groups": {"group_0": group}}  # fmt: skip
    return Method(config, write)


def _extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "group":
        assert args.group_size is not None
        groups = weight.reshape(rows, -1, args.group_size)
        return groups.amin(2), groups.amax(2)
    assert args.block_structure is not None
    high, wide = args.block_structure
    padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    blocks = padded.reshape(-(-rows // high), high, -(-columns // wide), wide)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


# ---- AWQ and GPTQ ----
class Codes(NamedTuple):
    """Codes (rows, columns), zero points and scales (rows, groups), and the group of each column."""

    codes: np.ndarray[Any, np.dtype[np.int64]]
    zeros: np.ndarray[Any, np.dtype[np.int64]]
    scales: np.ndarray[Any, np.dtype[np.float16]]
    groups: list[int]

    def values(self) -> torch.Tensor:
        """(code - zero point) * scale, exact, then rounded once."""
        of = np.array(self.groups)
        return torch.from_numpy((self.codes - self.zeros[:, of]) * self.scales.astype(np.float64)[:, of]).float()


def drawn(weight: torch.Tensor, group: int, seed: int, *, ordered: bool = False) -> Codes:
    """Asymmetric rounding of a matrix, with zero points of all sizes; `ordered`: columns belong to groups at random."""
    rng = np.random.default_rng(seed)
    rows, columns = weight.shape
    num_groups = columns // group
    groups = [k // group for k in range(columns)]
    if ordered:
        rng.shuffle(groups)
    of = np.array(groups)
    zeros = rng.integers(1, 16, (rows, num_groups))
    dense = weight.float().numpy()
    largest = np.stack([np.abs(dense[:, of == g]).max(1) for g in range(num_groups)], axis=1)
    scales = np.where(largest > 0, largest / 7, 1).astype(np.float16)
    codes = np.clip(np.rint(dense / scales.astype(np.float32)[:, of]) + zeros[:, of], 0, 15).astype(np.int64)
    return Codes(codes, zeros, scales, groups)


def _words(codes: np.ndarray[Any, Any], order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Words (n, m / 8) of codes (n, m): code 8 c + order[i] of a row lies in bits 4 i of word c."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for i, place in enumerate(order):
        words |= codes[:, place::8].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32))


def awq(group: int, seed: int = 1) -> Method:
    def write(weight: torch.Tensor) -> Written:
        drawn_codes = drawn(weight, group, seed)
        tensors = {
            "qweight": _words(drawn_codes.codes.T, AWQ_ORDER), "qzeros": _words(drawn_codes.zeros.T, AWQ_ORDER),
            "scales": torch.from_numpy(drawn_codes.scales.T.copy()),
        }  # fmt: skip
        converter = AutoAWQConverter(group_size=group)
        codes, scales, zeros = converter._convert_gemm_module(tensors["qweight"], tensors["scales"], tensors["qzeros"])
        assert zeros is not None
        wide = [tensor.repeat_interleave(group, dim=1) for tensor in (zeros, scales)]
        values = (codes.float() - wide[0].float()) * wide[1].float()
        assert torch.equal(values, drawn_codes.values()), "the library reads what was written"
        return Written(tensors, values)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
              "modules_to_not_convert": None}  # fmt: skip
    return Method(config, write)


def gptq(group: int, seed: int = 2, *, version: str = "gptq", ordered: bool = False) -> Method:
    def write(weight: torch.Tensor) -> Written:
        drawn_codes = drawn(weight, group, seed, ordered=ordered)
        stored_zeros = (drawn_codes.zeros - (version == "gptq")) % 16
        tensors = {
            "qweight": _words(drawn_codes.codes).T.contiguous(), "qzeros": _words(stored_zeros.T),
            "scales": torch.from_numpy(drawn_codes.scales.T.copy()),
            "g_idx": torch.tensor(drawn_codes.groups, dtype=torch.int32),
        }  # fmt: skip
        return Written(tensors, drawn_codes.values())

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": ordered, "sym": False,
              "checkpoint_format": version, "damp_percent": 0.1, "true_sequential": True}  # fmt: skip
    return Method(config, write)


def modelopt(algorithm: str) -> Method:
    """ModelOpt's own config with what compressed-tensors writes alike."""
    strategy = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": "block"}[algorithm]
    blocks: Config = {"block_structure": [128, 128]} if strategy == "block" else {}
    same = compressed("float-quantized", torch.float32, num_bits=8, type="float", strategy=strategy, **blocks)

    def write(weight: torch.Tensor) -> Written:
        tensors, values = same.write(weight)
        scales = tensors["weight_scale"]
        down, across = (*scales.shape, 1)[:2]
        shape = {"tensor": (), "channel": (down,), "block": (down, 1, across, 1)}[strategy]
        more = {} if strategy == "block" else {"input_scale": torch.tensor(0.5)}
        return Written(tensors | {"weight_scale": scales.reshape(shape)} | more, values)

    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return Method(config, write)


def fbgemm() -> Method:
    """FBGEMM's config with what compressed-tensors writes alike."""
    same = compressed("float-quantized", torch.float32, num_bits=8, type="float", strategy="channel")
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    return Method(config, same.write)


FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}
METHODS: Mapping[str, Method] = {
    "fp8": fp8_blocks(16, 16),
    "fp8, bfloat16 scales": fp8_blocks(8, 16, scales=torch.bfloat16),
    "fp8, ue8m0 scales": fp8_blocks(16, 16, "ue8m0"),
    "float-quantized, tensor": compressed("float-quantized", **FP8, strategy="tensor"),
    "float-quantized, channel": compressed("float-quantized", **FP8, strategy="channel"),
    "float-quantized, block": compressed("float-quantized", **FP8, strategy="block", block_structure=[16, 16]),
    "modelopt, tensor": modelopt("FP8"),
    "modelopt, channel": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt, block": modelopt("FP8_PB_WO"),
    "fbgemm": fbgemm(),
    "pack-quantized": compressed("pack-quantized", **INT4, strategy="group", group_size=16),
    "pack-quantized, zero points": compressed("pack-quantized", **INT4, strategy="group", group_size=16, symmetric=False),
    "pack-quantized, channel": compressed("pack-quantized", torch.float16, **INT4, strategy="channel"),
    "mxfp4-pack-quantized": compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    "awq": awq(16),
    "gptq": gptq(16),
    "gptq, version 2": gptq(16, version="gptq_v2"),
    "gptq, act-order": gptq(16, ordered=True),
    "gptq, one group": gptq(128),
}  # fmt: skip
