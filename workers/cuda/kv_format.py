"""How keys and values are kept on a GPU: in 16 bits, or as codes with a scale for each row (kog_dist/decode/kv_formats.py).

A row is what one position has in one KV head, of K or of V.
"""

from __future__ import annotations

from typing import Any

from kog_dist.decode.kv_formats import (
    INT4_KEY_LEVELS,
    INT4_MOST_SCALE,
    INT4_VALUE_LEVELS,
    LEAST_SCALE,
    MOST_CODE,
    MOST_SCALE,
    rotation_factors,
)
from kog_dist.model.spec import ModelSpec

FORMATS = {"bfloat16": "Bf16", "float16": "Fp16"}  # names of 16-bit formats in device code
CODE_BITS = {"fp8": 8, "int4": 4}  # of the formats in codes, of values
NAMES = (*FORMATS, *CODE_BITS)  # of all
_KEY_BITS = {"fp8": 8, "int4": 6}
_HEAD_DIMS = {"fp8": (32, 64, 128, 256), "int4": (64, 128)}  # a warp of prefill has whole heads
_SCALE_BYTES = 2


def position_bytes(head_dim: int, kv_dtype: str) -> int:
    """Of K and V of a position in a KV head, scales included."""
    if kv_dtype not in CODE_BITS:
        return 2 * 2 * head_dim
    return head_dim * (CODE_BITS[kv_dtype] + _KEY_BITS[kv_dtype]) // 8 + 2 * _SCALE_BYTES


def kv_findings(spec: ModelSpec, kv_dtype: str) -> list[str]:
    """What the kernel cannot do with this cache of this model, in words."""
    if kv_dtype in FORMATS:
        return []
    if kv_dtype not in NAMES:
        return [f"a {kv_dtype} KV cache ({', '.join(NAMES[:-1])} or {NAMES[-1]})"]
    findings, article = [], "an" if kv_dtype == "int4" else "a"
    if not spec.has_one_stream:
        findings.append(f"{article} {kv_dtype} KV cache of a Laneformer ({' or '.join(FORMATS)})")
    if spec.head_dim not in (dims := _HEAD_DIMS[kv_dtype]):
        findings.append(f"{article} {kv_dtype} KV cache of heads of {spec.head_dim} values ({', '.join(map(str, dims))})")
    return findings


def kv_lines(kv_dtype: str, head_dim: int) -> list[str]:
    """Of a generated header: what codes are expanded to, or the format itself, and what kv_codes.cuh needs."""
    factor_in, factor_out = rotation_factors(head_dim)
    numbers: dict[str, Any] = {
        "kKvMostCode": MOST_CODE,
        "kKvMostKey": INT4_KEY_LEVELS - 1,
        "kKvMostValue": INT4_VALUE_LEVELS - 1,
        "kKvLeastScale": LEAST_SCALE,
        "kKvMostScale": INT4_MOST_SCALE if kv_dtype == "int4" else MOST_SCALE,
        "kKvFactorIn": factor_in,
        "kKvFactorOut": factor_out,
    }
    lines = [f"constexpr float {name} = static_cast<float>({float(value)!r});" for name, value in numbers.items()]
    bits = CODE_BITS.get(kv_dtype, 16)
    return [f"using KvFormat = {FORMATS.get(kv_dtype, 'Fp16')};", f"constexpr int kKvBits = {bits};", *lines]
