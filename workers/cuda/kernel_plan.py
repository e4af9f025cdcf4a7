"""The plan that the monokernel runs: its steps are those of the products that the kernels are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from kog_dist.decode.plan.plan import Plan, make_plan
from kog_dist.workers.cuda.kernel_shape import KernelShape


def kernel_plan(shapes: Sequence[KernelShape]) -> Plan:
    """The plan of all ranks, given what the kernel of each is compiled for. Raises PlanError as `make_plan` does."""
    return make_plan(shapes[0].spec, len(shapes), [shape.products for shape in shapes], num_ctas=shapes[0].num_ctas)
