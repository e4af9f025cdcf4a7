"""What a gateway says of its engine and of its model: /kog/info, and the answers that clients of llama.cpp and Ollama ask for."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kog_dist import __version__
from kog_dist.gateway.documents import PATHS, document, handler_of
from kog_dist.gateway.engine_metrics import EngineFacts
from kog_dist.gateway.ollama.facts import ModelSize, running, show, tags
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.props import props, slots
from kog_dist.gateway.service import Service
from kog_dist.gateway.status import describe
from kog_dist.rpc.messages import EngineState, StatusReport
from kog_dist.sampling_params import SamplingParams
from tests.unit.pinning import compare

SAMPLING = SamplingParams(0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3)
MODEL = ServedModel("org/model", ("short", "gpt-*"), 2048, 4096, None, None, 86_400, SAMPLING)
TEMPLATE = SimpleNamespace(source="<think>", tool_source="")
REPORT = StatusReport(
    EngineState.READY, "one", "demo", "b7", 11, 2, ("ready", "ready"), (0.123456, 0.2), 1.23456, "r1", ("r2", "r3"), 4,
    5, 6, 7, 8, 9, 10, 12, num_expired=13, running_position=14, running_prompt_tokens=15, prefill=True, own_sampling="greedy",
)  # fmt: skip
ROUTER = dataclasses.replace(
    REPORT, replica_names=("a", "b", "c"), replica_states=("ready", "lost", "ready"), replica_running=("r1", "", "r9"),
    also_running=("r9",), parallel=3,
)  # fmt: skip


def service(**changes: Any) -> Service:
    """One that has begun a while ago, with the parts that are described."""
    parts: dict[str, Any] = {
        "readiness": SimpleNamespace(health=lambda: SimpleNamespace(state="ready", reason="why"), report=REPORT),
        "welcome": SimpleNamespace(instance="one"), "url": "http://x", "begin_s": time.monotonic() - 5, "served": MODEL,
        "checkpoint": None, "tokenizer": None, "weights_format": "bfloat16", "facts": EngineFacts(2048),
        "metrics": SimpleNamespace(newest=None),
    }  # fmt: skip
    return cast(Service, SimpleNamespace(**{**parts, **changes}))


def test_all_of_an_engine() -> None:
    found = describe(service())
    uptime_s = found.pop("uptime_s")
    assert 5 <= uptime_s < 60
    assert uptime_s == round(uptime_s, 3)
    assert found.pop("model") == {
        **MODEL.card(), "vocab_size": 4096, "has_tokenizer": False, "num_parameters": None, "num_lanes": None,
        "format": "bfloat16",
    }  # fmt: skip
    assert found.pop("engine") == {
        "state": "ready", "build": "b7", "pid": 11, "uptime_s": 1.235, "num_running": 1, "parallel": 1, "num_waiting": 2,
        "queue_limit": 4,
        "prefill": True, "own_sampling": "greedy", "running_position": 14, "running_prompt_tokens": 15, "num_tokens": 12,
        "num_completed": 5, "num_cancelled": 6, "num_failed": 7, "num_refused": 8, "num_expired": 13,
    }  # fmt: skip
    assert found.pop("ranks") == [
        {"rank": 0, "state": "ready", "beat_age_s": 0.1235, "place": None},
        {"rank": 1, "state": "ready", "beat_age_s": 0.2, "place": None},
    ]
    assert found.pop("devices") == [{"name": "CPU", "count": 2}]
    assert set(found.pop("speed").values()) == {None, False}
    assert found == {
        "version": __version__, "url": "http://x", "state": "ready", "reason": "why", "instance": "one", "replicas": [],
    }  # fmt: skip


def test_a_gateway_without_an_engine() -> None:
    readiness = SimpleNamespace(health=lambda: SimpleNamespace(state="loading", reason="a"), report=None)
    found = describe(service(readiness=readiness, welcome=None, served=None))
    assert (found["model"], found["instance"], found["engine"]) == (None, None, None)
    assert found["devices"] == found["ranks"] == found["replicas"] == []


def test_ranks_have_places_and_a_router_replicas() -> None:
    placed = dataclasses.replace(REPORT, rank_places=("GPU 0 (H100, GPU-1)", "GPU 1 (H100, GPU-2)"), running=None)
    readiness = SimpleNamespace(health=lambda: SimpleNamespace(state="ready", reason=""), report=placed)
    found = describe(service(readiness=readiness))
    assert [rank["place"] for rank in found["ranks"]] == ["GPU 0 (H100, GPU-1)", "GPU 1 (H100, GPU-2)"]
    assert found["devices"] == [{"name": "H100", "count": 2}]
    assert found["engine"]["num_running"] == 0
    readiness.report = ROUTER
    found = describe(service(readiness=readiness))
    assert found["engine"]["num_running"] == 2
    assert found["devices"] == []
    assert found["replicas"] == [
        {"name": "a", "state": "ready", "is_running": True},
        {"name": "b", "state": "lost", "is_running": False},
        {"name": "c", "state": "ready", "is_running": True},
    ]


@pytest.mark.parametrize(
    ("newest", "facts", "wanted"),
    [
        (
            (100.04, 0.1234567, 9, True),
            (2_000_000, 1e9, "NVML"),
            (100.0, 0.123457, 9, False, 2_000_000, 1e9, "NVML", 0.2001, 500.0),
        ),
        ((0.0, None, 0, False), (2_000_000, 1e9, "NVML"), (None, None, 0, True, 2_000_000, 1e9, "NVML", None, 500.0)),
        ((50.0, 0.5, 3, False), (2_000_000, 0.0, ""), (50.0, 0.5, 3, True, 2_000_000, None, None, None, None)),
        ((50.0, 0.5, 3, False), (0, 1e9, "NVML"), (50.0, 0.5, 3, True, None, 1e9, None, None, None)),
        (None, (2_000_000, 3e9, "NVML"), (None, None, None, False, 2_000_000, 3e9, "NVML", None, 1500.0)),
    ],
)
def test_speed(newest: tuple[Any, ...] | None, facts: tuple[int, float, str], wanted: tuple[Any, ...]) -> None:
    names = ("tokens_per_s", "ttft_s", "num_tokens", "ended")
    of_request = None if newest is None else SimpleNamespace(**dict(zip(names, newest, strict=True)))
    found = describe(service(metrics=SimpleNamespace(newest=of_request), facts=EngineFacts(2048, *facts)))["speed"]
    assert tuple(found.values()) == wanted
    assert tuple(found) == (
        "tokens_per_s", "ttft_s", "num_tokens", "is_running", "bytes_per_token", "peak_bytes_s", "peak_source", "bandwidth_share",
        "ceiling_tokens_per_s",
    )  # fmt: skip


def test_size_and_lanes_are_those_of_the_folder() -> None:
    checkpoint = SimpleNamespace(spec=SimpleNamespace(num_parameters=7, num_lanes=3))
    model = describe(service(checkpoint=checkpoint, tokenizer=object()))["model"]
    assert (model["num_parameters"], model["num_lanes"], model["has_tokenizer"]) == (7, 3, True)


def test_props() -> None:
    tokenizer = SimpleNamespace(special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, has_channels=False)
    full = dataclasses.replace(MODEL, tokenizer=cast(Any, tokenizer), chat_template=cast(Any, TEMPLATE))
    assert props(full, None) == {
        "default_generation_settings": {
            "n_ctx": 2048,
            "params": {
                "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1, "presence_penalty": 0.2,
                "frequency_penalty": 0.3,
            },
        },
        "total_slots": 1, "model_alias": "org/model", "model_path": "org/model", "modalities": {"vision": False, "audio": False},
        "chat_template": "<think>", "bos_token": "<s>", "eos_token": "</s>", "build_info": f"kog_dist {__version__}",
    }  # fmt: skip
    bare = props(MODEL, ROUTER)
    assert (bare["chat_template"], bare["bos_token"], bare["eos_token"], bare["total_slots"]) == ("", "", "", 3)


@pytest.mark.parametrize(
    ("report", "wanted"),
    [
        (None, [False]),
        (REPORT, [True]),
        (dataclasses.replace(REPORT, running=None), [False]),
        (ROUTER, [True, True, False]),
        (dataclasses.replace(REPORT, also_running=("r2",), parallel=3), [True, True, False]),
    ],
)
def test_slots(report: StatusReport | None, wanted: list[bool]) -> None:
    assert slots(MODEL, report) == [
        {"id": index, "n_ctx": 2048, "speculative": False, "is_processing": runs} for index, runs in enumerate(wanted)
    ]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, ""), (1, "0M"), (134_515_008, "135M"), (999_999_999, "1000M"), (1_000_000_000, "1.0B"), (2_340_000_000, "2.3B")],
)
def test_what_ollamas_clients_list(count: int, shown: str) -> None:
    details = {"parent_model": "", "format": "", "family": "kog", "families": ["kog"]}
    entry = {
        "modified_at": "1970-01-02T00:00:00Z", "size": 99, "digest": hashlib.sha256(b"org/model").hexdigest(),
        "details": {**details, "parameter_size": shown, "quantization_level": "int4"},
    }  # fmt: skip
    size = ModelSize(count, 99, "int4")
    named = [{"name": name, "model": name, **entry} for name in ("org/model", "short")]
    assert tags(MODEL, size) == {"models": named}
    kept = {"expires_at": "9999-12-31T23:59:59Z", "context_length": 2048, "size_vram": 99}
    assert running(MODEL, size) == {"models": [{**one, **kept} for one in named]}


def test_what_ollamas_clients_ask_of_a_model() -> None:
    assert show({"model": "org/model"}, MODEL) == {
        "modelfile": "", "modified_at": "1970-01-02T00:00:00Z", "template": "", "capabilities": ["completion"],
        "parameters": "temperature 0.7\ntop_p 0.9\ntop_k 5\nmin_p 0.1\nrepetition_penalty 1.1",
        "details": {"parent_model": "", "format": "", "family": "kog", "families": ["kog"]},
        "model_info": {"general.architecture": "kog", "kog.context_length": 2048},
    }  # fmt: skip
    with pytest.raises(ApiError, match="other"):
        show({"name": "other"}, MODEL)
    assert show({"name": "short"}, MODEL) == show({}, MODEL)


@pytest.mark.parametrize(
    ("tools", "reasoning", "capabilities"),
    [
        ("hermes", "think", ["tools", "thinking"]),
        ("none", "think", ["thinking"]),
        ("hermes", "none", ["tools"]),
        ("none", "none", []),
    ],
)
def test_capabilities(tools: str, reasoning: str, capabilities: list[str]) -> None:
    model = dataclasses.replace(MODEL, chat_template=cast(Any, TEMPLATE), tool_parser=tools, reasoning_parser=reasoning)
    found = show({}, model)
    assert found["capabilities"] == ["completion", *capabilities]
    assert found["template"] == "<think>"


LIMITS = ("minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems", "maxItems", "pattern")


def limits_in(schema: object, path: str) -> Iterator[str]:
    """A line for each limit, with the place of its schema."""
    if isinstance(schema, list):
        for inner in schema:
            yield from limits_in(inner, path)
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            if key in LIMITS and not isinstance(inner, dict):
                yield f"{path} {key} {inner}"
            else:
                yield from limits_in(inner, path if key in ("properties", "anyOf") else f"{path}.{key}")


def test_requests_have_the_limits_that_they_had() -> None:
    """Fields may come; limits of those that are there change with their clients' knowledge alone."""
    compare("limits-of-requests", list(limits_in(document()["components"]["schemas"], "")), may_grow=True)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_its_answers(path: str) -> None:
    found = document()["paths"][path]
    ((method, operation),) = found.items()
    statuses = set(operation["responses"])
    assert {"200", "400", "401", "403", "500"} <= statuses
    has_body, answers = "requestBody" in operation, "429" in statuses
    assert (method == "post") is has_body
    assert has_body is ({"408", "413", "415"} <= statuses)
    assert answers is ({"422", "504"} <= statuses)
    assert answers is (
        path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
    )
    assert ("304" in statuses) is (path in ("/", "/static/{name}"))
    assert ("{name}" in path) is ("parameters" in operation)
    assert all((one["in"], one["required"]) == ("path", True) for one in operation.get("parameters", ()))
    assert operation["operationId"] == (path.strip("/").replace("/", "_").replace("{name}", "name") or "index")
    error = "AnthropicError" if path.startswith("/v1/messages") else "OllamaError" if path.startswith("/api/") else "Error"
    schemas = {
        one["content"]["application/json"]["schema"].get("$ref") for code, one in operation["responses"].items() if code[0] == "4"
    }
    assert schemas == {f"#/components/schemas/{error}"}


def test_paths_have_handlers() -> None:
    assert [handler_of(path) for path in PATHS] == list(PATHS)
    assert handler_of("/v1/models/a/b") == "/v1/models/{name}"
    assert handler_of("/static/a.js") == "/static/{name}"
    assert handler_of("/v1/model") == handler_of("/nothing") == handler_of("") == "other"
