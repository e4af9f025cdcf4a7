"""Python, the packages that pyproject.toml asks for, and which build of torch there is."""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from kog_dist.doctor.report import Finding, ok, problem, warning
from kog_dist.errors import install

_DISTRIBUTION = "kog-dist"
_ROOT = Path(__file__).parents[2]  # of the repository, where this is one
_OLDEST_PYTHON = (3, 11)
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(?:>=\s*(?P<least>[0-9.]+))?[^;]*(?:;.*extra == ['\"](?P<extra>\w+))?"
)
EXTRAS = {  # what each is for
    "cuda": "GPUs",
    "train": "training",
    "gguf": "GGUF files",
    "mpi": "mpirun",
    "ray": "Ray",
    "bench": "plots",
}


def python() -> Iterator[Finding]:
    """Version, and the operating system."""
    version, place = platform.python_version(), f"{sys.executable} on {platform.system()} {platform.release()}"
    if sys.version_info < _OLDEST_PYTHON:
        yield problem(f"Python {version} is too old; install 3.11 or newer", version=version)
    elif platform.system() != "Linux":
        yield problem(f"{platform.system()} is not supported; use Linux")
    elif platform.machine() != "x86_64":
        yield warning(
            f"the order of stores between processes is proven for x86-64 only, and this is {platform.machine()}; use x86-64"
        )
    else:
        yield ok(f"Python {version}, {place}", version=version, executable=sys.executable, kernel=platform.release())


def packages() -> Iterator[Finding]:
    """Those that every engine needs, then the optional ones by extra."""
    remedy = "pip install . in a clone"
    try:
        own, wanted = metadata.version(_DISTRIBUTION), metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        own, wanted, remedy = "from a folder of sources", _wanted_by_sources(), "pip install -e ."
        if not wanted:
            yield warning(f"{_DISTRIBUTION} is not installed, so versions are not compared; install it with {remedy}")
            return
    matches = [match for match in map(_REQUIREMENT.match, wanted) if match]
    core = [(match["name"], match["least"] or "0") for match in matches if match["extra"] is None]
    found = {name: _version(name) for name, _ in core}
    missing = [name for name, version in found.items() if version is None]
    if missing:
        yield problem(f"packages are missing: {', '.join(missing)}; {remedy}", missing=missing)
    for name, least in core:
        version = found[name]
        if version is not None and _numbers(version) < _numbers(least):
            yield problem(f"{name} {version} is too old; pip install '{name}>={least}'", package=name, version=version)
    present = {name: version for name, version in found.items() if version is not None}
    shown = ", ".join(f"{name} {version}" for name, version in present.items())
    yield ok(f"{_DISTRIBUTION} {own}{f' with {shown}' if shown else ''}", version=own, packages=present)
    for extra, purpose in EXTRAS.items():
        yield _extra(extra, purpose, [(m["name"], m["least"] or "0") for m in matches if m["extra"] == extra])


def _wanted_by_sources() -> list[str]:
    """What pyproject.toml beside the package asks for, as an installed distribution says it; empty where there is none."""
    try:
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return []
    extras = project["optional-dependencies"].items()
    return [*project["dependencies"]] + [f'{name}; extra == "{extra}"' for extra, names in extras for name in names]


def torch_build() -> Iterator[Finding]:
    """Whether torch can use GPUs, as training there needs it to."""
    version, spec = _version("torch"), util.find_spec("torch")
    if version is None or spec is None or spec.origin is None:
        return
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    cuda = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", text, re.M)
    yield ok(
        f"torch {version} is a {f'CUDA {cuda[1]}' if cuda else 'CPU'} build", version=version, cuda=cuda[1] if cuda else None
    )


def _extra(extra: str, purpose: str, wanted: list[tuple[str, str]]) -> Finding:
    found = {name: _version(name) for name, _ in wanted}
    missing = [name for name, version in found.items() if version is None]
    old = [f"{name} {found[name]}" for name, least in wanted if found[name] and _numbers(str(found[name])) < _numbers(least)]
    remedy = install(extra)
    if old:
        return warning(f"for {purpose}: {' and '.join(old)} {'is' if len(old) == 1 else 'are'} too old; {remedy}", extra=extra)
    if missing:
        return ok(f"for {purpose}, where it is wanted: {remedy} (not here: {', '.join(missing)})", extra=extra, missing=missing)
    return ok(f"for {purpose}: {', '.join(f'{name} {version}' for name, version in found.items())}", extra=extra, packages=found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
