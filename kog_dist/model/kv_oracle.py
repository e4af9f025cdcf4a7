"""What KV caches of less than 16 bit keep, in torch's own types: the oracle of kog_dist/decode/kv_formats.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Round = Callable[[Tensor], Tensor]


class KvForm(NamedTuple):
    """`enter` rounds rows (..., head_dim). Full groups of `group` positions are rounded by `keys` and `values`; 0: no groups."""

    enter: Round
    group: int
    keys: Round
    values: Round


def kv_form(form: torch.dtype | str) -> KvForm:
    """That of a type, or of a format by its name."""
    if isinstance(form, torch.dtype):
        return KvForm(partial(_rounded, dtype=form), 0, _as_is, _as_is)
    return {
        "fp8": KvForm(_fp8, 0, _as_is, _as_is),
        "int4": KvForm(partial(_rounded, dtype=torch.float16), 32, partial(_int4, dim=-2), partial(_int4, dim=-1)),
    }[form]


def attend_in_groups(query: Tensor, key: Tensor, value: Tensor, form: KvForm, window: int | None) -> Tensor:
    """Causal attention of the newest positions. Each sees its own group as it entered, and those before it rounded.

    query: (batch, heads, time, head_dim), of the last of the positions of key and value (batch, kv_heads, positions, head_dim).
    """
    time, num_keys, copies = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    first = (num_keys - time) // form.group * form.group  # what is before is not of any query's own group
    keys, values = _settled(key, form.group, form.keys), _settled(value, form.group, form.values)
    keys, values, raw_keys, raw_values = (
        rows.repeat_interleave(copies, 1) for rows in (keys, values, key[:, :, first:], value[:, :, first:])
    )
    key_pos = torch.arange(num_keys, device=query.device)
    query_pos = torch.arange(num_keys - time, num_keys, device=query.device)[:, None]
    is_own = key_pos[first:] // form.group == query_pos // form.group
    scores = query @ keys.transpose(2, 3)
    scores[..., first:] = torch.where(is_own, query @ raw_keys.transpose(2, 3), scores[..., first:])
    unseen = key_pos > query_pos
    if window is not None:
        unseen |= key_pos <= query_pos - window
    weights = functional.softmax((scores * query.shape[-1] ** -0.5).masked_fill_(unseen, float("-inf")), dim=-1)
    own = weights[..., first:] * is_own
    weights[..., first:] -= own
    return weights @ values + own @ raw_values


def _settled(rows: Tensor, group: int, settle: Round) -> Tensor:
    """The rows (..., positions, head_dim) with all full groups rounded."""
    full = rows.shape[-2] // group * group
    groups = rows[..., :full, :].reshape(*rows.shape[:-2], full // group, group, rows.shape[-1])
    return torch.cat((settle(groups).flatten(-3, -2), rows[..., full:, :]), dim=-2) if full else rows


def _as_is(rows: Tensor) -> Tensor:
    return rows


def _rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return rows.clamp(-largest, largest).to(dtype).to(rows.dtype)


def _fp8(rows: Tensor) -> Tensor:
    values = rows.float()
    mantissa, exponent = torch.frexp(values.abs().amax(-1, keepdim=True) / 448)
    scales = torch.ldexp((mantissa * 128).round(), exponent - 7).clamp(2.0**-14, 144.0)  # 7 significant bits
    codes = (values * (1 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scales).to(rows.dtype)


def _int4(groups: Tensor, dim: int) -> Tensor:
    values = groups.float()
    lows = values.amin(dim, keepdim=True).half().float()
    scales = ((values.amax(dim, keepdim=True) - lows) / 15).clamp_min(2.0**-14).half().float()
    return (lows + ((values - lows) / scales).round().clamp(0, 15) * scales).to(groups.dtype)
