"""From the bytes of a request body to a checked pydantic model; whatever is wrong with them is one ApiError naming the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar

import pydantic

from kog_dist.gateway.openai.body_counts import check_counts
from kog_dist.gateway.openai.errors import ApiError, invalid, unsupported
from kog_dist.gateway.openai.peer_fields import is_harmless
from kog_dist.gateway.openai.request_model import RequestModel
from kog_dist.gateway.openai.unknown_fields import leave_out, path_text

Model = TypeVar("Model", bound=RequestModel)

MAX_NESTING = 64  # of arrays and objects; far above what a JSON schema needs, far below what recursion can take
MAX_FIELDS = 256
_MAX_MEMBERS = 4096  # of one object: each may cost a complaint, of which one is told
_MAX_SHOWN = 60


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
    check_nesting(parsed)
    if b"\\ud" in raw or b"\\uD" in raw:  # an escape may be half a character, which no encoding of text can express
        try:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise invalid(None, "the body holds text that is not valid Unicode: a lone surrogate") from None
    return parsed


def parse(model: type[Model], body: object, *, leaves_out: bool = False) -> Model:
    """The body as a `model`. Raises ApiError naming the first field that is wrong or unsupported.

    `leaves_out`: unknown fields, see `unknown_fields.leave_out`; else they are refused.
    """
    if not isinstance(body, dict):
        raise invalid(None, f"the body must be a JSON object, got {_kind(body)}")
    check_nesting(body)
    if len(body) > MAX_FIELDS:
        raise invalid(None, f"the body has {len(body)} fields; no request has more than {MAX_FIELDS}")
    for name, value in body.items():  # before anything that they replace is missing
        refusal = model.refused.get(name)
        if refusal is not None and not is_harmless(refusal, value, body):
            raise unsupported(name, f"{name} is not supported: {refusal.reason}")
    try:
        request = model.model_validate(body)
    except pydantic.ValidationError as error:
        raise _first_problem(error, body) from None
    return request.with_left_out(leave_out(request, refuses=not leaves_out))


def _json_complaint(error: ValueError) -> str:
    """What the parser says, but for its advice to Python's programmers."""
    if "int_max_str_digits" in str(error):
        return f"an integer is too long, with more than {sys.get_int_max_str_digits()} digits"
    return str(error)[:200]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > _MAX_MEMBERS:
        raise ValueError(f"an object has {len(pairs)} members, at most {_MAX_MEMBERS} are read")
    unique: dict[str, object] = {}
    for name, value in pairs:
        if name in unique:
            raise ValueError(f"the key {name[:40]!a} is given twice in one object")
        unique[name] = value
    return unique


def check_nesting(parsed: object) -> None:
    """Raise ApiError for a value of more than MAX_NESTING levels."""
    level: list[object] = [parsed]
    for _ in range(MAX_NESTING + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise invalid(None, f"the body nests deeper than {MAX_NESTING} levels")


# ---- pydantic's findings as one sentence ----
def _first_problem(error: pydantic.ValidationError, body: Mapping[str, object]) -> ApiError:
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
    if finding["type"] == "missing":
        return invalid(param, f"{param} is missing", "missing_required_parameter")
    if finding["type"] in ("too_long", "too_short"):
        bound, limit = ("most", "max_length") if finding["type"] == "too_long" else ("least", "min_length")
        limit, num_items = finding["ctx"][limit], len(finding["input"])
        return invalid(param, f"{param}: must have at {bound} {limit} item{'s' if limit != 1 else ''}, got {num_items}")
    if finding["type"] == "union_tag_invalid":
        expected, tag = finding["ctx"]["expected_tags"], finding["ctx"]["tag"]
        return invalid(param, f"{param}: its type must be one of {expected}, got {_shown(tag)}")
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


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _shown(value: object) -> str:
    """A short form of a hostile value."""
    if isinstance(value, (dict, list)):
        return _kind(value)
    text = json.dumps(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= 2 * _MAX_SHOWN else text[: 2 * _MAX_SHOWN] + "..."
