"""Whether a Ray cluster takes our token: asked before Ray joins it, which would try for 20 s and not say why it gave up."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ASK_S = 2.0
_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # Ray's own first one; its empty message needs no fields


def auth_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Token authentication where there is a token. A cluster without it takes such a client too, the other way round fails."""
    has_token = (
        environ.get("RAY_AUTH_TOKEN") or environ.get("RAY_AUTH_TOKEN_PATH") or Path("~/.ray/auth_token").expanduser().exists()
    )
    return {"RAY_AUTH_MODE": "token"} if has_token and not environ.get("RAY_AUTH_MODE") else {}


def token_refusal(address: str) -> str:
    """What the cluster at `host:port` has against our token, or against having none; empty if nothing, or if nobody can say.

    Call it where Ray may be imported: with the environment that it reads then.
    """
    try:
        import grpc
        from ray.exceptions import AuthenticationError

        raylet: Any = import_module("ray._raylet")
        loader = raylet.AuthenticationTokenLoader.instance()
    except (ImportError, AttributeError):  # another Ray, or one without grpcio: it finds out by itself
        return ""
    try:
        metadata = tuple(loader.get_token_for_http_header().items()) if loader.has_token() else ()
    except AuthenticationError:  # the mode is `token`, and there is none
        metadata = ()
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(_QUESTION, request_serializer=None, response_deserializer=None)
        try:
            ask(b"", timeout=ASK_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return "it refuses this token" if metadata else "it wants a token, and there is none here"
    return ""
