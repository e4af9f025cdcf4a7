"""The trace that comes with `kog-bench agents`: an agent documents functions of this package. Made of the package's sources.

`python -m kog_dist.bench.service.own_trace FILE [SYSTEM_TOKENS]` writes it.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final

from kog_dist.bench.service.trace import Line

SYSTEM_TOKENS: Final = 20_000
BYTES_PER_TOKEN: Final = 4  # roughly, of source code and the tokenizers of today
_SHOWN: Final = ("rpc", "router", "chat", "runtime")  # folders whose files are in the system prompt
_EDITED: Final = ("affinity.py", "rules.py", "orders.py", "frames.py")  # of the router, three turns and a report each
_MAX_READ: Final = 6_000  # characters of a file that the tool gives
_TASK: Final = """\
You are an agent that edits the Python package below. Read a file before you edit it. Keep to its style: type hints, lines of at
most 130 characters, a docstring for each public function. After an edit run the tests. Files of the package:
"""


def own_trace(system_tokens: int = SYSTEM_TOKENS) -> list[Line]:
    """The lines of the trace, with a system prompt of about so many tokens."""
    return list(_lines(system_tokens))


def _lines(system_tokens: int) -> Iterator[Line]:
    yield {"tools": [_tool("read_file", "path"), _tool("edit_file", "path", "old", "new"), _tool("run_tests", "path")]}
    yield {"role": "system", "content": _system(system_tokens * BYTES_PER_TOKEN)}
    for number, name in enumerate(_EDITED):
        path, source = f"router/{name}", _source("router", name)
        old, new = _edit(source)
        yield {"role": "user", "content": f"In {path}, say in the docstring of the first function what it does not change."}
        yield from _call(f"call_{number}_0", "read_file", source[:_MAX_READ], path=path)
        yield from _call(f"call_{number}_1", "edit_file", f"edited {path}: 1 place", path=path, old=old, new=new)
        told = f"tests/unit/{path.replace('/', '/test_')}\n" + "." * 20 + " [100%]\n20 passed in 1.31s"
        yield from _call(f"call_{number}_2", "run_tests", told, path=path)
        yield _answer(content=f"{path} now says so, and its 20 tests pass. This is the function as it stands:\n\n{new}")


def _tool(name: str, *parameters: str) -> dict[str, object]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": name.replace("_", " "), "parameters": schema}}


def _call(call_id: str, name: str, result: str, **arguments: str) -> Iterator[Line]:
    """The agent calls a tool, and is told what came of it."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    yield _answer(content="", tool_calls=[call])
    yield {"role": "tool", "tool_call_id": call_id, "content": result}


def _answer(content: str, **fields: Any) -> Line:
    written = content + "".join(call["function"]["arguments"] for call in fields.get("tool_calls", ()))
    return {"role": "assistant", "content": content, **fields, "max_tokens": max(16, len(written) // BYTES_PER_TOKEN)}


def _edit(source: str) -> tuple[str, str]:
    """The first function of a file that has a docstring, and the same with a sentence more."""
    tree = ast.parse(source)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and ast.get_docstring(node))
    first = min(functions, key=lambda node: node.lineno)
    old = ast.get_source_segment(source, first) or ""
    head, quotes, tail = old.partition('"""')
    text, closing, rest = tail.partition('"""')
    return old, f"{head}{quotes}{text} It changes nothing that it is given.{closing}{rest}"


def _system(num_bytes: int) -> str:
    """The task, and files of the package until there is enough."""
    text = _TASK
    for folder in _SHOWN:
        for name in sorted(entry.name for entry in resources.files(f"kog_dist.{folder}").iterdir()):
            if name.endswith(".py") and len(text) < num_bytes:
                text += f"\n=== {folder}/{name}\n{_source(folder, name)}"
    return text[: max(num_bytes, len(_TASK))]


def _source(folder: str, name: str) -> str:
    return resources.files(f"kog_dist.{folder}").joinpath(name).read_text(encoding="utf-8")


if __name__ == "__main__":
    lines = own_trace(*map(int, sys.argv[2:]))
    Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
