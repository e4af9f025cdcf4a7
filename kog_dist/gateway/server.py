"""uvicorn as this service runs it: on a socket that is bound already, stopped by signals that are ours to answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence

import uvicorn

from kog_dist.gateway.app import make_app
from kog_dist.gateway.guard import Guard
from kog_dist.gateway.keys import ApiKeys
from kog_dist.gateway.limits import Limits
from kog_dist.gateway.protocol import bounded
from kog_dist.gateway.service import Service
from kog_dist.runtime.process_page import BEAT_S, ProcessPage

CLOSE_S = 1.0  # for connections to close once every answer has been written
FIRST_WORD_S = 0.3


class Server(uvicorn.Server):
    """uvicorn's server without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals mean what `serve` says."""
        yield


def make_server(service: Service, keys: Sequence[str], port: int, limits: Limits) -> Server:
    """The server of a service; the socket is given to `serve`."""
    guard = Guard(
        make_app(service),
        service.log,
        host=service.args.host,
        port=port,
        keys=ApiKeys(keys, share_prefixes=service.args.share_prefixes),
        cors_origins=service.args.cors_origins,
        on_response=service.count_response,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it has to say is in our log or of no use
    return Server(
        uvicorn.Config(
            guard,
            http=bounded(limits, service.bridge.deliver, service.count_refusal),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=round(limits.keep_alive_s),
            timeout_graceful_shutdown=round(CLOSE_S),
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.head_bytes,
        )
    )


async def serve(service: Service, listener: socket.socket, keys: Sequence[str], page: ProcessPage | None = None) -> None:
    """Serve until told to stop: the first SIGTERM (or SIGINT) drains, the second one ends at once.

    With a `page` of a launcher it beats, and only the launcher's signals count so.
    """
    loop = asyncio.get_running_loop()
    server = make_server(service, keys, _port(listener), service.limits)
    stop = asyncio.Event()

    def on_signal(signum: int) -> None:
        if page is not None:
            page.obey(signum)
        if stop.is_set():
            server.should_exit = server.force_exit = True
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)
    beating = asyncio.create_task(_beat(page)) if page is not None else None
    try:
        await run(service, server, listener, stop)
    finally:
        if beating is not None:
            beating.cancel()


async def _beat(page: ProcessPage) -> None:
    while True:
        page.beat()
        await asyncio.sleep(BEAT_S)


def _port(listener: socket.socket) -> int:
    return 0 if listener.family == socket.AF_UNIX else int(listener.getsockname()[1])


async def run(service: Service, server: Server, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, drain, and close everything."""
    bridge = asyncio.create_task(service.bridge.run())
    await _first_word(service)
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(_stop_when_drained(stop, service, server))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        service.announce()
        done, _ = await asyncio.wait([serving, bridge, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # what ended it, if that was an error
    finally:
        server.should_exit = True
        stopping.cancel()
        await asyncio.gather(serving, stopping, return_exceptions=True)
        bridge.cancel()
        await asyncio.gather(bridge, return_exceptions=True)
        service.close()


async def _first_word(service: Service) -> None:
    """An engine that is there is heard before the first client asks how it is."""
    for _ in range(round(FIRST_WORD_S / 0.01)):
        if service.readiness.is_connected and service.served is not None:
            return
        await asyncio.sleep(0.01)


async def _stop_when_drained(stop: asyncio.Event, service: Service, server: Server) -> None:
    await stop.wait()
    service.drain()
    drained = asyncio.create_task(service.drained())
    while not drained.done() and not server.force_exit:
        await asyncio.wait([drained], timeout=0.05)
    drained.cancel()
