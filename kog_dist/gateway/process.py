"""The gateway's process: `python -m kog_dist.gateway.process JSON`, started by `kog-launch` or become of `kog-gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TextIO

from kog_dist.gateway.args import GatewayArgs
from kog_dist.gateway.bind import url_of
from kog_dist.gateway.keys import read_keys
from kog_dist.gateway.limits import LIMITS
from kog_dist.rpc.process_main import serve_argument
from kog_dist.runtime.process_page import ProcessPage

SPARE_THREADS = 2  # to wait for processes that end
SWITCH_S = 0.0005  # a thread that checks a request gives way to the streams after so long
SPARE_FILES = 128  # descriptors besides those of HTTP connections


def run_gateway(args: GatewayArgs) -> int:
    """The life of the process. Returns its exit code; raises KogError if it cannot start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to decide on, until `serve` answers signals
    from kog_dist.gateway import body_work
    from kog_dist.gateway.body_reader import SMALL_AT_ONCE
    from kog_dist.gateway.logs import Log
    from kog_dist.gateway.server import serve
    from kog_dist.gateway.service import Service

    os.set_inheritable(args.listen_fd, False)
    listener = socket.socket(fileno=args.listen_fd)
    listener.setblocking(False)
    keys = read_keys(args.key_fd)
    page = ProcessPage.from_fd(args.page_fd)
    limits = replace(LIMITS, connections=_room_for_connections())
    log = Log(
        log_format=args.log_format,
        with_prompts=args.log_prompts,
        secrets=keys,
        terminal=_open_terminal(args.terminal_fd),
    )

    sys.setswitchinterval(SWITCH_S)

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(
            ThreadPoolExecutor(SMALL_AT_ONCE + SPARE_THREADS, thread_name_prefix="check")
        )
        body_work.prepare()
        service = Service(args, log, url=url_of(args.host, listener), limits=limits)
        gc.freeze()  # what is there now stays: looking through it again and again would hold up the streams
        log.event("serving", url=service.url, key="required" if keys else "none")
        await serve(service, listener, keys, page)

    try:
        asyncio.run(run())
    finally:
        log.event("stopped")
        log.close()
    return 0


def _open_terminal(fd: int) -> TextIO | None:
    if fd < 0:
        return None
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # this process is in the background, and `stty tostop` would stop it
    return os.fdopen(fd, "w", encoding="utf-8", errors="replace")


def _room_for_connections() -> int:
    """As many as the descriptors allow, raised as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMITS.connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(16, min(LIMITS.connections, soft - SPARE_FILES)) if soft != resource.RLIM_INFINITY else LIMITS.connections


def main() -> int:
    """Serve, or say in one line why not."""
    return serve_argument(
        "gateway", "use kog-gateway, or kog-launch, which starts it", lambda text: run_gateway(GatewayArgs.from_json(text))
    )


if __name__ == "__main__":
    sys.exit(main())
