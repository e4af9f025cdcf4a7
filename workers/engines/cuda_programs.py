"""The device programs of a rank, so that they can be compiled side by side, before the first is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kog_dist.cuda.build import Program, prebuild
from kog_dist.workers.cuda.build import HEAD_SOURCES, KERNEL_SOURCES, PLAIN_SOURCE, PROCESSORS_SOURCE, program
from kog_dist.workers.cuda.company_build import company_headers, company_sizes
from kog_dist.workers.cuda.draft_builds import draft_headers, drafts_processors
from kog_dist.workers.cuda.kernel_header import headers

if TYPE_CHECKING:
    from kog_dist.workers.arguments import WorkerArgs
    from kog_dist.workers.cuda.kernel_shape import KernelShape


def kernel_builds(shape: KernelShape, args: WorkerArgs) -> Iterator[tuple[dict[str, str], str]]:
    """Headers and source of each build of the monokernel."""
    sources = (*KERNEL_SOURCES, *(HEAD_SOURCES if args.prefill != "off" else ()))
    yield from ((headers(shape), source) for source in sources)
    yield from ((generated, PLAIN_SOURCE) for generated in (draft_headers(shape) if args.drafts else ()))
    have_both = args.drafts and drafts_processors(shape)
    yield from ((generated, PROCESSORS_SOURCE) for generated in (draft_headers(shape) if have_both else ()))
    yield from ((company_headers(shape, size), PLAIN_SOURCE) for size in company_sizes(shape, args.parallel))


def compile_ahead(shapes: Iterable[KernelShape], args: WorkerArgs) -> None:
    """Have what these ranks load in the cache. What does not compile is left to whoever asks for it."""
    prebuild(one for shape in shapes for one in _programs(shape, args))


def _programs(shape: KernelShape, args: WorkerArgs) -> Iterator[Program]:
    """Builds of the monokernel, and prefill's programs if the rank may have it."""
    from kog_dist.workers.prefill.memory import obstacle_to_prefill
    from kog_dist.workers.prefill.programs import programs

    yield from (program(generated, source) for generated, source in kernel_builds(shape, args))
    if args.prefill != "off" and not obstacle_to_prefill(shape.spec, shape.coding, shape.kv_dtype):
        yield from programs(shape)
