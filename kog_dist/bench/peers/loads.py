"""What every engine is asked: the conditions of published tables, and the tasks that drafts are measured with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kog_dist.bench.engine.drafts import message_of, tasks
from kog_dist.bench.service.prompts import Prompt, prompts_from_file, random_prompts
from kog_dist.errors import ConfigError
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.quoting import short
from kog_dist.records import dataclass

_LENGTHS: Final[Mapping[str, tuple[int, int]]] = {"short": (1024, 128), "long": (8000, 1000)}  # tokens of prompt and answer
_SAMPLE_WORDS: Final = 512
_OF_TEMPLATE: Final = 256  # tokens
_CHARACTERS: Final = 2  # of a token, at least
_NOT_ALIKE: Final = frozenset({"schema", "tools", "must_call", "predicts"})  # what an engine may not know, or do otherwise
_FIRST_TOKENS: Final = 32  # of what is asked before: some engines compile then
_DEFAULT_TOKENS: Final = 256  # of prompts in a file


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Requests, so many at once. `first`: is asked before, and not measured; no other prompt begins as it does.

    `context`: tokens that the longest one may take.
    """

    name: str
    backend: str
    at_once: int
    first: Prompt
    prompts: Sequence[Prompt]
    context: int
    ignore_eos: bool = False

    @property
    def label(self) -> str:
        """Of rows."""
        return self.name if self.at_once == 1 else f"{self.name}, {self.at_once} at once"


def loads_of(names: str, at_once: Sequence[int], requests: int, tokenizer: Tokenizer | None = None) -> list[PeerLoad]:
    """Of a list with commas: short (1,024 + 128 tokens), long (8,000 + 1,000), PROMPT+ANSWER, kinds of `kog-bench drafts`, or
    files with prompts.

    Those of lengths are measured with each of `at_once`, `requests` times as many requests; answers have their whole length.
    Others are asked one after the other. Without a tokenizer a word counts as a token. Raises ConfigError.
    """
    found = list[PeerLoad]()
    alike = [task for task in tasks() if _NOT_ALIKE.isdisjoint(task)]
    kinds = dict.fromkeys(str(task["kind"]) for task in alike)
    for name in filter(None, names.split(",")):
        if name in kinds:
            prompts = [_prompt_of(task) for task in alike if task["kind"] == name]
            found.append(_of_prompts(name, prompts, tokenizer))
        elif (path := Path(name)).suffix in (".jsonl", ".txt"):
            found.append(_of_prompts(path.stem, prompts_from_file(path), tokenizer))
        else:
            prompt, answer = _lengths(name, kinds)
            words = _num_words(prompt, tokenizer)
            for count in at_once:
                drawn = random_prompts(1 + count * requests, words, len(found))
                first = replace(drawn[0], max_tokens=min(answer, _FIRST_TOKENS))
                asked = [replace(one, max_tokens=answer) for one in drawn[1:]]
                found.append(PeerLoad(name, "openai", count, first, asked, _context(asked, tokenizer), ignore_eos=True))
    if not found:
        raise ConfigError("--loads names none")
    return found


def _lengths(name: str, kinds: Mapping[str, None]) -> tuple[int, int]:
    """Tokens of the prompt and of the answer."""
    if name in _LENGTHS:
        return _LENGTHS[name]
    if (found := re.fullmatch(r"([1-9]\d{0,6})\+([1-9]\d{0,6})", name)) is None:
        known = ", ".join((*_LENGTHS, *kinds))
        raise ConfigError(f"no load is called {short(name)}; known: {known}, PROMPT+ANSWER in tokens, FILE.jsonl")
    return int(found[1]), int(found[2])


def _num_words(tokens: int, tokenizer: Tokenizer | None) -> int:
    """So many of `random_prompts` are about as many tokens."""
    if tokenizer is None:
        return tokens
    [sample] = random_prompts(1, _SAMPLE_WORDS, 0)
    return max(1, round(tokens * _SAMPLE_WORDS / len(tokenizer.encode(sample.text, add_special_tokens=False))))


def _prompt_of(task: Mapping[str, Any]) -> Prompt:
    return Prompt(messages=(message_of(task),), max_tokens=task["max_tokens"])


def _of_prompts(name: str, prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> PeerLoad:
    """One after the other."""
    is_chat = any(prompt.messages for prompt in prompts)
    first = Prompt(messages=({"role": "user", "content": "Say yes."},)) if is_chat else Prompt("Yes")
    asked = [replace(prompt, max_tokens=prompt.max_tokens or _DEFAULT_TOKENS) for prompt in prompts]
    backend = "openai-chat" if is_chat else "openai"
    return PeerLoad(name, backend, 1, replace(first, max_tokens=_FIRST_TOKENS), asked, _context(asked, tokenizer))


def _context(prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> int:
    """Tokens that the longest request may take."""
    return max(_num_tokens(_text_of(prompt), tokenizer) + (prompt.max_tokens or 0) for prompt in prompts) + _OF_TEMPLATE


def _text_of(prompt: Prompt) -> str:
    return prompt.text + "".join(str(message.get("content", "")) for message in prompt.messages)


def _num_tokens(text: str, tokenizer: Tokenizer | None) -> int:
    return len(text) // _CHARACTERS if tokenizer is None else len(tokenizer.encode(text))
