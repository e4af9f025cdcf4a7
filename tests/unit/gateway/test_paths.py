"""What is answered where, also to HEAD, and what somebody is told who asks for something else."""

from __future__ import annotations

import httpx
import pytest

from kog_dist.gateway import documents
from kog_dist.gateway.nearest_path import nearest_path
from tests.unit.gateway.scripted_engine import RunningGateway, raw_request


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/metrics", "/v1/models", "/kog/info", "/openapi.json", "/"])
def test_head_is_as_get_without_the_body(http: httpx.Client, running: RunningGateway, path: str) -> None:
    got, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    answer = raw_request(running.port, f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n"), "no byte of a body"


def test_head_of_what_takes_a_body_is_refused(http: httpx.Client) -> None:
    refused = http.head("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert http.head("/nothing").status_code == 404


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"), ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/V1/Chat/Completions", "/v1/chat/completions"), ("//v1/models", "/v1/models"), ("/models", "/v1/models"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"), ("/v1/completion", "/v1/completions"),
        ("/completions", "/v1/completions"), ("/api/v1/models", "/v1/models"), ("/v1/response", "/v1/responses"),
        ("/responses", "/v1/responses"), ("/completion", "/v1/completions"), ("/healthz", "/health"), ("/v1/health", "/health"),
        ("/v1/metrics", "/metrics"), ("/v1/tokenize", "/tokenize"), ("/docs", "/openapi.json"), ("/metric", "/metrics"),
        ("/v1", "/v1/models"), ("/v1/", "/v1/models"), ("/info", "/kog/info"), ("/index.html", "/"),
        ("/v1/api/chat", "/api/chat"), ("/messages", "/v1/messages"), ("/api/v1/messages", "/v1/messages"),
        ("/v1/embeddings", None), ("/favicon.ico", None), ("/wp-login.php", None), ("/v1/audio/speech", None),
    ],
)  # fmt: skip
def test_the_nearest_path_is_named(http: httpx.Client, asked: str, meant: str | None) -> None:
    assert nearest_path(asked, documents.PATHS) == meant
    refused = http.post(asked, json={})
    assert refused.status_code == 404
    message = refused.json()["error"]["message"]
    assert message.endswith(f"; use {meant}" if meant is not None else "; /openapi.json lists what there is"), message


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"), ("/tokenize", "/tokenize"), ("/metrics", "/metrics"), ("/", "/"),
        ("/v1/models/a/b", "/v1/models/{name}"), ("/static/chat.js", "/static/{name}"), ("/v1/model", "other"),
        ("/nothing", "other"), ("/v1/chat/completions/x", "other"), ("", "other"),
    ],
)  # fmt: skip
def test_nobody_can_make_up_labels_of_metrics(path: str, label: str) -> None:
    assert documents.handler_of(path) == label
