"""Fields that a request has and its model has not: left out and named, or refused where that would change the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

from kog_dist.gateway.openai.errors import invalid, unsupported
from kog_dist.gateway.openai.peer_fields import HARMLESS, is_harmless
from kog_dist.gateway.openai.request_model import RequestModel, is_ignored
from kog_dist.misspelt import is_misspelt

MAX_UNKNOWN: Final = 256  # different ones of a request: each is compared with all names that count
MAX_NAMED: Final = 16  # in the header and the log
_MAX_SHOWN: Final = 40
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")

Path = tuple[int | str, ...]


def leave_out(request: RequestModel, *, refuses: bool) -> tuple[str, ...]:
    """Take the unknown fields out of a request and all that it holds; their names, at most MAX_NAMED and how many more.

    Raises ApiError for one that changes the answer: by `refused` of the object that it is in, or since its name is like one of
    the fields that count there. `refuses`: for any.
    """
    finder = _Finder(refuses)
    finder.look_at(request, ())
    names = list(dict.fromkeys(finder.names.values()))
    return tuple(names if len(names) <= MAX_NAMED else [*names[:MAX_NAMED], f"and {len(names) - MAX_NAMED} more"])


def nearest(name: str, model: type[RequestModel]) -> str | None:
    """The field that counts in `model` and that `name` seems to mean."""
    return next((known for known in _counting(model) if is_misspelt(name, known)), None)


def path_text(path: Path) -> str:
    """A path as OpenAI writes it: messages[0].content."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    return text.encode("ascii", "backslashreplace").decode()[:200]


class _Finder:
    """`names`: what is said of unknown fields, by the model that they are in, their name, and whether they were null."""

    def __init__(self, refuses: bool) -> None:
        self._refuses = refuses
        self.names: dict[tuple[type[RequestModel], str, bool], str] = {}

    def look_at(self, model: RequestModel, path: Path) -> None:
        if extra := model.__pydantic_extra__:
            for name, value in extra.items():
                self._judge(type(model), path, name, value, model.__dict__ | extra)
            extra.clear()
        for name, value in model.__dict__.items():
            if isinstance(value, RequestModel):
                self.look_at(value, (*path, name))
            elif isinstance(value, list) and value and isinstance(value[0], RequestModel):
                for idx, item in enumerate(value):
                    self.look_at(item, (*path, name, idx))

    def _judge(self, kind: type[RequestModel], path: Path, name: str, value: object, siblings: Mapping[str, object]) -> None:
        if (refusal := kind.refused.get(name)) is not None:
            if not is_harmless(refusal, value, siblings):
                param = path_text((*path, name))
                raise unsupported(param, f"{param} is not supported: {refusal.reason}")
            return
        key = (kind, name, value is None)
        if key in self.names and not self._refuses:
            return
        meant = None if value is None or name in HARMLESS else nearest(name, kind)
        if self._refuses or meant is not None:
            param = path_text((*path, _shown(name)))
            hint = f"; did you mean {meant}?" if meant is not None else ""
            raise invalid(param, f'unknown field "{param}"{hint} docs/openai.md lists the known ones', "unknown_parameter")
        if len(self.names) == MAX_UNKNOWN:
            raise invalid(None, f"the body has more than {MAX_UNKNOWN} unknown fields of different names; no request has so many")
        self.names[key] = _pattern(path, name)


def _pattern(path: Path, name: str) -> str:
    """A path that stands for all items of its lists: messages[].id."""
    steps = ("[]" if isinstance(step, int) else f".{step}" for step in (*path, _shown(name)))
    return "".join(steps).removeprefix(".")


def _shown(name: str) -> str:
    """What a header can hold of a name."""
    return name if _NAME.fullmatch(name) else ascii(name[:_MAX_SHOWN])


@cache
def _counting(model: type[RequestModel]) -> tuple[str, ...]:
    """The names of the fields that change an answer."""
    fields = model.model_fields.items()
    return tuple(field.alias or name for name, field in fields if name not in model.inert and not is_ignored(field))
