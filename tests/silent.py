"""A planted fault: one thread block of the monokernel never publishes its rows of a product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kog_dist.bench.kernel.yardsticks import replaced
from kog_dist.workers.cuda.kernel_header import headers

if TYPE_CHECKING:
    from kog_dist.workers.cuda.monokernel import Monokernel

LAST_DOWN = "layer == kLayers - 1 && kind == 1"


def with_silent_cta(sources: Mapping[str, str], cta: int, where: str = LAST_DOWN) -> dict[str, str]:
    """The sources with a thread block that is silent where the finaliser of residual rows sees `where`."""
    passage = "publish_stream(rows, kind, layer, lane_idx, first_row, stream, tag);"
    return replaced(sources, "finalize_residual.cuh", passage, f"if (rows.role.cta != {cta} || !({where})) {passage}")


def make_silent(kernel: Monokernel, cta: int) -> None:
    """Give a kernel on a GPU the plain build with that thread block silent."""
    from kog_dist.cuda.build import build
    from kog_dist.cuda.driver import Kernel
    from kog_dist.workers.cuda.build import PLAIN_SOURCE, device_sources
    from kog_dist.workers.cuda.monokernel import KERNEL_NAME
    from kog_dist.workers.cuda.shared_memory import SHARED_BYTES

    sources = with_silent_cta({**device_sources(), **headers(kernel.shape)}, cta)
    kernel._kernel = Kernel(build(sources, PLAIN_SOURCE).path, KERNEL_NAME, SHARED_BYTES)
