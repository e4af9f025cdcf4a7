"""How keys and values are kept on a GPU: in 16 bits, or as codes with a scale for each row (kog_dist/decode/kv_formats.py).

A row is what one position has in one KV head, of K or of V.
"""

from __future__ import annotations

from kog_dist.decode.kv_formats import LEAST_SCALE, MOST_CODE, MOST_SCALE
from kog_dist.model.spec import ModelSpec

FORMATS = {"bfloat16": "Bf16", "float16": "Fp16"}  # names of 16-bit formats in device code
CODE_BITS = {"fp8": 8}  # of the formats in codes
_HEAD_DIMS = (32, 64, 128)  # a warp of prefill has whole heads
_SCALE_BYTES = 2
_FP8_NUMBERS = {"kKvMostCode": float(MOST_CODE), "kKvLeastScale": float(LEAST_SCALE), "kKvMostScale": float(MOST_SCALE)}


def row_bytes(head_dim: int, kv_dtype: str) -> int:
    """Of a row, its scale included."""
    bits = CODE_BITS.get(kv_dtype)
    return 2 * head_dim if bits is None else head_dim * bits // 8 + _SCALE_BYTES


def kv_findings(spec: ModelSpec, kv_dtype: str) -> list[str]:
    """What the kernel cannot do with this cache of this model, in words."""
    if kv_dtype in FORMATS:
        return []
    names = [*FORMATS, *CODE_BITS]
    if kv_dtype not in names:
        return [f"a {kv_dtype} KV cache ({', '.join(names[:-1])} or {names[-1]})"]
    findings = []
    if not spec.has_one_stream:
        findings.append(f"a {kv_dtype} KV cache of a Laneformer ({' or '.join(FORMATS)})")
    if spec.head_dim not in _HEAD_DIMS:
        findings.append(f"a {kv_dtype} KV cache of heads of {spec.head_dim} values ({', '.join(map(str, _HEAD_DIMS))})")
    return findings


def kv_lines(kv_dtype: str) -> list[str]:
    """Of a generated header: what codes are expanded to, or the format itself, and what kv_codes.cuh needs."""
    bits = CODE_BITS.get(kv_dtype, 16)
    numbers = [f"constexpr float {name} = static_cast<float>({value!r});" for name, value in _FP8_NUMBERS.items()]
    return [f"using KvFormat = {FORMATS.get(kv_dtype, 'Fp16')};", f"constexpr int kKvBits = {bits};", *numbers]
