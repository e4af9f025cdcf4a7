"""Forms of the monokernel that only measure: its sources with a passage replaced. The kernel has no switch for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kog_dist.cuda.build import Cubin
from kog_dist.cuda.build import build as build_sources
from kog_dist.workers.cuda.kernel_header import headers

if TYPE_CHECKING:
    from kog_dist.workers.cuda.kernel_shape import KernelShape


def replaced(sources: Mapping[str, str], name: str, passage: str, instead: str) -> dict[str, str]:
    """The sources with another text in place of `passage`, which the file `name` has once."""
    text = sources[name]
    assert text.count(passage) == 1, f"{name} has {passage!r} {text.count(passage)} times"
    return {**sources, name: text.replace(passage, instead)}


def without_delayed_sums(sources: Mapping[str, str]) -> dict[str, str]:
    """Delayed sums are neither sent nor awaited, so the tokens are wrong: what is missing in its time is what they cost."""
    return replaced(
        sources,
        "finalize_residual.cuh",
        "constexpr bool kSendsDelayed = kRanks > 1 && !kOneStream;",
        "constexpr bool kSendsDelayed = false;",
    )


def build_without_delayed_sums(shape: KernelShape) -> Cubin:
    """The plain build of this form, from the cache or built now."""
    from kog_dist.workers.cuda.build import PLAIN_SOURCE, device_sources

    return build_sources(without_delayed_sums({**device_sources(), **headers(shape)}), PLAIN_SOURCE)
