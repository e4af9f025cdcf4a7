"""`kog-bench peers`: what is started, what is asked, and what is said of engines that cannot be measured."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kog_dist.bench.cli import app
from kog_dist.bench.commands import peers as command
from kog_dist.bench.engine.processes import command_line, parents
from kog_dist.bench.files import writing
from kog_dist.bench.peers import run as peers
from kog_dist.bench.peers.loads import PeerLoad, loads_of
from kog_dist.bench.peers.peer import Peer, chosen, known
from kog_dist.bench.peers.rows import first_difference
from kog_dist.bench.service.answers import RequestRecord
from kog_dist.errors import ConfigError, LaunchError
from kog_dist.workers.coordinator.model_folder import ModelFolder

DEMO = Path(str(resources.files("kog_dist"))) / "models" / "demo"
AGAINST = str(inspect.signature(command.peers, eval_str=True).parameters["against"].annotation.__metadata__[0].help)
STUB = Path(__file__).with_name("stub_engine.py")
OURS = ("def ", "add", "(", "a", ")")


def stub(name: str, kind: str = "plain", text: Sequence[str] = OURS) -> Peer:
    """An engine whose whole command line is given."""
    return Peer(name, name, whole=(sys.executable, str(STUB), "{port}", kind, *text))


def plan_of(*engines: Peer, loads: str = "8+5", **changes: Any) -> peers.PeerPlan:
    plan = peers.PeerPlan(DEMO, None, engines, loads_of(loads, (1,), 2), devices=1, on_gpus=False, start_s=30.0)
    return replace(plan, **changes)


def measured(plan: peers.PeerPlan, capsys: pytest.CaptureFixture[str], num_missing: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Rows of the JSON object, and what was printed before."""
    assert peers.run(plan) == num_missing
    *lines, last = capsys.readouterr().out.splitlines()
    rows: list[dict[str, Any]] = json.loads(last)["figures"]
    return rows, "\n".join(lines)


def test_engines_are_asked_the_same_and_compared_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    other = (*OURS[:3], "b", OURS[4])
    rows, shown = measured(plan_of(stub("kog"), stub("late", "late"), stub("other", text=other), processes=2), capsys)
    assert [row["engine"] for row in rows] == ["kog", "late", "other"]
    tokenizer = ModelFolder.from_folder(DEMO, "demo").tokenizer
    assert tokenizer is not None
    same = len(tokenizer.encode("def add(", add_special_tokens=False))
    assert [row["differs_at"] for row in rows] == [None, None, same]
    for row in rows:
        assert row["error"] == ""
        assert (row["prompt_tokens"], row["answer_tokens"]) == (9, 5)
        assert len(row["tokens_per_s_runs"]) == 2, "of each process"
        assert row["tokens_per_s"] > 0
        assert row["total_tokens_per_s"] > 0
        assert row["memory_gb"] > 0.001
        assert row["start_s"] > 0
    assert "8+5, 9 + 5 tokens" in shown
    assert "not measured" not in shown


def test_what_cannot_be_measured_is_a_row_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    engines = (
        stub("kog"), stub("ends", "ends"), Peer("none", "none", program="no-such-engine"),
        replace(known()["vllm"], program=sys.executable, version=("-c", "import sys; sys.exit('no module of that name')")),
        replace(known()["xllamacpp"], program=sys.executable, version=("-c", "print(1)")),
        replace(known()["trtllm"], program="true"),
    )  # fmt: skip
    rows, shown = measured(plan_of(*engines), capsys, num_missing=8)
    errors = {row["engine"]: row["error"] for row in rows}
    assert errors.pop("kog") == ""
    assert errors.pop("ends") == (
        "it ended with code 1 before it answered; its last line: 'a model of four legs is not supported'"
    )
    assert errors.pop("none") == "there is no 'no-such-engine' here; give one with --start none=PROGRAM"
    assert "ended with code 1: 'no module of that name'" in errors.pop("vLLM")
    assert errors.pop("llama.cpp (xllamacpp)") == "llama.cpp (xllamacpp) reads GGUF files alone; give one with --gguf"
    assert errors.pop("TensorRT-LLM") == "TensorRT-LLM is not started on a CPU here"
    assert not errors
    assert "vLLM (8+5; 8+5, ngram; 8+5, suffix): " in shown, "one line for all that it cannot"
    assert [command_line(pid) for pid, *_ in parents() if str(STUB) in command_line(pid)] == [], "nothing is left"


@pytest.mark.parametrize(
    ("said", "version"), [("note\\n1.2", "1.2"), ("version: 7 (abc)\\nbuilt with GNU 12", "version: 7 (abc)")]
)
def test_a_version_is_the_line_that_says_so_or_the_last(said: str, version: str) -> None:
    assert replace(known()["vllm"], program=sys.executable, version=("-c", f"print('{said}')")).found_version() == version


def test_who_never_answers_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = measured(plan_of(stub("deaf", "deaf"), start_s=0.5), capsys, num_missing=1)
    assert rows[0]["error"].startswith("no answer at its port after 0.5 s; it")
    assert [command_line(pid) for pid, *_ in parents() if str(STUB) in command_line(pid)] == [], "nothing is left"


def test_a_load_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    rows, shown = measured(plan_of(stub("kog", "chats-fail"), loads="8+5,prose"), capsys, num_missing=1)
    assert [(row["load"], row["error"][:42]) for row in rows] == [("8+5", ""), ("prose", rows[1]["error"][:42])]
    assert "no chats here" in rows[1]["error"]
    assert "prose: no figures" in shown


def test_several_requests_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(stub("kog"), loads="8+5")
    plan = replace(plan, loads=loads_of("8+5", (1, 2), 2))
    assert (plan.slots, plan.context) == (2, plan.loads[0].context)
    rows, _ = measured(plan, capsys)
    assert [row["load"] for row in rows] == ["8+5", "8+5, 2 at once"]


def test_files_have_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / f"peers.{kind}") for kind in ("md", "csv", "json", "svg")]
    with writing(names):
        peers.run(plan_of(stub("kog"), stub("ends", "ends")))
    capsys.readouterr()
    table, values, whole, picture = (Path(name).read_text() for name in names)
    assert "| 8+5 | kog |" in table
    assert values.splitlines()[1].startswith("8+5,kog,none,")
    assert json.loads(whole)["configuration"]["commands"]["kog"].startswith(f"{Path(sys.executable).name} {STUB}")
    assert "<svg" in picture


@pytest.mark.parametrize("name", known())
def test_every_engine_of_the_table_has_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = replace(known()[name], program="true")
    for on_gpus in (True, False):
        for drafts in ("", *peer.drafts):
            if (peer.gpu if on_gpus else peer.cpu) is None:
                with pytest.raises(LaunchError, match="is not started"):
                    peer.command("DIR", 1234, context=99, slots=3, devices=2, on_gpus=on_gpus, drafts=drafts)
                continue
            words = " ".join(peer.command("DIR", 1234, context=99, slots=3, devices=2, on_gpus=on_gpus, drafts=drafts)[1:])
            assert "DIR" in words
            assert "1234" in words
            assert not {"{model}", "{port}", "{context}", "{slots}", "{devices}", "{script}", "{all_context}"} & set(
                words.split()
            )
            assert "{" not in words or drafts in ("ngram", "suffix"), words
    assert name == "kog" or name in AGAINST, "the help of --against lists it"
    assert not peer.script or Path(peers.__file__).with_name(peer.script).exists()


def test_programs_and_commands_that_are_given() -> None:
    starts = ["vllm=/opt/vllm/bin/vllm", "mine=serve --on {port} 'a b' {model}"]
    kog, vllm, mine = chosen("vllm", starts)
    assert (kog.name, vllm.program, vllm.words) == ("kog", "/opt/vllm/bin/vllm", known()["vllm"].words)
    assert mine.whole == ("serve", "--on", "{port}", "a b", "{model}")
    command = replace(mine, whole=("true", *mine.whole[1:])).command(
        "DIR", 7, context=1, slots=1, devices=1, on_gpus=True, drafts=""
    )
    assert command[1:] == ["--on", "7", "a b", "DIR"]


@pytest.mark.parametrize(
    ("against", "start", "message"),
    [
        ("vlm", "", "no engine is called 'vlm'; known: kog, vllm, "),
        ("", "mine=/bin/true", "no engine is called 'mine'"),
        ("", "vllm", "NAME=PROGRAM"),
        ("", "=true", "NAME=PROGRAM"),
        ("", "vllm=", "NAME=PROGRAM"),
        ("", "vllm='", "cannot be read"),
    ],
)
def test_wrong_names_are_refused(against: str, start: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(against, [start] if start else [])


def test_loads(tmp_path: Path) -> None:
    [short] = loads_of("short", (1,), 3)
    long, two, edit = loads_of("long,64+16,edit", (2,), 1)
    assert (len(short.prompts), short.prompts[0].num_words, short.prompts[0].max_tokens) == (3, 1024, 128)
    assert (long.prompts[0].num_words, long.prompts[0].max_tokens, long.at_once) == (8000, 1000, 2)
    assert (two.label, len(two.prompts), two.ignore_eos) == ("64+16, 2 at once", 2, True)
    assert len({prompt.text for prompt in (two.first, *two.prompts)}) == 3
    assert (edit.backend, edit.at_once, edit.ignore_eos) == ("openai-chat", 1, False)
    assert "bisect" in str(edit.prompts[0].messages) or "def " in str(edit.prompts[0].messages)
    (tmp_path / "own.jsonl").write_text('{"prompt": "Once", "max_tokens": 7}\n{"prompt": "Twice"}\n')
    [own] = loads_of(str(tmp_path / "own.jsonl"), (1,), 3)
    assert [(prompt.text, prompt.max_tokens) for prompt in own.prompts] == [("Once", 7), ("Twice", 256)]
    assert (own.name, own.backend) == ("own", "openai")


@pytest.mark.parametrize("names", ["", "medium", "8+0", "+4", "8+4+2", "json with a schema", "tool calls", "nothing.jsonl"])
def test_wrong_loads_are_refused(names: str) -> None:
    with pytest.raises(ConfigError):
        loads_of(names, (1,), 1)


def test_loads_that_the_context_has_no_room_for_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    limit = ModelFolder.from_folder(DEMO, "demo").spec.max_context
    plan = plan_of(stub("kog"), loads="8+5,long")
    kept = peers.with_room(plan)
    assert [load.name for load in kept.loads] == ["8+5"]
    long = plan.loads[1]
    assert capsys.readouterr().out == f"long: left out, it may take {long.context:,} tokens and the model has {limit:,}\n"
    with pytest.raises(ConfigError, match="room for none"):
        peers.with_room(plan_of(stub("kog"), loads="long"))


def test_the_weights_of_each(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "m.gguf"
    with pytest.raises(ConfigError, match="there is no"):
        peers.weights_of(file, None)
    file.touch()
    assert peers.weights_of(file, None) == (file, file)
    assert peers.weights_of(tmp_path / "a", None) == (file, file)
    (tmp_path / "a" / "model.safetensors").touch()
    assert peers.weights_of(tmp_path / "a", None) == (tmp_path / "a", None)
    assert peers.weights_of(tmp_path / "a", file) == (tmp_path / "a", file)


def test_where_answers_part() -> None:
    tokenizer = ModelFolder.from_folder(DEMO, "demo").tokenizer
    assert tokenizer is not None

    def at(wanted: str, found: str) -> int | None:
        return first_difference([RequestRecord(1, text=wanted)], [RequestRecord(1, text=found)], tokenizer)

    assert at("def f():", "def f():") is None
    assert at("def f():", "def f") is None, "shorter, not another"
    assert at("x", "y") == 0
    assert first_difference([RequestRecord(1, text="x")], [RequestRecord(1, text="y")], None) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model DIR --threads 1 --gpus 1", "either --gpus N or --threads N"),
        ("--model DIR", "either --gpus N or --threads N"),
        ("--model DIR --threads 1 --requests 0", "--requests"),
        ("--model /nowhere --threads 1", "there is no /nowhere"),
    ],
)
def test_wrong_flags_are_refused(flags: str, message: str) -> None:
    words = shlex.split(flags.replace("DIR", str(DEMO)))
    found = CliRunner().invoke(app, ["peers", *words])
    assert isinstance(found.exception, ConfigError)
    assert message in str(found.exception)


def test_a_load_has_its_label() -> None:
    load = PeerLoad("short", "openai", 4, loads_of("8+5", (1,), 1)[0].first, (), 1)
    assert load.label == "short, 4 at once"
