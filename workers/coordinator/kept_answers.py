"""What was answered before, as drafts of what is answered next: agents ask again, and almost the same comes.

The newest answers of a scope (a request's `cache_salt`) stand where a client's prediction would: first that of the prompt
whose end is most like this one's, so that an answer which is given again is drafted from its first token on. Answers that
the prompt quotes, as a conversation does, are there already. Tokens alone are kept, whatever became of their keys and values.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Final, NamedTuple

from kog_dist.workers.coordinator.kept_blocks import num_common

MOST_RECALLED: Final = 4096  # tokens, which a lookup goes through
_MOST_KEPT: Final = 64 * 1024  # tokens of all scopes,
_MOST_ANSWERS: Final = 128  # and answers
_LEAST: Final = 8  # tokens of an answer
_COMPARED: Final = 64  # last tokens of prompts


class _Answered(NamedTuple):
    num_prompt: int
    prompt_end: array[int]  # its last _COMPARED tokens, the last one first
    answer: array[int]


class KeptAnswers:
    """Of all scopes, the newest: _MOST_ANSWERS, and _MOST_KEPT tokens, at most."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, bytes], _Answered] = OrderedDict()  # by scope and answer, the newest last
        self._num_tokens = 0

    def add(self, scope: str, sequence: array[int], num_prompt: int) -> None:
        """The prompt of `num_prompt` tokens was answered; both are the `sequence`."""
        answer = sequence[num_prompt:][:MOST_RECALLED]
        if len(answer) < _LEAST:
            return
        key = scope, answer.tobytes()
        self._drop(key)
        self._kept[key] = _Answered(num_prompt, _backwards(sequence[:num_prompt]), answer)
        self._num_tokens += len(answer)
        while self._num_tokens > _MOST_KEPT or len(self._kept) > _MOST_ANSWERS:
            self._drop(next(iter(self._kept)))

    def recall(self, scope: str, prompt: array[int], most: int = MOST_RECALLED) -> array[int]:
        """At most `most` tokens of answers to prompts of that scope, each whole but for the last; none: there are none."""
        end = _backwards(prompt)
        found = [kept for (of, _), kept in reversed(self._kept.items()) if of == scope and not _is_quoted(kept, prompt)]
        found.sort(key=lambda kept: num_common(kept.prompt_end, end), reverse=True)
        tokens = array("I")
        for kept in found:
            if len(tokens) >= most:
                break
            tokens += kept.answer
        return tokens[:most]

    def _drop(self, key: tuple[str, bytes]) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._num_tokens -= len(kept.answer)


def _backwards(prompt: array[int]) -> array[int]:
    return prompt[: -_COMPARED - 1 : -1]


def _is_quoted(kept: _Answered, prompt: array[int]) -> bool:
    """Whether the prompt has the answer where it was given: a conversation goes on."""
    answer = kept.answer[:-1]  # the last one may be a token that ends an answer, of which templates make what they like
    return prompt[kept.num_prompt : kept.num_prompt + len(answer)] == answer
