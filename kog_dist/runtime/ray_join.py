"""The way to a Ray cluster that exists: its address, asked before Ray is, and what this process says there.

A bare `ray.init()` waits for minutes on a cluster file that a dead cluster left behind, so an address is used only after it has
answered a TCP probe.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kog_dist.errors import ConfigError, LaunchError, install
from kog_dist.foreign_file import read_text
from kog_dist.runtime.ray_token import auth_environment, token_refusal

PROBE_S: Final = 2.0
_CLUSTER_FILE: Final = "ray_current_cluster"
_ADDRESS_BYTES: Final = 1 << 10
Say = Callable[[str], None]


def import_ray(environment: Mapping[str, str], needed_by: str) -> ModuleType:
    """Ray, which reads `environment` when it is imported: it stays in this process's. Raises LaunchError."""
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # an actor that dies is for the one to tell of who has started it
    os.environ.update(environment)
    try:
        import ray
    except ImportError:
        raise LaunchError(f"{needed_by} needs Ray: {install('ray')}") from None
    module: ModuleType = ray
    return module


def join(address: str, needed_by: str) -> None:
    """Connect this process to the cluster at `host:port`. Raises LaunchError; there is nothing to disconnect from then."""
    ray = import_ray(auth_environment(os.environ), needed_by)
    if refusal := token_refusal(address):
        raise LaunchError(
            f"cannot join the Ray cluster at {address}: {refusal}; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's"
        )
    try:
        init_quietly(ray, address=address)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise LaunchError(
            f"cannot join the Ray cluster at {address}: {first_line(error)}; if it uses token authentication, set RAY_AUTH_TOKEN "
            "or RAY_AUTH_TOKEN_PATH, and see that it has the same Ray and Python versions"
        ) from error


def init_quietly(ray: ModuleType, **options: Any) -> None:
    """`ray.init` that prints nothing and leaves this process its signals. What it raises goes on, after a disconnect."""
    previous = signal.getsignal(signal.SIGTERM)  # Ray puts its own in place
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=False, **options)
    except BaseException:
        ray.shutdown()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    ray._private.worker._worker_logs_enabled = False  # it prints deaths of actors to stdout, where answers go


def first_line(error: Exception) -> str:
    """What an error of Ray's says, without the pages behind it."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def resolve_address(given: str | None, environ: Mapping[str, str], say: Say, flag: str = "--ray-address") -> str | None:
    """`host:port` of a cluster that answers, None for a private one. Raises ConfigError, and LaunchError for a dead address.

    `auto` is what the cluster file names, if that is alive. `flag` is where the address was given.
    """
    source = flag if given else "RAY_ADDRESS"
    address = (given or environ.get("RAY_ADDRESS", "")).strip()
    if address in ("", "local"):
        return None
    if address == "auto":
        recorded = _recorded_address(environ)
        if recorded is not None and not _answers(recorded):
            say(f"ignoring the dead Ray cluster {recorded} that the cluster file names")
            return None
        return recorded
    scheme, separator, _ = address.partition("://")
    if separator and scheme == "ray":
        raise ConfigError(
            f"{source} {address} is the port of Ray Client, through which actors cannot be watched; give HOST:PORT of the "
            "cluster (6379, not 10001), or start with ray job submit"
        )
    if separator:
        raise ConfigError(
            f"{source} {address} is a dashboard, which takes jobs: ray job submit --address {address} -- kog-launch ... "
            "--launcher ray; a launcher outside needs HOST:PORT of the cluster"
        )
    try:
        is_alive = _answers(address)
    except ValueError:
        raise ConfigError(f"{source} must be HOST:PORT of a Ray cluster, auto or local; got {address!r}") from None
    if not is_alive:
        other = "leave the address out for a private one" if flag == "--ray-address" else "give that of another one"
        raise LaunchError(f"no Ray cluster answers at {source} {address}; start it, or {other}")
    return address


def _recorded_address(environ: Mapping[str, str]) -> str | None:
    file = Path(environ.get("RAY_TMPDIR") or environ.get("RAY_TEMP_DIR") or "/tmp") / "ray" / _CLUSTER_FILE
    try:
        return read_text(file, _ADDRESS_BYTES).strip() or None
    except OSError:
        return None


def _answers(address: str) -> bool:
    """Whether something listens there. Raises ValueError for what is no address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(address)
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except OSError:
        return False
    return True
