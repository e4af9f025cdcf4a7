"""The workload of `kog-bench drafts`: chats that a gateway takes, and that are the same with and without drafts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.commands.drafts import drafts
from kog_dist.bench.engine import cpu_passes
from kog_dist.bench.engine import drafts as benchmark
from kog_dist.bench.engine.drafts import body_of, tasks
from kog_dist.errors import ConfigError
from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.runtime.http_file import HttpFile
from kog_dist.speculation import Speculation


def test_every_task_is_a_chat() -> None:
    tokenizer = Tokenizer.from_folder(Path(str(resources.files("kog_dist"))) / "models" / "demo")
    served = ServedModel("demo", (), 8192, 4096, tokenizer, None, 1_700_000_000)
    found = tasks()
    assert {task["kind"] for task in found} == {
        "edit",
        "edit with prediction",
        "quote",
        "json",
        "tool calls",
        "json with a schema",
        "required call",
        "prose",
    }
    for task in found:
        with_drafts, without = (body_of(task, value) for value in (Speculation.AUTO, Speculation.OFF))
        assert {**with_drafts, "speculate": "off"} == without
        assert "{text}" not in json.dumps(with_drafts)
        if "tools" in task:
            continue  # this model has no template for them
        if "schema" in task:
            assert plan_chat(with_drafts, served).generates[0].constraints
        (generate,) = plan_chat(with_drafts, served).generates
        assert generate.speculate is Speculation.AUTO
        assert bool(generate.prediction_ids) is bool(task.get("predicts"))
        assert replace(generate, request_id="a", speculate=None).max_tokens == task["max_tokens"]
        assert "module" not in task or len(task["text"]) > 500


def test_passes_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy and drawn, with filters and without; answers are those of decoding without drafts, or it says so."""
    ask = {
        "kind": "prose",
        "ask": "def area(width, height):\n    return width * height\n\n\ndef area(",
        "max_tokens": 30,
        "text": "",
    }
    made = [{**ask, "name": "greedy"}, {**ask, "name": "drawn", "temperature": 0.8}, {**ask, "name": "other", "kind": "json"}]
    monkeypatch.setattr(cpu_passes, "tasks", lambda: made)
    monkeypatch.setattr(cpu_passes, "_TURN", 7)
    assert cpu_passes.run(None, (70,), ("prose",))
    *lines, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)["figures"]
    assert [answer["name"] for answer in figures["answers"]] == ["greedy", "drawn"]
    assert all(answer["tokens"] <= 30 and answer["is_same"] for answer in figures["answers"])
    assert figures["answers"][0]["accepted_tokens"] > 0
    assert figures["prompts"][0]["tokens"] == 70
    assert figures["prompts"][0]["cpu_s"] > 0
    assert any(line.startswith("a prompt of 70 tokens: ") for line in lines)
    with pytest.raises(ConfigError, match="no tasks without a grammar of the kind poems; there are prose, json"):
        cpu_passes.run(None, (), ("poems",))
    with pytest.raises(ConfigError, match="--prompts may have 1 to"):
        cpu_passes.run(None, (10**6,), ())
    monkeypatch.setattr(cpu_passes._Decoding, "_pass", lambda self: self.ids.append(len(self.ids) + (self._drafter is None)))
    assert not cpu_passes.run(None, (), ("prose",))
    assert "ANSWERS DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "started"),
    [
        ({}, ["--device=cpu --ranks=1", "--device=cpu --ranks=2"]),
        ({"ranks": "4"}, ["--device=cpu --ranks=4"]),
        ({"gpus": "1,2"}, ["--gpus=1", "--gpus=2"]),
    ],
)
def test_engines_are_of_ranks_or_of_gpus(
    options: dict[str, Any], started: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = list[str]()

    class Session:
        instance_folder = Path("/nowhere")

        def launch(self, *words: str) -> None:
            found.append(" ".join(words))

        def connect(self, timeout_s: float) -> object:
            return nullcontext()

        def processes(self) -> dict[str, int]:
            return {"rank 0": 0}

    row = {"kind": "prose", "tokens": 10, "drafted_tokens": 0, "accepted_tokens": 0, "is_same": True}
    rates = {f"{name}_{how}": 1.0 for name in ("tokens_per_s", "tokens_per_cpu_s") for how in ("off", "lookup", "auto")}
    monkeypatch.setattr(benchmark, "engine_session", lambda: nullcontext(Session()))
    monkeypatch.setattr(HttpFile, "read", lambda folder: HttpFile("http://127.0.0.1:1", 1, True))
    monkeypatch.setattr(benchmark, "_measured", lambda *_: {**row, **rates})
    drafts(kinds="prose", **options)
    assert found == [f"{words} --http --port=0" for words in started]
    assert ("processor" in capsys.readouterr().out) == ("gpus" not in options)
    with pytest.raises(ConfigError, match="exclude each other"):
        drafts(ranks="1", gpus="1")
