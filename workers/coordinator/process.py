"""The process that serves requests: `python -m kog_dist.workers.coordinator.process JSON`. What it does is in loop.py.

The socket is bound before anything slow, so clients can ask for the state while ranks load.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys
from pathlib import Path

from kog_dist.errors import LaunchError
from kog_dist.quoting import short
from kog_dist.rpc.listener import RpcListener
from kog_dist.rpc.process_main import serve_argument
from kog_dist.runtime.control import COORDINATOR, ControlPage
from kog_dist.runtime.instance import Instance
from kog_dist.runtime.notes import note
from kog_dist.runtime.wait import sleep_precisely
from kog_dist.system.parent_death import continue_without_parent
from kog_dist.workers.coordinator.arguments import CoordinatorArgs
from kog_dist.workers.coordinator.loop import Coordinator
from kog_dist.workers.coordinator.model_folder import ModelFolder


def run_coordinator(args: CoordinatorArgs) -> int:
    """The life of the process. Returns its exit code; raises KogError if it cannot start.

    It dies of SIGTERM, as of any signal: the launcher drains and stops it through the control page.
    """
    continue_without_parent()  # and remove the folder, should the reaper be dead, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to decide on
    listener = RpcListener(Path(args.folder), tcp_port=args.rpc_port, tcp_host=args.rpc_host)
    control = ControlPage.from_fd(args.control_fd)
    control.beat(COORDINATOR)
    if args.rank_places:  # which only GPUs have
        importlib.import_module("numpy")  # while GPUs load: their first long prompt or grammar shall not wait for it
    instance = Instance.inherit(Path(args.folder), args.lease_fd) if args.lease_fd >= 0 else None
    model = ModelFolder.from_folder(Path(args.model), args.model_name, args.context, args.speculate)
    if model.spec.max_context != control.max_context:
        raise LaunchError(
            f"the control page is made for a context of {control.max_context}, the model has {model.spec.max_context}"
        )
    if model.tokenizer is not None and model.tokenizer.left_out:
        note(f"tokenizer.json: {', '.join(map(short, model.tokenizer.left_out))} left out")
    try:
        supervisor_fd = os.pidfd_open(args.supervisor_pid)
    except ProcessLookupError:
        raise LaunchError(f"the launcher, process {args.supervisor_pid}, is gone") from None
    coordinator = Coordinator(args, control, model, listener, supervisor_fd=supervisor_fd)
    sleep_precisely()  # of a first token's 20 us
    gc.freeze()  # what was made by now stays, and need not be looked through while somebody waits for a token
    exit_code = coordinator.run()
    if instance is not None and select.select([supervisor_fd], [], [], 0)[0]:
        instance.remove()  # the launcher is dead and cannot do it
    return exit_code


def main() -> int:
    """`python -m kog_dist.workers.coordinator.process JSON`: serve, or say in one line why not."""
    return serve_argument(
        "coordinator", "it is started by kog-launch", lambda text: run_coordinator(CoordinatorArgs.from_json(text))
    )


if __name__ == "__main__":
    sys.exit(main())
