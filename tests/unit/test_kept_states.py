"""Requests go on behind copies of a state, and get what a fresh engine gives: tokens, log-probabilities, bits of all logits."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.cpu.pool_sizes import bytes_of_states, pool_slots
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.recipes import state_bytes
from kog_dist.decode.request import DecodeRequest, KvCopy, KvCopyKind, KvUse
from kog_dist.errors import ConfigError
from kog_dist.launch.kept_prefixes import kept_on_cpu
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.published_config import read_config
from kog_dist.runtime.control import KvLayout
from kog_dist.runtime.ring import Finish, TokenEntry
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.coordinator import kept_caches, kept_states
from kog_dist.workers.coordinator.kept_caches import KeptCaches
from kog_dist.workers.coordinator.kept_states import KeptStates
from kog_dist.workers.engines import cpu, cpu_blocks
from kog_dist.workers.engines.cpu_blocks import CpuBlocks
from tests.unit.delta_configs import CONFIGS
from tests.unit.delta_models import VOCAB, published
from tests.unit.test_cpu_drafts import Foretold, Page, without_moments

STEP, BLOCK_TOKENS = 8, 4
SAMPLING = SamplingParams(0.9, seed=3, logprobs=2)


# ---- the books ----
def ids(count: int, first: int = 0) -> array[int]:
    return array("I", range(first, first + count))


@pytest.mark.parametrize(
    ("num_cached", "end", "num_answer", "branch", "places"),
    [
        (0, 0, 1, 0, set()), (0, 511, 1, 0, {511, 512}), (0, 513, 3, 0, {512, 513}),
        (512, 513, 600, 512, {513, 1024}), (0, 2000, 10, 700, {512, 700, 1024, 1536, 2000}),
        (1900, 2000, 1100, 1950, {1950, 2000, 2048, 2560, 3072}), (300, 400, 10, 400, {400}),
    ],
)  # fmt: skip
def test_where_copies_are_made(num_cached: int, end: int, num_answer: int, branch: int, places: set[int]) -> None:
    found = KeptStates(64).places(num_cached, end, num_answer, (branch,), {}, None)
    assert {position for position, _ in found} == places
    assert found == sorted(found)
    of_prompt = [slot for position, slot in found if position <= end]
    assert len(set(of_prompt)) == len(of_prompt), "what a prompt leaves stays"


def test_a_long_prompt_has_fewer_and_a_long_answer_two() -> None:
    states = KeptStates(16)
    found = states.places(0, 100_000, 5_000, (), {}, None)
    of_prompt = [position for position, _ in found if position <= 100_000]
    assert of_prompt == [32768, 65536, 98304, 99840, 100_000]
    assert np.diff(of_prompt).tolist()[:2] == [32768, 32768]
    assert len({slot for position, slot in found if position > 100_000}) == 2
    states.made("", ids(105_000), found)
    assert sorted(states.find("", ids(105_000))) == [*of_prompt, 104_448, 104_960]
    assert states.num_used == len(of_prompt) + 2


def test_few_slots_hold_what_matters_most() -> None:
    for num_slots, places in ((0, []), (1, [2000]), (2, [2000, 2048]), (4, [1536, 2000, 2048, 2560]), (5, [1536, 1800, 2000])):
        found = [position for position, _ in KeptStates(num_slots).places(0, 2000, 700, (1800,), {}, None)]
        assert found[: len(places)] == places, num_slots
    assert KeptStates(1).places(0, 2000, 700, (), {}, 0) == [], "what the request itself goes on behind stays"


def test_the_least_recently_used_makes_room_and_scopes_know_nothing_of_each_other() -> None:
    states = KeptStates(2)
    states.made("a", ids(10), [(4, 0), (8, 1)])
    assert states.find("a", ids(10)) == {4: 0, 8: 1}
    assert states.find("a", ids(7)) == {4: 0}
    assert states.find("b", ids(10)) == states.find("a", ids(10, 1)) == {}
    states.use({4: 0, 8: 1}, 0, ())
    assert states.end("b", ids(6)) == 1
    assert states.find("a", ids(10)) == {4: 0}
    assert states.end("b", ids(6)) is None, "it is there"
    states.made("b", ids(6), [(6, 0)])
    assert (states.find("b", ids(6)), states.num_used) == ({6: 0}, 1), "one copy of a beginning"
    states.clear()
    assert (states.find("b", ids(6)), states.num_used) == ({}, 0)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ((), (0, 0)), ((700,), (0, 0)), ((790,), (0, 790)), ((600, 790), (600, 790)), ((511, 600, 768), (0, 768)),
        ((512, 600, 767), (512, 0)), ((790, 796), (790, 796)),
    ],
)  # fmt: skip
def test_where_messages_of_a_chat_begin(others: tuple[int, ...], found: tuple[int, int]) -> None:
    tokens = ids(800, 1)
    for at in others:
        tokens[at] = tokens[0]
    assert kept_states.of_messages(tokens) == found
    assert kept_states.of_messages(ids(0)) == (0, 0)


def test_stems_have_a_fourth_of_the_slots_and_are_used_by_all_that_pass_them() -> None:
    states = KeptStates(8)
    states.made("", ids(4000), [(at, at // 500 - 1) for at in range(500, 4001, 500)], stems=(1000, 2000, 3000))
    assert set(states._oldest()) == set(range(8)) - {1, 3}, "of those of one sequence the shortest"
    states.use(states.find("", ids(600)), None, (500,))
    assert set(states._oldest()) == set(range(8)) - {0, 1}, "one that was made for something else"
    for first in range(0, 90, 10):
        assert states.end("", ids(5000, 9000 + first)) not in (None, 0, 1)
    assert set(states.find("", ids(4000))) == {500, 1000}
    states.made("", ids(1000), [(1000, 6)])
    assert set(states._oldest()) == set(range(8)) - {0, 6}, "a copy in another slot is one as well"
    states.made("", ids(700, 8000), [(700, 2)], stems=(700,))
    assert set(states._oldest()) == set(range(8)) - {2, 6}
    states.use(states.find("", ids(600)), None, ())
    assert set(states._oldest()) == set(range(8)) - {2, 0}
    assert KeptStates(3)._oldest() == [0, 1, 2]


def test_slots_of_a_request_that_runs_are_its_own_until_it_has_ended() -> None:
    states = KeptStates(4)
    states.made("", ids(20), [(4, 0), (8, 1), (12, 2), (16, 3)])
    states.reserve((1, 3))
    assert states.find("", ids(20)) == {4: 0, 12: 2}
    assert {slot for _, slot in states.places(0, 2000, 700, (1800,), {}, None)} == {0, 2}
    assert {states.end("", ids(6, first)) for first in (100, 200, 300)} == {0, 2}
    states.made("", ids(16), [(16, 0)])
    assert states.find("", ids(20)) == {16: 0}, "whoever makes the same copy has it elsewhere"
    states.reserve((0, 2))
    assert (states.places(0, 2000, 700, (), {}, None), states.end("", ids(6, 400))) == ([], None), "it goes on without copies"
    states.release((1,))
    assert states.find("", ids(20)) == {8: 1}, "in a slot that was not used the old copy is left"
    states.clear()
    assert states.end("", ids(6)) == 1, "what is forgotten belongs to those that run all the same"
    states.release((0, 2, 3))
    assert set(states._oldest()) == {0, 1, 2, 3}


def test_copies_that_would_make_room_move_to_the_host() -> None:
    """Half of the slots at most, where no request has them; the host forgets what was used before them."""
    states = KeptStates(4, num_host_slots=3)
    states.made("", ids(20), [(4, 0), (8, 1), (12, 2), (16, 3)])
    states.use({8: 1}, 1, ())
    states.reserve((2,))
    assert states.spill() == [(0, 4), (3, 5)]
    assert (states.find("", ids(20)), states.num_used) == ({4: 4, 8: 1, 16: 5}, 4), "what stands in a request's slot is its own"
    assert states.spill() == [], "slots are free"
    assert {slot for _, slot in states.places(0, 2000, 700, (), {}, None)} <= {0, 1, 3}, "none of the host"
    states.release((2,))
    states.use({4: 4}, 4, ())
    states.made("", ids(9, 50), [(9, 0)])
    states.made("", ids(9, 60), [(9, 3)])
    assert states.spill() == [(2, 6), (1, 5)]
    assert states.find("", ids(20)) == {4: 4, 8: 5, 12: 6}
    assert KeptStates(4).spill() == []
    states.clear()
    assert (states.find("", ids(20)), states.num_used, states.spill()) == ({}, 0, [])


def test_a_request_leaves_half_of_the_slots_to_those_that_may_begin() -> None:
    books = KeptCaches(KvLayout(4, 0, 64, 500, 0, 16), None, is_recurrent=True, parallel=4)
    uses = [books.take(ids(9000, first), reuse=True, num_answer=4096) for first in range(0, 40_000, 10_000)]
    slots = [{copy.slot for copy in use.copies if copy.kind is KvCopyKind.SAVE_STATE} for use in uses]
    assert [len(found) for found in slots] == [8, 4, 2, 2]
    assert len(set().union(*slots)) == 16
    for use in uses:
        books.give_back(ids(9000), 0, 0, use.cache)
    assert len(books.states._oldest()) == 16, "those of requests that are cancelled as well"


def books_of_35b_a3b(parallel: int = 1) -> KeptCaches:
    """With the pool that Qwen3.5-35B-A3B has by default."""
    spec = read_config(CONFIGS["Qwen3.5-35B-A3B"])
    slots, states = pool_slots(spec, spec.num_lanes, 4, kept_on_cpu(LaunchConfig(), 1, state_bytes(spec)))
    return KeptCaches(KvLayout(4, 0, 64, slots, 0, states), None, is_recurrent=True, parallel=parallel)


class Agents:
    """Conversations of any number of agents with an engine's books; a token is another one each time, but for those of templates.

    A prompt ends with tokens that open an answer (three, the first as of every message) and a thought (two). The next one has
    the answer without the thought, and what a tool said.
    """

    def __init__(self, books: KeptCaches, systems: list[list[int]], opening: list[int]) -> None:
        self.books, self.opening, self.chosen, self.next_token = books, opening, random.Random(3), 1000
        self.chats = [[*system, *opening[:1], *self.said(100, 400)] for system in systems]
        self.anew: list[list[int]] = [[] for _ in systems]
        self._heads: list[int] = [0 for _ in systems]  # tokens that the engine has had
        self._running: dict[int, array[int]] = {}  # prompts, by KV cache

    def said(self, least: int, most: int) -> list[int]:
        first, self.next_token = self.next_token, self.next_token + self.chosen.randint(least, most)
        return list(range(first, self.next_token))

    def turn(self, agent: int, num_had: int | None = None) -> None:
        """`num_had`: tokens of the prompt that the engine has had before, if not this agent's own."""
        self.end(agent, self.begin(agent, num_had))

    def begin(self, agent: int, num_had: int | None = None) -> KvUse:
        prompt = [*self.chats[agent], *self.opening]
        for cache, tokens in self._running.items():
            self.books.moved(cache, tokens)
        use = self.books.take(prompt, reuse=True, num_answer=4096)
        self._running[use.cache] = array("I", prompt[:-1])
        self.anew[agent].append((self._heads[agent] if num_had is None else num_had) - use.num_cached)
        self._heads[agent] = len(self.chats[agent]) + 3
        return use

    def end(self, agent: int, use: KvUse) -> None:
        prompt, answer = [*self.chats[agent], *self.opening], self.said(30, 300)
        sequence = [*prompt, *self.said(50, 900), *answer]
        del self._running[use.cache]
        self.books.give_back(sequence, len(sequence) - 1, len(sequence) - 1, use.cache)
        self.books.save(use.cache)
        self.chats[agent] += [*self.opening[:3], *answer, *self.opening[:1], *self.said(50, 2500)]


@pytest.mark.parametrize("parallel", [1, 4])
def test_the_trace_of_an_agent_of_16_turns(parallel: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens that each turn reads besides what is new. Three more agents, who have the same 6,000 tokens of system prompt and
    tools, begin in the middle, and at the end.
    """
    opening, system = [1, 2, 3, 4, 5], [1, *range(10**6, 10**6 + 5999)]
    agents = Agents(books_of_35b_a3b(parallel), [system] * 4, opening)
    for agent in [0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 3]:
        agents.turn(agent, len(system) + 1 if agent and not agents.anew[agent] else None)
    with capsys.disabled():
        lengths = [len(chat) for chat in agents.chats]
        print(f"\nread anew: {agents.anew}; tokens of the chats at the end: {lengths}")
    assert len(agents.anew[0]) == 16
    assert agents.anew[0][0] == 0
    assert agents.anew == [[0, *[3] * 15], [1, 3, 3], [0], [0]], "what opens an answer, or a message"


def test_agents_whose_turns_run_together_go_on_behind_what_they_share() -> None:
    """With 16 copies of states; with as many as four requests have where memory allows they read nothing anew but what opens an
    answer, or a message.
    """
    for states in (16, 49):
        agents = Agents(
            KeptCaches(KvLayout(4, 0, 64, 3000, 0, states), None, is_recurrent=True, parallel=4),
            [[1, *range(10**6, 10**6 + 5999)]] * 4,
            [1, 2, 3, 4, 5],
        )
        agents.turn(0)
        for _ in range(5):
            uses = [agents.begin(agent) for agent in range(4)]
            assert min(use.num_cached for use in uses) >= 6000
            for agent, use in enumerate(uses):
                agents.end(agent, use)
    assert max(map(max, agents.anew)) <= 3


@pytest.mark.parametrize("begins", [range(10**7, 10**7 + 99), [7] * 99])
def test_without_messages_a_turn_reads_at_most_a_step_anew(begins: Sequence[int]) -> None:
    """Prompts begin with a token that does not come again, or comes again at once."""
    agents = Agents(books_of_35b_a3b(), [list(begins)], [1, 2, 3, 4, 5])
    for _ in range(16):
        agents.turn(0)
    assert 3 < max(agents.anew[0]) <= kept_states.STEP


def test_what_two_have_parted_from_stays_while_one_goes_on() -> None:
    """Without messages: where the second left a prompt of the first, a third finds it many turns later."""
    shared = list(range(10**6, 10**6 + 3000))
    agents = Agents(books_of_35b_a3b(), [[*shared, *range(2 * 10**6, 2 * 10**6 + 2000)], shared, shared], [1, 2, 3, 4, 5])
    for agent in [0, 0, 0, 1, *[0] * 10, 2]:
        agents.turn(agent, len(shared) if agent else None)
    assert agents.anew[1][0] > kept_states.STEP, "nobody knew that others would leave it there"
    assert agents.anew[2] == [0], "the copy that the second made"
    assert max(agents.anew[0]) <= kept_states.STEP


@pytest.mark.parametrize(("num_others", "num_anew"), [(3, 1), (4, 6001)])
def test_what_agents_share_stays_while_others_go_on(num_others: int, num_anew: int) -> None:
    """However long they do: of 16 slots a fourth is for beginnings such as theirs, and the one used last stays."""
    systems = [[1, *range(first, first + 5999)] for first in range(10**6, (num_others + 2) * 10**6, 10**6)]
    agents = Agents(books_of_35b_a3b(), [systems[0], *systems], [1, 2, 3, 4, 5])
    for agent in (0, 0, 0, *np.repeat(range(2, num_others + 2), 8).tolist(), 1):
        agents.turn(agent, 6001 if agent == 1 else None)
    assert agents.anew == [[0, 3, 3], [num_anew], *[[0, *[3] * 7]] * num_others]


# ---- with an engine ----
class Kept(Page):
    """An engine of one rank with KV caches and a pool, and its books."""

    def __init__(self, folder: Path, *, slots: int = 200, states: int = 200, num_caches: int = 2, context: int = 320) -> None:
        checkpoint = open_checkpoint(folder, context=context)
        plan = make_plan(checkpoint.spec, 1, num_tokens=8)
        weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes), keeps_halves=host_library.library() is not None)
        self.interpreter = Interpreter(plan, 0, weights, None, num_kv_caches=num_caches)
        super().__init__(self.interpreter)
        cast(Any, self.engine)._blocks = CpuBlocks(self.interpreter.memory, slots, states)
        cast(Any, self.engine)._pass_tokens = 4
        layout = KvLayout(num_caches, 0, BLOCK_TOKENS if slots else 0, slots, 0, states)
        self.books = KeptCaches(layout, None, is_recurrent=True)
        self.num_read, self.cancel_after = 0, 10**6
        self.begin = self.engine._begin
        cast(Any, self.engine)._begin = self._cancelling

    def _cancelling(self, running: Any, intake: Any) -> int:
        """Rank 0 hears of a cancel so many passes later."""
        self.cancel_after -= 1
        return self.begin(running, intake) | (self.cancel_after < 0)

    def ask(
        self, prompt: list[int], num_tokens: int, *, reuse: bool = True, scope: str = "", cancel_after: int = 10**6,
        drafts: bool = False, stop_ids: tuple[int, ...] = (),
    ) -> list[TokenEntry]:  # fmt: skip
        """The entries of an answer."""
        self.cancel_after = cancel_after
        use = self.books.take(prompt, reuse=reuse, scope=scope, num_answer=num_tokens)
        self.num_read = len(prompt) - use.num_cached
        request = DecodeRequest(prompt, num_tokens, SAMPLING, stop_ids, logit_digests=True, kv=use, drafts=drafts)
        entries, held = self.run(request)
        tokens = [entry.token_id for entry in entries if entry.token_id >= 0]
        self.books.give_back(prompt + tokens, held, held, use.cache)
        if (saved := self.books.save(use.cache)) is not None:
            self.engine.copy_blocks(saved)
        return without_moments(entries)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_states, "STEP", STEP)
    monkeypatch.setattr(cpu_blocks, "BLOCK_TOKENS", BLOCK_TOKENS)
    monkeypatch.setattr(kept_caches, "_WORTH", 1)
    published("qwen3_5, tied, three layers", tmp_path)
    return tmp_path


@pytest.fixture
def kept(folder: Path) -> Iterator[Kept]:
    made = Kept(folder)
    yield made
    made.control.close()


@pytest.fixture
def fresh(folder: Path) -> Iterator[Kept]:
    """Reads everything anew."""
    made = Kept(folder, slots=0, states=0, num_caches=1)
    yield made
    made.control.close()


def drawn(chosen: random.Random, count: int) -> list[int]:
    return [chosen.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize(("slots", "states"), [(200, 200), (20, 5), (9, 1), (200, 0), (0, 0)])
def test_requests_in_any_order_get_what_a_fresh_engine_gives(
    slots: int, states: int, folder: Path, fresh: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three beginnings that are shared by two scopes; cancels in prompts and answers, end tokens, drafts right and wrong."""
    kept, chosen, num_saved = Kept(folder, slots=slots, states=states), random.Random(4), 0
    stems = [drawn(chosen, 40) for _ in range(3)]
    for _ in range(40):
        prompt = chosen.choice(stems)[: chosen.randint(1, 40)] + drawn(chosen, chosen.randint(0, 3))
        prompt = [*prompt, *chosen.choice([[], drawn(chosen, 14)])]
        num_tokens = chosen.randint(1, 20)
        plain = fresh.ask(prompt, num_tokens, reuse=False)
        tokens = [entry.token_id for entry in plain]
        share = chosen.choice([0.0, 0.3])
        monkeypatch.setattr(cpu, "LookupDrafter", lambda *_, tokens=tokens, share=share: Foretold(tokens, share, VOCAB))
        stop_ids = (chosen.choice(tokens),) if chosen.random() < 0.3 else ()
        found = kept.ask(
            prompt, num_tokens, cancel_after=chosen.choice([10**6, 10**6, 1, 2, 8]), scope=chosen.choice("ab"),
            drafts=chosen.random() < 0.6, stop_ids=stop_ids,
        )  # fmt: skip
        num_saved += len(prompt) - kept.num_read
        assert [replace(entry, finish=Finish.NONE) for entry in found[:-1]] == [
            replace(entry, finish=Finish.NONE) for entry in plain[: len(found) - 1]
        ]
        last, wanted = found[-1], plain[len(found) - 1]
        if last.finish is not Finish.CANCELLED:
            assert replace(last, finish=Finish.NONE) == replace(wanted, finish=Finish.NONE)
            assert stop_ids or last.finish is Finish.LENGTH
    assert num_saved > {200: 300, 20: 100, 9: 20, 0: 0}[slots] if states else num_saved >= 0
    kept.control.close()


def test_an_agent_of_16_turns_reads_little_anew(kept: Kept, fresh: Kept) -> None:
    """Each turn is what came before, but for the prompt's last two tokens and the thoughts of the answer, which the template
    leaves out; then what a tool says. Another agent, who begins alike, takes turns with it.
    """
    chosen = random.Random(2)
    system = drawn(chosen, 60)
    chats, heads = [system + drawn(chosen, 10) for _ in range(2)], [0, 0]
    anew: list[int] = []
    for turn in range(16):
        agent = turn % 2 if turn < 4 else turn // 4 % 2
        prompt = [*chats[agent], 5, 6]
        entries = kept.ask(prompt, 7)
        assert entries == fresh.ask(prompt, 7, reuse=False), turn
        anew.append(kept.num_read - (len(prompt) - heads[agent]))
        heads[agent] = len(chats[agent])
        chats[agent] += [entry.token_id for entry in entries[4:]] + drawn(chosen, 9)
    assert anew[0] == 0, "all of it is new"
    assert anew[1] <= STEP - len(system), "of the other agent's beginning"
    assert max(anew[2:]) <= STEP, "beside what is new"
    assert kept.books.states.num_used < 200


def test_more_conversations_than_caches_take_turns(kept: Kept, fresh: Kept) -> None:
    chosen = random.Random(8)
    chats = [drawn(chosen, 30) for _ in range(5)]
    for turn in range(15):
        chat = chats[turn % 5]
        entries = kept.ask(chat, 6)
        assert entries == fresh.ask(chat, 6, reuse=False)
        if turn >= 5:
            assert kept.num_read == 4, "the last token of the answer, which was never decoded, and three new ones"
        chat += [entry.token_id for entry in entries] + drawn(chosen, 3)


def test_a_stop_string_goes_back_within_the_answer(kept: Kept, fresh: Kept) -> None:
    """Ranks were further than the stop string when they heard of it: the next turn repeats the answer up to that alone. Of an
    answer the last two whole steps stay.
    """
    prompt = drawn(random.Random(5), 21)
    answer = [entry.token_id for entry in kept.ask(prompt, 40)]
    for num_said in (39, 34, 29):
        following = [*prompt, *answer[:num_said], 9, 4]
        assert kept.ask(following, 5) == fresh.ask(following, 5, reuse=False)
        assert kept.num_read <= 2 + STEP, num_said
    again = kept.ask(prompt, 40)
    assert (again, kept.num_read) == (fresh.ask(prompt, 40, reuse=False), 1)


def test_without_a_pool_a_conversation_goes_on(folder: Path, fresh: Kept) -> None:
    """Behind its end alone."""
    kept, chosen = Kept(folder, slots=0, states=0), random.Random(9)
    chat = drawn(chosen, 20)
    for turn, num_read in enumerate((20, 4, 4)):
        entries = kept.ask(chat, 5)
        assert (entries, kept.num_read) == (fresh.ask(chat, 5, reuse=False), num_read), turn
        chat += [entry.token_id for entry in entries] + drawn(chosen, 3)
    kept.ask(chat[:-4], 5)
    assert kept.num_read == len(chat) - 4, "a state cannot go back"
    kept.control.close()


def test_a_cancel_within_a_prompt_leaves_what_was_read(kept: Kept, fresh: Kept) -> None:
    prompt = drawn(random.Random(6), 50)
    for num_passes in range(1, 12):
        kept.books.forget(0)
        assert kept.ask(prompt, 3, cancel_after=num_passes)[-1].finish is Finish.CANCELLED
        assert kept.ask(prompt, 3) == fresh.ask(prompt, 3, reuse=False)
        assert kept.num_read < 50 - 2 * num_passes


def test_what_two_prompts_share_is_copied_when_the_second_leaves_it(kept: Kept) -> None:
    """Between two whole steps, of which there are few in a long prompt: the third prompt finds it."""
    chosen = random.Random(7)
    system = drawn(chosen, 45)
    for number, num_read in enumerate((45 + 30, 5 + 30, 30)):
        kept.ask([*system, number, *drawn(chosen, 29)], 2, scope="")
        assert kept.num_read == num_read


def test_a_request_at_the_end_of_a_context_of_262_144(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions, copies and the request block reach that far; the answer ends where the context does, drafts or not."""
    published("qwen3_5, tied, three layers", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("320", "262144"))
    answers: list[tuple[list[int], bytes | None, list[bytes]]] = []
    context, num_cached = 262_144, 262_100
    prompt = drawn(random.Random(1), num_cached + 30)
    for drafts in (False, True):
        kept = Kept(tmp_path, slots=10, states=20, context=context)
        rng = np.random.default_rng(3)
        for layer in kept.interpreter.memory.states:
            for array_ in layer[0]:
                array_[...] = rng.standard_normal(array_.shape)
        kept.engine.copy_blocks(KvUse(0, 0, 0, (KvCopy(KvCopyKind.SAVE_STATE, 19, 0),)))
        kept.interpreter.filled(0, num_cached)
        places = (262_120, *range(262_129, 262_142))  # within passes of drafts, too
        saves = tuple(KvCopy(KvCopyKind.SAVE_STATE, slot, at) for slot, at in enumerate(places))
        if drafts:
            monkeypatch.setattr(cpu, "LookupDrafter", lambda *_: Foretold(answers[0][0], 0.2, VOCAB))
        use = KvUse(0, 0, num_cached, (KvCopy(KvCopyKind.LOAD_STATE, 19, num_cached), *saves))
        entries, held = kept.run(DecodeRequest(prompt, 1000, SAMPLING, logit_digests=True, kv=use, drafts=drafts))
        assert (len(entries), entries[-1].finish, held) == (14, Finish.LENGTH, context - 1)
        blocks = cast(Any, kept.engine)._blocks
        copies = [array_[slot].tobytes() for slot in range(len(places)) for layer in blocks._states for array_ in layer]
        answers.append(([entry.token_id for entry in entries], without_moments(entries)[-1].digest, copies))
        kept.control.close()
    assert answers[0] == answers[1]
    assert len(set(answers[0][2])) == len(answers[0][2])
    books = KeptCaches(KvLayout(4, 0, 64, 4096, 0, 1024), None, is_recurrent=True)
    use = books.take(prompt, reuse=True, num_answer=context - len(prompt))
    assert 200 < len(use.copies) < 600


# ---- how much it is ----
def test_memory_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_config(CONFIGS["Qwen3.5-35B-A3B"])
    of_state = state_bytes(spec)
    assert kept_on_cpu(LaunchConfig(prefix_cache="off"), 2, of_state) == 0
    monkeypatch.setattr("kog_dist.runtime.memfd.available_bytes", lambda: 2 * 8 * bytes_of_states(40, of_state))
    for parallel, states in ((1, 16), (2, 27), (3, 38), (4, 40)):  # of an eighth of what is free, on each of two ranks
        assert kept_on_cpu(LaunchConfig(), 2, of_state, parallel) == bytes_of_states(states, of_state)
    assert kept_on_cpu(LaunchConfig(), 1, of_state, 4) == bytes_of_states(49, of_state)
    monkeypatch.setattr("kog_dist.runtime.memfd.available_bytes", lambda: 0)
    assert kept_on_cpu(LaunchConfig(), 2, of_state, 4) == bytes_of_states(16, of_state), "as many as one needs, in any case"
    monkeypatch.undo()
    default = kept_on_cpu(LaunchConfig(), 2, of_state)
    blocks, states = pool_slots(spec, spec.num_lanes, 4, default)
    assert states == 16
    assert bytes_of_states(16, of_state) == default
    token_bytes = 2 * 10 * spec.num_lanes * spec.lane_kv_heads * 256 * 4
    assert 0 <= default - states * of_state - blocks * 64 * token_bytes < 64 * token_bytes
    assert pool_slots(spec, spec.num_lanes, 4, of_state) == (0, 0)
    for num_bytes in (of_state, 10_101):  # of a small model as well the least that is named is enough
        with pytest.raises(ConfigError, match=r"0\.000001 has no room for a copy of this model's state") as caught:
            kept_on_cpu(LaunchConfig(prefix_cache="0.000001"), 1, num_bytes)
        least = str(caught.value).partition("give ")[2].split()[0]
        assert bytes_of_states(1, num_bytes) <= kept_on_cpu(LaunchConfig(prefix_cache=least), 1, num_bytes)
        assert float(least) * 2**30 < bytes_of_states(1, num_bytes) + 1100
    assert kept_on_cpu(LaunchConfig(prefix_cache="1"), 2, of_state) == 1 << 30
