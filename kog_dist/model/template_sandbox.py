"""The process that renders a chat template: started by `chat_template`, one JSON object per line in and one per line out.

The template runs in jinja2's immutable sandbox, and the kernel limits memory. A timer of the core's time, whose default
action ends the process, bounds every render, even inside one long operation of the interpreter. The parent starts another
process if need be.
"""

from __future__ import annotations

import functools
import json
import re
import resource
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kog_dist.model.marked_text import Marked, Marks


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


class _MarkingCode(jinja2.compiler.CodeGenerator):
    """Compiled templates make and join texts by the environment, which knows of marks."""

    def _output_child_pre(self, node: object, frame: object, finalize: object) -> None:
        self.write("environment.text_of(")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: object) -> None:  # noqa: N802 - jinja2's way
        self.write("environment.concat((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that published chat templates are written for. What a render is given comes out marked as such.

    It has one template and renders once at a time.
    """

    code_generator_class = _MarkingCode
    intercepted_binops = frozenset({"+", "%", "*"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self.marks = Marks((), ())
        self.filters["tojson"] = _tojson
        self.filters = {name: self._marking(function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._marking(_strftime_now)

    def concat(self, pieces: Any) -> str:
        """The pieces of an output, or the operands of `~`, as one text."""
        return self.marks.joined(pieces)

    def text_of(self, value: object) -> str:
        """What stands in the output for a value."""
        return self.marks.text_of(value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja2's way
        """Call an object from the template; methods of texts with marks."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and isinstance(__obj, types.BuiltinMethodType):
            for name in ("_loop_vars", "_block_vars"):  # for functions that want a context
                kwargs.pop(name, None)
            return __self.marks.call(getattr(str, __obj.__name__), (owner, *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: object, operator: str, left: object, right: object) -> object:
        """An operation of the template."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return self.marks.joined((left, right))
        return self.marks.call(self.binop_table[operator], (left, right), {})

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's own `str.format`, with marks."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        owner, name = value.__self__, value.__name__

        def formatted(*args: Any, **kwargs: Any) -> str:
            def plain(form: str, *args: Any, **kwargs: Any) -> str:
                function = super(TemplateEnvironment, self).wrap_str_format(getattr(str.__str__(form), name))
                assert function is not None
                return function(*args, **kwargs)

            return self.marks.call(plain, (owner, *args), kwargs)  # type: ignore[no-any-return]

        return formatted

    def _marking(self, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)  # with the attributes by which jinja2 passes a context
        def marked(*args: Any, **kwargs: object) -> Any:
            return self.marks.call(function, args, kwargs)

        return marked


def make_environment() -> TemplateEnvironment:
    """A new environment."""
    return TemplateEnvironment()


def _tojson(
    value: object,
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


def render_marked(
    environment: TemplateEnvironment, template: jinja2.Template, request: Mapping[str, Any], rules: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a request: of `given`, which comes out marked, and of `own`, variables of the model. And the runs of marked
    characters in it, if they make a difference to its special tokens.

    `rules`: `specials`, the texts of special tokens; `everything`, see Marks; `max_characters`. Raises TooLong.
    """
    given, specials = request["given"], rules["specials"]
    environment.marks = Marks(specials, [*_texts(request), rules["source"]], everything=rules["everything"])
    pieces, total = [], 0
    variables = {name: environment.marks.marked(value) for name, value in given.items()}
    for piece in template.generate(**variables, **request["own"]):
        total += len(piece)
        if total > rules["max_characters"]:
            raise TooLong(f"the output exceeds {rules['max_characters']} characters")
        pieces.append(piece)
    text = environment.concat(pieces)
    if not isinstance(text, Marked):
        return text, []
    if not rules["everything"]:
        spans = (match.span() for match in _tags(tuple(specials)).finditer(text))
        if all(text.startswith(text.twin[begin:end], begin) for begin, end in spans):
            return str.__str__(text), []
    return str.__str__(text), [match.span() for match in environment.marks.runs.finditer(text.twin)]


@functools.lru_cache(1)
def _tags(specials: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")


def _texts(value: object) -> Iterator[str]:
    """All strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)


def _variables(environment: TemplateEnvironment, source: str) -> list[str]:
    """Names that a template looks up without making them itself."""
    return sorted(jinja2.meta.find_undeclared_variables(environment.parse(source)))


def _reply(kind: str, answer: object) -> None:
    sys.stdout.write(json.dumps({kind: answer}) + "\n")
    sys.stdout.flush()


def _limit_memory(max_bytes: int) -> None:
    for kind, limit in ((resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; we end when our input does
    settings = {"source": "", **json.loads(sys.stdin.readline())}
    seconds = float(settings["seconds"])
    environment = make_environment()
    _limit_memory(int(settings["memory_bytes"]))
    templates: dict[str, jinja2.Template] = {}
    _reply("ready", "")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            request = json.loads(line)
            kind: str = "text"
            answer: object
            if (source := request.get("source")) is not None:
                templates[request["name"]] = environment.from_string(source)
                settings["source"] += source
                answer = _variables(environment, source)
            else:
                answer = render_marked(environment, templates[request["name"]], request, settings)
        except RaisedByTemplate as error:
            kind, answer = "raised", str(error)[:500]
        except MemoryError:
            kind, answer = "limit", f"it needs more than {settings['memory_bytes']} bytes of memory"
        except (TooLong, RecursionError) as error:
            kind, answer = "limit", str(error)[:500]
        except Exception as error:  # whatever a template can provoke is an answer, not the end of this process
            kind, answer = "failed", f"{type(error).__name__}: {error}"[:500]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(kind, answer)


if __name__ == "__main__":
    _serve()
