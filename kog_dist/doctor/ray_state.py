"""Ray: whether it is installed, and whether the clusters that the environment and the cluster file name are alive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from kog_dist.doctor.report import Finding, ok, warning
from kog_dist.errors import ConfigError, LaunchError, install
from kog_dist.runtime.ray_join import resolve_address


def ray() -> Iterator[Finding]:
    """Looks at addresses with a TCP probe of bounded time; never connects as a client and starts nothing."""
    if find_spec("ray") is None:
        named = os.environ.get("RAY_ADDRESS")
        if named:
            yield warning(f"RAY_ADDRESS is {named}, but Ray is missing: {install('ray')}; or unset RAY_ADDRESS")
        else:
            yield ok(f"no Ray, which only --launcher ray needs; where it is wanted, {install('ray')}")
        return
    remarks: list[str] = []
    try:
        address = resolve_address(None, os.environ, remarks.append)
        recorded = resolve_address("auto", os.environ, remarks.append) if address is None else None
    except (ConfigError, LaunchError) as error:
        yield warning(str(error))
        return
    if address is not None:
        yield ok(f"the Ray cluster at {address} answers (RAY_ADDRESS)", address=address)
    elif recorded is not None:
        yield ok(f"a Ray cluster runs at {recorded}; --launcher ray joins it with RAY_ADDRESS=auto", address=recorded)
    elif remarks:
        yield warning(
            f"{remarks[0]}: kog-launch starts a private one instead, but other programs wait for minutes; delete the file"
        )
    else:
        yield ok("no Ray cluster runs here; --launcher ray starts a private one")
