"""`kog-bench serve` against a server whose answers are known: what is counted, what is an error, what the files hold."""

from __future__ import annotations

import json
import math
import statistics
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kog_dist.bench.cli import app
from kog_dist.bench.service import serve
from kog_dist.bench.service.figures import DETAILS, notes_of
from kog_dist.bench.service.options import settings_of
from kog_dist.bench.service.prompts import prompts_of_agents
from kog_dist.errors import ConfigError, LaunchError, RequestFailed
from tests.unit.openai_stub import DONE, OpenAiStub, Scripted, chat, completion, event, openai_stub

# Keys of a result of `vllm bench serve --save-detailed`, from vllm/benchmarks/serve.py; p90 besides its default p99.
VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "latencies",
    "start_times", "queue_times", "generated_texts", "errors", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx",
} | {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")}  # fmt: skip

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
FLAGS: dict[str, Any] = {
    "backend": "openai", "model": None, "num_prompts": 2, "num_warmups": 0, "max_concurrency": None, "request_rate": None,
    "input_len": 5, "output_len": 3, "prompts": None, "ignore_eos": False, "temperature": 0.0, "seed": 0, "timeout_s": 20.0,
    "extra_body": "{}", "api_key": "",
}  # fmt: skip


def measure(stub: OpenAiStub, folder: Path, **flags: Any) -> dict[str, Any]:
    """A run against the stub; what it wrote to its file."""
    settings, prompts = settings_of(url=stub.url, **(FLAGS | flags))
    serve.run(settings, prompts, output=folder / "result.json", html=folder / "report.html")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_the_result_has_the_keys_of_vllm_and_the_last_line_is_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with openai_stub(Scripted(completion(["a", "b", "c"], usage=USAGE))) as stub:
        result = measure(stub, tmp_path, num_warmups=1)
    assert set(result) >= VLLM_KEYS
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last) == set(result) - set(DETAILS)
    assert (result["completed"], result["failed"], result["model_id"]) == (2, 0, "stub")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (14, 6)
    assert (result["output_tokens_from"], result["cached_input_tokens"]) == ("usage", 4)
    assert len(stub.requests) == 3, "one warm-up, two that count"
    assert result["generated_texts"] == ["abc", "abc"]


def test_drafts_are_asked_for_and_counted(tmp_path: Path) -> None:
    timings = {"draft_n": 5, "draft_n_accepted": 2}
    with openai_stub(Scripted(completion(["a", "b", "c"], usage=USAGE, timings=timings))) as stub:
        result = measure(stub, tmp_path, speculate="lookup")
    assert [request["speculate"] for request in stub.requests] == ["lookup"] * 2
    assert (result["spec_decode_draft_tokens"], result["spec_decode_accepted_tokens"]) == (10, 4)
    assert any("4 of 10 drafted tokens" in note for note in notes_of(result))
    with openai_stub(Scripted(completion(["a"], usage=USAGE))) as stub:
        result = measure(stub, tmp_path)
    assert "speculate" not in stub.requests[0]
    assert result["spec_decode_draft_tokens"] == 0
    assert not any("drafted" in note for note in notes_of(result))


def test_requests_are_what_was_asked_for(tmp_path: Path) -> None:
    with openai_stub(Scripted(completion(["a"], usage=USAGE))) as stub:
        measure(stub, tmp_path, ignore_eos=True, extra_body='{"top_k": 3}', api_key="secret", model="m")
    asked = stub.requests[0]
    assert asked.pop("prompt").count(" ") == 4
    assert asked == {
        "path": "/v1/completions", "model": "m", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.0, "ignore_eos": True, "top_k": 3,
    }  # fmt: skip
    assert stub.headers[0]["authorization"] == "Bearer secret"
    assert stub.requests[0] != stub.requests[1], "prompts differ, or a cache would be measured"
    assert "secret" not in (tmp_path / "result.json").read_text() + (tmp_path / "report.html").read_text()


def test_figures_are_those_of_the_stamps(tmp_path: Path) -> None:
    with openai_stub(Scripted(chat(["a", "b", "c"], usage=USAGE))) as stub:
        result = measure(stub, tmp_path, backend="openai-chat")
    for idx in range(2):
        stamps = result["stamps"][idx]
        assert len(stamps) == 3, "the role is no token"
        assert stamps[0] == result["ttfts"][idx]
        assert result["itls"][idx] == [b - a for a, b in pairwise(stamps)]
        assert 0 < stamps[0] <= stamps[-1] <= result["latencies"][idx] < result["duration"]
    tpots = [(result["latencies"][idx] - result["ttfts"][idx]) / 2 * 1e3 for idx in range(2)]
    assert math.isclose(result["mean_tpot_ms"], statistics.mean(tpots))
    assert math.isclose(result["median_ttft_ms"], statistics.median(result["ttfts"]) * 1e3)
    assert math.isclose(result["std_e2el_ms"], statistics.pstdev(result["latencies"]) * 1e3)
    assert stub.requests[0]["messages"][0]["role"] == "user"


def test_agents_take_turns_and_each_request_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached = {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}
    with openai_stub(Scripted(completion(["a b", "c"], usage=cached))) as stub:
        settings, prompts = settings_of(**{**FLAGS, "url": stub.url, "num_prompts": 4, "agents": 2, "shared_len": 3})
        serve.run(settings, prompts, output=tmp_path / "result.json", html=None, each=True)
    first, second, third, fourth = (request["prompt"].split() for request in stub.requests[-4:])
    assert first[:3] == second[:3] != first[3:6]
    assert (len(first), len(third)) == (8, 13)
    assert (third[:8], fourth[:8]) == (first, second)
    assert first[3:] != second[3:]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["request", "input", "cached", "output", "ttft", "ms", "tokens/s"]
    assert [line.split()[:4] for line in lines[1:5]] == [[str(idx), "7", "4", "3"] for idx in range(4)]
    assert json.loads((tmp_path / "result.json").read_text())["cached_lens"] == [4] * 4
    with pytest.raises(ConfigError, match="--shared-len needs --agents"):
        settings_of(**{**FLAGS, "url": stub.url, "shared_len": 3})


def test_without_usage_chunks_are_counted_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_stub(Scripted(completion(["a b", "c"]))) as stub:
        result = measure(stub, tmp_path)
    assert (result["output_lens"], result["input_lens"], result["output_tokens_from"]) == ([2, 2], [5, 5], "chunks")
    assert "did not count its tokens" in capsys.readouterr().out


def test_several_tokens_in_a_chunk_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_stub(Scripted(completion(["abc"], usage=USAGE))) as stub:
        result = measure(stub, tmp_path)
    assert result["tokens_per_chunk"] == 3.0
    assert "3.00 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Scripted([b'{"error": {"message": "no room"}}'], status=429, content_type="application/json"), "429: no room"),
        (Scripted([b"<html>bad gateway</html>"], status=502, content_type="text/html"), "502: <html>bad gateway"),
        (Scripted(completion(["a"])[:1], cut_off=True), "in the middle of its answer"),
        (Scripted(completion(["a"], finish=None)[:-1]), "without a finish reason"),
        (Scripted([DONE]), "without a token"),
        (Scripted([*completion(["a"])[:1], event({"error": {"message": "rank 3 died"}})]), "rank 3 died"),
        (Scripted([b'{"choices": []}'], content_type="application/json"), "did not stream"),
        (Scripted([b"data: {oops\n\n"]), "not OpenAI's"),
        (Scripted([b"data: [1, 2]\n\n"]), "not OpenAI's"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_an_error_of_that_request(tmp_path: Path, answer: Scripted, reason: str) -> None:
    good = Scripted(completion(["a", "b"], usage=USAGE))
    with openai_stub(answer, good) as stub:
        settings, prompts = settings_of(url=stub.url, **FLAGS)
        assert serve.run(settings, prompts, output=tmp_path / "result.json", html=tmp_path / "report.html") == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert reason in result["errors"][0]
    assert (result["errors"][1], result["completed"], result["failed"]) == ("", 1, 1)
    assert (result["ttfts"][0], result["output_lens"][0], result["total_output_tokens"]) == (0.0, 0, 3)
    assert reason[:4] in (tmp_path / "report.html").read_text()


def test_a_server_that_says_nothing_runs_into_the_time_limit(tmp_path: Path) -> None:
    go_on = threading.Event()
    with openai_stub(Scripted(completion(["a"]), wait=go_on)) as stub:
        result = measure(stub, tmp_path, timeout_s=0.2, num_prompts=1)
        go_on.set()
    assert result["errors"] == ["no complete answer within 0.2 s"]


def test_connections_that_the_server_closed_are_made_anew(tmp_path: Path) -> None:
    with openai_stub(Scripted(completion(["a"], usage=USAGE), hangs_up=True)) as stub:
        result = measure(stub, tmp_path, num_prompts=5, max_concurrency=2)
    assert result["failed"] == 0
    assert result["max_concurrent_requests"] <= 2


def test_open_loop_arrivals_are_poisson_and_follow_the_seed() -> None:
    times = [at_s for at_s in serve.arrival_times(4000, 50.0, 1) if at_s is not None]
    gaps = [late - early for early, late in pairwise(times)]
    assert times == serve.arrival_times(4000, 50.0, 1)
    assert times != serve.arrival_times(4000, 50.0, 2)
    assert abs(statistics.mean(gaps) * 50 - 1) < 0.05
    assert abs(statistics.pstdev(gaps) * 50 - 1) < 0.05, "an exponential distribution's deviation is its mean"


def test_open_loop_sends_when_it_is_due(tmp_path: Path) -> None:
    with openai_stub(Scripted(completion(["a"], usage=USAGE))) as stub:
        result = measure(stub, tmp_path, num_prompts=5, request_rate=50.0)
    due = serve.arrival_times(5, 50.0, 0)
    for at_s, start_s, queue_s in zip(due, result["start_times"], result["queue_times"], strict=True):
        assert at_s is not None
        assert start_s >= at_s
        assert math.isclose(start_s - at_s, queue_s, abs_tol=1e-6)
    assert result["request_rate"] == 50.0


def test_nobody_there(tmp_path: Path) -> None:
    settings, prompts = settings_of(url="http://127.0.0.1:9", **FLAGS)
    with pytest.raises(LaunchError, match=r"cannot connect to http://127\.0\.0\.1:9.*start a service"):
        serve.run(settings, prompts, output=None, html=None)


def test_a_failing_warm_up_ends_the_run(tmp_path: Path) -> None:
    with openai_stub(Scripted([b"{}"], status=401)) as stub, pytest.raises(RequestFailed, match="401"):
        measure(stub, tmp_path, num_warmups=1)


def test_a_server_without_models_needs_a_name(tmp_path: Path) -> None:
    with openai_stub(Scripted()) as stub:
        stub.models = {"data": []}
        with pytest.raises(ConfigError, match="--model"):
            measure(stub, tmp_path)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 9}\n\n{"messages": [{"role": "user", "content": "y"}]}\n')
    with openai_stub(Scripted(chat(["a"], usage=USAGE))) as stub:
        measure(stub, tmp_path, prompts=str(path), backend="openai-chat", num_prompts=3)
    assert [(asked["messages"][0]["content"], asked["max_tokens"]) for asked in stub.requests] == [("x", 9), ("y", 3), ("x", 9)]
    with pytest.raises(ConfigError, match="openai-chat"):
        settings_of(url=stub.url, **(FLAGS | {"prompts": str(path)}))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"backend": "x"}, "--backend"), ({"num_prompts": 0}, "--num-prompts"), ({"request_rate": 0.0}, "--request-rate"),
        ({"speculate": "eagle"}, "--speculate"),
        ({"extra_body": "[]"}, "--extra-body"), ({"extra_body": "{"}, "--extra-body"), ({"timeout_s": math.nan}, "--timeout"),
        ({"prompts": "/nonexistent"}, "--prompts"), ({"max_concurrency": 0}, "--max-concurrency"),
    ],
)  # fmt: skip
def test_wrong_flags_are_named(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        settings_of(url="http://127.0.0.1:9", **(FLAGS | flags))


def test_the_report_loads_nothing_and_escapes_what_the_server_said(tmp_path: Path) -> None:
    hostile = Scripted([b'{"error": {"message": "<script>alert(1)</script>"}}'], status=400, content_type="application/json")
    with openai_stub(hostile, Scripted(completion(["a", "b"], usage=USAGE))) as stub:
        measure(stub, tmp_path, num_prompts=4)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "http://www" not in page
    assert page.count("<svg") >= 3, "two distributions and the timeline; a curve if it took a tenth of a second"


def test_several_numbers_at_once_are_a_load_each_and_a_table(tmp_path: Path) -> None:
    with openai_stub(Scripted(completion(["a", "b", "c"], usage=USAGE))) as stub:
        command = ["serve", "--url", stub.url, "--num-prompts", "3", "--num-warmups", "0", "--max-concurrency", "1,2"]
        files = {kind: tmp_path / f"several.{kind}" for kind in ("json", "html")}
        result = CliRunner().invoke(app, [*command, "--output", str(files["json"]), "--html", str(files["html"])])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.endswith(" at once")] == ["1 at once", "2 at once"]
    heading = next(i for i, line in enumerate(lines) if line.split()[:2] == ["at", "once"])
    assert [line.split()[0] for line in lines[heading + 1 : heading + 3]] == ["1", "2"]
    last, whole = json.loads(lines[-1]), json.loads(files["json"].read_text())
    assert [run["max_concurrency"] for run in last["runs"]] == [1, 2]
    assert [run["generated_texts"] for run in whole["runs"]] == [["abc"] * 3] * 2
    prompts = [request["prompt"] for request in stub.requests]
    assert len(set(prompts)) == 6, "what was kept of one load is no help for the next"
    page = files["html"].read_text()
    assert page.count("<h2>") == 3, "two plots and all figures"
    assert "Of all together" in page
    assert "http://www" not in page


def test_agents_chats_grow_by_a_message() -> None:
    """Their texts begin alike, and so do their chats: the shared part is the system's, each turn the user's."""
    first, other, again = prompts_of_agents(3, 2, shared_words=4, num_words=3, seed=1)
    shared = {"role": "system", "content": first.beginning}
    assert len(first.beginning.split()) == 4
    assert first.as_messages()[0] == other.as_messages()[0] == shared
    assert again.as_messages()[:-1] == first.as_messages()
    assert again.as_messages()[-1]["role"] == "user"
    assert again.text.startswith(first.text)
    assert len(again.text.split()) == 4 + 3 + 3
    alone = prompts_of_agents(1, 1, shared_words=0, num_words=2, seed=1)[0]
    assert alone.as_messages() == [{"role": "user", "content": alone.text}]
