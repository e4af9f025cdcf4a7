"""The process that renders a chat template: started by `chat_template`, one JSON object per line in and one per line out.

The template runs in jinja2's immutable sandbox, the kernel limits memory, and an alarm whose default action ends the process
bounds every render, even inside one long operation of the interpreter. Its parent starts another one if need be.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class RaisedByTemplate(jinja2.TemplateError):
    """The template called raise_exception: the conversation is not one it accepts."""


class TooLong(Exception):
    """The output grew over its limit."""


def make_environment() -> jinja2.Environment:
    """The environment that published chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any], max_characters: int) -> str:
    """Render piece by piece; raises TooLong as soon as the output exceeds `max_characters`."""
    pieces, total = [], 0
    for piece in template.generate(**variables):
        total += len(piece)
        if total > max_characters:
            raise TooLong(f"the output exceeds {max_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


def _reply(kind: str, text: str) -> None:
    sys.stdout.write(json.dumps({kind: text}) + "\n")
    sys.stdout.flush()


def _limit_memory(max_bytes: int) -> None:
    for kind, limit in ((resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; we end when our input does
    settings = json.loads(sys.stdin.readline())
    seconds, max_characters = float(settings["seconds"]), int(settings["max_characters"])
    environment = make_environment()
    _limit_memory(int(settings["memory_bytes"]))
    template: jinja2.Template | None = None
    _reply("ready", "")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            request = json.loads(line)
            if template is None:
                template = environment.from_string(request["template"])
                kind, text = "text", ""
            else:
                kind, text = "text", render_bounded(template, request, max_characters)
        except RaisedByTemplate as error:
            kind, text = "raised", str(error)
        except MemoryError:
            kind, text = "limit", f"it needs more than {settings['memory_bytes']} bytes of memory"
        except (TooLong, RecursionError) as error:
            kind, text = "limit", str(error)
        except Exception as error:  # whatever a template can provoke is an answer, not the end of this process
            kind, text = "failed", f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(kind, text if kind == "text" else text[:500])


if __name__ == "__main__":
    _serve()
