"""Traces of agents: what a turn is, which files are none, the trace that comes with the command, and the table."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.service.agents import figures_of, table_of
from kog_dist.bench.service.answers import RequestRecord
from kog_dist.bench.service.options import trace_settings
from kog_dist.bench.service.own_trace import BYTES_PER_TOKEN, own_trace
from kog_dist.bench.service.trace import as_text, read_trace, turns_of
from kog_dist.errors import ConfigError

TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
LINES: list[dict[str, Any]] = [
    {"tools": TOOLS},
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "max_tokens": 7},
    {"role": "tool", "tool_call_id": "1", "content": "t"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "nobody answers"},
]


def written(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_a_turn_has_all_messages_before_a_recorded_answer(tmp_path: Path) -> None:
    first, second = turns_of(read_trace(written(tmp_path, *LINES)), "x")
    assert (first.max_tokens, second.max_tokens) == (7, None)
    assert first.tools == second.tools == tuple(TOOLS)
    assert first.messages == tuple(LINES[1:3])
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "tool"]
    assert second.messages[2] == {"role": "assistant", "content": None, "tool_calls": [CALL]}, "as it was recorded"


def test_as_a_text_each_turn_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    first, second = map(as_text, turns_of(read_trace(written(tmp_path, *LINES)), "x"))
    assert first == f"<tools>\n{json.dumps(TOOLS)}\n<system>\ns\n<user>\nu\n<assistant>\n"
    assert second == f"{first}\n{json.dumps([CALL])}\n<tool>\nt\n<assistant>\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2 is not JSON"),
        ([1], "line 2 must be an object"),
        ({"tools": []}, "line 2 must have a role of system, .* got None"),
        ({"role": "robot"}, "got 'robot'"),
        ({"role": "assistant", "max_tokens": 0}, "at least 1, of an answer, got 0"),
        ({"role": "assistant", "max_tokens": True}, "got True"),
        ({"role": "user", "max_tokens": 5}, "of an answer, got 5"),
    ],
)
def test_lines_that_are_no_messages_are_named(tmp_path: Path, line: object, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"trace\.jsonl {why}" if why.startswith("line") else why):
        read_trace(written(tmp_path, LINES[1], line))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "nothing to ask"),
        (LINES[:3], "nothing to ask"),
        ([LINES[5]], "begins with an answer"),
        ([LINES[0], LINES[5]], "begins with an answer"),
    ],
)
def test_traces_without_anything_to_ask_are_refused(tmp_path: Path, lines: list[object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        turns_of(read_trace(written(tmp_path, *lines)), "x")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path)


def test_the_own_trace_is_a_session_of_the_size_that_it_says(tmp_path: Path) -> None:
    lines = own_trace()
    assert lines == own_trace(), "it is the same each time"
    assert len(lines[1]["content"]) == 20_000 * BYTES_PER_TOKEN
    turns = turns_of(read_trace(written(tmp_path, *lines)), "own")
    assert len(turns) == 16
    assert all(set(turn.messages[idx]) >= {"role", "content"} for turn in turns for idx in range(len(turn.messages)))
    called = [call["function"] for line in lines for call in line.get("tool_calls", ())]
    assert {call["name"] for call in called} == {tool["function"]["name"] for tool in lines[0]["tools"]}
    edits = [json.loads(call["arguments"]) for call in called if call["name"] == "edit_file"]
    assert len(edits) == 4
    for edit in edits:
        assert edit["new"] != edit["old"]
        ast.parse(edit["new"])
    assert len(own_trace(1000)[1]["content"]) == 1000 * BYTES_PER_TOKEN


def test_figures_of_turns_and_of_all() -> None:
    first = RequestRecord(100, output_tokens=11, ttft_s=0.5, latency_s=1.5, cached_tokens=0)
    second = RequestRecord(150, output_tokens=1, ttft_s=0.1, latency_s=0.1, cached_tokens=96)
    failed = RequestRecord(7, error="HTTP 400: too long")
    figures = figures_of([first, second, failed])
    assert [turn["tokens_per_s"] for turn in figures["turns"]] == [pytest.approx(10.0), None, None]
    assert figures["total"] == {
        "turns": 2, "prompt_tokens": 250, "cached_tokens": 96, "output_tokens": 12, "ttft_ms": pytest.approx(600.0),
        "tokens_per_s": pytest.approx(10.0), "seconds": pytest.approx(1.6),
    }  # fmt: skip
    rows = table_of(figures).splitlines()
    assert [row.split() for row in rows[1:5]] == [
        ["1", "100", "0", "11", "500.0", "10.0"], ["2", "150", "96", "1", "100.0", "-"],
        ["3", "HTTP", "400:", "too", "long"], ["all", "250", "96", "12", "600.0", "10.0"],
    ]  # fmt: skip
    silent = figures_of([RequestRecord(100, output_tokens=2, ttft_s=0.5, latency_s=0.6)])
    assert silent["total"]["cached_tokens"] is None, "a server that does not say is not one that has none"


def test_a_turn_is_asked_with_its_tools(tmp_path: Path) -> None:
    first, second = turns_of(read_trace(written(tmp_path, *LINES)), "x")
    settings = trace_settings(
        url="http://127.0.0.1:1", backend="openai-chat", model="m", output_len=9, ignore_eos=True, temperature=0.0,
        timeout_s=1.0, extra_body='{"cache_salt": "run-2"}', api_key="",
    )  # fmt: skip
    body = settings.body(first, "m")
    assert (body["tools"], body["max_tokens"], body["cache_salt"]) == (TOOLS, 7, "run-2")
    assert settings.body(second, "m")["max_tokens"] == 9
    assert (settings.num_warmups, settings.max_concurrency) == (0, 1), "a warm-up would leave the beginning behind"
