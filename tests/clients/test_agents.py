"""Agents that people use, with their own code and their own prompts, against a model that writes given texts: `make clients`.

What is asked makes the model call; what the call gives makes it answer. So the answer shows that the call's arguments and its
result arrived. The blocks are those of docs/clients.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import httpx
import pytest

from kog_dist.bench.engine.session import engine_session
from tests.clients.commands import run, run_page, run_python, run_script, run_shell
from tests.clients.installed import node_client, python_client
from tests.clients.page import block
from tests.clients.scripted_model import Cue, call, write_scripted_model
from tests.e2e.http_engine import http_engine

CODE = "Thought: I look it up.\n<code>\n{}\n</code>"
CUES = (
    Cue(("sunny, 21 degrees",), "It is sunny in Paris."),
    Cue(("weather in Paris",), "I ask.\n" + call("weather", city="Paris")),
    Cue(("weather in Rome",), "Rain and wind, they say."),
    Cue(("rain, 4 degrees",), call("final_answer", answer="It rains in Oslo.")),
    Cue(("weather in Oslo",), call("weather", city="Oslo")),
    Cue(("fog, 15 degrees",), CODE.format('final_answer("There is fog in Lima.")')),
    Cue(("weather in Lima",), CODE.format('print(weather("Lima"))')),
    Cue(("the number is 4711",), "I have read that it is 4711."),
    Cue(("number is in note.txt",), "I look.\n" + call("Bash", command="cat note.txt", description="Show the note")),
    Cue(("tool WebFetch can be called now",), "It has been loaded."),
    Cue(("tool that fetches pages",), call("ToolSearch", query="select:WebFetch", max_results=1)),
    Cue(("number does note.txt hold",), "I look.\n" + call("bash", command="cat note.txt", description="Show the note")),
    Cue(("greeting into hello.py",), 'hello.py\n```\nprint("hello")\n```\n'),
)
NOTE, READ = "the number is 4711\n", "I have read that it is 4711."
CALLED = ["weather(Paris)", "It is sunny in Paris."]

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models") / "scripted"
    write_scripted_model(folder, CUES)
    names = "--served-model-name=scripted,claude-*"
    with engine_session() as session, http_engine(session, str(folder), "--device=cpu", names) as engine:
        yield engine.url
        assert engine.launcher.poll() is None, session.output()


# ---- coding agents ----
def test_claude_code(url: str, tmp_path: Path) -> None:
    """A prompt of some 30,000 tokens, most of which is cached when the result of its command comes back."""
    (tmp_path / "note.txt").write_text(NOTE, encoding="utf-8")
    programs = node_client("@anthropic-ai/claude-code")
    found = json.loads(run_shell(block("Claude Code", "sh", url), programs, tmp_path))
    assert (found["result"], found["is_error"], found["num_turns"]) == (READ, False, 2)
    assert found["usage"]["cache_read_input_tokens"] > 8192
    assert not found["permission_denials"]


def test_claude_code_loads_a_deferred_tool(url: str, tmp_path: Path) -> None:
    """It sends no definitions of most of its tools until its own search has referred to them."""
    asked = block("Claude Code", "sh", url).replace("Which number is in note.txt?", "Look for a tool that fetches pages.")
    found = json.loads(run_shell(asked, node_client("@anthropic-ai/claude-code"), tmp_path))
    assert (found["result"], found["is_error"], found["num_turns"]) == ("It has been loaded.", False, 2)


def test_opencode(url: str, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text(NOTE, encoding="utf-8")
    (tmp_path / "opencode.json").write_text(block("opencode", "json", url), encoding="utf-8")
    said = run_shell(block("opencode", "sh", url), node_client("opencode-ai"), tmp_path, OPENCODE_DISABLE_AUTOUPDATE="1")
    assert READ in said


def test_aider_writes_a_file(url: str, tmp_path: Path) -> None:
    quiet = {"YES_ALWAYS": "true", "GIT": "false", "ANALYTICS_DISABLE": "true", "CHECK_UPDATE": "false", "PRETTY": "false"}
    variables = {f"AIDER_{name}": value for name, value in {**quiet, "SHOW_RELEASE_NOTES": "false"}.items()}
    run_shell(block("aider", "sh", url), python_client("aider-chat"), tmp_path, **variables)
    assert (tmp_path / "hello.py").read_text(encoding="utf-8") == 'print("hello")\n'


# ---- packages ----
def test_anthropic(url: str, tmp_path: Path) -> None:
    assert run_page("anthropic", "anthropic", url, tmp_path) == CALLED
    found = run_script("anthropic", "anthropic_package", url, tmp_path)
    events = found["events"]
    assert [events[0], *events[-2:]] == ["message_start", "message_delta", "message_stop"]
    of_blocks = [kind.removeprefix("content_block_") for kind in events if kind.startswith("content_block_")]
    assert [kind for kind, _ in groupby(of_blocks)] == ["start", "delta", "stop"] * 2, "a text, and a call"
    assert {"text", "input_json"} <= set(events), "what the package makes of the deltas"
    assert found["counted"] == found["prompt"]
    assert found["call"] == ["weather", {"city": "Paris"}]
    assert (found["reasons"], found["text"]) == (["tool_use", "end_turn"], "It is sunny in Paris.")
    assert found["cached"] >= found["prompt"] - 16
    assert found["missing"] == "not_found_error"
    assert re.fullmatch("prompt is too long: [0-9]+ tokens > 65535 maximum", found["too_long"])


def test_ollama(url: str, tmp_path: Path) -> None:
    assert run_page("ollama", "ollama", url, tmp_path) == CALLED
    lines = run_shell(block("ollama", "sh", url), python_client("ollama"), tmp_path).splitlines()
    assert "".join(json.loads(line)["response"] for line in lines) == "Rain and wind, they say."
    found = run_script("ollama", "ollama_package", url, tmp_path)
    assert found["models"] == found["running"] == ["scripted"]
    assert {"completion", "tools"} <= set(found["capabilities"])
    assert found["prompt"] == "".join(found["pieces"]) == "Rain and wind, they say."
    assert found["done"] == [False] * (len(found["done"]) - 1) + [True]
    assert (found["num_tokens"], found["reason"]) == (4, "stop"), "three of the text, and the end"
    assert (found["missing"][0], "no model" in found["missing"][1]) == (404, True)


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, tmp_path: Path, model: str) -> None:
    text = block("openai-agents", "python", url).replace("OpenAIChatCompletionsModel", model)
    assert run_python(text, "openai-agents", tmp_path) == CALLED


def test_litellm(url: str, tmp_path: Path) -> None:
    lines = [line for line in run_page("litellm", "litellm", url, tmp_path) if "weather" in line]
    providers = ["openai", "hosted_vllm", "lm_studio", "anthropic", "ollama_chat"]
    assert lines == [f'{name}/default weather {{"city": "Paris"}} It is sunny in Paris.' for name in providers]


def test_langchain(url: str, tmp_path: Path) -> None:
    assert run_page("langchain-openai", "LangChain", url, tmp_path) == CALLED


def test_vercels_ai_sdk(url: str, tmp_path: Path) -> None:
    modules = node_client("ai", "@ai-sdk/openai-compatible").parent
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "agent.mjs").write_text(block("Vercel's AI SDK", "js", url), encoding="utf-8")
    *said, usage = run(["node", tmp_path / "agent.mjs"], tmp_path).splitlines()
    assert "".join(said) == "I ask.weather(Paris)It is sunny in Paris."
    assert json.loads(usage)["inputTokens"] > json.loads(usage)["outputTokens"] > 0


def test_smolagents(url: str, tmp_path: Path) -> None:
    lines = run_page("smolagents[openai]", "smolagents", url, tmp_path)
    assert lines == ["weather(Oslo)", "It rains in Oslo.", "weather(Lima)", "There is fog in Lima."]


def test_nothing_failed_meanwhile(url: str) -> None:
    """The engine answers, and has refused nothing but what was asked for to be refused."""
    found = httpx.get(f"{url}/kog/info", trust_env=False).json()
    assert (found["state"], found["engine"]["num_failed"]) == ("ready", 0)
