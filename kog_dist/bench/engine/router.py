"""`kog-bench router`: what the router in front of replicas adds to each token, with sources that need no model."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kog_dist.bench.report import finish, machine, percentile
from kog_dist.router.args import RouterArgs
from kog_dist.router.orders import FleetOrder, ReplicaOrder, socket_pair
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Tokens
from kog_dist.rpc.transport import Access
from kog_dist.system import python_child

_READY_S = 20.0


def run(rates: Sequence[int], *, num_tokens: int, num_streams: int) -> None:
    """Measure every rate on one stream and on `num_streams` at once; prints a line for each, then the JSON object."""
    before = machine()
    figures = []
    with fleet(num_streams) as (router, sources):
        for rate in rates:
            for count in sorted({1, num_streams}):
                direct_us = _delays_us(sources[:count], rate, num_tokens)
                routed_us = _delays_us([router] * count, rate, num_tokens)
                figure = {"tokens_per_s": rate, "streams": count, "direct": _summary(direct_us), "routed": _summary(routed_us)}
                figures.append(figure)
                added = {name: figure["routed"][name] - figure["direct"][name] for name in ("p50_us", "p99_us")}  # type: ignore[index]
                print(
                    f"{rate} tokens/s, {count} stream{'s' if count > 1 else ''}: sent to received p50 "
                    f"{percentile(direct_us, 0.5):.0f} us direct, {percentile(routed_us, 0.5):.0f} us through the router: "
                    f"{added['p50_us']:+.0f} us (p99 {added['p99_us']:+.0f} us)",
                    flush=True,
                )
    finish("router", {"tokens": num_tokens, "streams": num_streams}, before, figures)


def _summary(delays_us: Sequence[float]) -> dict[str, float]:
    return {"p50_us": percentile(delays_us, 0.5), "p99_us": percentile(delays_us, 0.99)}


@contextlib.contextmanager
def fleet(num_sources: int, *, kept_tokens: int = 0, us_per_token: int = 0) -> Iterator[tuple[Access, list[Access]]]:
    """A router, and the sources that it knows; see `FakeReplica` for what they keep."""
    ours, theirs = socket_pair()
    with tempfile.TemporaryDirectory(prefix="kog-r-") as root, contextlib.ExitStack() as running, ours, theirs:
        folders = [Path(root) / name for name in ("router", *(f"s{i}" for i in range(num_sources)))]
        for folder in folders:
            folder.mkdir(mode=0o700)
        sources = [Access.from_folder(folder) for folder in folders[1:]]
        for folder in folders[1:]:
            running.enter_context(_process("kog_dist.bench.fakes.fake_replica", str(folder), str(kept_tokens), str(us_per_token)))
        args = RouterArgs("bench", str(folders[0]), -1, theirs.fileno(), 1.0)
        running.enter_context(_process("kog_dist.router.process", args.to_json(), pass_fd=theirs.fileno()))
        orders = (ReplicaOrder(f"r{i}", 1, access) for i, access in enumerate(sources))
        ours.send(FleetOrder(tuple(orders)).to_bytes())
        router = Access.from_folder(folders[0])
        with Client(router, connect_timeout_s=_READY_S, patient=True) as client:
            deadline_s = time.monotonic() + _READY_S
            while set(client.status().replica_states) != {"ready"} and time.monotonic() < deadline_s:
                time.sleep(0.01)
        yield router, sources


@contextlib.contextmanager
def _process(module: str, *arguments: str, pass_fd: int = -1) -> Iterator[None]:
    """A child that is told to end by its closed standard input, and is killed if it does not."""
    command = python_child.command(module, *arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(pass_fd,) if pass_fd >= 0 else ()) as child:
        try:
            yield
        finally:
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(0.5)
            except subprocess.TimeoutExpired:
                child.kill()


def _delays_us(targets: Sequence[Access], rate: int, num_tokens: int) -> list[float]:
    """Microseconds from a token's sending to its arrival as an event in the client, of all streams together."""
    found: list[list[float]] = [[] for _ in targets]
    threads = [
        threading.Thread(target=_receive, args=(access, rate, num_tokens, delays_us))
        for access, delays_us in zip(targets, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [delay_us for delays_us in found for delay_us in delays_us]


def _receive(access: Access, rate: int, num_tokens: int, delays_us: list[float]) -> None:
    with Client(access) as client:
        for event in client.generate(prompt=str(rate), max_tokens=num_tokens):
            if isinstance(event, Tokens):
                delays_us.append((time.monotonic_ns() - int(event.text)) / 1e3)
