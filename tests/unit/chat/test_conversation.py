"""Commands, requests and the meter of `kog-chat`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kog_dist.chat.conversation import HELP, MAX_TOKENS, Again, Conversation, Stats
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
    assert body["max_tokens"] == MAX_TOKENS == 512


def test_completion_mode_sends_the_text_alone() -> None:
    talk = Conversation("m", system="x")
    talk.command("/completion")
    path, body = talk.request("def f(", counts_tokens=False)
    assert (path, body["prompt"]) == ("/completions", "def f(")
    assert "messages" not in body
    talk.command("/chat")
    assert talk.request("x", counts_tokens=False)[0] == "/chat/completions"


def test_drafts_are_asked_for_in_words() -> None:
    talk = Conversation("m")
    assert "speculate" not in talk.request("x", counts_tokens=True)[1]
    assert talk.command("/speculate lookup") == "speculate is lookup"
    assert talk.request("x", counts_tokens=True)[1]["speculate"] == "lookup"
    assert "speculate lookup" in str(talk.command("/settings"))
    with pytest.raises(ConfigError, match="speculate must be one of off, lookup, auto, got 'eagle'"):
        talk.command("/speculate eagle")
    assert talk.command("/speculate") == "speculate is the service's"
    assert talk.completions("/spec") == ["/speculate"]


def test_reset_system_and_save(tmp_path: Path) -> None:
    talk = Conversation("m")
    talk.command("/system speak  German")
    talk.add("a", "b")
    talk.command("/seed 7")
    path = tmp_path / "talk.json"
    assert str(path) in str(talk.command(f"/save {path}"))
    saved = json.loads(path.read_text())
    assert (saved["model"], saved["seed"], len(saved["messages"])) == ("m", 7, 3)
    assert saved["messages"][0] == {"role": "system", "content": "speak  German"}
    talk.command("/reset")
    assert (talk.messages, talk.system) == ([], "speak  German")
    talk.command("/system")
    assert talk.system == ""


def test_a_saved_conversation_goes_on(tmp_path: Path) -> None:
    path, talk, other = tmp_path / "talk.json", Conversation("m", system="be brief"), Conversation("m")
    talk.add("a", "b")
    talk.command(f"/save {path}")
    assert "2 messages" in str(other.command(f"/load {path}"))
    assert (other.messages, other.system) == (talk.messages, "be brief")
    assert other.command("/retry") == Again("a")
    assert other.messages == []


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"messages": 1}', '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "x"}]}',
    ],
)  # fmt: skip
def test_what_is_no_saved_conversation_changes_nothing(tmp_path: Path, text: str) -> None:
    path, talk = tmp_path / "talk.json", Conversation("m")
    path.write_text(text)
    talk.add("a", "b")
    with pytest.raises(ConfigError, match="is no conversation"):
        talk.command(f"/load {path}")
    assert len(talk.messages) == 2


def test_a_question_is_asked_again_or_another_one_instead() -> None:
    talk = Conversation("m")
    with pytest.raises(ConfigError, match="no question yet"):
        talk.command("/retry")
    for prompt, answer in (("one", "first"), ("two", "second")):
        talk.request(prompt, counts_tokens=False)
        talk.add(prompt, answer)
    assert talk.command("/retry") == Again("two")
    assert [message["content"] for message in talk.messages] == ["one", "first"]
    talk.request("two", counts_tokens=False)  # refused: nothing was added
    assert talk.command("/edit  three") == Again("three")
    assert [message["content"] for message in talk.messages] == ["one", "first"]
    with pytest.raises(ConfigError, match="needs the text"):
        talk.command("/edit")
    talk.command("/reset")
    with pytest.raises(ConfigError, match="no question yet"):
        talk.command("/retry")


def test_another_model_is_asked() -> None:
    talk = Conversation("m")
    talk.command("/model other")
    assert talk.request("x", counts_tokens=False)[1]["model"] == "other"
    with pytest.raises(ConfigError, match="needs the name"):
        talk.command("/model")


def test_stats_are_of_all_answers() -> None:
    talk, stats = Conversation("m"), Stats()
    assert str(talk.command("/stats")) == "no answer yet"
    stats.count(0, None, 0.0)
    for num_tokens, first_s in ((11, 0.1), (21, 0.3), (1, 0.2)):
        stats.count(num_tokens, first_s, 0.1 * (num_tokens > 1))
    assert str(stats) == "3 answers of 33 tokens together, 150 tokens/s, first token after 200 ms (median)"


def test_commands_complete() -> None:
    completions = Conversation("m").completions
    assert completions("/s") == ["/save", "/seed", "/settings", "/speculate", "/stats", "/system"]
    assert all(name in HELP for name in completions("/"))


def test_settings_go_back_to_the_default_and_are_shown() -> None:
    talk = Conversation("m")
    assert talk.command("/max-tokens 9") == "max_tokens is 9"
    assert "max_tokens 9" in str(talk.command("/settings"))
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
    meter.take(Piece(prompt_read=(64, 900)), 1.9)
    assert meter.line(2.0, None) == "reading the prompt, 64 of 900 tokens, 2.0 s"
    meter.take(Piece("a", 1), 2.0)
    meter.take(Piece("bc", 21), 2.01)
    meter.take(Piece(num_prompt_tokens=4, num_tokens=21), 2.02)
    assert meter.line(2.02, 8) == "2000 tokens/s, 21 tokens, first after 2000 ms, 8 ranks"
    assert summary(meter, "length", 1).startswith("[4 prompt tokens, 2000 tokens/s")
    meter.take(Piece(queue_ms=1500.2), 2.03)
    assert "first after 2000 ms (1500 in the queue)" in summary(meter, "length", 1)
    meter.take(Piece(drafts=(12, 15)), 2.03)
    assert "(1500 in the queue), 12 of 15 drafts right" in summary(meter, "length", 1)
    assert "cut off" in summary(meter, "length", 1)


def test_without_counts_it_counts_chunks_and_says_so() -> None:
    meter = Meter(0.0)
    for moment in range(1, 12):
        meter.take(Piece("x"), moment / 10)
    assert meter.line(1.1, None) == "about 10 tokens/s, 11 tokens, first after 100 ms"
