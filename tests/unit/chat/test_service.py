"""The client of `kog-chat` against a server whose answers are known."""

from __future__ import annotations

import socket
import threading

import pytest

from kog_dist.chat.service import ChatService
from kog_dist.chat.wire import ServiceUrl
from kog_dist.errors import LaunchError, RequestError, RequestFailed
from tests.unit.openai_stub import OpenAiStub, Scripted, chat, event, openai_stub

USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


def service_of(stub: OpenAiStub, **options: float) -> ChatService:
    return ChatService(ServiceUrl.parse(stub.url), "key", **options)


def test_an_answer_comes_in_pieces() -> None:
    with openai_stub(Scripted(chat(["Hi", " you"], usage=USAGE))) as stub:
        pieces = list(service_of(stub).stream("/chat/completions", {"messages": []}))
    assert "".join(piece.text for piece in pieces) == "Hi you"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    assert [(piece.num_prompt_tokens, piece.num_tokens) for piece in pieces if piece.num_prompt_tokens] == [(3, 2)]
    assert stub.headers[0]["authorization"] == "Bearer key"


def test_a_place_in_the_queue_is_told() -> None:
    places = [b": keep-alive\n\n", b": 12 before this one\n\n", b": 3 before this one, or so\n\n", b": 5 of 8 prompt tokens\n\n"]
    answer = [
        *chat(["a"]),
        event({"choices": [], "usage": USAGE, "timings": {"queue_ms": 700.4, "draft_n": 9, "draft_n_accepted": 4}}),
        b"data: [DONE]\n\n",
    ]
    with openai_stub(Scripted(places + answer)) as stub:
        pieces = list(service_of(stub).stream("/chat/completions", {}))
    assert {piece.num_before for piece in pieces} <= {12, None}
    assert {piece.prompt_read for piece in pieces} <= {(5, 8), None}
    assert [(piece.queue_ms, piece.drafts) for piece in pieces if piece.queue_ms is not None] == [(700.4, (4, 9))]


def test_silence_is_told_and_has_a_limit() -> None:
    go_on = threading.Event()
    with openai_stub(Scripted(chat(["a", "b"]), wait=go_on)) as stub:
        pieces = service_of(stub, silence_s=0.25).stream("/chat/completions", {})
        assert next(pieces).text == ""
        with pytest.raises(RequestFailed, match=r"said nothing for 0\.25 s"):
            list(pieces)
        go_on.set()


def test_leaving_the_answer_closes_the_connection() -> None:
    go_on = threading.Event()
    pieces = [*chat(["a"] * 5), b"data: " + b"x" * (8 << 20) + b"\n\n"]  # more than sockets hold, so that the server must notice
    with openai_stub(Scripted(pieces, wait=go_on)) as stub:
        stream = service_of(stub).stream("/chat/completions", {})
        next(stream)
        stream.close()
        go_on.set()
    assert stub.num_lost_clients == 1


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (Scripted([b'{"error": {"message": "bad prompt"}}'], status=400), RequestError, "400: bad prompt"),
        (Scripted([b'{"error": {"message": "wrong key"}}'], status=401), RequestError, "wrong key; give the key with"),
        (Scripted(chat(["a"])[:2]), RequestFailed, "broke off"),
        (Scripted(chat(["a"])[:2], cut_off=True), RequestFailed, "in the middle of its answer"),
        (Scripted([event({"error": {"message": "rank 1 died"}})]), RequestFailed, "rank 1 died"),
        (Scripted([b"data: {x\n\n"]), RequestFailed, "cannot be read"),
        (Scripted([b"data: []\n\n"]), RequestFailed, "cannot be read"),
    ],
)
def test_what_goes_wrong_is_one_sentence(answer: Scripted, kind: type[Exception], reason: str) -> None:
    with openai_stub(answer) as stub, pytest.raises(kind, match=reason):
        list(service_of(stub).stream("/chat/completions", {}))


def test_facts_of_a_foreign_service() -> None:
    with openai_stub(Scripted()) as stub:
        facts = service_of(stub).facts(None)
        assert (facts.model, facts.num_ranks, facts.has_chat) == ("stub", None, True)
        assert service_of(stub).facts("mine").model == "mine"
        stub.models = {}
        with pytest.raises(LaunchError, match="--model"):
            service_of(stub).facts(None)


def test_nobody_there_and_somebody_else_there() -> None:
    with pytest.raises(LaunchError, match=r"no service answers at http://127\.0\.0\.1:9: .*kog-launch"):
        ChatService(ServiceUrl.parse("http://127.0.0.1:9")).facts(None)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(RequestFailed, match="not an HTTP"):
            ChatService(ServiceUrl.parse(f"http://127.0.0.1:{listener.getsockname()[1]}")).facts(None)
        thread.join(10)
