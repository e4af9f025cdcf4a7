"""Arguments for functions of which nothing is known but names, annotations and defaults."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator

_VALUES = {
    "int": "0 1 2 3 5 7 10 -1 -4 64 100 255 1000".split(),
    "float": "0.0 0.5 1.5 -2.25 3.75 100.0 1e-3".split(),
    "bool": ["True", "False"],
    "str": [
        "''", "'a'", "'abc'", "'Hello World'", "'hello_world'", "'one two three'", "'a,b;c'", "'Some CamelCase Text'", "'42'",
        "'3.5'", "'key=value'", "'http://example.com/a/b?x=1&y=2'", "'/usr/lib/file.txt'", "'2024-03-15'", "'  padded  '",
        "'line one\\nline two'", "'<b>bold</b>'", "'1.2.3'", "'UPPER'",
    ],
    "bytes": ["b''", "b'abc'", "b'\\x00\\x01\\xff'", "b'key: value\\r\\n'"],
    "list": [
        "[]", "[1]", "[1, 2, 3]", "[3, 1, 2, 2]", "['a', 'b', 'c']", "[[1, 2], [3, 4]]", "[0.5, 1.5, 2.0]", "['b=1', 'a=2']",
        "[(1, 'a'), (2, 'b')]", "[5, -3, 8, 0]",
    ],
    "tuple": ["()", "(1, 2)", "(1, 2, 3)", "('a', 'b')", "(0.5, 2.5)", "(3, 4, 5, 6)"],
    "dict": ["{}", "{'a': 1}", "{'a': 1, 'b': 2}", "{'x': [1, 2], 'y': {'z': 3}}", "{1: 'one', 2: 'two'}", "{'name': 'value'}"],
    "set": ["{1, 2, 3}", "{'a', 'b'}", "set()"],
    "None": ["None"],
    "function": ["abs", "len", "str", "sum"],
}  # fmt: skip
_NAME_HINTS = {  # kind of value -> words of parameter names
    "int": """n i j k num count size index idx width height length start stop end max min limit depth level number bits year month
        day offset pos indent""",
    "float": "x y z a b c value ratio scale alpha t h s v r g",
    "str": """s str string text name key line path url word prefix suffix sep msg message label title pattern header content char
        filename source delimiter""",
    "list": """lst list seq items values args iterable elements data xs lines names keys sequence array it iterables parts words
        nums""",
    "dict": "d dict mapping kwargs options params config headers attrs dic",
    "function": "func function fn f key predicate callback",
    "bool": "flag is use strict reverse default",
    "tuple": "shape pair point color rgb version interval span",
    "bytes": "bytes buf buffer raw blob",
}
_ANNOTATION_HINTS = {  # kind of value -> words of annotations
    "int": "int",
    "float": "float complex number real",
    "bool": "bool",
    "str": "str anystr text",
    "bytes": "bytes bytearray",
    "list": "list sequence iterable iterator collection",
    "tuple": "tuple",
    "dict": "dict mapping",
    "set": "set",
    "None": "none optional",
    "function": "callable",
}


def invented_call(function: ast.FunctionDef, draw: random.Random) -> str:
    """A literal `((positional, ...), {"name": value})` for a call: mostly values that names and annotations suggest."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    given = [_invented_value(argument, draw) for argument in positional[:num_required]]
    for argument in positional[num_required:]:
        if draw.random() < 0.6:
            break
        given.append(_invented_value(argument, draw))
    if arguments.vararg is not None and len(given) == len(positional):
        given += [_invented_value(arguments.vararg, draw) for _ in range(draw.randrange(4))]
    named = [
        f"{argument.arg!r}: {_invented_value(argument, draw)}"
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None or draw.random() < 0.3
    ]
    return f"(({''.join(value + ', ' for value in given)}), {{{', '.join(named)}}})"


def _invented_value(argument: ast.arg, draw: random.Random) -> str:
    kinds = list(_hinted_kinds(argument))
    kind = draw.choice(kinds) if kinds and draw.random() < 0.75 else draw.choice(list(_VALUES))
    return draw.choice(_VALUES[kind])


def _hinted_kinds(argument: ast.arg) -> Iterator[str]:
    """Kinds of values that the annotation or, without one, the words of the name suggest."""
    if argument.annotation is not None:
        words, hints = set(re.findall(r"[a-z]+", ast.unparse(argument.annotation).lower())), _ANNOTATION_HINTS
    else:
        words, hints = set(argument.arg.lower().split("_")), _NAME_HINTS
    for kind, hinting in hints.items():
        if words & set(hinting.split()):
            yield kind
