"""What `kog-bench requests` measures of an engine that runs. Each function returns figures that go into the JSON object."""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kog_dist.bench.engine.request_client import RequestClient, TimedAnswer
from kog_dist.bench.engine.request_stages import steps_ms
from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.bench.report import percentile
from kog_dist.errors import ConfigError, RequestFailed
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.rpc.messages import Done, Error, FinishReason

BUDGET_S = 3.0  # for the repeats of one figure, of which two are always made
KINDS_BUDGET_S = 12.0  # of all kinds of sampling, ten rounds on one H200: they are told apart by a percent
KINDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 7},
    "top-p with logprobs": {"temperature": 0.8, "seed": 7, "top_p": 0.9, "logprobs": 5},
}
_RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["function", "class", "module"]},
        "size": {"type": "number", "minimum": 0, "maximum": 1000},
        "is_public": {"type": "boolean"},
    },
    "required": ["id", "name", "kind", "size", "is_public"],
    "additionalProperties": False,
}
_LONG = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"], "additionalProperties": False}
SCHEMAS: dict[str, dict[str, object]] = {  # neither is at its end before many tokens
    "records": {"type": "array", "items": _RECORD, "minItems": 200},
    "long text": _LONG,
}
_SHORT_PROMPT = 16
FIRST_OF = 8  # tokens of answers whose first one is measured; the last token of an answer waits until ranks have left it
PAUSE_S, RESTED_REPEATS = 0.15, 5
NUM_BARE = 5  # launches of the kernel alone beside an engine, each of which begins a position further on
_BETWEEN_S = 0.002  # from the first to the second SIGTERM: two at once may be seen as one
_ENDED_S = 20.0


@dataclass(frozen=True, slots=True)
class Workload:
    """How long prompts and answers are, in tokens, and how often each request is made."""

    prompts: tuple[int, ...]
    kept: int  # tokens of a prompt whose KV is kept, before `new` ones; 0: not measured
    new: int
    context: int  # prompt of the answers whose speed is measured
    tokens: int  # of these answers
    repeats: int

    def check(self, spec: ModelSpec) -> None:
        """Raise ConfigError if something is longer than the model's context."""
        for name, size in (
            ("--prompts", max(self.prompts) + FIRST_OF),
            ("--kept and --new", self.kept + self.new + FIRST_OF),
            ("--context and --tokens", self.context + self.tokens + NUM_BARE - 1),
            ("a short prompt", 2 * _SHORT_PROMPT),
        ):
            if size > spec.max_context:
                raise ConfigError(f"{name}: {size} tokens, the model's context is {spec.max_context}")


class Measures:
    """All measurements of one engine, with random prompts of its vocabulary, the same each time."""

    def __init__(self, client: RequestClient, spec: ModelSpec, workload: Workload) -> None:
        self._client, self._spec, self._workload = client, spec, workload
        self._chance = random.Random(1)

    def _ids(self, count: int) -> list[int]:
        return self._chance.choices(range(self._spec.vocab_size - 1), k=count)

    def warm_up(self) -> None:
        """Every kind of request once, so that nothing is made for the first time when it is measured."""
        self._client.ask(self._ids(max(self._workload.prompts)), max_tokens=1, reuse_kv=False)
        for options in KINDS.values():
            self._client.ask(self._ids(_SHORT_PROMPT), max_tokens=_SHORT_PROMPT, **options)

    # ---- first tokens ----
    def first_tokens(self) -> list[dict[str, Any]]:
        """Milliseconds to the first token by length of the prompt, and with a kept beginning."""
        found = [self._first_token(length) for length in self._workload.prompts]
        return [*found, self._first_token_behind_kept()] if self._workload.kept else found

    def _first_token(self, length: int) -> dict[str, object]:
        def ask() -> TimedAnswer:
            return self._client.ask(self._ids(length), max_tokens=FIRST_OF, reuse_kv=False)

        return _ttft([ask() for _ in self._repeats()], self._after_pauses(ask), {"prompt": length})

    def _first_token_behind_kept(self) -> dict[str, object]:
        kept, new = self._workload.kept, self._workload.new
        beginning, answers = self._ids(kept), []

        def ask() -> TimedAnswer:
            return self._client.ask([*beginning, *self._ids(new)], max_tokens=FIRST_OF)

        for _ in self._repeats():
            self._client.ask(beginning, max_tokens=1)
            answers.append(ask())
        rested = self._after_pauses(ask, before=lambda: self._client.ask(beginning, max_tokens=1))
        return _ttft(answers, rested, {"prompt": kept + new, "kept": kept, "new": new})

    def _after_pauses(self, ask: Callable[[], TimedAnswer], before: Callable[[], object] = lambda: None) -> list[TimedAnswer]:
        """Answers of an engine that had nothing to do for a while: then its cores and its GPU are not awake."""
        answers = []
        for _ in range(min(self._workload.repeats, RESTED_REPEATS)):
            before()
            time.sleep(PAUSE_S)
            answers.append(ask())
        return answers

    def _repeats(self, budget_s: float = BUDGET_S) -> Iterator[int]:
        begin_s = time.monotonic()
        for number in range(self._workload.repeats):
            if number < 2 or time.monotonic() - begin_s < budget_s:
                yield number

    # ---- speed ----
    def kinds(self) -> list[dict[str, Any]]:
        """Microseconds per token of each kind of sampling, in turns, and beside greedy.

        Each round begins with the next kind: the first answer after a pause, or the one that finds a card warm, is another's.
        """
        prompt, kinds = self._ids(self._workload.context), deque(KINDS.items())
        answers: dict[str, list[TimedAnswer]] = {name: [] for name in KINDS}
        for _ in self._repeats(KINDS_BUDGET_S):
            for name, options in kinds:
                answers[name].append(self._client.ask(prompt, max_tokens=self._workload.tokens, **options))
            kinds.rotate(-1)
        return _beside_first([_speed(found, {"kind": name}) for name, found in answers.items()])

    def constrained(self) -> list[dict[str, Any]]:
        """The same with a JSON schema, greedy. `first_s`: until the first request with one had its first token."""
        prompt, found = self._ids(self._workload.context), []
        for name, schema in SCHEMAS.items():
            options = {"json_schema": json.dumps(schema), "max_tokens": self._workload.tokens, "ignore_eos": False}
            first = self._client.ask(prompt, **options)
            answers = [self._client.ask(prompt, **options) for _ in self._repeats()]
            more = {"kind": f"JSON: {name}", "first_s": first.ttft_ms / 1e3, "answer": answers[0].text[:80]}
            found.append(_speed(answers, more) | {"ttft_ms": statistics.median(answer.ttft_ms for answer in answers)})
        return found

    # ---- ends ----
    def cancels(self) -> list[dict[str, Any]]:
        """Milliseconds from a cancel to the client's `Done`, and to the first token of the request that waits behind it.

        Each a third of the way through the longest prompt, and in the middle of an answer.
        """
        longest = max(self._workload.prompts)
        whole_s = self._client.ask(self._ids(longest), max_tokens=1, reuse_kv=False).ttft_ms / 1e3
        found: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
        for _ in self._repeats():
            answer = self._client.send(self._ids(longest), max_tokens=2, reuse_kv=False)
            self._client.follow(lambda answer=answer: answer.num_tokens > 0, answer.sent_s + whole_s / 3)  # type: ignore[misc]
            found["decode" if answer.num_tokens else "prefill"] += self._cancel(answer)
            answer = self._client.send(self._ids(_SHORT_PROMPT), max_tokens=self._spec.max_context - _SHORT_PROMPT)
            self._client.follow(lambda answer=answer: answer.num_tokens >= _SHORT_PROMPT or answer.end is not None)  # type: ignore[misc]
            found["decode"] += self._cancel(answer)
        alone = [self._client.ask(self._ids(_SHORT_PROMPT), max_tokens=FIRST_OF).ttft_ms for _ in self._repeats()]
        return [_cancelled(name, times, statistics.median(alone)) for name, times in found.items()]

    def _cancel(self, answer: TimedAnswer) -> list[tuple[float, float]]:
        """Milliseconds to the end of the request, and to the first token of one that was sent at once; empty: it ended before."""
        begin_s = self._client.cancel(answer)
        following = self._client.send(self._ids(_SHORT_PROMPT), max_tokens=FIRST_OF)
        self._client.follow(lambda: answer.end is not None and following.end is not None)
        assert following.done
        if answer.done.finish_reason is not FinishReason.CANCELLED:
            return []
        return [(1e3 * (answer.end_s - begin_s), 1e3 * (following.arrivals[0][0] - begin_s))]

    def abort(self, session: EngineSession, launcher: subprocess.Popen[bytes], *, in_prefill: bool) -> dict[str, object]:
        """The engine's end: milliseconds from a second SIGTERM to the client's error, and until nothing of it is left.

        `counts` false: the request ended by itself before, so these milliseconds say nothing of aborts.
        """
        longest, room = max(self._workload.prompts), self._spec.max_context - _SHORT_PROMPT
        if in_prefill:
            answer = self._client.send(self._ids(longest), max_tokens=1, reuse_kv=False)
            self._client.follow(lambda: answer.accepted_s is not None)
        else:
            answer = self._client.send(self._ids(_SHORT_PROMPT), max_tokens=room)
            self._client.follow(lambda: answer.num_tokens >= 2)
        launcher.send_signal(signal.SIGTERM)  # drains: what runs may come to its end
        self._client.follow(lambda: answer.end is not None, time.monotonic() + _BETWEEN_S)
        begin_s, was_over, tokens = time.monotonic(), answer.end is not None, answer.num_tokens
        launcher.send_signal(signal.SIGTERM)
        try:
            self._client.follow(lambda: answer.end is not None)
        except RequestFailed:
            answer.end_s = time.monotonic()
        told_ms = 1e3 * (answer.end_s - begin_s)
        launcher.wait(_ENDED_S)
        until(lambda: not session.leftovers(), _ENDED_S, lambda: f"left behind: {session.leftovers()}")
        end = answer.end.code.value if isinstance(answer.end, Error) else "done" if isinstance(answer.end, Done) else "lost"
        return {
            "during": "prefill" if in_prefill and not tokens else "decode",
            "counts": not was_over and end != "done",
            "end": end,
            "told_ms": told_ms,
            "clean_ms": 1e3 * (time.monotonic() - begin_s),
        }


def _ttft(answers: Sequence[TimedAnswer], rested: Sequence[TimedAnswer], about: dict[str, object]) -> dict[str, object]:
    """`ms`: before the request is sent to the first token in the client. `engine_ms`: what the engine itself says.

    `rested_ms`: of answers that came after a pause.
    """
    times = [answer.ttft_ms for answer in answers]
    engine_ms = [1e3 * (answer.done.ttft_s or 0.0) for answer in answers]
    cached = sorted({answer.done.num_cached_tokens for answer in answers})
    return {
        **about,
        "ms": statistics.median(times),
        "most_ms": max(times),
        "engine_ms": statistics.median(engine_ms),
        "cached_tokens": cached,
        "repeats": len(times),
        "steps_ms": steps_ms(answers),
        "rested_ms": statistics.median(answer.ttft_ms for answer in rested),
        "rested_steps_ms": steps_ms(rested),
    }


def _speed(answers: Sequence[TimedAnswer], about: dict[str, object]) -> dict[str, object]:
    """Microseconds per token by the engine's stamps: `us` the median of the answers, `best_us`. Rates: also at the client."""
    rates = [answer.done.tokens_per_s or 0.0 for answer in answers]
    times_us = [1e6 / rate for rate in rates if rate]
    return {
        **about,
        "us": statistics.median(times_us),
        "best_us": min(times_us),
        "each_us": times_us,
        "tokens_per_s": statistics.median(rates),
        "client_tokens_per_s": statistics.median(answer.tokens_per_s or 0.0 for answer in answers),
        "itl_p99_us": 1e6 * max(answer.done.itl_p99_s or 0.0 for answer in answers),
        "tokens": answers[0].done.num_generated_tokens,
        "repeats": len(answers),
    }


def _beside_first(figures: list[dict[str, Any]]) -> list[dict[str, object]]:
    first = figures[0]
    return [
        figure | {"of_greedy": figure["us"] / first["us"], "of_greedy_best": figure["best_us"] / first["best_us"]}
        for figure in figures
    ]


def _cancelled(name: str, times: Sequence[tuple[float, float]], alone_ms: float) -> dict[str, object]:
    """`told_ms`: to the end of the request in the client. `free_ms`: to the next one's first token, else after `alone_ms`."""
    figure: dict[str, object] = {"during": name, "count": len(times), "alone_ms": alone_ms}
    for place, key in enumerate(("told_ms", "free_ms")):
        values = [pair[place] for pair in times]
        if values:
            figure |= {key: percentile(values, 0.5), f"most_{key}": max(values)}
    return figure
