"""What others say reaches nobody's terminal as it is: it is quoted where it leaves a command, whoever said it and wherever."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.cli import app as bench
from kog_dist.bench.compare import run as compare
from kog_dist.chat import flags, history
from kog_dist.chat.conversation import Conversation
from kog_dist.chat.screen import Screen
from kog_dist.chat.service import ChatService
from kog_dist.chat.session import ChatSession
from kog_dist.chat.wire import ServiceUrl
from kog_dist.doctor.report import CheckResult, as_json, as_text, problem
from kog_dist.quoting import Verbatim, json_text, quoted
from kog_dist.rpc.output import progress_line, quoted_streams, write_error, write_out
from tests.unit.openai_stub import DONE, Scripted, chat, event, openai_stub
from tests.unit.test_layering import ROOT, parsed, source_files
from tests.unit.test_quoting import acts

ACTING = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\x08"
INFO = {
    "model": {"id": f"m{ACTING}", "chat": f"template{ACTING}"}, "state": f"ready{ACTING}", "ranks": [ACTING],
    "engine": {"own_sampling": f"temperature{ACTING}"},
}  # fmt: skip
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


# ---- the border itself ----
def test_streams_quote_whatever_is_written_to_them(capsys: pytest.CaptureFixture[str]) -> None:
    with quoted_streams():
        print(f"one\ttwo\nthree{ACTING}", flush=True)
        print(f"error{ACTING}", file=sys.stderr)
        sys.stdout.write(Verbatim("\x1b[2m"))
        sys.stderr.write(Verbatim("\x1b[0m"))
    out, err = capsys.readouterr()
    assert out == "one\ttwo\nthree\\x1b]0;owned\\x07\\x1b[2J\\r\\x9b31m\\u202e\\x08\n\x1b[2m"
    assert err.endswith("\\x08\n\x1b[0m")
    assert not acts(err.removesuffix("\x1b[0m"))


def test_the_streams_are_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError), quoted_streams():
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == before


def test_words_of_commands_are_quoted_without_streams_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    write_out(f"a{ACTING}\n")
    write_error(f"b{ACTING}")
    out, err = capsys.readouterr()
    assert not acts(out + err)


def test_a_line_of_progress_acts_as_we_want_and_not_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_line(enabled=True) as show:
        show(f"m{ACTING}")
    assert terminal.getvalue().startswith("\r\x1b[Km\\x1b]0;owned")
    assert not acts(terminal.getvalue().replace("\r\x1b[K", ""))


@pytest.mark.parametrize("value", [ACTING, "\x7f", {"\x7f": ["\u2028", 1]}])
def test_json_stays_json(value: Any) -> None:
    text = json_text(value)
    assert quoted(text) == text
    assert json.loads(text) == value


def test_verbatim_is_said_of_few_things() -> None:
    """Where our own codes are made, and where an answer goes on."""
    found = set()
    for path in source_files():
        if "Verbatim" not in path.read_text(encoding="utf-8"):  # far sooner seen than in a syntax tree
            continue
        if any(isinstance(node, ast.Name) and node.id == "Verbatim" for node in ast.walk(parsed(path))):
            found.add(str(path.relative_to(ROOT)))
    assert found == {"kog_dist/quoting.py", "kog_dist/rpc/output.py", "kog_dist/rpc/commands.py", "kog_dist/chat/screen.py"}


@pytest.mark.parametrize("name", ["bench/cli.py", "chat/flags.py", "doctor/cli.py", "gateway/cli.py", "rpc/flags.py"])
def test_every_command_has_the_border(name: str) -> None:
    """kog-launch has its own, `events.say`, and is looked at in test_quoting.py."""
    calls = {ast.unparse(node.func) for node in ast.walk(parsed(ROOT / "kog_dist" / name)) if isinstance(node, ast.Call)}
    assert "quoted_streams" in calls


# ---- commands that meet a hostile service ----
@pytest.fixture
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "begin", lambda _completions: None)

    def end(_prompt: str = "") -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)


@pytest.mark.usefixtures("no_terminal")
@pytest.mark.parametrize("info", [INFO, None])
def test_the_banner_of_the_chat_shows_names_quoted(info: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_stub(Scripted(chat(["a"]))) as stub:
        stub.info, stub.models = info, {"data": [{"id": f"m{ACTING}"}]}
        service = ChatService(ServiceUrl.parse(stub.url))
        facts = service.facts(None)
        ChatSession(service, facts, Conversation(facts.model), Screen()).talk()
    said = capsys.readouterr().err
    assert "m\\x1b]0;owned" in said
    assert not acts(said)


def hostile_answers() -> Iterator[Scripted]:
    """Everything that a service may say beside its answer, and values of other types."""
    yield Scripted(chat(["a"], finish=f"stop{ACTING}", usage=USAGE))
    yield Scripted([event({"error": {"message": f"no{ACTING}"}})])
    yield Scripted([event({"error": ACTING})])
    yield Scripted([json.dumps({"error": {"message": ACTING, "code": ACTING}}).encode()], 500, "application/json")
    yield Scripted([ACTING.encode("utf-8")], 418, "text/plain")
    yield Scripted([ACTING.encode("latin-1", "replace")], 200, "text/plain")
    yield Scripted([b"data: " + b"[" * 100_000 + b"\n\n"])
    yield Scripted([b"[" * 100_000], 500, "application/json")
    for value in (ACTING, [ACTING], {"a": ACTING}, 1, True, None, 1e300):
        yield Scripted(chat(["a"], usage={"prompt_tokens": value, "completion_tokens": value, "prompt_tokens_details": value}))
        for chunk in (
            {"choices": value}, {"choices": [value]}, {"choices": [{"delta": value}]}, {"choices": [{"text": value}]},
            {"choices": [{"delta": {"content": value}}]}, {"choices": [{"delta": {"content": "a"}, "finish_reason": value}]},
            {"choices": [], "usage": value}, {"timings": value}, value,
        ):  # fmt: skip
            yield Scripted([event(chunk), DONE])


def test_the_chat_shows_nothing_of_a_service_that_acts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    answers = list(hostile_answers())
    with openai_stub(*answers) as stub:
        stub.info = INFO
        for answer in answers:
            code = 0
            try:
                code = flags.run(["--url", stub.url, "hello"])
            except SystemExit as ended:
                code = int(ended.code or 0)
            assert code in (0, 2, 4), answer
            assert not acts(capsys.readouterr().err), answer


def test_a_benchmark_shows_nothing_of_a_service_that_acts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answers = list(hostile_answers())
    with openai_stub(*answers) as stub:
        stub.models = {"data": [{"id": f"m{ACTING}"}]}
        command = ["serve", "--url", stub.url, "--num-prompts", str(len(answers) - 1), "--num-warmups", "0", "--each"]
        with pytest.raises(SystemExit), quoted_streams():
            bench([*command, "--backend", "openai-chat", "--output", str(tmp_path / "a.json")])
        said = capsys.readouterr()
    assert "error: " in said.out
    assert not acts(said.out + said.err)


def test_results_of_others_are_compared_quoted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lists = {"ttfts": [0.1], "itls": [[0.1]], "errors": [""], "output_lens": [2], "input_lens": [1], "start_times": [0.0]}
    whole = {**lists, "model_id": ACTING, "commit": ACTING, "date": ACTING, "configuration": {"url": ACTING}, "backend": ACTING}
    for name in ("a", "b"):
        (tmp_path / name).write_text(json.dumps(whole | {"configuration": {"url": f"{name}{ACTING}"}, "latencies": [0.2]}))
    compare(tmp_path / "a", tmp_path / "b", fail_if_slower=None, seed=0)
    said = capsys.readouterr().out
    assert "\\x1b]0;owned" in said
    assert not acts(said)


def test_the_doctor_quotes_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = [CheckResult("gpus", "users", [problem(f"used by {ACTING}", name=ACTING)])]
    with quoted_streams():
        print(as_text(found))
        print(as_json(found))
    text, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert not acts(text + line)
    assert json.loads(line)["findings"][0]["details"]["name"] == ACTING
