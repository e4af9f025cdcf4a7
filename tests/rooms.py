"""What twins look at, file by file: CI leaves out those whose rooms do not differ from the merge base.

`python -m tests.rooms COMMIT` prints the files that can be left out. Rooms of a file are the modules of this repository that it
imports, directly or not, also within functions; and what is not Python in the folders of these modules, such as device sources.
`tests/opened.py` checks whenever they run that they open nothing else.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of tests that compile device code for a CPU and run it there, of prefill around it, and of builds by nvcc.
TWINS = (
    "tests/unit/test_*twin.py", "tests/unit/test_word_log.py", "tests/unit/prefill/test_*.py", "tests/unit/test_expert_widths.py",
    "tests/unit/test_geometry.py", "tests/unit/test_monokernel_registers.py",
)  # fmt: skip
EVERYWHERE = (ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "Makefile", ROOT / ".ci", ROOT / "tests/unit/conftest.py")


def twins() -> list[Path]:
    """Files of tests that can be left out."""
    return sorted(path for pattern in TWINS for path in ROOT.glob(pattern))


@cache
def modules_of(name: str) -> tuple[Path, ...]:
    """Files that an import of `name` runs: each package on its way, and the module itself; none of other projects."""
    parts = name.split(".")
    if parts[0] not in ("kog_dist", "tests"):
        return ()
    paths = [ROOT.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    files = (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")))
    return tuple(file.resolve() for file in files if file.is_file())  # kog_dist/workers is a link


@cache
def imports(module: Path) -> frozenset[Path]:
    """Modules of this repository that a module names in its imports, wherever in it they are."""
    names = list[str]()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return frozenset(found for name in names for found in modules_of(name))


def closure(modules: Iterable[Path]) -> set[Path]:
    """These modules, and those that they import, directly or not."""
    found, left = set[Path](), list(modules)
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += imports(module)
    return found


@cache
def _has_modules(folder: Path) -> bool:
    return any(folder.rglob("*.py"))


class Rooms:
    """Of a file of tests."""

    def __init__(self, path: Path) -> None:
        self._modules = closure([path, ROOT / "tests" / "conftest.py"])
        self._folders = {folder for module in self._modules for folder in module.parents if ROOT in folder.parents}

    def has(self, path: Path) -> bool:
        """Whether the tests look at a file of the repository, which need not be there any more.

        What is not Python belongs to the nearest folder above it that has modules, in it or below: kernels to `workers`.
        """
        if any(path.is_relative_to(one) for one in EVERYWHERE):
            return True
        if path.suffix == ".py":
            return path in self._modules or not path.exists()  # who has imported it can be seen no more
        return next(folder for folder in path.parents if folder == ROOT or _has_modules(folder)) in self._folders


def untouched(changed: Iterable[Path]) -> Iterator[Path]:
    """Files of twins that look at none of these."""
    changes = list(changed)
    return (path for path in twins() if not any(map(Rooms(path).has, changes)))


def changed_since(commit: str) -> list[Path]:
    """Files that differ from a commit, or are gone, or that git does not know yet."""
    commands = (["diff", "--name-only", "--no-renames", "-z", commit, "--"], ["ls-files", "--others", "--exclude-standard", "-z"])
    found = [subprocess.run(["git", *one], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True) for one in commands]
    return [ROOT / name for one in found for name in one.stdout.split("\0") if name]


if __name__ == "__main__":
    for left_out in untouched(changed_since(sys.argv[1])):
        print(left_out.relative_to(ROOT))
