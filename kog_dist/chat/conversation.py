"""A conversation: what was said, how the next answer is asked for, and the commands that change both."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from kog_dist.errors import ConfigError

HELP: Final = """\
/help                this list
/reset               begin anew; settings stay
/save FILE           write the conversation as JSON
/system TEXT         instructions for the model; without TEXT: none
/temperature NUMBER  0 takes the most likely token; also /top_p /seed /max_tokens; without NUMBER: the service's default
/chat, /completion   talk to the model, or have it continue a text
/settings            what is set
/quit                end; so does Ctrl-D

Ctrl-C ends an answer. A line that ends with a backslash goes on in the next one."""

_LIMITS: Final[Mapping[str, tuple[Callable[[str], float], float, float]]] = {
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 1e-6, 1.0),
    "seed": (int, 0, 2**63 - 1),
    "max_tokens": (int, 1, 2**31 - 1),
}


@dataclass
class Settings:
    """How answers are asked for. None: the service decides."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None

    def change(self, name: str, text: str) -> None:
        """Set one of them. Raises ConfigError for what it cannot be."""
        kind, low, high = _LIMITS[name]
        if not text:
            setattr(self, name, None)
            return
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"{name} must be a number, got {text[:40]!r}") from None
        if not low <= value <= high:
            raise ConfigError(f"{name} must be from {low:g} to {high:g}, got {text[:40]}")
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

    def request(self, prompt: str, *, counts_tokens: bool) -> tuple[str, dict[str, Any]]:
        """Path and body that ask for the answer to `prompt`. `counts_tokens`: each chunk is to say how many there are."""
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if counts_tokens else {})
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": options, **self.settings.fields()}
        if self.is_completion:
            return "/completions", body | {"prompt": prompt}
        before = [{"role": "system", "content": self.system}] if self.system else []
        return "/chat/completions", body | {"messages": [*before, *self.messages, {"role": "user", "content": prompt}]}

    def add(self, prompt: str, answer: str) -> None:
        """Remember a turn. What was asked and not answered at all is forgotten, so that it can be asked again."""
        if answer:
            self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    # ---- commands ----
    def command(self, line: str) -> str:
        """Obey a line that begins with a slash; returns what to say. Raises ConfigError, and EOFError for the end."""
        name, _, rest = line[1:].partition(" ")
        name, rest = name.lower().replace("-", "_"), rest.strip()
        if name in _LIMITS:
            self.settings.change(name, rest)
            return f"{name} is {value:g}" if (value := getattr(self.settings, name)) is not None else f"{name} is the service's"
        commands: dict[str, Callable[[], str]] = {
            "help": lambda: HELP,
            "reset": self._reset,
            "save": lambda: self._save(rest),
            "system": lambda: self._set_system(rest),
            "chat": lambda: self._set_mode(is_completion=False),
            "completion": lambda: self._set_mode(is_completion=True),
            "settings": self._describe,
            "quit": _quit,
            "exit": _quit,
        }
        if name not in commands:
            near = difflib.get_close_matches(name, [*commands, *_LIMITS], 1)
            raise ConfigError(f"there is no command /{name[:40]}; " + (f"did you mean /{near[0]}?" if near else "see /help"))
        return commands[name]()

    def _reset(self) -> str:
        self.messages.clear()
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
        shown = [f"{name} {value:g}" for name, value in self.settings.fields().items()]
        system = [f"instructions: {self.system}"] if self.system else []
        return ", ".join([f"{self.model} {mode}, {len(self.messages)} messages so far", *shown, *system])


def _quit() -> str:
    raise EOFError
