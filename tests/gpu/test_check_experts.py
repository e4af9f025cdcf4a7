"""`kog-launch --check-experts` on one GPU, two and four: answers are as without it, and a planted wrong choice is found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, which RPC speaks")

from kog_dist.bench.engine.session import EngineSession, engine_session, until
from kog_dist.bench.fakes.tiny_model import TINY_WITH_EXPERTS, write_tiny_model
from kog_dist.errors import RequestFailed
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import ErrorCode
from tests.gpu.test_engine_ranks import READY_S, answer, first_tokens, stop

pytestmark = pytest.mark.timeout(220)
COUNTS = [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (1, 2, 4)]
PROMPT = [(7 * number + 3) % 256 for number in range(30)]
LAYER, BLOCK, FOUR = 2, 5, r"(\d+(, )?){4}"


@pytest.fixture
def session() -> Iterator[EngineSession]:
    with engine_session() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "experts"
    write_tiny_model(folder, TINY_WITH_EXPERTS)
    return str(folder)


def answers(client: Client) -> dict[str, Any]:
    """Prompts of several launches, a kept prefix, and every way in which a token is chosen."""
    greedy = answer(client, PROMPT, max_tokens=60)
    anew: dict[str, Any] = {"reuse_kv": False}
    events = client.generate(prompt_ids=PROMPT, max_tokens=400, ignore_eos=True)
    cancelled = first_tokens(events, 10)[:10]
    events.close()  # cancels
    return {
        "greedy": greedy,
        "cancelled": cancelled,
        "longer": answer(client, [*PROMPT, *greedy["tokens"], 5, 6], max_tokens=20),
        "sampled": answer(client, PROMPT, max_tokens=60, temperature=0.8, seed=7, **anew),
        "digests": answer(client, PROMPT, max_tokens=20, logit_digests=True, **anew),
        "processed": answer(client, PROMPT, max_tokens=20, temperature=0.9, seed=3, top_p=0.9, logprobs=2, **anew),
        "grammar": answer(client, PROMPT, max_tokens=12, regex="[a-z]{3,9}", ignore_eos=False, **anew),
        "whole context": answer(client, PROMPT, max_tokens=482, **anew),
    }


@pytest.mark.parametrize("count", COUNTS)
def test_answers_are_as_without_the_comparison(session: EngineSession, model: str, count: int) -> None:
    found = []
    for name, flag in (("plain", "--prefill=off"), ("checked", "--check-experts")):
        launcher = session.launch(model, f"--gpus={count}", flag, name=name)
        with session.connect(READY_S) as client:
            assert not client.status().prefill
            found.append(answers(client))
        stop(session, launcher)
    plain, checked = found
    assert len(plain["whole context"]["tokens"]) == 482
    for name, expected in plain.items():
        assert checked[name] == expected, name


# Started by the Python of every process; on rank 1 a layer's router prefers four experts, once the engine is ready.
WRONG_RANK = f"""
import sys
if '"rank": 1,' in " ".join(sys.orig_argv):
    from kog_dist.workers.engines.cuda import CudaEngine

    startup = CudaEngine.startup

    def planted(engine):
        startup(engine)
        import cupy

        engine._gpu.kernel.weights.experts.router_bias[{LAYER}, :4] = 0x4700  # 32,768 in bfloat16
        cupy.cuda.Device().synchronize()

    CudaEngine.startup = planted
"""


@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_wrong_choice_of_one_rank(session: EngineSession, model: str, count: int, is_checked: bool) -> None:
    """It ends the engine with a sentence that says where, as on CPU ranks; nobody notices without the option."""
    plant(session, WRONG_RANK)
    launcher = session.launch(model, f"--gpus={count}", "--check-experts" if is_checked else "--prefill=off")
    with session.connect(READY_S) as client:
        until(lambda: "ready after" in session.output(stream="out"), READY_S, session.output)  # else it is a failed start
        if not is_checked:
            assert len(answer(client, PROMPT, max_tokens=20)["tokens"]) == 20
            stop(session, launcher)
            return
        with pytest.raises(RequestFailed) as caught:
            answer(client, PROMPT, max_tokens=20)
    assert caught.value.code is ErrorCode.RANK_FAILED
    assert launcher.wait(READY_S) == 4
    found = rf"rank 1 chose experts 0, 1, 2, 3 in layer {LAYER} at position 0, but rank 0 {FOUR}: the ranks do not compute"
    assert re.search(found, session.output()), session.output()


# The same: in thread block 5 the experts of a layer are those behind the right ones.
WRONG_BLOCK = f"""
import sys
if '"rank": 0,' in " ".join(sys.orig_argv):
    from kog_dist.workers.cuda import build

    sources, end = build.device_sources, "const float top = value_of_key(largest);"

    def planted():
        text = sources()["finalize_experts.cuh"]
        assert text.count(end) == 1
        wrong = "if (role.cta == {BLOCK} && layer == {LAYER}) chosen[0] = (chosen[0] << 1 | chosen[0] >> 23) & 0xffffff;"
        return {{**sources(), "finalize_experts.cuh": text.replace(end, wrong + " " + end)}}

    build.device_sources = planted
"""


@pytest.mark.gpu(1)
def test_a_wrong_choice_of_one_thread_block_is_no_start(session: EngineSession, model: str) -> None:
    """One rank is enough: its trial finds it."""
    plant(session, WRONG_BLOCK)
    launcher = session.launch(model, "--gpus=1", "--check-experts")
    assert launcher.wait(READY_S) == 3, session.output()
    found = rf"thread block {BLOCK} chose experts {FOUR} in layer {LAYER} at position 0 on rank 0, but thread block 0 {FOUR}"
    assert re.search(found, session.output()), session.output()


def plant(session: EngineSession, program: str) -> None:
    """Have it started by every Python of the session."""
    (session.folder / "sitecustomize.py").write_text(program, encoding="utf-8")
    session.variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(session.folder), os.environ.get("PYTHONPATH"))))
