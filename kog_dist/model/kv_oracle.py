"""What KV caches of less than 16 bit keep, in torch's own types: the oracle of kog_dist/decode/kv_formats.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

Round = Callable[[Tensor], Tensor]


class KvForm(NamedTuple):
    """Each call rounds rows (..., head_dim)."""

    enter_keys: Round
    enter_values: Round


def kv_form(form: torch.dtype | str) -> KvForm:
    """That of a type, or of a format by its name."""
    if isinstance(form, torch.dtype):
        rounded = partial(_rounded, dtype=form)
        return KvForm(rounded, rounded)
    return {"fp8": KvForm(_fp8, _fp8), "int4": KvForm(partial(_int4, largest=63), partial(_int4, largest=15))}[form]


def _rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return rows.clamp(-largest, largest).to(dtype).to(rows.dtype)


def _fp8(rows: Tensor) -> Tensor:
    values = rows.float()
    scales = _with_seven_bits(values.abs().amax(-1, keepdim=True) / 448).clamp(2.0**-14, 144.0)
    codes = (values * (1 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scales).to(rows.dtype)


def _int4(rows: Tensor, largest: int) -> Tensor:
    head_dim, matrix = rows.shape[-1], torch.ones(1, 1, device=rows.device)
    while head_dim % (2 * len(matrix)) == 0:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    size = len(matrix)
    exponent = size.bit_length() - 1
    values = rows.float().reshape(*rows.shape[:-1], head_dim // size, size) @ matrix * 2.0 ** -(exponent // 2)
    scales = _with_seven_bits(values.abs().amax((-2, -1), keepdim=True) / largest).clamp(2.0**-14, 4096.0)
    odd = 2 * (values * (0.5 / scales) + largest / 2).round().clamp(0, largest) - largest
    kept = (odd * scales) @ matrix * 2.0 ** -(exponent - exponent // 2)
    return kept.reshape(rows.shape).to(rows.dtype)


def _with_seven_bits(values: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 128).round(), exponent - 7)
