"""The host's side of passes with tokens of several requests: what is compiled, what is refused, and what a launch is told."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.shapes import named_shape
from kog_dist.collectives.cuda_abi import PEERS
from kog_dist.collectives.mailbox import place
from kog_dist.errors import ConfigError
from kog_dist.runtime.abi import MAX_STOP_IDS
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda import company_build
from kog_dist.workers.cuda.company_build import (
    CompanyBuild,
    CompanySeat,
    company_bytes,
    company_headers,
    company_params,
    company_shape,
    obstacle_to_company,
)
from kog_dist.workers.cuda.draft_builds import drafting_shape
from kog_dist.workers.cuda.kernel_abi import COMPANY_PARAMS, COMPANY_STATES_PARAMS, DECODE_PARAMS, DECODE_STATE, DELTA_PARAMS
from kog_dist.workers.cuda.kernel_shape import KernelShape

FIRST = CompanySeat(0x1000, 0x2000, 0x3000, 0x4000, 0x5000, SamplingParams(temperature=0.5, seed=7), (3, 9), 11)
NET = replace(FIRST, nets_ptr=0x6000)
SECOND = CompanySeat(0x1100, 0x2100, 0x3100, 0x4000, 0x5100, SamplingParams(), (), 12)


def shape_of(name: str, num_ranks: int = 1, **options: Any) -> KernelShape:
    spec, codings = named_shape(name)
    return KernelShape(spec, spec.lanes_of_rank(0, num_ranks), num_ranks=num_ranks, **codings, **options)


def params_of(raw: bytes) -> Any:
    return np.frombuffer(raw, COMPANY_PARAMS.dtype)[0]


def test_each_seat_has_its_request_and_an_empty_one_nothing() -> None:
    params = params_of(company_params([None, FIRST, SECOND, None]))
    assert int(params["taken"]) == 0b0110
    for name in ("state_ptr", "prompt_ptr", "ring_ptr", "host_ptr", "kv_ptr"):
        assert params[name].tolist() == [0, getattr(FIRST, name), getattr(SECOND, name), 0]
    assert params["seed"].tolist() == [0, 7, 0, 0]
    assert params["inverse_temperature_bits"].view(np.float32).tolist() == [0, 2, 0, 0]
    assert params["request_tag"].tolist() == [0, 11, 12, 0]
    assert params["num_stop_ids"].tolist() == [0, 2, 0, 0]
    assert params["stop_ids"].reshape(-1, MAX_STOP_IDS)[1].tolist() == [3, 9, *[0] * (MAX_STOP_IDS - 2)]
    assert params["stop_ids"].sum() == 12


@pytest.mark.parametrize(
    ("seats", "cause"),
    [
        ([None, None], "needs a request in one of its seats"),
        ([FIRST, replace(SECOND, kv_ptr=FIRST.kv_ptr)], "two seats have the same kv_ptr"),
        ([FIRST, FIRST], "two seats have the same state_ptr"),
        ([FIRST, replace(SECOND, ring_ptr=FIRST.ring_ptr)], "two seats have the same ring_ptr"),
        ([NET, replace(SECOND, nets_ptr=NET.nets_ptr)], "two seats have the same nets_ptr"),
        ([None, replace(FIRST, tag=0)], "seat 1 has tag 0 (not 0)"),
        ([replace(FIRST, stop_ids=tuple(range(17)))], "17 stop ids (at most 16)"),
    ],
)
def test_what_no_launch_may_have_is_refused(seats: list[CompanySeat | None], cause: str) -> None:
    with pytest.raises(ValueError, match="seat") as raised:
        company_params(seats)
    assert cause in str(raised.value)


class Memory:
    """An array of cupy, in host memory."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.array = np.zeros(shape, dtype)
        self.data = SimpleNamespace(ptr=self.array.ctypes.data)

    def fill(self, value: int) -> None:
        self.array.fill(value)

    def get(self, stream: Any) -> Any:
        return self.array.copy()


@pytest.fixture
def company(monkeypatch: pytest.MonkeyPatch) -> CompanyBuild:
    """One that runs nothing."""
    cupy = SimpleNamespace(zeros=Memory, uint64=np.uint64, float32=np.float32, uint8=np.uint8)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(company_build, "build", lambda generated: SimpleNamespace(path=Path("cubin")))
    monkeypatch.setattr("kog_dist.cuda.driver.Kernel", lambda path, name, shared_bytes: (path, name, shared_bytes))
    return CompanyBuild(shape_of("llama-3.2-1b@300"), "kog_decode", 2)


def test_a_launch_has_memory_of_the_build_and_nothing_of_another_request(company: CompanyBuild) -> None:
    of_launch = np.zeros((), DECODE_PARAMS.dtype)
    for name in DECODE_PARAMS.dtype.names or ():
        of_launch[name] = 5
    raw = company.params(of_launch, b"p" * PEERS.size_bytes, [SECOND])
    assert len(raw) == DECODE_PARAMS.size_bytes + PEERS.size_bytes + COMPANY_PARAMS.size_bytes
    assert len(raw) < 4096, "what a kernel takes at most"
    made = np.frombuffer(raw[: DECODE_PARAMS.size_bytes], DECODE_PARAMS.dtype)[0]
    own = {"words_ptr": company.words.data.ptr, "logits_ptr": company.logits.data.ptr, "state_ptr": company._state.data.ptr}
    own |= dict.fromkeys(("kv_ptr", "prompt_ptr", "ring_ptr", "drafts_ptr"), 0)
    for name in DECODE_PARAMS.dtype.names or ():
        assert np.all(made[name] == own.get(name, 5)), name
    assert int(params_of(raw[DECODE_PARAMS.size_bytes + PEERS.size_bytes :])["taken"]) == 1
    with pytest.raises(ValueError, match="3 seats in passes of 2 tokens"):
        company.params(of_launch, b"", [SECOND, None, None])


def test_each_seat_has_a_state_behind_what_all_nets_share(company: CompanyBuild) -> None:
    of_nets = b"n" * DELTA_PARAMS.size_bytes
    raw = company.params(np.zeros((), DECODE_PARAMS.dtype), b"", [None, NET], of_nets)
    states = raw[-COMPANY_STATES_PARAMS.size_bytes :]
    assert raw[DECODE_PARAMS.size_bytes + COMPANY_PARAMS.size_bytes :] == of_nets + states
    assert np.frombuffer(states, COMPANY_STATES_PARAMS.dtype)[0]["state_ptr"].tolist() == [0, NET.nets_ptr, 0, 0]


def test_what_the_last_launch_has_left(company: CompanyBuild) -> None:
    held: Any = company._state
    held.array.view(DECODE_STATE.dtype)["abort_mirror"] = 1
    held.array.view(DECODE_STATE.dtype)["epoch"] = 40
    assert (int(company.state(None)["abort_mirror"]), int(company.state(None)["epoch"])) == (1, 40)


@pytest.mark.parametrize("tokens", [2, 4])
def test_ranks_have_boxes_of_their_own_behind_those_of_one_token_and_of_drafts(tokens: int) -> None:
    shape = shape_of("qwen3-8b", 2)
    boxes = company_shape(shape, tokens).words.boxes
    placed, drafted = place(boxes.specs(), 2), place(drafting_shape(shape).words.boxes.specs(), 2)
    assert placed[: len(drafted)] == drafted
    assert [box.spec for box in placed] == company_shape(shape, 6 - tokens).words.boxes.specs(), "one heap is for both"
    header = company_headers(shape, tokens)["peers_shape.cuh"]
    own = {box.spec.name: box for box in placed[len(drafted) :]}
    for name in ("attention", "mlp", "candidates"):
        box, alone = own[boxes.name_of(name)], next(box for box in placed if box.spec.name == name)
        assert box.row_words == tokens * alone.row_words
        assert f"Mailbox{{{box.first_word}, {box.row_words}, " in header
        assert boxes.label_of(box.index) == name
    assert len(own) == 6


def test_memory_is_that_of_words_logits_state_and_boxes() -> None:
    shape = shape_of("llama-3.2-1b@300")
    company = company_shape(shape, 4)
    assert company_bytes(shape, 4) == 8 * company.words.num_words + 16 * shape.spec.vocab_size + DECODE_STATE.size_bytes
    of_two = shape_of("llama-3.2-1b@300", 2)
    beside = 8 * company_shape(of_two, 4).words.num_words + 8 * of_two.spec.vocab_size + DECODE_STATE.size_bytes
    assert company_bytes(of_two, 4) > beside, "and boxes"


@pytest.mark.parametrize(
    ("name", "options", "tokens", "finding"),
    [
        ("llama-3.2-1b", {"kv_dtype": "int4"}, 4, "a cache of int4"),
        ("2b", {}, 2, "a stream of each lane"),
        ("qwen3-8b", {"num_ranks": 8}, 2, "8 ranks (1, 2 or 4)"),
        ("llama-3.2-1b", {}, 8, "passes of 8 tokens (1, 2 or 4)"),
        ("qwen2.5-coder-7b+fp8", {}, 4, "ring slots in shared memory"),
        ("llama-3.2-1b", {}, 1, "passes of 1 tokens to share (2 or 4 without)"),
        ("llama-3.2-1b", {"drafts": True}, 2, "passes of 2 tokens that look for drafts to share (2 or 4 without)"),
        ("gpt-oss-20b", {"checks_experts": True}, 2, "choices of experts to keep, of tokens of several requests"),
    ],
)
def test_what_cannot_share_a_pass_is_refused_by_name(name: str, options: dict[str, Any], tokens: int, finding: str) -> None:
    shape = shape_of(name, **options)
    with pytest.raises(ConfigError) as raised:
        company_shape(shape, tokens)
    assert finding in str(raised.value)
    assert str(raised.value).startswith("several requests cannot decode together on GPUs here: ")
    assert str(raised.value).endswith("; use --parallel 1")
    assert finding in obstacle_to_company(shape, tokens)


def test_nothing_stands_against_models_whose_passes_may_have_drafts() -> None:
    assert [obstacle_to_company(shape_of(name), 4) for name in ("llama-3.1-8b", "qwen3-4b+fp8", "gpt-oss-20b")] == [""] * 3
