"""`kog-bench passes`: what passes of several tokens bring on one CPU rank, in this process, by the processor's time.

Other processes do not count then, so that it can be asked on a machine that does other work: what is compared takes turns every
few tokens.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kog_dist.bench.engine.drafts import body_of, tasks
from kog_dist.bench.report import finish, machine
from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter, StepOutput
from kog_dist.decode.cpu.passes import most_tokens, most_verified, pass_sizes
from kog_dist.decode.draft_lengths import SIZES, costs_between
from kog_dist.decode.drafts import LookupDrafter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.sampling import Candidate, Sampler
from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.launch.target import model_folder
from kog_dist.model.chat_template import ChatTemplate
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import Generate
from kog_dist.sampling_params import GREEDY
from kog_dist.speculation import Speculation

_MEASURED: Final = (1, 2, 4, 8, 16)
_ROUNDS, _TURN = 5, 25  # of sizes of passes; tokens until the other way of decoding has its turn
_PROMPT_MODULES: Final = ("argparse", "typing", "inspect")  # whose source is the text of prompts


class _Rank(NamedTuple):
    """A model on one rank."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    served: ServedModel
    interpreter: Interpreter


def run(model: str | None, prompts: Sequence[int], kinds: Sequence[str]) -> bool:
    """Measure, print lines and then the JSON object. True: all answers were the same. Raises ConfigError."""
    known = dict.fromkeys(task["kind"] for task in tasks() if not _is_constrained(task))
    if wrong := set(kinds) - known.keys():
        raise ConfigError(
            f"there are no tasks without a grammar of the kind {', '.join(sorted(wrong))}; there are {', '.join(known)}"
        )
    before = machine()
    rank = _rank(Path(model) if model is not None else model_folder(LaunchConfig())[0])
    costs = {position: _pass_costs(rank, position) for position in (0, min(500, rank.served.max_context // 2))}
    for position, cost_s in costs.items():
        shown = ", ".join(f"{size}: {taken_s * 1e3:.1f} ms ({taken_s / cost_s[1]:.2f})" for size, taken_s in cost_s.items())
        print(f"passes at position {position}: {shown}", flush=True)
    read = [_read(rank, num_tokens) for num_tokens in prompts]
    table = costs_between(costs[0])
    answers = [_in_turns(rank, task, table) for task in tasks() if task["kind"] in kinds]
    for kind in kinds:
        of_kind = [answer for answer in answers if answer["kind"] == kind]
        plain_s, drafts_s = (sum(answer[name] for answer in of_kind) for name in ("plain_cpu_s", "drafts_cpu_s"))
        print(f"{kind}: {plain_s / drafts_s:.3f} times as fast with drafts", flush=True)
    figures = {"pass_cpu_s": costs, "prompts": read, "answers": answers}
    finish("passes", {"model": model or "demo", "prompts": list(prompts), "kinds": list(kinds)}, before, figures)
    return all(answer["is_same"] for answer in answers)


def _is_constrained(task: Any) -> bool:
    """Its masks come from another process."""
    return "schema" in task or bool(task.get("must_call"))


def _rank(folder: Path) -> _Rank:
    checkpoint, tokenizer = open_checkpoint(folder), Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer, which makes texts prompts; give a model that has one")
    spec = checkpoint.spec
    plan = make_plan(spec, 1, num_tokens=most_verified(make_plan(spec, 1)))
    if plan.num_tokens < SIZES[-1]:
        raise ConfigError(f"{folder}: the model has no passes of {SIZES[-1]} tokens")
    weights = checkpoint.rank_weights(range(spec.num_lanes), keeps_halves=host_library.library() is not None)
    template = ChatTemplate.from_folder(folder, tokenizer)
    served = ServedModel("model", (), spec.max_context, spec.vocab_size, tokenizer, template, 1_700_000_000)
    interpreter = Interpreter(plan, 0, weights, None)
    for size in SIZES:
        interpreter.prepare(size)
    return _Rank(checkpoint, tokenizer, served, interpreter)


def _pass_costs(rank: _Rank, position: int) -> dict[int, float]:
    """Seconds of a pass of each size there, sizes in turn; medians."""
    taken_s: dict[int, list[float]] = {size: [] for size in _MEASURED}
    for _ in range(_ROUNDS):
        for size, found in taken_s.items():
            rank.interpreter.filled(0, position)
            found.append(_cpu_s(partial(rank.interpreter.verify, (0,) * size, position, GREEDY)))
    return {size: statistics.median(found) for size, found in taken_s.items()}


def _cpu_s(work: Callable[[], object]) -> float:
    before_s = time.process_time()
    work()
    return time.process_time() - before_s


def _read(rank: _Rank, num_tokens: int) -> dict[str, Any]:
    """A prompt of so many tokens, of which the first passes of each size have been compiled before. Raises ConfigError."""
    origins = [spec.origin for name in _PROMPT_MODULES if (spec := importlib.util.find_spec(name)) is not None and spec.origin]
    text = "\n".join(read_text(Path(origin)) for origin in origins)
    ids = rank.tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
    if not 0 < num_tokens == len(ids) < rank.served.max_context:
        raise ConfigError(f"--prompts may have 1 to {min(len(ids), rank.served.max_context - 1)} tokens, got {num_tokens}")
    engine, sizes = rank.interpreter, [*pass_sizes(num_tokens, most_tokens(rank.interpreter.plan))]
    for size in {*sizes}:
        engine.read(ids[:size], 0)

    def read() -> None:
        position = 0
        for size in sizes:
            engine.read(ids[position : position + size], position)
            position += size

    taken_s = _cpu_s(read)
    print(f"a prompt of {num_tokens} tokens: {taken_s:.2f} s, {num_tokens / taken_s:.0f} tokens/s", flush=True)
    return {"tokens": num_tokens, "cpu_s": taken_s}


class _Decoding:
    """One of the two ways to decode an answer: where it is, and what it took."""

    def __init__(self, rank: _Rank, asked: Generate, drafter: LookupDrafter | None) -> None:
        assert asked.prompt_ids is not None, "chats have ids"
        self._engine, self._asked, self._drafter = rank.interpreter, asked, drafter
        self._prompt = tuple(asked.prompt_ids)
        self._sampler = Sampler(rank.served.vocab_size, self._prompt, asked.sampling, rank.tokenizer.eos_ids)
        self._ends = frozenset(rank.tokenizer.eos_ids)
        self.ids: list[int] = []
        self.cpu_s, self.num_drafted, self.num_right = 0.0, 0, 0

    @property
    def is_over(self) -> bool:
        return len(self.ids) >= (self._asked.max_tokens or 0) or bool(self.ids and self.ids[-1] in self._ends)

    def go_on(self, until: int) -> None:
        """Up to so many tokens, or a few more."""
        before_s = time.process_time()
        while len(self.ids) < until and not self.is_over:
            self._pass()
        self.cpu_s += time.process_time() - before_s

    def _pass(self) -> None:
        num, asked = len(self.ids), self._asked
        most = (asked.max_tokens or 0) - num - 1
        drafted = () if self._drafter is None else self._drafter.draft(most).token_ids
        last = self.ids[-1] if self.ids else self._prompt[-1]
        chooses = asked.sampling.has_processors
        outputs: list[StepOutput] = self._engine.verify(
            (last, *drafted), len(self._prompt) - 1 + num, asked.sampling, chooses, choose=self._choose if chooses else None
        )
        found = [output.token_id for output in outputs]
        end = next((idx + 1 for idx, token_id in enumerate(found) if token_id in self._ends), len(found))
        self.ids += found[:end]
        self.num_drafted, self.num_right = self.num_drafted + len(drafted), self.num_right + len(found) - 1
        if self._drafter is not None:
            self._drafter.took(found)

    def _choose(self, logits: Any, position: int) -> Candidate:
        best = self._sampler.choose(logits, position)
        self._sampler.accept(best.token_id)
        return best


def _in_turns(rank: _Rank, task: Any, costs: Sequence[float]) -> dict[str, Any]:
    """An answer in both ways, each a few tokens at a time: first with drafts, then the same positions without."""
    (asked,) = plan_chat(body_of(task, Speculation.AUTO), rank.served).generates
    prompt = tuple(asked.prompt_ids or ())
    engine, position = rank.interpreter, 0
    engine.use_cache(0, 0, 0)
    for size in pass_sizes(len(prompt) - 1, most_tokens(engine.plan)):
        engine.read(prompt[position : position + size], position)
        position += size
    before_s = time.process_time()
    drafter = LookupDrafter(prompt, asked.prediction_ids or (), costs)
    plain, drafts = _Decoding(rank, asked, None), _Decoding(rank, asked, drafter)
    drafts.cpu_s += time.process_time() - before_s
    while not drafts.is_over:
        begin = len(drafts.ids)
        drafts.go_on(begin + _TURN)
        engine.filled(0, len(prompt) - 1 + begin)
        plain.go_on(len(drafts.ids))
    is_same = plain.ids == drafts.ids
    more, other = drafts.cpu_s / plain.cpu_s - 1, "" if is_same else ", ANSWERS DIFFER"
    print(
        f"{task['kind']}, {task['name']}: {len(plain.ids)} tokens, {plain.cpu_s:.2f} s, {drafts.cpu_s:.2f} s with drafts "
        f"({more:+.1%}), {drafts.num_right} of {drafts.num_drafted} right{other}",
        flush=True,
    )
    return {
        "kind": task["kind"],
        "name": task["name"],
        "tokens": len(plain.ids),
        "plain_cpu_s": plain.cpu_s,
        "drafts_cpu_s": drafts.cpu_s,
        "drafted_tokens": drafts.num_drafted,
        "accepted_tokens": drafts.num_right,
        "is_same": is_same,
    }
