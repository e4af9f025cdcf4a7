"""How the weights of a checkpoint are kept, for people, and how many bytes of them a token needs."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from kog_dist.model.formats.lanes import weight_format

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint

_HALF: Final = 2  # bytes of a weight that is not quantised


def formats(checkpoint: Checkpoint) -> str:
    """`bfloat16`, or how matrices are quantised and what the others are: `FP8 (E4M3) ..., the rest bfloat16`."""
    return quantised(checkpoint) or checkpoint.dtype


def quantised(checkpoint: Checkpoint) -> str:
    """`formats` of a model with quantised matrices; empty if it has none."""
    found: dict[str, None] = {}
    for name in checkpoint.layouts:
        if (form := weight_format(checkpoint, name)) is not None:
            found[str(form)] = None
    if not found:
        return ""
    source = "rounded at the start" if checkpoint.quantisation is None else f"as published ({checkpoint.quantisation.method})"
    return f"{'; '.join(found)}, {source}, the rest {checkpoint.dtype}"


def num_quantised(checkpoint: Checkpoint) -> int:
    """Values of all matrices that are quantised."""
    layouts = checkpoint.layouts
    return sum(layouts[name].num_values for name in layouts if weight_format(checkpoint, name) is not None)


def bytes_per_token(checkpoint: Checkpoint) -> int:
    """Weight bytes that a decode step reads where matrices stay as they are: codes with their scales, others in 16 bit."""
    total = checkpoint.spec.bytes_per_token(_HALF)
    for name, layout in checkpoint.layouts.items():
        form = weight_format(checkpoint, name)
        if form is None:
            continue
        if checkpoint.is_rounded(name):
            lanes, rows, columns = layout.shape
            num_bytes = lanes * form.num_bytes(rows, columns)
        else:
            num_bytes = form.num_bytes(*checkpoint.names[name].shape(layout))
        total += num_bytes - _HALF * prod(layout.shape)
    return total
