"""From the bytes of a request body to a checked pydantic model; whatever is wrong with them is one ApiError naming the field."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import pydantic

from kog_dist.gateway.openai.body_counts import check_counts
from kog_dist.gateway.openai.errors import ApiError, invalid, unsupported
from kog_dist.gateway.openai.request_model import RequestModel

Model = TypeVar("Model", bound=RequestModel)

MAX_NESTING = 64  # of arrays and objects; far above what a JSON schema needs, far below what recursion can take
MAX_FIELDS = 256
MAX_LEFT_OUT = 16  # each is compared with all known names, and named in a header
_MAX_MEMBERS = 4096  # of one object: each may cost a complaint, of which one is told
_MAX_SHOWN = 60
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")  # a response header can name it


def read_body(raw: bytes) -> object:
    """The JSON of a body.

    Raises ApiError: too many values, not UTF-8, not JSON, NaN or Infinity, a key given twice, text that is no Unicode, nested
    too deeply.
    """
    check_counts(raw)
    try:
        parsed: object = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise invalid(None, f"the body nests deeper than {MAX_NESTING} levels") from None
    except ValueError as error:
        raise invalid(None, f"the body is not valid JSON: {_json_complaint(error)}") from None
    _check_nesting(parsed)
    if b"\\ud" in raw or b"\\uD" in raw:  # an escape may be half a character, which no encoding of text can express
        try:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise invalid(None, "the body holds text that is not valid Unicode: a lone surrogate") from None
    return parsed


def parse(model: type[Model], body: object, *, leaves_out: bool = False) -> Model:
    """The body as a `model`. Raises ApiError naming the first field that is wrong, unknown or unsupported.

    `leaves_out`: unknown fields of the request itself, up to MAX_LEFT_OUT, unless their names look like a known one that was
    misspelt: that would change the answer.
    """
    if not isinstance(body, dict):
        raise invalid(None, f"the body must be a JSON object, got {_kind(body)}")
    _check_nesting(body)
    if len(body) > MAX_FIELDS:  # each unknown one costs a complaint, of which one is told
        raise invalid(None, f"the body has {len(body)} fields; no request has more than {MAX_FIELDS}")
    kept = {}
    for name, value in body.items():
        refusal = model.refused.get(name)
        if refusal is None:
            kept[name] = value
        elif not _is_one_of(value, refusal.harmless):
            raise unsupported(name, f"{name} is not supported: {refusal.reason}")
    unknown = [name for name in kept if name not in model.model_fields] if leaves_out else []
    unknown = [name for name in unknown if _may_be_left_out(name, model)] if len(unknown) <= MAX_LEFT_OUT else []
    try:
        return model.model_validate({name: kept[name] for name in kept if name not in unknown}).with_left_out(unknown)
    except pydantic.ValidationError as error:
        raise _first_problem(error, kept, model) from None


def _may_be_left_out(name: str, model: type[RequestModel]) -> bool:
    """Whether this, which is no field, is a name, and not like that of a field."""
    return bool(_NAME.fullmatch(name)) and not _nearest(name, model)


def _nearest(name: str, model: type[RequestModel]) -> list[str]:
    return difflib.get_close_matches(name, model.model_fields, 1)


def _json_complaint(error: ValueError) -> str:
    """What the parser says, but for its advice to Python's programmers."""
    if "int_max_str_digits" in str(error):
        return f"an integer is too long, with more than {sys.get_int_max_str_digits()} digits"
    return str(error)[:200]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_MEMBERS:
        raise ValueError(f"an object has {len(pairs)} members, at most {_MAX_MEMBERS} are read")
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise ValueError(f"the key {name[:40]!a} is given twice in one object")
        unique[name] = value
    return unique


def _check_nesting(parsed: object) -> None:
    level: list[object] = [parsed]
    for _ in range(MAX_NESTING + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise invalid(None, f"the body nests deeper than {MAX_NESTING} levels")


def _is_one_of(value: object, harmless: Iterable[object]) -> bool:
    return any(type(value) is type(allowed) and value == allowed for allowed in harmless)


# ---- pydantic's findings as one sentence ----
def _first_problem(error: pydantic.ValidationError, body: Mapping[str, Any], model: type[RequestModel]) -> ApiError:
    """Of a union pydantic tells the complaints of all its branches; the one that got deepest into the input is meant, and of two
    that got as far, the one of a branch that takes values of this type.
    """
    findings = [(_path(finding["loc"], body), finding) for finding in error.errors(include_url=False, include_context=True)]
    first_field = findings[0][0][:1]
    path, finding = max(
        ((path, finding) for path, finding in findings if path[:1] == first_field),
        key=lambda found: (len(found[0]), not found[1]["type"].endswith("_type")),
    )
    param = path_text(path) or None
    if param is None:
        return invalid(None, f"the body has a field whose name is not valid Unicode: {_shown(finding['input'])}")
    if finding["type"] == "extra_forbidden":
        close = _nearest(str(path[-1]), model) if len(path) == 1 else []
        hint = f"; did you mean {close[0]}?" if close else ""
        return invalid(param, f"unknown field {_shown(param)}{hint} docs/openai.md lists the known ones", "unknown_parameter")
    if finding["type"] == "missing":
        return invalid(param, f"{param} is missing", "missing_required_parameter")
    if finding["type"] in ("too_long", "too_short"):
        bound, limit = ("most", "max_length") if finding["type"] == "too_long" else ("least", "min_length")
        limit, num_items = finding["ctx"][limit], len(finding["input"])
        return invalid(param, f"{param}: must have at {bound} {limit} item{'s' if limit != 1 else ''}, got {num_items}")
    reason = str(finding["msg"])
    reason = reason.removeprefix("Value error, ").replace("Input should be", "must be").replace("should", "must")
    reason = reason[:1].lower() + reason[1:]
    return invalid(param, f"{param}: {reason}, got {_shown(finding['input'])}")


def _path(loc: Sequence[int | str], body: object) -> tuple[int | str, ...]:
    """The steps of `loc` that lead into the input; pydantic mixes them with the names of a union's branches."""
    path: list[int | str] = []
    here = body
    for place, step in enumerate(loc):
        is_key = isinstance(here, dict) and step in here
        is_index = isinstance(here, list) and isinstance(step, int) and step < len(here)
        if is_key or is_index:
            here = here[step]  # type: ignore[index]
            path.append(step)
        elif place == len(loc) - 1 and isinstance(here, dict) and isinstance(step, str) and step.isidentifier():
            path.append(step)  # a field that is missing
    return tuple(path)


def path_text(path: Sequence[int | str]) -> str:
    """A path as OpenAI writes it: messages[0].content."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    return text.encode("ascii", "backslashreplace").decode()[:200]


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _shown(value: object) -> str:
    """A short form of a hostile value."""
    if isinstance(value, (dict, list)):
        return _kind(value)
    text = json.dumps(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= 2 * _MAX_SHOWN else text[: 2 * _MAX_SHOWN] + "..."
