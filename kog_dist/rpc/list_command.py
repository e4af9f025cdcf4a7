"""`kog-client list`: the engines of this user on this machine, with what each says of itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from kog_dist.errors import KogError
from kog_dist.quoting import json_text
from kog_dist.records import dataclass
from kog_dist.rpc.client import Client
from kog_dist.rpc.output import check_stdout, write_out
from kog_dist.rpc.paths import url_of_instance
from kog_dist.rpc.shown import headline
from kog_dist.rpc.transport import Access
from kog_dist.runtime.instance import instances_root, running

ANSWER_S: Final = 1.0  # of one engine: one that hangs must not hide the others


@dataclass(frozen=True, slots=True)
class Listed:
    """An engine. `url` is None without HTTP; `says` has state, model and ranks, or why it does not answer."""

    name: str
    url: str | None
    says: str


def list_engines(*, as_json: bool) -> int:
    """Print a line for each engine. Returns the exit code, 0 also without any. Raises OutputError."""
    check_stdout()
    found = [_ask(name) for name in running(instances_root())]
    try:
        if as_json:
            write_out("".join(f"{json_text(asdict(engine))}\n" for engine in found))
        elif not found:
            write_out("no engine of this user runs here; start one with kog-launch\n")
        else:
            write_out("".join(f"{engine.says}{'' if engine.url is None else f', {engine.url}'}\n" for engine in found))
    except BrokenPipeError:
        return 0
    return 0


def _ask(name: str) -> Listed:
    url = url_of_instance(name)
    try:
        with Client(Access.of_instance(name), connect_timeout_s=ANSWER_S, greet=False) as client:
            return Listed(name, url, headline(client.status()))
    except KogError as error:
        return Listed(name, url, f"{name}: does not answer: {error}")
