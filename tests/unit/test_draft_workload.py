"""The workload of `kog-bench drafts`: chats that a gateway takes, and that are the same with and without drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

from kog_dist.bench.engine.drafts import body_of, tasks
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
