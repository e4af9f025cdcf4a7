"""Which GPUs CUDA shows to a process, and in which order: the driver's reading of CUDA_VISIBLE_DEVICES, as a pure function.

Numbers are read like strtoul does (`1gpu` is 1), UUIDs may be abbreviated as long as they are unique, the first entry that names
nothing ends the list, an entry that is named twice empties it, and an empty variable shows nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from kog_dist.hardware.gpus import Gpu
from kog_dist.records import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
_MOST_DIGITS = 20  # what does not fit into 64 bits names nothing either
_NUMBER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, slots=True)
class Visible:
    """GPUs in CUDA's order. `why` says what CUDA_VISIBLE_DEVICES did where that explains something; else it is empty."""

    gpus: tuple[Gpu, ...]
    why: str = ""


def visible_gpus(present: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """What a CUDA program started in this environment would see of the GPUs that are present."""
    mask = environ.get(VARIABLE)
    if mask is None:
        return Visible(tuple(present))
    shown = f"{VARIABLE}={mask}"
    if mask.startswith("MIG-"):
        return Visible((), f"{shown} selects an instance of a split GPU (MIG), and the kernel needs a whole one")
    if mask.startswith("GPU-"):
        chosen = _by_uuid(mask, present)
    else:
        chosen = _by_number(mask, present)
        if chosen and _order_is_unknown(present, environ):
            return Visible(
                (),
                f"{shown} counts in CUDA's own order, fastest first, which is not known for GPUs of different kinds; "
                f"set {ORDER_VARIABLE}=PCI_BUS_ID or list UUIDs",
            )
    if not chosen:
        return Visible((), f"{shown} hides all {len(present)}" if present else "")
    return Visible(chosen, f"{shown} shows {len(chosen)} of {len(present)}" if len(chosen) < len(present) else "")


def _by_uuid(mask: str, present: Sequence[Gpu]) -> tuple[Gpu, ...]:
    prefixes = list(itertools.takewhile(lambda part: part.startswith("GPU-"), mask.split(",")))
    if len(set(prefixes)) < len(prefixes):
        return ()
    chosen: list[Gpu] = []
    for prefix in prefixes:
        matches = [gpu for gpu in present if gpu.uuid.startswith(prefix)]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return ()
        chosen.append(matches[0])
    return tuple(chosen)


def _by_number(mask: str, present: Sequence[Gpu]) -> tuple[Gpu, ...]:
    numbers: list[int] = []
    for part in mask.split(","):
        found = _NUMBER.match(part.strip())
        number = int(found[0][:_MOST_DIGITS]) if found else -1
        if number in numbers:
            return ()
        if number < 0:
            break
        numbers.append(number)
    by_index = {gpu.index: gpu for gpu in present}
    stop = next((place for place, number in enumerate(numbers) if number not in by_index), len(numbers))
    return tuple(by_index[number] for number in numbers[:stop])


def _order_is_unknown(present: Sequence[Gpu], environ: Mapping[str, str]) -> bool:
    return environ.get(ORDER_VARIABLE) != "PCI_BUS_ID" and len({gpu.name for gpu in present}) > 1
