"""Which experts a layer chose, compared: by ranks, and by the thread blocks of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_REMEDY = "start again, and report it if it comes back"


def difference(choices: Sequence[tuple[int, ...]], layer: int, position: int, *, blocks_of: int | None = None) -> str:
    """What to say of the first choice that differs from that of most, or from the first one if none has most; "" if none does.

    `choices`: numbers of experts, of all ranks, or of the thread blocks of rank `blocks_of`.
    `position`: of the token in its request, from 0.
    """
    usual = Counter(choices).most_common(1)[0][0]  # of equally many the first
    odd = next((number for number, choice in enumerate(choices) if choice != usual), None)
    if odd is None:
        return ""
    place, who, whose = f"in layer {layer} at position {position}", "rank", "the ranks"
    if blocks_of is not None:
        place, who, whose = f"{place} on rank {blocks_of}", "thread block", "they"
    return (
        f"{who} {odd} chose experts {_names(choices[odd])} {place}, but {who} {choices.index(usual)} {_names(usual)}: {whose} do "
        f"not compute the same; {_REMEDY}"
    )


def _names(choice: tuple[int, ...]) -> str:
    return ", ".join(map(str, choice))
