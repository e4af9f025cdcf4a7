"""`kog-bench drafts`: how fast answers come with and without drafts, and once more; whether they are the same."""

from __future__ import annotations

import importlib.util
import json
import statistics
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from kog_dist.bench.engine.decode import cpu_s
from kog_dist.bench.engine.session import EngineSession, engine_session, until
from kog_dist.bench.report import finish, machine
from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.runtime.http_file import HttpFile
from kog_dist.speculation import Speculation

_WORKLOAD = "draft_workload.json"
_ANSWER_S, _START_S = 600.0, 300.0
_SEED = 7


def tasks() -> list[Mapping[str, Any]]:
    """The workload, with the texts of this Python's standard library in place."""
    raw = json.loads(resources.files(__package__).joinpath(_WORKLOAD).read_text(encoding="utf-8"))
    return [{**task, "text": _text_of(task)} for task in raw["tasks"]]


def _text_of(task: Mapping[str, Any]) -> str:
    if "module" not in task:
        return ""
    spec = importlib.util.find_spec(task["module"])
    if spec is None or spec.origin is None:
        raise ConfigError(f"this Python has no source of {task['module']}, which the workload quotes")
    first, last = task["lines"]
    return "\n".join(read_text(Path(spec.origin)).splitlines()[first - 1 : last])


def message_of(task: Mapping[str, Any]) -> dict[str, str]:
    """What a user asks for."""
    return {"role": "user", "content": task["ask"].replace("{text}", task["text"])}


def body_of(task: Mapping[str, object], speculate: str) -> dict[str, object]:
    """The chat that asks for a task; the same with each `speculate`."""
    body: dict[str, object] = {
        "messages": [message_of(task)],
        "max_tokens": task["max_tokens"],
        "temperature": task.get("temperature", 0.0),
        "seed": _SEED,
        "speculate": speculate,
    }
    if "tools" in task:
        body["tools"] = task["tools"]
    if task.get("must_call"):
        body["tool_choice"] = "required"
    if "schema" in task:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": task["schema"]}}
    if task.get("predicts"):
        body["prediction"] = {"type": "content", "content": f"```python\n{task['text']}\n```"}
    return body


def run(model: str | None, rank_counts: Sequence[int], *, repeats: int, kinds: Sequence[str] = (), on_gpus: bool = False) -> bool:
    """Measure each number of ranks on a fresh engine; prints a table, then the JSON object. True: all answers were the same.

    `kinds`: of tasks; none: all. Raises ConfigError for one that is not there.
    """
    chosen = [task for task in tasks() if not kinds or task["kind"] in kinds]
    if wrong := set(kinds) - {task["kind"] for task in chosen}:
        known = ", ".join(dict.fromkeys(task["kind"] for task in tasks()))
        raise ConfigError(f"there are no tasks of the kind {', '.join(sorted(wrong))}; there are {known}")
    before = machine()
    figures: list[dict[str, Any]] = []
    for ranks in rank_counts:
        place = [f"--gpus={ranks}"] if on_gpus else ["--device=cpu", f"--ranks={ranks}"]
        with _engine([*([model] if model else []), *place]) as (session, url):
            rank = session.processes()["rank 0"]
            rows = [_measured(url, rank, task, repeats) for task in chosen]
        for kind in dict.fromkeys(row["kind"] for row in rows):
            of_kind = [row for row in rows if row["kind"] == kind]
            off, lookup, again = (_rate(of_kind, name) for name in (Speculation.OFF, Speculation.LOOKUP, Speculation.AUTO))
            less = _rate(of_kind, Speculation.LOOKUP, "tokens_per_cpu_s") / _rate(of_kind, Speculation.OFF, "tokens_per_cpu_s")
            drafted, right = (sum(row[name] for row in of_kind) for name in ("drafted_tokens", "accepted_tokens"))
            same = "" if all(row["is_same"] for row in of_kind) else ", ANSWERS DIFFER"
            by_processor = "" if on_gpus else f"; {less:.2f} by rank 0's processor time"
            print(
                f"{'GPUs' if on_gpus else 'ranks'} {ranks}, {kind:<20} {off:7.1f} tokens/s without, {lookup:7.1f} with drafts "
                f"({lookup / off:.2f} times{by_processor}), {right} of {drafted} right, {again:7.1f} asked again{same}",
                flush=True,
            )
        figures.append({"ranks": ranks, "tasks": rows})
    finish("drafts", {"model": model or "demo", "repeats": repeats, "on_gpus": on_gpus}, before, figures)
    return all(row["is_same"] for figure in figures for row in figure["tasks"])


def _rate(rows: Sequence[Mapping[str, Any]], name: str, figure: str = "tokens_per_s") -> float:
    """Tokens of all rows in the time that they took together."""
    taken_s: float = sum(row["tokens"] / row[f"{figure}_{name}"] for row in rows)
    num_tokens: float = sum(row["tokens"] for row in rows)
    return num_tokens / taken_s


def _measured(url: str, rank: int, task: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """In turn without, with, and with those of earlier answers, so that all see the machine alike. `rank`: the process whose
    time is measured, too.
    """
    _ask(url, body_of(task, Speculation.OFF) | {"max_tokens": 1})  # the prompt is kept then
    kinds = Speculation.OFF, Speculation.LOOKUP, Speculation.AUTO
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    answers: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for speculate, found in answers.items():
            before_s = cpu_s(rank)
            found.append(_ask(url, body_of(task, str(speculate))))
            cpu[speculate].append(cpu_s(rank) - before_s)
    said = [_said(answer) for found in answers.values() for answer in found]
    last = answers[Speculation.LOOKUP][-1]
    rates = {
        f"tokens_per_s_{name}": statistics.median(answer["timings"]["predicted_per_second"] or 0.0 for answer in found)
        for name, found in answers.items()
    }
    timings, num_tokens = last["timings"], last["usage"]["completion_tokens"]
    rates |= {f"tokens_per_cpu_s_{name}": num_tokens / statistics.median(found) for name, found in cpu.items()}
    return {
        "kind": task["kind"],
        "name": task["name"],
        "tokens": num_tokens,
        **rates,
        "drafted_tokens": timings.get("draft_n", 0),
        "accepted_tokens": timings.get("draft_n_accepted", 0),
        "is_same": len(set(said)) == 1,
    }


def _said(answer: Mapping[str, Any]) -> str:
    """All of an answer but its names."""
    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return json.dumps([message["content"], calls, answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]])


def _ask(url: str, body: Mapping[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
        answer: dict[str, object] = json.load(response)
    return answer


@contextmanager
def _engine(words: Sequence[str]) -> Iterator[tuple[EngineSession, str]]:
    with engine_session() as session:
        session.launch(*words, "--http", "--port=0")
        with session.connect(_START_S):
            until(lambda: HttpFile.read(session.instance_folder) is not None, _START_S, lambda: "the gateway does not listen")
            said = HttpFile.read(session.instance_folder)
            assert said is not None
            yield session, said.url
