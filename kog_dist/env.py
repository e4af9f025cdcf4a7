"""The one place that reads environment variables of the project: `KOG_<SETTING>` for every setting of `kog-launch`."""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIX = "KOG_"
# What Kubernetes sets in each pod for a service called kog, or kog-something: KOG_PORT=tcp://10.0.0.1:8000 and others.
_OF_A_SERVICE = re.compile(r"KOG_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)")
_LINK = re.compile(r"(tcp|udp|sctp)://")


def variable(setting: str) -> str:
    """Name of the environment variable of a setting: `rpc_port` is `KOG_RPC_PORT`."""
    return PREFIX + setting.upper()


def kog_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that the environment gives, by setting name; empty values, and what Kubernetes sets, count as not set."""
    return {
        name[len(PREFIX) :].lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and value and not _is_of_a_service(name, value)
    }


def service_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those that Kubernetes has set for a service whose name begins like ours."""
    return tuple(name for name, value in environ.items() if name.startswith(PREFIX) and _is_of_a_service(name, value))


def _is_of_a_service(name: str, value: str) -> bool:
    return bool(_OF_A_SERVICE.fullmatch(name)) or (name.endswith("_PORT") and bool(_LINK.match(value)))


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of an engine's processes: one BLAS thread each, since ranks are the unit of parallelism here; no threads for
    tokenizers, which get one text at a time.

    The number of threads must not reach the arithmetic either: a lane's bits may not depend on it.
    """
    single = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    inherited = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    return inherited | dict.fromkeys(single, "1") | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
