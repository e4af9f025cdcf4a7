"""Parts of uvicorn that are not its public interface, and that `gateway/protocol.py` and `server.py` stand on.

Raise the bound of uvicorn in pyproject.toml only with this test: read `H11Protocol` and `RequestResponseCycle` of the new version
for what it does with each of these, then `make test` and `make service`.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

ROOT = Path(__file__).parents[3]
METHODS = {
    "connection_made", "connection_lost", "data_received", "handle_events", "pause_writing", "resume_writing",
    "send_400_response", "handle_websocket_upgrade", "eof_received", "_unset_keepalive_if_required",
}  # fmt: skip
OF_PROTOCOL = {"conn", "cycle", "flow", "loop", "transport", "connections"}
OF_CYCLE = {"scope", "transport", "disconnected", "message_event", "response_started", "response_complete"}


def assigned(kind: type) -> set[str]:
    """The attributes that a class's source sets on `self`."""
    source = inspect.getsource(kind)
    return {word.removeprefix("self.").rstrip(":") for word in source.split() if word.startswith("self.")}


def test_the_version_is_bounded_where_private_parts_are_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bound,) = (need for need in map(Requirement, project["dependencies"]) if need.name == "uvicorn")
    assert uvicorn.__version__ in bound.specifier
    looked_at = Version(uvicorn.__version__)
    assert f"{looked_at.major}.{looked_at.minor + 1}" not in bound.specifier, (
        "a version that nobody has looked at must not be installed"
    )


def test_private_parts_are_there() -> None:
    assert vars(H11Protocol).keys() >= METHODS
    assert assigned(H11Protocol) >= OF_PROTOCOL
    assert assigned(RequestResponseCycle) >= OF_CYCLE
    assert "capture_signals" in vars(uvicorn.Server)
    assert assigned(uvicorn.Server) >= {"started", "should_exit", "force_exit"}
