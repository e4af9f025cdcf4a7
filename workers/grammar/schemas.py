"""JSON schemas as the library takes them, and what it says of them in words of their authors."""

from __future__ import annotations

import json
from typing import Any, Final

from kog_dist.json_schema import rewritten

FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # of texts, that the library enforces
_ONE_OF: Final = (
    "oneOf is enforced only where no value can satisfy two of its schemas; use anyOf, or set additionalProperties to false "
    "in each of them and require a property that the others do not have"
)


def without_unknown_formats(text: str) -> str:
    """The schema without formats that nobody can enforce: JSON Schema has them as notes, which stop nothing."""
    if '"format"' not in text:
        return text
    return json.dumps(rewritten(json.loads(text), _without_unknown_format))


def in_our_words(reason: str) -> str:
    """What the library says, without its options."""
    return _ONE_OF if "coerce_one_of" in reason else reason


def _without_unknown_format(schema: dict[str, Any]) -> dict[str, object]:
    found = schema.get("format")
    if not isinstance(found, str) or found in FORMATS:
        return schema
    return {key: value for key, value in schema.items() if key != "format"}
