"""What `kog-bench soak` asks for: a repeatable mix of everything that a request may be, and of what may become of it."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kog_dist.bench.fakes.tiny_model import EOS_ID
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.rpc.messages import ErrorCode, Generate
from kog_dist.sampling_params import SamplingParams
from kog_dist.speculation import Speculation

PREFIX_LENGTHS = (4, 90)  # tokens
_SHARED = 40
_MOST_TOKENS = 24
_ANSWERED = 12  # requests that may be repeated
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_REGEX = ("[a-z]{2,9}", "[0-9]+-[0-9]{1,3}", "(yes|no|perhaps)")
_SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false}'

_PLAIN = {"max_tokens", "sampling", "deadline_s", "ignore_eos", "stop", "prompt_ids"}  # changes nothing about logits


class Fate(enum.Enum):
    """What the client does with a request."""

    COMPLETE = "complete"
    CANCEL = "cancel"
    DISCONNECT = "disconnect"
    DEADLINE = "deadline"  # the engine ends it, if it does not end before
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """A request. Its client acts once it has `after` tokens; `code`: how it must be refused."""

    message: Generate
    fate: Fate
    after: int = 0
    code: ErrorCode | None = None


class RequestMix:
    """An endless series of requests for one model; the same for the same seed, but for prompts that extend earlier answers."""

    def __init__(
        self,
        spec: ModelSpec,
        seed: int,
        *,
        kept_is_exact: bool = True,
        prefix_lengths: tuple[int, int] = PREFIX_LENGTHS,
        repeats: bool = False,
    ) -> None:
        """`kept_is_exact`: a token does not depend on what was cached. If not, only plain greedy requests use what is; then most
        prompts begin alike, because GPUs keep one cache. `repeats`: half of the requests are earlier ones, with their answers as
        predictions, as they are or damaged, so that drafts are right and wrong in all ways."""
        self._spec, self._chance, self.kept_is_exact = spec, random.Random(seed), kept_is_exact
        shared = () if kept_is_exact else self._ids(_SHARED)
        self._prefixes = [shared + self._ids(self._chance.randint(*prefix_lengths)) for _ in range(6)]
        self._sequences: deque[tuple[int, ...]] = deque(maxlen=3)
        self._answered: deque[tuple[Generate, tuple[int, ...]]] = deque(maxlen=_ANSWERED)
        self._repeats = repeats
        self._number = 0

    def remember(self, sequence: tuple[int, ...]) -> None:
        """A prompt with its answer, which later prompts may extend."""
        if len(sequence) <= self._spec.max_context - 2 * _MOST_TOKENS:
            self._sequences.append(sequence)

    def remember_answer(self, message: Generate, answer: Sequence[int]) -> None:
        """A request that was answered as a whole."""
        if message.prediction_ids is None and answer:
            self._answered.append((message, tuple(answer)))

    def next(self) -> SoakRequest:
        """The next request."""
        chance = self._chance
        self._number += 1
        request_id = f"soak-{self._number}"
        if self._number == 2:  # at once: nothing else takes as much of the coordinator's memory, some of which it keeps
            return self._too_long(request_id)
        if chance.random() < 0.05 and self._number > 1:
            return self._bad(request_id)
        fates = (Fate.COMPLETE, Fate.CANCEL, Fate.DISCONNECT, Fate.DEADLINE)
        fate = chance.choices(fates, (62, 18, 8, 12))[0]
        if self._repeats and self._answered and chance.random() < 0.5:
            return self._repeated(request_id, fate)
        fields: dict[str, Any] = {"max_tokens": chance.randint(1, _MOST_TOKENS), **self._sampling()}
        if fate is Fate.DEADLINE:
            fields["deadline_s"] = chance.choice((0.002, 0.02, 0.1, 0.3, 0.6))
        if chance.random() < 0.04 or self._number == 1:  # at once: it starts a process, which is no leak
            fields |= chance.choice(({"regex": chance.choice(_REGEX)}, {"json_schema": _SCHEMA}))
        else:
            fields["ignore_eos"] = chance.random() < 0.5
        if chance.random() < 0.3:
            fields["stop"] = tuple(chance.sample(_LETTERS, 4))
        if chance.random() < 0.1:
            fields["logit_digests"] = True
        fields |= self._prompt()
        if not self.kept_is_exact:
            is_greedy = fields["sampling"].given().keys() <= {"seed"}
            fields["reuse_kv"] = is_greedy and "prompt_ids" in fields and set(fields) <= _PLAIN
        return SoakRequest(Generate(request_id, **fields), fate, after=chance.choice((0, 0, 1, 2, 5, 12)))

    def _repeated(self, request_id: str, fate: Fate) -> SoakRequest:
        """An earlier request, with a prediction."""
        chance = self._chance
        message, answer = chance.choice(self._answered)
        share = chance.choice((0.0, 0.0, 0.1, 0.3, 1.0))  # of wrong tokens
        predicted = [chance.randrange(EOS_ID) if chance.random() < share else token for token in answer]
        if chance.random() < 0.2:
            del predicted[: chance.randint(1, len(predicted))]
        speculate = chance.choice((None, Speculation.LOOKUP, Speculation.AUTO))
        again = replace(message, request_id=request_id, deadline_s=None, speculate=speculate, prediction_ids=predicted)
        return SoakRequest(again, Fate.COMPLETE if fate is Fate.DEADLINE else fate, after=chance.choice((0, 0, 1, 2, 5, 12)))

    def _prompt(self) -> dict[str, object]:
        chance, kind = self._chance, self._chance.random()
        if kind < 0.1:
            return {"prompt": "".join(chance.choices(_LETTERS + " \n(){}äß😀", k=chance.randint(1, 40)))}
        if kind < 0.3:
            return {"prompt_ids": self._ids(chance.randint(1, 60))}
        beginning: Sequence[int] = chance.choice(self._prefixes)
        if kind < 0.7 and self._sequences:
            beginning = chance.choice(self._sequences)
        if chance.random() < 0.1:
            beginning = beginning[: chance.randint(0, len(beginning))]
        return {"prompt_ids": (*beginning, *self._ids(chance.randint(0 if beginning else 1, 9)))}

    def _sampling(self) -> dict[str, object]:
        chance = self._chance
        fields: dict[str, Any] = {"temperature": chance.choice((0.0, 0.0, 0.7, 1.0, 1.6)), "seed": chance.randint(0, 2**63 - 1)}
        if chance.random() < 0.65:
            return {"sampling": SamplingParams(**fields)}
        settings: dict[str, object] = {
            "top_k": chance.randint(1, 60),
            "top_p": chance.uniform(0.2, 1.0),
            "min_p": chance.uniform(0.0, 0.2),
            "repetition_penalty": chance.uniform(0.8, 1.5),
            "presence_penalty": chance.uniform(-1, 1),
            "frequency_penalty": chance.uniform(-1, 1),
            "min_tokens": 1,
            "logprobs": chance.randint(0, 4),
        }
        fields |= {name: settings[name] for name in chance.sample(sorted(settings), chance.randint(1, 4))}
        if chance.random() < 0.3:
            fields |= {"logit_bias": ((5, 3.0), (EOS_ID, -2.0))}
        return {"sampling": SamplingParams(**fields)}

    def _bad(self, request_id: str) -> SoakRequest:
        """A request that must be refused before a rank sees it."""
        spec, ids = self._spec, self._ids(4)
        choices: list[tuple[dict[str, Any], ErrorCode]] = [
            ({"prompt_ids": ()}, ErrorCode.INVALID_REQUEST),
            ({"prompt_ids": ids, "max_tokens": 4, "sampling": SamplingParams(min_tokens=5)}, ErrorCode.INVALID_REQUEST),
            ({"prompt_ids": ids, "regex": "(unclosed"}, ErrorCode.INVALID_CONSTRAINT),
            ({"prompt_ids": (*ids, spec.vocab_size)}, ErrorCode.TOKEN_ID_OUT_OF_RANGE),
            ({"prompt_ids": ids, "max_tokens": spec.max_context}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
            ({"prompt": "x " * spec.max_context}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ]
        if (chosen := self._chance.randrange(len(choices) + 1)) == len(choices):
            return self._too_long(request_id)
        fields, code = choices[chosen]
        return SoakRequest(Generate(request_id, **fields), Fate.REFUSED, code=code)

    def _too_long(self, request_id: str) -> SoakRequest:
        """A text so long that it is read beside the loop, and refused."""
        message = Generate(request_id, prompt="x " * 12 * self._spec.max_context)
        return SoakRequest(message, Fate.REFUSED, code=ErrorCode.CONTEXT_LENGTH_EXCEEDED)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.choices(range(EOS_ID), k=count))
