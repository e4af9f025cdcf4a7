"""The router's process: `python -m kog_dist.router.process JSON`, started by `kog-launch`."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from kog_dist.router.args import RouterArgs
from kog_dist.router.router import Router
from kog_dist.rpc.listener import RpcListener
from kog_dist.rpc.process_main import serve_argument
from kog_dist.rpc.transport import socket_address
from kog_dist.runtime.process_page import ProcessPage


def run_router(args: RouterArgs) -> int:
    """The life of the process. Returns its exit code; raises KogError if it cannot start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to decide on
    if args.lease_fd >= 0:
        os.set_inheritable(args.lease_fd, False)  # held until this process ends, so that nobody takes the name before
    page, folder = ProcessPage.from_fd(args.page_fd), Path(args.folder)
    listener = RpcListener(folder, tcp_port=args.rpc_port, tcp_host=args.rpc_host)
    orders = socket.socket(fileno=args.orders_fd)
    orders.setblocking(False)
    address = listener.tcp_address or socket_address(folder)
    router = Router(args.instance, listener, address, orders, drain_s=args.drain_s, page=page)

    def stop(signum: int, _frame: object) -> None:
        if page is not None:
            page.obey(signum)
        router.is_stopped = True

    signal.signal(signal.SIGTERM, stop)
    return router.run()


def main() -> int:
    """Serve, or say in one line why not."""
    return serve_argument("router", "it is started by kog-launch", lambda text: run_router(RouterArgs.from_json(text)))


if __name__ == "__main__":
    sys.exit(main())
