"""Commands, requests and the meter of `kog-chat`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kog_dist.chat.conversation import HELP, Conversation
from kog_dist.chat.screen import Meter, summary
from kog_dist.chat.service import Piece
from kog_dist.errors import ConfigError


def test_a_request_carries_what_was_said_and_what_is_set() -> None:
    talk = Conversation("m", system="be brief")
    talk.add("one", "first")
    talk.add("unanswered", "")
    talk.command("/temperature 0.5")
    path, body = talk.request("two", counts_tokens=True)
    assert path == "/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"}, {"role": "user", "content": "two"},
    ]  # fmt: skip
    assert (body["temperature"], body["stream"]) == (0.5, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "seed" not in body


def test_completion_mode_sends_the_text_alone() -> None:
    talk = Conversation("m", system="x")
    talk.command("/completion")
    path, body = talk.request("def f(", counts_tokens=False)
    assert (path, body["prompt"]) == ("/completions", "def f(")
    assert "messages" not in body
    talk.command("/chat")
    assert talk.request("x", counts_tokens=False)[0] == "/chat/completions"


def test_reset_system_and_save(tmp_path: Path) -> None:
    talk = Conversation("m")
    talk.command("/system speak  German")
    talk.add("a", "b")
    talk.command("/seed 7")
    path = tmp_path / "talk.json"
    assert str(path) in talk.command(f"/save {path}")
    saved = json.loads(path.read_text())
    assert (saved["model"], saved["seed"], len(saved["messages"])) == ("m", 7, 3)
    assert saved["messages"][0] == {"role": "system", "content": "speak  German"}
    talk.command("/reset")
    assert (talk.messages, talk.system) == ([], "speak  German")
    talk.command("/system")
    assert talk.system == ""


def test_settings_go_back_to_the_default_and_are_shown() -> None:
    talk = Conversation("m")
    assert talk.command("/max-tokens 9") == "max_tokens is 9"
    assert "max_tokens 9" in talk.command("/settings")
    assert talk.command("/max_tokens") == "max_tokens is the service's"
    assert talk.settings.fields() == {}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/temperature hot", "must be a number"), ("/temperature -1", "from 0 to 100"), ("/temperature nan", "from 0 to 100"),
        ("/seed 1.5", "must be a number"), ("/tempratur 1", "did you mean /temperature"), ("/xyzzy", "see /help"),
        ("/", "see /help"),
        ("/save", "name of a file"), ("/save /nonexistent/x", "cannot be written"), ("/top_p 0", "from 1e-06 to 1"),
    ],
)  # fmt: skip
def test_wrong_commands_say_what_is_wrong(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Conversation("m").command(line)


def test_help_names_every_command_and_quit_ends() -> None:
    talk = Conversation("m")
    assert talk.command("/help") == HELP
    for name in ("reset", "save", "system", "temperature", "top_p", "seed", "max_tokens", "completion", "settings", "quit"):
        assert f"/{name}" in HELP
    with pytest.raises(EOFError):
        talk.command("/quit")


def test_the_meter_counts_what_the_service_counts() -> None:
    meter = Meter(0.0)
    assert meter.line(1.5, 8) == "waiting for the first token, 1.5 s, 8 ranks"
    meter.take(Piece(num_before=2), 1.6)
    meter.take(Piece(), 1.6)
    assert meter.line(1.7, None) == "waiting, 2 before this one, 1.7 s"
    meter.take(Piece(num_before=0), 1.8)
    assert meter.line(1.9, None).startswith("waiting for the first token")
    meter.take(Piece("a", 1), 2.0)
    meter.take(Piece("bc", 21), 2.01)
    meter.take(Piece(usage={"prompt_tokens": 4}, num_tokens=21), 2.02)
    assert meter.line(2.02, 8) == "2000 tokens/s, 21 tokens, first after 2000 ms, 8 ranks"
    assert summary(meter, "length", 1).startswith("[4 prompt tokens, 2000 tokens/s")
    meter.take(Piece(queue_ms=1500.2), 2.03)
    assert "first after 2000 ms (1500 in the queue)" in summary(meter, "length", 1)
    assert "cut off" in summary(meter, "length", 1)


def test_without_counts_it_counts_chunks_and_says_so() -> None:
    meter = Meter(0.0)
    for moment in range(1, 12):
        meter.take(Piece("x"), moment / 10)
    assert meter.line(1.1, None) == "about 10 tokens/s, 11 tokens, first after 100 ms"
