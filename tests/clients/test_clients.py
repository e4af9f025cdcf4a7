"""The clients that people use, with their own code, against SmolLM2 on a CPU rank: `make clients`.

Each is asked the same question, which this model answers right. What a row of docs/clients.md says is tried here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.engine.session import engine_session
from tests.clients.installed import node_client, python_client
from tests.e2e.http_engine import http_engine

MODEL = Path(__file__).parents[2] / "build" / "models" / "SmolLM2-135M-Instruct"
SCRIPTS, TASKS = Path(__file__).parent / "scripts", Path(__file__).parent / "lm_eval"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
CLIENT_S = 240.0

pytestmark = [
    pytest.mark.clients, pytest.mark.timeout(1200), pytest.mark.skipif(not MODEL.is_dir(), reason="needs `make model`"),
]  # fmt: skip


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with engine_session() as session, http_engine(session, str(MODEL), "--device=cpu") as engine:
        yield f"{engine.url}/v1"
        assert engine.launcher.poll() is None, session.output()


def run(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """What a client prints in a folder, beside a home of its own."""
    home = folder.parent / f"home of {folder.name}"
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "PWD": str(folder), "NO_PROXY": "127.0.0.1", "NO_COLOR": "1", **variables}
    for name in ("PYTHONPATH", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        environment.pop(name, None)
    done = subprocess.run(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CLIENT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def script(client: str, name: str, base_url: str, folder: Path) -> Any:
    """The JSON that a script of ours prints last, run with a client's interpreter."""
    said = run([python_client(client) / "python", SCRIPTS / f"{name}.py", base_url], folder)
    return json.loads(said.splitlines()[-1])


# ---- packages ----
def test_openai(base_url: str, tmp_path: Path) -> None:
    assert script("openai", "openai_package", base_url, tmp_path) == {
        "text": ANSWER, "streamed": ANSWER, "response": ANSWER, "arguments": {"city": "Paris"}, "num_scored": 7,
        "refused": "model_not_found",
    }  # fmt: skip


def test_litellm(base_url: str, tmp_path: Path) -> None:
    found = script("litellm", "litellm_package", base_url, tmp_path)
    assert (found["text"], found["streamed"]) == (ANSWER, ANSWER)
    assert found["completion"].startswith(" Paris")
    assert "no model 'no-such-model' here" in found["refused"]
    assert found["num_tokens"] == 8


def test_pydantic_ai(base_url: str, tmp_path: Path) -> None:
    found = script("pydantic-ai-slim[openai]", "pydantic_ai_package", base_url, tmp_path)
    assert found == {"text": ANSWER, "city": "Paris", "num_tokens": 8}


def test_openai_agents(base_url: str, tmp_path: Path) -> None:
    found = script("openai-agents", "openai_agents_package", base_url, tmp_path)
    assert (found["text"], found["response"], found["asked"]) == (ANSWER, ANSWER, ["Paris"])
    assert found["after_tool"]


# ---- commands ----
def test_llm(base_url: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: kog\n  model_name: default\n  api_base: {base_url}\n  supports_schema: true\n", encoding="utf-8"
    )
    llm: list[str | Path] = [python_client("llm") / "llm", "-m", "kog", "-o", "temperature", "0", "-o", "max_tokens", "32"]
    assert run([*llm, QUESTION], tmp_path, LLM_USER_PATH=str(tmp_path)).strip() == ANSWER
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
    said = run([*llm, "--no-stream", "--schema", json.dumps(schema), QUESTION], tmp_path, LLM_USER_PATH=str(tmp_path))
    assert json.loads(said)["city"] in ("Paris", "Oslo")


def test_aider(base_url: str, tmp_path: Path) -> None:
    said = run(
        [
            python_client("aider-chat") / "aider", "--model=openai/default", f"--openai-api-base={base_url}",
            "--openai-api-key=none", "--no-git", "--yes-always", "--analytics-disable", "--no-check-update",
            "--no-show-release-notes", "--no-show-model-warnings", "--no-pretty", "--map-tokens=0", "--chat-mode=ask",
            f"--message={QUESTION}",
        ],
        tmp_path,
    )  # fmt: skip
    assert ANSWER in said


def test_opencode(base_url: str, tmp_path: Path) -> None:
    model = {"name": "default", "temperature": True, "tool_call": False, "limit": {"context": 8192, "output": 32}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": base_url, "apiKey": "none"},
        "models": {"default": model},
    }
    plain = {"mode": "primary", "prompt": "Answer in one sentence.", "temperature": 0, "tools": {"*": False}}
    config = {
        "autoupdate": False, "share": "disabled", "provider": {"kog": provider}, "model": "kog/default",
        "small_model": "kog/default", "agent": {"plain": plain},
    }  # fmt: skip
    (tmp_path / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
    assert ANSWER in run([node_client("opencode-ai") / "opencode", "run", "--agent=plain", QUESTION], tmp_path)


def test_continue(base_url: str, tmp_path: Path) -> None:
    model = {
        "name": "kog", "provider": "openai", "model": "default", "apiBase": base_url, "apiKey": "none", "roles": ["chat"],
        "defaultCompletionOptions": {"temperature": 0, "maxTokens": 32, "contextLength": 8192},
    }  # fmt: skip
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"name": "kog", "version": "0.0.1", "schema": "v1", "models": [model]}), encoding="utf-8")
    command: list[str | Path] = [node_client("@continuedev/cli") / "cn", f"--config={config}", "-p", QUESTION]
    assert ANSWER in run(command, tmp_path, CONTINUE_TELEMETRY_ENABLED="0")


# ---- evaluation ----
def test_lm_eval(base_url: str, tmp_path: Path) -> None:
    """Log-likelihoods of choices, and answers: their own tokenizer is the service's."""
    for name in ("capitals.jsonl", "kog_answers.yaml", "kog_choices.yaml"):
        (tmp_path / name).write_bytes((TASKS / name).read_bytes())
    run(
        [
            python_client("lm_eval[api]") / "lm_eval", "run", "--model=local-completions",
            f"--model_args=model=default,base_url={base_url}/completions,num_concurrent=1", "--batch_size=4",
            "--include_path=.", "--tasks=kog_choices,kog_answers", "--output_path=out", "--log_samples",
        ],
        tmp_path, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1",
    )  # fmt: skip
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text(encoding="utf-8"))["results"]
    assert found["kog_choices"]["acc,none"] == 1.0
    assert found["kog_answers"]["exact_match,stripped"] >= 0.5
    (samples,) = (tmp_path / "out").rglob("samples_kog_choices_*.jsonl")
    told = {}
    for line in samples.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        for asked, answers in zip(sample["arguments"].values(), sample["resps"], strict=True):
            told[asked["arg_0"], asked["arg_1"]] = float(answers[0][0])
    assert len(told) == 18
    assert told == pytest.approx(_with_transformers(list(told)), abs=0.02)


def _with_transformers(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """The same log-likelihoods of the same weights in float32."""
    import torch

    from kog_dist.model.checkpoint import open_checkpoint
    from kog_dist.model.tokenizer import Tokenizer
    from tests.e2e.test_smollm2 import with_transformers

    checkpoint, tokenizer = open_checkpoint(MODEL), Tokenizer.from_folder(MODEL)
    assert tokenizer is not None
    model = with_transformers(checkpoint)
    found = {}
    for begin, choice in pairs:
        head, whole = tokenizer.encode(begin), tokenizer.encode(begin + choice)
        assert whole[: len(head)] == head
        with torch.no_grad():
            logprobs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        found[begin, choice] = sum(float(logprobs[i - 1, whole[i]]) for i in range(len(head), len(whole)))
    return found
