"""Prompts for `kog-bench serve`: lines of a file, or words drawn by a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.records import dataclass

# Short words that most vocabularies have as one token; how many tokens they were is what the server says.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work night point home water room mother area money story fact month lot "
    "right study book eye job word business side kind head house service friend father power hour game line end member law car"
).split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked: a text, or the messages of a chat and its tools. `max_tokens`: of this prompt alone.

    `turns`: the text again as a chat would have it, behind a `beginning` that is the system's.
    """

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    tools: tuple[dict[str, Any], ...] = ()
    turns: tuple[str, ...] = ()
    beginning: str = ""

    @property
    def num_words(self) -> int:
        """Words of the whole prompt."""
        return sum(len(str(message.get("content", "")).split()) for message in self.messages) + len(self.text.split())

    def as_text(self) -> str:
        """For the completions endpoint. Raises ConfigError for a chat, whose template only the server knows."""
        if self.messages:
            raise ConfigError("the prompts are chats, which /v1/completions cannot take; use --backend openai-chat")
        return self.text

    def as_messages(self) -> list[dict[str, Any]]:
        """For the chat endpoint."""
        if self.messages:
            return list(self.messages)
        first = [{"role": "system", "content": self.beginning}] if self.beginning else []
        return [*first, *({"role": "user", "content": turn} for turn in self.turns or (self.text,))]


def random_prompts(count: int, num_words: int, seed: int) -> list[Prompt]:
    """`count` different prompts of so many words."""
    return [Prompt(" ".join(random.Random(f"{seed} {idx}").choices(_WORDS, k=num_words))) for idx in range(count)]


def prompts_of_agents(count: int, num_agents: int, shared_words: int, num_words: int, seed: int) -> list[Prompt]:
    """`count` prompts of agents that take turns: what all of them begin with, and `num_words` more of its own in each turn.

    As a chat the beginning is a system message, and each turn one of the user.
    """
    source = random.Random(f"{seed} agents")
    shared = " ".join(source.choices(_WORDS, k=shared_words))
    held: list[tuple[str, ...]] = [()] * num_agents
    prompts: list[Prompt] = []
    for idx in range(count):
        agent = idx % num_agents
        held[agent] += (" ".join(source.choices(_WORDS, k=num_words)),)
        turns = [part for part in (shared, *held[agent]) if part]
        prompts.append(Prompt(" ".join(turns), turns=held[agent], beginning=shared))
    return prompts


def prompts_from_file(path: Path, count: int | None = None) -> list[Prompt]:
    """`count` prompts, from the beginning again where the file has fewer; all of it, if no number is given.

    A line is a prompt; in a .jsonl file an object with `prompt` or `messages`, and `max_tokens` if it wants. Raises ConfigError.
    """
    try:
        lines = [line for line in read_text(path).splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"--prompts {path} has no lines")
    if path.suffix != ".jsonl":
        prompts = [Prompt(line) for line in lines]
    else:
        prompts = [_from_json(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    return [prompts[idx % len(prompts)] for idx in range(len(prompts) if count is None else count)]


def _from_json(line: str, where: str) -> Prompt:
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(parsed, dict) or ("prompt" in parsed) == ("messages" in parsed):
        raise ConfigError(f"{where} must be an object with either prompt or messages")
    unknown = sorted(set(parsed) - {"prompt", "messages", "max_tokens"})
    if unknown:
        raise ConfigError(f"{where} has an unknown key {unknown[0]!r}; known: prompt, messages, max_tokens")
    text, messages, max_tokens = parsed.get("prompt", ""), parsed.get("messages", []), parsed.get("max_tokens")
    is_chat = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not isinstance(text, str) or not is_chat or not (text or messages):
        raise ConfigError(f"{where}: prompt must be a text, messages a list of objects, and not empty")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ConfigError(f"{where}: max_tokens must be a whole number of at least 1, got {max_tokens!r}")
    return Prompt(text, tuple(messages), max_tokens)
