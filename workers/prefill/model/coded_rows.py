"""The rows of a KV cache of FP8 (phases/attend_cache.cuh, kv_codes.cuh): for those who fill or read it from outside.

A batch is 16 rows of codes of K; 8 pairs of rows of V: for every dimension the code of the even position and that of the odd one;
and for each position the scales of its rows of K and V.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kog_dist.decode.kv_formats import CodedRows, encode_fp8, values_of_fp8

if TYPE_CHECKING:
    from torch import Tensor

Places = tuple["Tensor", "Tensor", "Tensor"]  # of positions: split, batch, row


class CodedParts(NamedTuple):
    """Views of a layer's batches: codes as uint8, scales as float16."""

    keys: Tensor  # (heads, splits, batches, 16, head_dim)
    values: Tensor  # (heads, splits, batches, 8, head_dim, 2)
    scales: Tensor  # (heads, splits, batches, 16, 2)


def coded_parts(batches: Tensor, head_dim: int) -> CodedParts:
    """Of `batches` (heads, splits, batches, bytes of a batch), uint8."""
    import torch

    of_keys = 16 * head_dim
    keys, values, scales = batches.tensor_split((of_keys, 2 * of_keys), dim=-1)
    shape = batches.shape[:-1]
    return CodedParts(
        keys.view(*shape, 16, head_dim), values.view(*shape, 8, head_dim, 2), scales.view(torch.float16).view(*shape, 16, 2)
    )


def store_rows(parts: CodedParts, places: Places, rows: tuple[Tensor, Tensor]) -> None:
    """Round keys and values (positions, heads, head_dim) and write them."""
    import torch

    split, batch, row = places
    for number, values in enumerate(rows):
        coded = encode_fp8(values.float().numpy())
        codes, scales = torch.from_numpy(coded.codes), torch.from_numpy(coded.scales)[..., 0]
        if number == 0:
            parts.keys[:, split, batch, row] = codes.transpose(0, 1)
        else:
            parts.values[:, split, batch, row // 2, :, row % 2] = codes
        parts.scales[:, split, batch, row, number] = scales.transpose(0, 1)


def load_rows(parts: CodedParts, places: Places) -> tuple[Tensor, Tensor]:
    """Keys and values (positions, heads, head_dim), float32."""
    import torch

    split, batch, row = places
    codes = parts.keys[:, split, batch, row].transpose(0, 1), parts.values[:, split, batch, row // 2, :, row % 2]
    scales = parts.scales[:, split, batch, row].transpose(0, 1)[..., None]
    keys, values = (
        torch.from_numpy(values_of_fp8(CodedRows(of_codes.numpy(), of_scales.numpy())))
        for of_codes, of_scales in zip(codes, scales.unbind(2), strict=True)
    )
    return keys, values


def rounded_rows(rows: Tensor) -> Tensor:
    """What is kept of rows (..., head_dim), float32."""
    import torch

    return torch.from_numpy(values_of_fp8(encode_fp8(rows.float().numpy())))
