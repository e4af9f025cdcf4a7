"""The one place that reads environment variables of the project: `KOG_<SETTING>` for every setting of `kog-launch`."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "KOG_"


def variable(setting: str) -> str:
    """Name of the environment variable of a setting: `rpc_port` is `KOG_RPC_PORT`."""
    return PREFIX + setting.upper()


def kog_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that the environment gives, by setting name; empty values count as not set."""
    return {name[len(PREFIX) :].lower(): value for name, value in environ.items() if name.startswith(PREFIX) and value}


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of an engine's processes: one BLAS thread each, since ranks are the unit of parallelism here; no threads for
    tokenizers, which get one text at a time.

    The number of threads must not reach the arithmetic either: a lane's bits may not depend on it.
    """
    single = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    inherited = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    return inherited | dict.fromkeys(single, "1") | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
