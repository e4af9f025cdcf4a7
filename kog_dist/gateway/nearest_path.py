"""Which of our paths somebody means who asks for one that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

# What other servers call it: Ollama, llama.cpp, TGI, vLLM, SGLang, and the usual words of load balancers.
_ELSEWHERE: Final = {
    "/v1/chat": "/v1/chat/completions", "/chat": "/v1/chat/completions",
    "/generate": "/v1/completions", "/generate_stream": "/v1/completions",
    "/completion": "/v1/completions", "/infill": "/v1/completions", "/v1/engines": "/v1/models",
    "/api/models": "/v1/models", "/info": "/kog/info",
    "/get_model_info": "/kog/info", "/get_server_info": "/kog/info",
    "/healthz": "/health", "/ping": "/health", "/health_generate": "/health", "/ready": "/readyz", "/live": "/livez",
    "/docs": "/openapi.json", "/redoc": "/openapi.json", "/swagger": "/openapi.json", "/v1": "/v1/models", "/ui": "/",
    "/index.html": "/", "/stats": "/metrics",
}  # fmt: skip


def nearest_path(asked: str, known: Sequence[str]) -> str | None:
    """The one of `known` that `asked` is with a part too much or too little, by another server's name, or misspelt."""
    path = "/" + "/".join(part for part in asked.lower().split("/") if part)
    paths = [one for one in known if "{" not in one and one != "/"]
    for found in (path, _ELSEWHERE.get(path)):
        if found in paths or found == "/":
            return found
    if inside := [one for one in paths if path.endswith(one)]:
        return max(inside, key=len)
    if around := [one for one in paths if one.endswith(path)]:
        return min(around, key=len)
    beginning = [one for one in _ELSEWHERE if path.endswith(one) and one.count("/") > 1]
    if beginning:
        return _ELSEWHERE[max(beginning, key=len)]
    return next(iter(difflib.get_close_matches(path, paths, 1, 0.75)), None)
