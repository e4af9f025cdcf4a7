"""The files through which clients find an engine, in its instance folder. Needs neither zmq nor msgpack."""

from __future__ import annotations

from typing import Final

SOCKET_NAME: Final = "rpc.sock"
ACCESS_NAME: Final = "rpc-access.json"  # address and keys of the TCP port, for its one client; mode 0600


def url_of_instance(instance: str) -> str | None:
    """Where the HTTP service of an engine of this user is, if it runs and has one."""
    from kog_dist.runtime.http_file import HttpFile
    from kog_dist.runtime.instance import instances_root, is_stale

    if not instance or "/" in instance or instance.startswith("."):
        return None
    folder = instances_root() / instance
    said = None if is_stale(folder) else HttpFile.read(folder)
    return None if said is None else said.url
