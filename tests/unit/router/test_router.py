"""What clients get from a router whose replicas answer, refuse, fail, vanish and come back."""

from __future__ import annotations

import select
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kog_dist.router import router as router_module
from kog_dist.router.affinity import TEXT_BLOCK_BYTES
from kog_dist.router.router import MAX_WAITING_OF_ONE, NO_REPLICA_S
from kog_dist.router.rules import STICKY_WAIT_S
from kog_dist.rpc import file_port
from kog_dist.rpc.client_events import EXIT_DRAIN_TIMEOUT
from kog_dist.rpc.messages import (
    Accepted,
    Alive,
    Cancel,
    Done,
    Drain,
    EngineState,
    Error,
    ErrorCode,
    FinishReason,
    Hello,
    PromptLogprobs,
    Status,
    StatusReport,
    Tokens,
    Welcome,
)
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.rpc.shown import describe

from .conftest import FakeReplica, RawClient, World

Pair = tuple[FakeReplica, FakeReplica]
LONG = "the beginning of a long conversation " * 50


def running(*replicas: FakeReplica) -> list[int]:
    return [len(replica.running) for replica in replicas]


def last(client: RawClient) -> object:
    return client.read()[-1] if client.read() else None


def only_error(client: RawClient) -> Error:
    errors = [event for event in client.read() if isinstance(event, Error)]
    assert len(errors) == 1
    return errors[0]


def ended(world: World) -> tuple[ErrorCode, int] | None:
    farewell = world.router.farewell
    return None if farewell is None else (farewell.code, farewell.exit_code)


def test_answer_passes_with_the_clients_id(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    replica = next(replica for replica in pair if replica.running)
    assert replica.running[0].request_id != "mine"
    replica.accept()
    replica.generate(0, 5, 6)
    replica.generate(2, 7)
    replica.finish()
    world.until(lambda: client.of(Done))
    accepted, first, second, done = client.read()
    assert accepted == Accepted("mine", 0, 3, 100)
    assert isinstance(first, Tokens)
    assert isinstance(second, Tokens)
    assert isinstance(done, Done)
    assert (first.token_ids, first.text, second.index, done.request_id) == ((5, 6), "<5><6>", 2, "mine")
    assert 0 <= done.queue_s - 0.5 == pytest.approx(done.total_s - 2.0) == pytest.approx((done.ttft_s or 0) - 1.0)


def test_each_replica_has_one_request_and_the_rest_waits_here(world: World, pair: Pair) -> None:
    client = world.client()
    for i in range(5):
        client.generate(f"q{i}")
    world.until(lambda: running(*pair) == [1, 1])
    world.settle()
    assert running(*pair) == [1, 1]
    client.send(Status())
    world.until(lambda: client.of(StatusReport))
    report = client.of(StatusReport)[0]
    assert isinstance(report, StatusReport)
    assert report.waiting == ("q2", "q3", "q4")
    assert f"waiting  q2 q3 q4 (at most {report.queue_limit}, {MAX_WAITING_OF_ONE} of one client)\n" in describe(report)
    lines = describe(report).splitlines()
    assert lines[0].startswith(f"{report.instance}: ready, {report.model} on 2 replicas, up ")
    assert lines[1] == "ranks    0: ready, 1: ready, 2: ready, 3: ready (of all replicas, one after the other)"
    assert lines[-2].startswith("r0       ready, 2 ranks, ")
    first, second = describe(replace(report, replica_ranks=(0, 1))).splitlines()[-2:]
    assert first.startswith("r0       ready, ranks not known, ")
    assert second.startswith("r1       ready, 1 rank, ")
    assert sorted(report.replica_running) == ["q0", "q1"]
    assert (report.replica_names, report.replica_states) == (("r0", "r1"), ("ready", "ready"))
    assert (report.world_size, report.state) == (4, EngineState.READY)
    pair[1].accept()
    pair[1].finish()
    world.until(lambda: running(*pair) == [1, 1])
    world.until(lambda: client.of(Done))


def test_waiting_requests_hear_where_they_are(world: World, pair: Pair) -> None:
    client = world.client()
    for i in range(4):
        client.generate(f"q{i}")
    world.until(lambda: running(*pair) == [1, 1])
    world.until(lambda: Alive("q3", 2) in client.read())
    assert Alive("q2", 1) in client.read()
    assert not client.of(Accepted)


def test_conversation_returns_to_its_replica(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("q0", conversation="c")
    world.until(lambda: sum(running(*pair)) == 1)
    home, other = pair if pair[0].running else pair[::-1]
    for i in range(1, 4):
        home.accept()
        home.finish()
        world.until(lambda: len(client.of(Done)) == i)  # noqa: B023  # until is over before the next round
        client.generate(f"q{i}", conversation="c")
        world.until(lambda: running(home, other) == [1, 0])


def test_prompt_that_goes_on_returns_to_its_replica(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("q0", LONG)
    world.until(lambda: sum(running(*pair)) == 1)
    home, other = pair if pair[0].running else pair[::-1]
    home.accept()
    home.generate(0, *range(900))  # longer than the prompt, so that it matters that it is remembered
    home.finish()
    world.until(lambda: client.of(Done))
    answer = "".join(event.text for event in client.read() if isinstance(event, Tokens))
    client.generate("q1", LONG + answer + "and a new question")
    world.until(lambda: running(home, other) == [1, 0])


def test_a_long_beginning_returns_to_its_replica_in_another_conversation(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("q0", LONG, conversation="first")
    world.until(lambda: sum(running(*pair)) == 1)
    home, other = pair if pair[0].running else pair[::-1]
    home.accept()
    home.finish()
    world.until(lambda: client.of(Done))
    client.generate("q1", LONG + "another task", conversation="second")
    world.until(lambda: running(home, other) == [1, 0])
    client.generate("q2", LONG + "of somebody else", cache_salt="salted")
    world.until(lambda: running(home, other) == [1, 1])


def test_a_conversation_of_another_salt_is_another_one(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("q0", "short", conversation="c")
    world.until(lambda: sum(running(*pair)) == 1)
    home, other = pair if pair[0].running else pair[::-1]
    home.accept()
    home.finish()
    world.until(lambda: client.of(Done))
    client.generate("q1", "short", conversation="c", cache_salt="salted")
    world.until(lambda: running(home, other) == [0, 1])  # idle for longer, and nothing is known of either
    client.generate("q2", "short", conversation="c")
    world.until(lambda: running(home, other) == [1, 1])


def test_what_a_prompt_costs_is_learned_from_answers(world: World, pair: Pair) -> None:
    """Five blocks of text in half a second."""
    before_s = world.router._block_s
    client = world.client()
    for number, (cached, prefill_s) in enumerate([(0, 0.5), (4, 0.5), (0, None)]):
        client.generate(f"q{number}", "x" * 5 * TEXT_BLOCK_BYTES)
        world.until(lambda: sum(running(*pair)) == 1)
        home = pair[0] if pair[0].running else pair[1]
        request = home.running[0]
        home.accept()
        done = Done(request.request_id, FinishReason.LENGTH, 5, 0, 0.0, 1.0, num_cached_tokens=cached, prefill_s=prefill_s)
        home.send(done)
        home.running.remove(request)
        world.until(lambda: len(client.of(Done)) == number + 1)  # noqa: B023  # until is over before the next round
    assert world.router._block_s == pytest.approx(before_s + 0.2 * (0.1 - before_s)), "too few blocks, or no time, tell nothing"


def test_stickiness_yields_after_a_while(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("q0", LONG)
    world.until(lambda: sum(running(*pair)) == 1)
    home, other = pair if pair[0].running else pair[::-1]
    world.router._block_s = 1.0  # so that it waits as long as it may
    client.generate("q1", LONG)
    client.generate("q2")
    world.until(lambda: running(home, other) == [1, 1])
    other.accept()
    other.finish()
    world.until(lambda: other.running == [])
    assert running(home, other) == [1, 0]
    world.skipped_s += STICKY_WAIT_S
    world.until(lambda: running(home, other) == [1, 1])


def test_a_replica_that_computes_a_long_prompt_is_not_waited_for(world: World, pair: Pair) -> None:
    client = world.client()
    world.router._block_s = STICKY_WAIT_S  # so that the prompt takes longer than anybody waits
    client.generate("q0", LONG)
    world.until(lambda: sum(running(*pair)) == 1)
    client.generate("q1", LONG)
    world.until(lambda: running(*pair) == [1, 1])
    assert world.router._book.unfinished["q1"].passed_s is None, "it has gone to the other one at once"


def test_lost_before_the_first_token_goes_elsewhere_once(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    first.accept()
    world.until(lambda: client.of(Accepted))
    first.die()
    world.until(lambda: second.running)
    second.accept()
    second.generate(0, 5)
    second.finish()
    world.until(lambda: client.of(Done))
    assert [type(event) for event in client.read() if not isinstance(event, Alive)] == [Accepted, Tokens, Done]


def test_request_that_kills_replicas_does_not_kill_them_all(world: World, pair: Pair) -> None:
    third = world.add("r2")
    world.until(lambda: world.states().get("r2") == "ready")
    client = world.client()
    client.generate("poison")
    for _ in range(2):
        world.until(lambda: sum(running(*pair, third)) == 1)
        victim = next(replica for replica in (*pair, third) if replica.running)
        victim.running.clear()
        victim.die()
    world.until(lambda: client.of(Error))
    error = only_error(client)
    assert error.code is ErrorCode.ENGINE_LOST
    assert "were lost with this request, which is not tried again" in error.message
    world.settle()
    assert running(*pair, third) == [0, 0, 0]


def test_lost_after_the_first_token_is_one_clear_error(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    first.accept()
    first.generate(0, 5)
    world.until(lambda: client.of(Tokens))
    first.die()
    world.until(lambda: client.of(Error))
    error = only_error(client)
    assert (error.request_id, error.code) == ("mine", ErrorCode.ENGINE_LOST)
    assert error.message == (
        f"replica {first.name} was lost in the middle of the answer (the connection closed); send the request again"
    )
    world.settle()
    assert second.running == []


def test_log_probabilities_of_a_prompt_pass_and_are_a_part_of_the_answer(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    first.accept()
    first.send(PromptLogprobs(first.running[0].request_id, 1, (5,), (-0.5,), (), ()))
    world.until(lambda: client.of(PromptLogprobs))
    assert client.of(PromptLogprobs) == [PromptLogprobs("mine", 1, (5,), (-0.5,), (), ())]
    first.die()
    world.until(lambda: client.of(Error))
    assert only_error(client).code is ErrorCode.ENGINE_LOST
    world.settle()
    assert second.running == [], "a client would have them twice"


def test_answer_that_was_complete_when_its_replica_died_is_complete(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    replica = next(replica for replica in pair if replica.running)
    replica.accept()
    replica.generate(0, *range(50))
    replica.finish()
    world.settle()
    replica.die()
    world.until(lambda: client.of(Done))
    assert not client.of(Error)


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.QUEUE_FULL])
def test_refusals_of_a_replica_alone_are_not_the_clients(world: World, pair: Pair, code: ErrorCode) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    first.fail(code)
    world.until(lambda: second.running)
    assert not client.of(Error)


def test_refusals_of_the_request_are_passed_on(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    replica = next(replica for replica in pair if replica.running)
    replica.fail(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long")
    world.until(lambda: client.of(Error))
    assert only_error(client) == Error(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", "mine")


def test_rank_that_fails_counts_as_a_loss_and_rests_until_the_next_report(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    first.state = EngineState.FAILED
    first.fail(ErrorCode.RANK_FAILED)
    world.until(lambda: second.running)
    client.generate("next")
    world.settle()
    assert running(first, second) == [0, 1]


def test_cancel_of_waiting_and_running_requests(world: World, pair: Pair) -> None:
    client, other = world.client(), world.client()
    for i in range(3):
        client.generate(f"q{i}")
    world.until(lambda: running(*pair) == [1, 1])
    for request_id in ("q2", "q0", "nobody"):
        other.send(Cancel(request_id))
    world.until(lambda: len(client.of(Done)) == 2 and len(other.read()) == 3)
    done = [event for event in client.read() if isinstance(event, Done)]
    assert [(event.request_id, event.finish_reason) for event in done] == [
        ("q2", FinishReason.CANCELLED), ("q0", FinishReason.CANCELLED),
    ]  # fmt: skip
    assert len(other.of(StatusReport)) == 2
    assert only_error(other).code is ErrorCode.UNKNOWN_REQUEST
    world.until(lambda: sum(len(replica.cancelled) for replica in pair) == 1)


def test_requests_of_a_client_that_vanished_are_cancelled(world: World, pair: Pair) -> None:
    client = RawClient(world.address)
    client.generate("q0")
    client.generate("q1")
    client.generate("q2")
    world.until(lambda: running(*pair) == [1, 1])
    client.close()
    world.until(lambda: sum(len(replica.cancelled) for replica in pair) == 2)
    assert running(*pair) == [0, 0]
    assert world.router.counters.num_dropped_clients == 1


def test_who_connects_and_says_nothing_is_disconnected(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_port, "HANDSHAKE_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(tmp_path / "router" / SOCKET_NAME))
        poll = select.poll()
        poll.register(silent, select.POLLRDHUP)
        world.until(lambda: poll.poll(0))


def num_received(client: RawClient) -> int:
    events = client.read()
    return max((event.index + len(event.token_ids) for event in events[-3:] if isinstance(event, Tokens)), default=0)


def test_slow_reader_is_dropped_and_slows_nobody(world: World, pair: Pair) -> None:
    slow, quick = world.client(RCVHWM=1, RCVBUF=4096), world.client()
    slow.generate("slow")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    quick.generate("quick")
    world.until(lambda: second.running)
    first.accept()
    second.accept()
    index = 0
    while not first.cancelled:
        assert index < 200_000
        if first.running:
            first.generate(index, *range(100))
            second.generate(index, *range(100))
        index += 100
        world.until(lambda index=index: num_received(quick) >= index - 1000)  # type: ignore[misc]
    second.finish()
    world.until(lambda: quick.of(Done))
    assert num_received(quick) == index
    assert not quick.of(Error)
    world.until(lambda: slow.of(Error))
    assert only_error(slow).code is ErrorCode.SLOW_READER


def test_ids_are_unique_while_they_are_in_use(world: World, pair: Pair) -> None:
    client, other = world.client(), world.client()
    client.generate("same")
    world.until(lambda: sum(running(*pair)) == 1)
    other.generate("same")
    world.until(lambda: other.of(Error))
    assert only_error(other).code is ErrorCode.DUPLICATE_REQUEST_ID


def test_queue_is_bounded(world: World, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_WAITING", 3)
    client = world.client()
    for i in range(6):
        client.generate(f"q{i}")
        world.settle()
    assert only_error(client).request_id == "q5"
    assert only_error(client).code is ErrorCode.QUEUE_FULL
    assert only_error(client).retry_after_s == 0.5, "a second for each request, two replicas"


def test_a_client_has_its_own_bounds_where_there_is_room_for_others(
    world: World, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "MAX_WAITING_OF_ONE", 1)
    first, second = world.client(), world.client()
    for i in range(4):
        first.generate(f"q{i}")
        world.settle()
    assert only_error(first).request_id == "q3"
    assert only_error(first).message == "1 requests of this client are waiting already; try again later"
    monkeypatch.setattr(router_module, "MAX_WAITING_BYTES_OF_ONE", 1)
    second.generate("other", "long enough")
    world.settle()
    assert second.of(Error) == []
    monkeypatch.setattr(router_module, "MAX_WAITING_OF_ONE", 9)
    second.generate("another", "long enough")
    world.settle()
    assert only_error(second).request_id == "another"


def test_clients_take_turns(world: World, pair: Pair) -> None:
    """Whoever sends ten requests makes another client wait for one of them."""
    first, second = world.client(), world.client()
    for i in range(5):
        first.generate(f"a{i}")
    world.until(lambda: running(*pair) == [1, 1])
    second.generate("b0")
    world.settle()
    second.send(Status())
    world.until(lambda: second.of(StatusReport))
    report = second.of(StatusReport)[0]
    assert isinstance(report, StatusReport)
    assert report.waiting == ("a2", "b0", "a3", "a4")


def test_memory_of_waiting_prompts_is_bounded(world: World, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_WAITING_BYTES", 1000)
    client = world.client()
    for i in range(4):
        client.generate(f"q{i}", f"{i}" * 1000)
        world.settle()
    assert only_error(client).code is ErrorCode.QUEUE_FULL


def test_hello_is_answered_when_it_is_known_what_is_served(world: World) -> None:
    client = world.client()
    client.send(Hello())
    world.settle()
    assert client.read() == []
    world.add("r0")
    world.until(lambda: client.of(Welcome))
    event = client.of(Welcome)[0]
    assert isinstance(event, Welcome)
    assert (event.instance, event.model, event.max_context, event.world_size) == ("fleet", "fake", 256, 2)


def test_epochs_waited_stand_at_the_ranks_of_their_replica(world: World) -> None:
    for name, epochs_waited in (("r0", ()), ("r1", (None, 7))):
        replica = world.replicas[name] = FakeReplica(world.folder / name, name)
        replica.epochs_waited = epochs_waited
        world.add(name)
    world.until(lambda: world.states() == {"r0": "ready", "r1": "ready"})
    client = world.client()

    def counted() -> tuple[int | None, ...]:
        num_reports = len(client.of(StatusReport))
        client.send(Status())
        world.until(lambda: len(client.of(StatusReport)) > num_reports)
        report = client.of(StatusReport)[-1]
        assert isinstance(report, StatusReport)
        return report.epochs_waited

    world.until(lambda: all(world.replicas[name].num_asked for name in ("r0", "r1")))
    world.settle()
    assert counted() == (None, None, None, 7)
    world.replicas["r1"].die()
    world.until(lambda: world.states()["r1"] != "ready")
    assert counted() == (), "counters of one replica alone would stand at other ranks"


def test_replicas_that_differ_are_refused_by_name(world: World) -> None:
    world.add("r0")
    world.until(lambda: world.states() == {"r0": "ready"})
    for name, attribute in (("r1", "model"), ("r2", "build")):
        replica = FakeReplica(world.folder / name, name)
        setattr(replica, attribute, "another")
        world.replicas[name] = replica
        world.add(name)
    world.until(lambda: world.states() == {"r0": "ready", "r1": "refused", "r2": "refused"})
    client = world.client()
    client.send(Status())
    world.until(lambda: client.of(StatusReport))
    report = client.of(StatusReport)[0]
    assert isinstance(report, StatusReport)
    assert report.replica_states[1].startswith("refused: it serves another (context 256")
    assert report.replica_states[2].startswith("refused: it is build another, this router is ")
    for i in range(3):
        client.generate(f"q{i}")
    world.until(lambda: world.replicas["r0"].running)
    world.settle()
    assert running(*world.replicas.values()) == [1, 0, 0]


def test_replica_that_sends_nonsense_is_refused_and_loses_its_requests(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    first.send_frame(b"HTTP/1.1 200 OK\r\n")
    world.until(lambda: second.running)
    world.until(lambda: world.states()[first.name] == "refused")


def test_replica_that_comes_back_is_used_again(world: World, pair: Pair) -> None:
    pair[0].die()
    world.until(lambda: world.states() == {"r0": "lost", "r1": "ready"})
    pair[0].come_back()
    world.until(lambda: world.states() == {"r0": "ready", "r1": "ready"})
    client = world.client()
    client.generate("a")
    client.generate("b")
    world.until(lambda: running(*pair) == [1, 1])


def test_replica_that_says_nothing_is_lost(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    first.is_silent = True
    world.skip(4.0)
    world.until(lambda: second.running)
    world.until(lambda: world.states()[first.name] == "lost")


def test_retiring_replica_finishes_what_it_has_and_gets_nothing_new(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("a")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    order = world.orders[first.name]
    world.orders[first.name] = type(order)(order.name, order.generation, order.access, is_retiring=True)
    world.order()
    client.generate("b")
    client.generate("c")
    world.until(lambda: second.running)
    first.accept()
    first.finish()
    world.until(lambda: client.of(Done))
    world.until(lambda: (report := world.report()) is not None and report.num_waiting == 1)
    world.settle()
    assert running(first, second) == [0, 1]
    report = world.report()
    assert report is not None
    assert [replica.num_running for replica in report.replicas if replica.name == first.name] == [0]
    assert report.num_waiting == 1


def test_new_generation_is_a_new_replica(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("a")
    world.until(lambda: sum(running(*pair)) == 1)
    first, second = pair if pair[0].running else pair[::-1]
    world.add(first.name, generation=1)
    world.until(lambda: second.running)
    world.until(lambda: world.states()[first.name] == "ready")


def test_requests_wait_for_the_first_replica(world: World) -> None:
    client = world.client()
    client.generate("early")
    world.until(lambda: client.of(Alive))
    replica = world.add("r0")
    world.until(lambda: replica.running)


def test_nobody_waits_for_ever_where_there_is_no_replica(world: World) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: client.of(Alive))
    world.skipped_s += NO_REPLICA_S + 1
    world.until(lambda: client.of(Error))
    assert only_error(client).code is ErrorCode.ENGINE_LOST


def test_deadline_counts_from_the_arrival_here(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("a")
    client.generate("b")
    client.generate("late", deadline_s=5.0)
    client.generate("later", deadline_s=50.0)
    world.until(lambda: running(*pair) == [1, 1])
    world.settle()
    world.skip(6.0)
    world.until(lambda: client.of(Error))
    assert (only_error(client).request_id, only_error(client).code) == ("late", ErrorCode.DEADLINE_EXCEEDED)
    pair[0].finish()
    world.until(lambda: pair[0].running)
    assert 34.0 < (pair[0].running[0].deadline_s or 0.0) <= 44.0  # of a machine that took up to 10 s for all this


def test_drain_finishes_what_runs_and_ends_the_rest(world: World, pair: Pair) -> None:
    client = world.client()
    for i in range(3):
        client.generate(f"q{i}")
    world.until(lambda: running(*pair) == [1, 1])
    client.send(Drain())
    world.until(lambda: client.of(Error) and client.of(StatusReport))
    assert (only_error(client).request_id, only_error(client).code) == ("q2", ErrorCode.DRAINING)
    late = world.client()
    late.generate("late")
    world.until(lambda: late.of(Error))
    assert only_error(late).code is ErrorCode.DRAINING
    for replica in pair:
        replica.accept()
        replica.finish()
    world.until(lambda: len(client.of(Done)) == 2)
    world.until(lambda: ended(world))
    assert ended(world) == (ErrorCode.DRAIN_TIMEOUT, 0), "nobody is left to be told the first"


def test_drain_has_a_limit(world: World, pair: Pair) -> None:
    client = world.client()
    client.generate("mine")
    world.until(lambda: sum(running(*pair)) == 1)
    world.order(is_draining=True)
    world.settle()
    assert ended(world) is None
    world.skip(31.0)
    world.until(lambda: ended(world))
    assert ended(world) == (ErrorCode.DRAIN_TIMEOUT, EXIT_DRAIN_TIMEOUT)


def test_router_ends_with_its_launcher(world: World, pair: Pair) -> None:
    world.launcher.close()
    world.until(lambda: ended(world))
    assert ended(world) == (ErrorCode.ENGINE_LOST, 4)
