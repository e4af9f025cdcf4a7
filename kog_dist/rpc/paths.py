"""The files through which clients find an engine, in its instance folder. Needs neither zmq nor msgpack."""

from __future__ import annotations

import contextlib
import json
from typing import Final

SOCKET_NAME: Final = "rpc.sock"
ACCESS_NAME: Final = "rpc-access.json"  # address and keys of the TCP port, for its one client; mode 0600


def url_of_instance(instance: str, http_name: str = "http.json") -> str | None:
    """Where the HTTP service of an engine of this user is, if it runs and has one."""
    from kog_dist.runtime.instance import instances_root, is_stale

    if not instance or "/" in instance or instance.startswith("."):
        return None
    folder = instances_root() / instance
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if not is_stale(folder):
            return str(json.loads((folder / http_name).read_text(encoding="utf-8"))["url"])
    return None
