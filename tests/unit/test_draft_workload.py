"""The workload of `kog-bench drafts`: chats that a gateway takes, and that are the same with and without drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from kog_dist.bench.engine import cpu_passes
from kog_dist.bench.engine.drafts import body_of, tasks
from kog_dist.errors import ConfigError
from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.model.tokenizer import Tokenizer
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
