"""A conversation: what was said, how the next answer is asked for, and the commands that change both."""

from __future__ import annotations

import difflib
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Final

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_file
from kog_dist.records import dataclass
from kog_dist.sampling_params import MAX_SEED
from kog_dist.speculation import Speculation

HELP: Final = """\
/help                this list
/retry               ask the last question again; /edit TEXT asks TEXT instead of it
/reset               begin anew; settings stay
/save FILE           write the conversation as JSON; /load FILE goes on with one
/model NAME          ask another model of the service
/stats               how fast the answers were
/thought             what the model thought before its last answer
/system TEXT         instructions for the model; without TEXT: none
/temperature NUMBER  0 takes the most likely token; also /top_p /seed /max_tokens; without NUMBER: the service's default
/speculate HOW       drafts of later tokens: off, lookup or auto; they change no answer; without HOW: the service's default
/chat, /completion   talk to the model, or have it continue a text
/settings            what is set
/quit, /exit         end; so does Ctrl-D

Ctrl-C ends an answer. A line that ends with a backslash goes on in the next one."""

_LIMITS: Final[Mapping[str, tuple[Callable[[str], float], float, float]]] = {
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 1e-6, 1.0),
    "seed": (int, 0, MAX_SEED),
    "max_tokens": (int, 1, 2**31 - 1),
}
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {"speculate": tuple(Speculation)}
_SETTINGS: Final = (*_LIMITS, *_WORDS)


MAX_TOKENS: Final = 512  # of an answer, unless something else is asked for
_MAX_SAVED_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class Again:
    """A command wants this asked."""

    prompt: str


@dataclass
class Stats:
    """How fast answers were, as their reader saw them."""

    num_answers: int = 0
    num_tokens: int = 0
    num_gaps: int = 0  # between tokens of one answer
    decode_s: float = 0.0
    first_s: list[float] = field(default_factory=list)

    def count(self, num_tokens: int, first_s: float | None, decode_s: float) -> None:
        """An answer has ended; `first_s`: until its first token, `decode_s`: from there to its last one."""
        if first_s is None:
            return
        self.num_answers, self.num_tokens = self.num_answers + 1, self.num_tokens + num_tokens
        self.num_gaps, self.decode_s = self.num_gaps + max(0, num_tokens - 1), self.decode_s + decode_s
        self.first_s.append(first_s)

    def __str__(self) -> str:
        if not self.num_answers:
            return "no answer yet"
        rate = f", {self.num_gaps / self.decode_s:.0f} tokens/s" if self.decode_s > 0 and self.num_gaps else ""
        answers = f"{self.num_answers} answer{'s' if self.num_answers > 1 else ''} of {self.num_tokens} tokens together"
        return f"{answers}{rate}, first token after {statistics.median(self.first_s) * 1e3:.0f} ms (median)"


@dataclass
class Settings:
    """How answers are asked for. None: the service decides."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = MAX_TOKENS
    speculate: str | None = None

    def change(self, name: str, text: str) -> None:
        """Set one of them. Raises ConfigError for what it cannot be."""
        if not text:
            setattr(self, name, None)
            return
        if name in _WORDS:
            if text not in _WORDS[name]:
                raise ConfigError(f"{name} must be one of {', '.join(_WORDS[name])}, got {text[:40]!r}")
            setattr(self, name, text)
            return
        kind, low, high = _LIMITS[name]
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"{name} must be a number, got {text[:40]!r}") from None
        if not low <= value <= high:
            limits = " to ".join(f"{limit:g}" if kind is float else str(limit) for limit in (low, high))
            raise ConfigError(f"{name} must be from {limits}, got {text[:40]}")
        setattr(self, name, value)

    def fields(self) -> dict[str, Any]:
        """Those that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class Conversation:
    """Messages of both sides. `is_completion`: the model continues texts, each by itself."""

    model: str
    settings: Settings = field(default_factory=Settings)
    system: str = ""
    is_completion: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    last_prompt: str | None = None
    last_thought: str = ""  # in front of the last answer

    def request(self, prompt: str, *, counts_tokens: bool) -> tuple[str, dict[str, Any]]:
        """Path and body that ask for the answer to `prompt`. `counts_tokens`: each chunk is to say how many there are."""
        self.last_prompt = prompt
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if counts_tokens else {})
        body: dict[str, object] = {"model": self.model, "stream": True, "stream_options": options, **self.settings.fields()}
        if self.is_completion:
            return "/completions", body | {"prompt": prompt}
        before = [{"role": "system", "content": self.system}] if self.system else []
        return "/chat/completions", body | {"messages": [*before, *self.messages, {"role": "user", "content": prompt}]}

    def add(self, prompt: str, answer: str) -> None:
        """Remember a turn. What was asked and not answered at all is forgotten, so that it can be asked again."""
        if answer:
            self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    # ---- commands ----
    def command(self, line: str) -> str | Again:
        """Obey a line that begins with a slash; returns what to say, or ask. Raises ConfigError, and EOFError for the end."""
        name, _, rest = line[1:].partition(" ")
        name, rest = name.lower().replace("-", "_"), rest.strip()
        if name in _SETTINGS:
            self.settings.change(name, rest)
            value = getattr(self.settings, name)
            return f"{name} is the service's" if value is None else f"{name} is {_shown(value)}"
        commands = self._commands(rest)
        if name not in commands:
            near = difflib.get_close_matches(name, [*commands, *_SETTINGS], 1)
            raise ConfigError(f"there is no command /{name[:40]}; " + (f"did you mean /{near[0]}?" if near else "see /help"))
        return commands[name]()

    def _commands(self, rest: str) -> dict[str, Callable[[], str | Again]]:
        """By name; `rest`: what stands behind it."""
        return {
            "help": lambda: HELP,
            "retry": lambda: self._again(None),
            "edit": lambda: self._again(rest),
            "reset": self._reset,
            "save": lambda: self._save(rest),
            "load": lambda: self._load(rest),
            "model": lambda: self._set_model(rest),
            "stats": lambda: str(self.stats),
            "thought": lambda: self.last_thought.strip() or "there was no thought before the last answer",
            "system": lambda: self._set_system(rest),
            "chat": lambda: self._set_mode(is_completion=False),
            "completion": lambda: self._set_mode(is_completion=True),
            "settings": self._describe,
            "quit": _quit,
            "exit": _quit,
        }

    def completions(self, begin: str) -> list[str]:
        """Commands that begin so."""
        return [name for name in sorted(f"/{name}" for name in (*self._commands(""), *_SETTINGS)) if name.startswith(begin)]

    def _again(self, prompt: str | None) -> Again:
        """Forget the last turn, and ask the same or something else instead."""
        if prompt == "":
            raise ConfigError("/edit needs the text that is to stand instead of your last question")
        if self.last_prompt is None:
            raise ConfigError("there is no question yet that could be asked again")
        if self.messages and self.messages[-2]["content"] == self.last_prompt:
            del self.messages[-2:]
        return Again(self.last_prompt if prompt is None else prompt)

    def _set_model(self, name: str) -> str:
        if not name:
            raise ConfigError("/model needs the name of a model of this service")
        self.model = name
        return f"{name} is asked from now on"

    def _load(self, path: str) -> str:
        if not path:
            raise ConfigError("/load needs the name of a file that /save has written")
        try:
            saved = json.loads(read_file(Path(path).expanduser(), _MAX_SAVED_BYTES))
            messages = [{"role": str(one["role"]), "content": one["content"]} for one in saved["messages"]]
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{path} is no conversation that /save has written") from None
        system = [one["content"] for one in messages if one["role"] == "system"]
        turns = [one for one in messages if one["role"] != "system"]
        roles = [one["role"] for one in turns]
        if not all(isinstance(one["content"], str) for one in messages) or roles != ["user", "assistant"] * (len(turns) // 2):
            raise ConfigError(f"{path} is no conversation of questions and answers in turns")
        self.system, self.messages = "\n".join(system), turns
        self.last_prompt = turns[-2]["content"] if turns else None
        return f"{len(turns)} messages read from {path}"

    def _reset(self) -> str:
        self.messages.clear()
        self.last_prompt = None
        return "the conversation begins anew"

    def _set_system(self, text: str) -> str:
        self.system = text
        return "the model has new instructions" if text else "the model has no instructions"

    def _set_mode(self, *, is_completion: bool) -> str:
        self.is_completion = is_completion
        return "the model continues what you write" if is_completion else "the model answers what you write"

    def _save(self, path: str) -> str:
        if not path:
            raise ConfigError("/save needs the name of a file")
        system = [{"role": "system", "content": self.system}] if self.system else []
        saved = {"model": self.model, **self.settings.fields(), "messages": [*system, *self.messages]}
        try:
            Path(path).expanduser().write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        return f"{len(self.messages)} messages written to {path}"

    def _describe(self) -> str:
        mode = "continues a text" if self.is_completion else "talks"
        shown = [f"{name} {_shown(value)}" for name, value in self.settings.fields().items()]
        system = [f"instructions: {self.system}"] if self.system else []
        return ", ".join([f"{self.model} {mode}, {len(self.messages)} messages so far", *shown, *system])


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _quit() -> str:
    raise EOFError
