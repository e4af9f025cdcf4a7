"""Requests with a grammar at the coordinator: accepted once it is checked, refused by name, ended when nobody can follow it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.errors import RequestError, RequestFailed
from kog_dist.rpc.messages import Accepted, Alive, Done, FinishReason, Tokens
from kog_dist.runtime.wait import Deadline
from tests.living_children import living_children

StartEngine = Callable[..., Any]  # the FakeEngine of conftest.py
EOS_ID = 256


def grammar_processes() -> list[psutil.Process]:
    """The runner, then the checker."""
    found = living_children("kog_dist.workers.grammar.process")
    return sorted(found, key=lambda child: (child.create_time(), child.pid))  # pids begin anew at their end


def stop_checking(engine: Any) -> None:
    """Catch the grammar processes while they start, which takes them long, so that no verdict comes."""
    engine.until(lambda: len(grammar_processes()) == 2)
    for process in grammar_processes():
        process.suspend()


def test_good_ones_are_accepted_and_bad_ones_refused(start_engine: StartEngine) -> None:
    engine = start_engine(lambda _request: [*b"hello", EOS_ID])
    with engine.client() as client:
        events = list(client.generate("x", regex="[a-z]+", max_tokens=20))
        assert isinstance(next(event for event in events if not isinstance(event, Alive)), Accepted)
        assert "".join(event.text for event in events if isinstance(event, Tokens)) == "hello"
        first = engine.requests[-1]
        assert first.mask_epoch > 0
        with pytest.raises(RequestError, match="regex cannot be used") as caught:
            list(client.generate("x", regex="(a"))
        assert caught.value.code == "invalid_constraint"
        with pytest.raises(RequestError, match="json_schema is not JSON") as caught:
            list(client.generate("x", json_schema="{"))
        assert caught.value.code == "invalid_constraint"
        list(client.generate("x", json_schema='{"type": "string"}', max_tokens=20))
        assert engine.requests[-1].mask_epoch >= first.mask_epoch + 20, "masks of two requests never have the same epoch"
        list(client.generate("x", max_tokens=20))
        assert engine.requests[-1].mask_epoch == 0
        report = client.status()
        assert (report.num_completed, report.num_refused) == (3, 2)


def test_what_no_grammar_could_help_is_refused_at_once(start_engine: StartEngine) -> None:
    with start_engine("x").client() as client:
        for keywords, finding in (
            ({"ignore_eos": True, "regex": "a"}, "ignore_eos and regex exclude"),
            ({"json_schema": "{}", "regex": "a"}, "json_schema and regex exclude"),
        ):
            with pytest.raises(RequestError, match=finding) as caught:
                next(client.generate("x", **keywords))
            assert caught.value.code == "invalid_request"
    with start_engine("x", with_tokenizer=False).client() as client:
        with pytest.raises(RequestError, match="no tokenizer") as caught:
            next(client.generate(prompt_ids=[1], regex="a"))
        assert caught.value.code == "no_tokenizer"
    assert grammar_processes() == [], "nothing was started for these"


def test_a_request_can_be_cancelled_while_its_grammar_is_checked(start_engine: StartEngine) -> None:
    engine = start_engine("hello")
    with engine.client() as client, engine.client() as other:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(client.generate("x", regex="[a-z]{9}", request_id="slow")))
        thread.start()
        stop_checking(engine)
        other.cancel("slow")
        thread.join(20.0)
        assert {type(event) for event in found[:-1]} <= {Alive}
        assert isinstance(found[-1], Done)
        assert found[-1].finish_reason is FinishReason.CANCELLED
        assert list(other.generate("x", max_tokens=2))
        assert engine.requests[-1].mask_epoch == 0


@pytest.mark.parametrize(("strike", "said"), [(psutil.Process.kill, "ended"), (psutil.Process.suspend, "was silent for 1")])
def test_a_lost_runner_ends_the_request_that_it_worked_for(
    start_engine: StartEngine, strike: Callable[[psutil.Process], None], said: str
) -> None:  # fmt: skip
    engine = start_engine("hello", paced=True)
    with engine.client() as client:
        events = client.generate("x", regex="[a-z]{30}", max_tokens=30)
        engine.allow(1)
        deadline = Deadline.after(20.0)
        while not isinstance(next(events), Tokens):
            assert not deadline.expired()
        strike(grammar_processes()[0])
        engine.allow(1)  # its mask was there; that of the next one is not
        with pytest.raises(RequestFailed, match=f"the process that followed regex {said}") as caught:
            list(events)
        assert caught.value.code == "constraint_failed"
        engine.allow(100)
        assert list(client.generate("x", regex="[a-z]{3}", max_tokens=3)), "the next one finds a new runner"


def test_a_drain_ends_what_is_being_checked(start_engine: StartEngine) -> None:
    engine = start_engine("hello", paced=True)
    with engine.client() as client, engine.client() as other:
        running = other.generate("x", max_tokens=3)
        next(running)
        codes: list[str] = []

        def ask() -> None:
            try:
                list(client.generate("x", regex="[a-z]{9}"))
            except (RequestError, RequestFailed) as error:
                codes.append(error.code)

        thread = threading.Thread(target=ask)
        thread.start()
        stop_checking(engine)
        with engine.client() as third:
            third.drain()
        thread.join(20.0)
        assert codes == ["draining"]
        engine.allow(10)
        assert engine.wait_exit() == 0
    assert grammar_processes() == []
