"""Collects Python source that may be trained on: whole projects, cleaned, each file once."""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from kog_dist.errors import ConfigError
from kog_dist.train.licences import PERMISSIVE, permissive_licence

END_OF_TEXT = "<|endoftext|>"
_MIN_CHARS, _MAX_CHARS = 200, 300_000
_SKIPPED_FOLDERS = frozenset(
    """test tests testing test_data testdata _vendor vendor vendored _vendored extern externals third_party site-packages
    dist-packages __pycache__ migrations node_modules pydoc_data encodings""".split()
)
_SKIPPED_NAMES = re.compile(
    r"(_pb2|_pb2_grpc|_generated|_lextab|_parsetab)\.py$|^(test_|conftest|_version|version\.py)|_test\.py$"
)
_GENERATED = re.compile(
    r"do not (edit|modify)|@generated|auto-?generated|(automatically|was|file) generated|generated (by|from|with)", re.IGNORECASE
)


@dataclass(frozen=True)
class Project:
    """A body of source under one licence. `files` are absolute paths; `root` is cut off to see folder names."""

    name: str
    version: str
    licence: str
    root: Path
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Document:
    """One cleaned source file."""

    project: str
    text: str


def installed_projects() -> tuple[list[Project], list[str]]:
    """The standard library and installed packages with a permissive licence; and the names of those that were refused."""
    stdlib = Path(sysconfig.get_paths()["stdlib"]).resolve()
    projects = [Project("python-stdlib", platform.python_version(), "PSF-2.0", stdlib, tuple(sorted(stdlib.rglob("*.py"))))]
    refused = []
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        files = tuple(sorted(Path(str(f.locate())) for f in distribution.files or () if f.suffix == ".py"))
        if not name or not files or any(project.name == name for project in projects):
            continue
        licence = permissive_licence(distribution)
        if licence is None:
            refused.append(name)
        else:
            projects.append(Project(name, distribution.version, licence, Path(str(distribution.locate_file(""))), files))
    return sorted(projects, key=lambda project: project.name), sorted(refused)


def folder_project(folder: Path, licence: str) -> Project:
    """A folder of source under a licence that the caller vouches for.

    Raises ConfigError if the licence is not permissive or the folder has no source.
    """
    if licence not in PERMISSIVE:
        raise ConfigError(f"{folder} is said to be under {licence!r}; only permissive licences are used: {', '.join(PERMISSIVE)}")
    files = tuple(sorted(folder.resolve().rglob("*.py")))
    if not files:
        raise ConfigError(f"{folder} holds no .py files; give a folder with Python source")
    return Project(folder.resolve().name.lower(), "local", licence, folder.resolve(), files)


def documents(projects: Iterable[Project], *, max_project_bytes: int, num_processes: int) -> Iterator[Document]:
    """Clean the files of all projects; each text once, at most `max_project_bytes` per project, in an order fixed by content."""
    seen: set[str] = set()
    with ProcessPoolExecutor(num_processes) if num_processes > 1 else nullcontext() as pool:
        for project in projects:
            roots = [project.root] * len(project.files)
            texts = (
                pool.map(_cleaned_file, project.files, roots, chunksize=16) if pool else map(_cleaned_file, project.files, roots)
            )
            by_digest = {hashlib.sha256(text.encode()).hexdigest(): text for text in texts if text is not None}
            num_bytes = 0
            for digest in sorted(by_digest.keys() - seen):
                num_bytes += len(by_digest[digest].encode())
                if num_bytes > max_project_bytes:
                    break
                yield Document(project.name, by_digest[digest])
            seen |= by_digest.keys()


def _cleaned_file(path: Path, root: Path) -> str | None:
    folders = path.relative_to(root).parts[:-1] if path.is_relative_to(root) else path.parts[:-1]
    if _SKIPPED_FOLDERS & set(folders) or _SKIPPED_NAMES.search(path.name):
        return None
    try:
        return clean(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def clean(text: str) -> str | None:
    """The source without licence header and trailing blanks, or None if it is junk: generated, tabular, foreign or invalid."""
    text = "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n"))
    text = _without_header(text).strip("\n") + "\n"
    if not _MIN_CHARS <= len(text) <= _MAX_CHARS or _GENERATED.search(text[:1000]) or END_OF_TEXT in text or "\t" in text:
        return None
    lines = text.split("\n")
    longest = max(map(len, lines))
    num_digits = sum(map(str.isdigit, text))
    num_foreign = sum(ord(character) > 126 for character in text)
    if longest > 400 or num_digits > 0.12 * len(text) or num_foreign > 0.02 * len(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text


def _without_header(text: str) -> str:
    """Drop the comment block at the top if it is about copyright; every project repeats its own in each file."""
    lines = text.split("\n")
    end = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    header = "\n".join(lines[:end]).lower()
    if "copyright" in header or "licen" in header or "coding" in header or header.startswith("#!"):
        return "\n".join(lines[end:])
    return text
