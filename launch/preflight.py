"""What a run needs besides its model, looked at without taking it: by `--check`, and by every start before it takes anything."""

from __future__ import annotations

import os
import socket

from kog_dist.config import LaunchConfig
from kog_dist.errors import LaunchError
from kog_dist.launch.choice import choose_launcher
from kog_dist.launch.events import check_log_folder
from kog_dist.launch.http import HttpGateway
from kog_dist.launch.replicas.places import check_replicas
from kog_dist.launch.replicas.remote_replica import RemoteReplicas
from kog_dist.rpc.transport import socket_address
from kog_dist.runtime.instance import instances_root


def preflight(settings: LaunchConfig, *, serves: bool) -> None:
    """Raise the KogError with which a start would end. Leaves nothing behind.

    A name, port or socket that a running engine has is no reason: that one may have ended by then.
    """
    choose_launcher(settings, os.environ)
    if settings.has_router:
        check_replicas(settings)
        RemoteReplicas(settings.remote_replicas)
    if serves:
        HttpGateway.check(settings)
    if settings.log_dir is not None:
        check_log_folder(settings.log_dir)
    socket_address(instances_root() / (settings.instance or "default"))
    if settings.rpc_port is not None:
        _check_rpc_port(settings.rpc_host, settings.rpc_port)


def _check_rpc_port(host: str, port: int) -> None:
    import zmq

    remedy = "choose another --rpc-port, or 0 for a free one"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        probe.setsockopt(zmq.LINGER, 0)
        try:
            probe.bind(f"tcp://{host}:0")
        except zmq.ZMQError as error:
            raise LaunchError(f"cannot listen on {host} port {port}: {error.strerror}; {remedy}") from None
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            plain.bind((host.strip("[]"), port))
        except PermissionError as error:
            raise LaunchError(f"cannot listen on {host} port {port}: {error.strerror}; {remedy}") from None
        except OSError:  # somebody has it now, or it is a name that only zmq knows
            return
