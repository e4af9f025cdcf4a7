"""The clients that people use, with their own code, against SmolLM2 on a CPU rank: `make clients`.

Each is asked the same question, which this model answers right. What it cannot do, such as calling tools, a scripted model does
(test_agents.py). The blocks are those of docs/clients.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import engine_session
from tests.clients.commands import run, run_page, run_script, run_shell
from tests.clients.installed import node_client, python_client
from tests.clients.page import block
from tests.e2e.http_engine import http_engine

MODEL = Path(__file__).parents[2] / "build" / "models" / "SmolLM2-135M-Instruct"
DEMO = Path(__file__).parents[2] / "kog_dist" / "models" / "demo"
TASKS = Path(__file__).parent / "lm_eval"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."

pytestmark = [
    pytest.mark.clients, pytest.mark.timeout(1200), pytest.mark.skipif(not MODEL.is_dir(), reason="needs `make model`"),
]  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with engine_session() as session, http_engine(session, str(MODEL), "--device=cpu") as engine:
        yield engine.url
        assert engine.launcher.poll() is None, session.output()


@pytest.fixture(scope="module")
def base_url(url: str) -> str:
    return f"{url}/v1"


# ---- packages ----
def test_openai(url: str, base_url: str, tmp_path: Path) -> None:
    assert run_page("openai", "openai", url, tmp_path) == [ANSWER]
    assert run_script("openai", "openai_package", base_url, tmp_path) == {
        "text": ANSWER, "streamed": ANSWER, "response": ANSWER, "arguments": {"city": "Paris"}, "num_scored": 7,
        "refused": "model_not_found",
    }  # fmt: skip


def test_litellm(base_url: str, tmp_path: Path) -> None:
    found = run_script("litellm", "litellm_package", base_url, tmp_path)
    assert (found["text"], found["streamed"]) == (ANSWER, ANSWER)
    assert found["completion"].startswith(" Paris")
    assert "no model 'no-such-model' here" in found["refused"]
    assert found["num_tokens"] == 8


def test_pydantic_ai(url: str, base_url: str, tmp_path: Path) -> None:
    assert run_page("pydantic-ai-slim[openai]", "pydantic-ai", url, tmp_path)[0] in ("city='Paris'", "city='Oslo'")
    found = run_script("pydantic-ai-slim[openai]", "pydantic_ai_package", base_url, tmp_path)
    assert found == {"text": ANSWER, "city": "Paris", "num_tokens": 8}


def test_openai_agents(base_url: str, tmp_path: Path) -> None:
    found = run_script("openai-agents", "openai_agents_package", base_url, tmp_path)
    assert (found["text"], found["response"], found["asked"]) == (ANSWER, ANSWER, ["Paris"])
    assert found["after_tool"]


# ---- commands ----
def test_llm(url: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(block("llm", "yaml", url), encoding="utf-8")
    programs = python_client("llm")
    assert run_shell(block("llm", "sh", url), programs, tmp_path, LLM_USER_PATH=str(tmp_path)).strip() == ANSWER
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
    llm: list[str | Path] = [programs / "llm", "-m", "kog", "-o", "temperature", "0", "--no-stream", "--schema"]
    said = run([*llm, json.dumps(schema), QUESTION], tmp_path, LLM_USER_PATH=str(tmp_path))
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


def test_continue(url: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(block("Continue", "yaml", url), encoding="utf-8")
    said = run_shell(block("Continue", "sh", url), node_client("@continuedev/cli"), tmp_path, CONTINUE_TELEMETRY_ENABLED="0")
    assert ANSWER in said


# ---- load ----
@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "messages"])
def test_aiperf(url: str, tmp_path: Path, endpoint: str) -> None:
    """Its own prompts, of another tokenizer; two at once."""
    command = block("AIPerf", "sh", url).replace("MODEL", str(DEMO)).strip()
    command = f"{command} --output-artifact-dir out".replace("--endpoint-type chat", f"--endpoint-type {endpoint}")
    # While that is set it takes no folder for a tokenizer.
    run_shell(f"unset HF_HUB_OFFLINE\n{command}", python_client("aiperf"), tmp_path)
    (found,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    result = json.loads(found.read_text(encoding="utf-8"))
    assert (result["request_count"]["avg"], result["error_summary"]) == (4, [])
    if endpoint in ("chat", "completions"):  # others have no word for it
        assert result["output_sequence_length"]["avg"] == 20
    assert result["time_to_first_token"]["avg"] > 0


# ---- evaluation ----
def test_lm_eval(url: str, tmp_path: Path) -> None:
    """Log-likelihoods of choices, and answers: their own tokenizer is the service's."""
    for name in ("capitals.jsonl", "kog_answers.yaml", "kog_choices.yaml"):
        (tmp_path / name).write_bytes((TASKS / name).read_bytes())
    offline = {"HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1"}
    command = block("lm-evaluation-harness", "sh", url).replace("TASK", "kog_choices,kog_answers").strip()
    options = "--batch_size=4 --include_path=. --output_path=out --log_samples"
    run_shell(f"{command} {options}", python_client("lm_eval[api]"), tmp_path, **offline)
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
