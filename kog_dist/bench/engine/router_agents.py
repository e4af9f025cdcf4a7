"""`kog-bench router --agents`: how much of what replicas have kept a router makes use of, with replicas that need no model."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kog_dist.bench.engine.router import fleet
from kog_dist.bench.report import finish, machine, percentile
from kog_dist.records import dataclass
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, Tokens
from kog_dist.rpc.transport import Access

SHARED, OWN, NEW, ANSWER = 4096, 256, 192, 64  # token ids: what all begin with, an agent's task, more each turn, an answer
KEPT_TOKENS = 32_768  # by each replica
US_PER_TOKEN = 25  # of a prompt that is not kept: the rate of Qwen3-4B on one H200, docs/kept-prefixes.md
_VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of an agent, and what its replica had of it. `num_known`: most that any could have: all that was sent before."""

    num_prompt: int
    num_known: int
    num_cached: int
    first_s: float


def run(num_agents: int, num_replicas: int, num_turns: int) -> None:
    """Let agents take turns behind a router, each asking again when it has an answer; prints a line, then the JSON object."""
    before = machine()
    with fleet(num_replicas, kept_tokens=KEPT_TOKENS, us_per_token=US_PER_TOKEN) as (router, _):
        turns = _all_turns(router, num_agents, num_turns)
    figures = summary(turns)
    print(
        f"{num_agents} agents, {num_replicas} replicas, {len(turns)} requests: {figures['cached_tokens']} of "
        f"{figures['prompt_tokens']} tokens were kept ({figures['hit_rate']:.1%}); most possible {figures['known_tokens']} "
        f"({figures['share_of_possible']:.1%} of it); first token p50 {figures['first_p50_ms']:.1f} ms, p99 "
        f"{figures['first_p99_ms']:.1f} ms"
    )
    configuration = {
        "agents": num_agents,
        "replicas": num_replicas,
        "turns": num_turns,
        "shared": SHARED,
        "own": OWN,
        "new": NEW,
        "answer": ANSWER,
        "kept_tokens": KEPT_TOKENS,
        "us_per_token": US_PER_TOKEN,
    }
    finish("router-agents", configuration, before, figures)


def summary(turns: Sequence[Turn]) -> dict[str, float]:
    """What is reported of all turns."""
    prompt, known, cached = (sum(getattr(turn, f"num_{name}") for turn in turns) for name in ("prompt", "known", "cached"))
    firsts_ms = [turn.first_s * 1e3 for turn in turns]
    return {
        "requests": len(turns),
        "prompt_tokens": prompt,
        "known_tokens": known,
        "cached_tokens": cached,
        "hit_rate": cached / prompt,
        "share_of_possible": cached / known,
        "first_p50_ms": percentile(firsts_ms, 0.5),
        "first_p99_ms": percentile(firsts_ms, 0.99),
    }


def _all_turns(router: Access, num_agents: int, num_turns: int) -> list[Turn]:
    found: list[list[Turn]] = [[] for _ in range(num_agents)]
    threads = [threading.Thread(target=_agent, args=(router, idx, num_turns, found[idx])) for idx in range(num_agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [turn for turns in found for turn in turns]


def _ids(begin: int, count: int) -> list[int]:
    return [(begin * 7919 + i * 31) % _VOCABULARY for i in range(count)]


def _agent(router: Access, idx: int, num_turns: int, turns: list[Turn]) -> None:
    """One conversation: the shared beginning, a task, then its own answers and what tools say to them."""
    prompt, num_known = [*_ids(0, SHARED), *_ids(1 + idx, OWN)], SHARED if idx else 0
    with Client(router) as client:
        for number in range(num_turns):
            sent_s, first_s, answer = time.monotonic(), 0.0, list[int]()
            for event in client.generate(prompt_ids=prompt, max_tokens=ANSWER):
                if isinstance(event, Tokens):
                    first_s = first_s or time.monotonic() - sent_s
                    answer += event.token_ids
                elif isinstance(event, Done):
                    turns.append(Turn(len(prompt), num_known, event.num_cached_tokens, first_s))
            num_known = len(prompt) + len(answer)
            prompt += [*answer, *_ids(1000 * idx + number + 2, NEW)]
