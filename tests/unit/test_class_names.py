"""A class name means one thing in the whole product: whoever reads it need not look where it was imported from."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("kog_dist", "collectives", "launch", "workers")


def defined(tree: ast.AST) -> list[str]:
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def repeated(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class names that stand twice, with the files where they do."""
    found = defaultdict(list)
    for name, source in sources.items():
        for made in defined(ast.parse(source)):
            found[made].append(name)
    return {made: names for made, names in found.items() if len(names) > 1}


def test_no_class_name_stands_twice() -> None:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(paths) > 300, "the folders were not found"
    assert not repeated({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths})


def test_a_second_one_is_found() -> None:
    nested = "def make():\n    class Plan:\n        pass\n"
    assert repeated({"a.py": "class Plan:\n    pass\n", "b.py": nested, "c.py": "class Other: ..."}) == {"Plan": ["a.py", "b.py"]}
