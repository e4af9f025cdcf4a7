"""Collects Python source that may be trained on: whole projects, cleaned, without duplicates."""

from __future__ import annotations

import hashlib
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import field
from importlib.metadata import Distribution, distributions
from itertools import chain
from pathlib import Path

from kog_dist.errors import ConfigError
from kog_dist.records import dataclass
from kog_dist.train.cleaning import Unfit, read_source, short_functions, standalone
from kog_dist.train.licences import PERMISSIVE, licence_of_folder, permissive_licence
from kog_dist.train.near_duplicates import NearDuplicates, Signature, signature

_SHARED_FUNCTION_LINES = (4, 40)  # functions whose copies elsewhere are looked for


@dataclass(frozen=True)
class Project:
    """A body of source under one licence. `files` are absolute paths; `root` is cut off to see folder names."""

    name: str
    version: str
    licence: str
    evidence: str  # what says so
    root: Path
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Document:
    """One cleaned source file. `functions`: its functions of 4 to 40 lines by `function_digest`, as `standalone` gives them."""

    project: str
    text: str
    functions: Mapping[bytes, str | None]


@dataclass
class Tally:
    """What became of the files of one project: kept ones, their bytes, and how many were dropped for which reason."""

    num_kept: int = 0
    num_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def installed_projects(site_packages: Sequence[Path] = ()) -> tuple[list[Project], dict[str, str]]:
    """The standard library and installed packages with a permissive licence; the others' names with what they say instead.

    site_packages: more folders with installed packages, as `pip install --target` makes them; of packages of the same name the
    environment's is taken. Raises ConfigError if there is nothing installed in such a folder.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"]).resolve()
    own = tuple(path for path in sorted(stdlib.rglob("*.py")) if "site-packages" not in path.relative_to(stdlib).parts)
    projects = [Project("python-stdlib", platform.python_version(), "PSF-2.0", "part of Python", stdlib, own)]
    refused = {}
    for distribution in chain(distributions(), *(_distributions_of(folder) for folder in site_packages)):
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        files = tuple(sorted(Path(str(f.locate())) for f in distribution.files or () if f.suffix == ".py"))
        if not name or not files or any(project.name == name for project in projects):
            continue
        found = permissive_licence(distribution)
        if found.licence is None:
            refused[name] = found.evidence
        else:
            root = Path(str(distribution.locate_file("")))
            projects.append(Project(name, distribution.version, found.licence, found.evidence, root, files))
    return sorted(projects, key=lambda project: project.name), dict(sorted(refused.items()))


def _distributions_of(folder: Path) -> list[Distribution]:
    found = list(distributions(path=[str(folder)]))
    if not found:
        raise ConfigError(f"no packages are installed in {folder}; fill it with `pip install --no-deps --target {folder} NAME`")
    return sorted(found, key=lambda distribution: str(distribution.metadata["Name"]))


def folder_project(folder: Path, licence: str = "") -> Project:
    """A folder of source under a licence that the caller vouches for, or else the one that its licence files hold.

    Raises ConfigError if the licence is not permissive or the folder has no source.
    """
    folder = folder.resolve()
    evidence = "given by the caller"
    if not licence:
        found = licence_of_folder(folder)
        if found.licence is None:
            raise ConfigError(f"{folder} has no permissive licence file ({found.evidence}); name its licence if you know it")
        licence, evidence = found.licence, found.evidence
    elif licence not in PERMISSIVE:
        raise ConfigError(f"{folder} is said to be under {licence!r}; only permissive licences are used: {', '.join(PERMISSIVE)}")
    files = tuple(sorted(folder.rglob("*.py")))
    if not files:
        raise ConfigError(f"{folder} holds no .py files; give a folder with Python source")
    return Project(folder.name.lower(), "local", licence, evidence, folder, files)


def documents(
    projects: Sequence[Project], tallies: dict[str, Tally], *, max_project_bytes: int, num_processes: int
) -> Iterator[Document]:
    """Clean the files of all projects; of texts that are the same or nearly so only the first is kept, whatever its project.

    At most `max_project_bytes` per project. The order of the projects is the caller's; files are ordered by their content.
    `tallies` is filled by project name on the way.
    """
    seen: set[str] = set()
    near = NearDuplicates()
    with ProcessPoolExecutor(num_processes) if num_processes > 1 else nullcontext() as pool:
        for project in projects:
            tally = tallies.setdefault(project.name, Tally())
            roots = [project.root] * len(project.files)
            examined = pool.map(_examine, project.files, roots, chunksize=16) if pool else map(_examine, project.files, roots)
            fit: dict[str, _Examined] = {}
            for found in examined:
                if isinstance(found, str):
                    tally.dropped[found] += 1
                elif found.digest in seen or found.digest in fit:
                    tally.dropped["same"] += 1
                else:
                    fit[found.digest] = found
            for digest in sorted(fit):
                found = fit[digest]
                num_bytes = len(found.text.encode())
                if tally.num_bytes + num_bytes > max_project_bytes:
                    tally.dropped["project is large"] += 1
                elif not near.add(found.signature):
                    tally.dropped["nearly the same"] += 1
                else:
                    tally.num_kept += 1
                    tally.num_bytes += num_bytes
                    yield Document(project.name, found.text, found.functions)
            seen |= fit.keys()


def function_digest(lines: Iterable[str]) -> bytes:
    """Eight bytes that copies of a function share, however they are indented."""
    return hashlib.sha256("\n".join(line.strip() for line in lines).encode()).digest()[:8]


@dataclass(frozen=True)
class _Examined:
    text: str
    digest: str
    signature: Signature
    functions: Mapping[bytes, str | None]


def _examine(path: Path, root: Path) -> _Examined | str:
    """A cleaned file, or the reason why it is dropped."""
    try:
        source = read_source(path, root)
    except Unfit as reason:
        return str(reason)
    text, lines = source.text, source.text.split("\n")
    functions = {
        function_digest(own): standalone(node, own) for node, own in short_functions(source.tree, lines, _SHARED_FUNCTION_LINES)
    }
    return _Examined(text, hashlib.sha256(text.encode()).hexdigest(), signature(text), functions)
