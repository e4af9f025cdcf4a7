"""The import rules of docs/architecture.md, checked on the syntax tree."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From top to bottom; a file may import from its own layer and from those below it.
LAYERS = ("launch", "workers", "collectives", "core")
FOLDERS = {"launch": "launch", "workers": "workers", "collectives": "collectives"}
# Never imported by a rank process or the client when it starts, so never at the top of a module there.
HEAVY = {"torch", "ray", "cupy", "mpi4py", "matplotlib", "transformers", "llguidance"}
TORCH_MODULES = {"kog_dist/model/laneformer.py"}
BANNED = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj"}


def source_files() -> list[Path]:
    """All Python files of the package, each once (the links in kog_dist/ are not followed)."""
    found = [p for folder in ("launch", "workers", "collectives") for p in (ROOT / folder).rglob("*.py")]
    linked = {ROOT / "kog_dist" / folder for folder in FOLDERS}
    found += [p for p in (ROOT / "kog_dist").rglob("*.py") if not any(link in p.parents for link in linked)]
    return sorted(found)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; nobody changes it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def layer_of_module(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "kog_dist":
        return None
    return FOLDERS.get(parts[1], "core") if len(parts) > 1 else "core"


def imports(tree: ast.AST, *, top_only: bool = False) -> Iterator[str]:
    nodes = ast.iter_child_nodes(tree) if top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which layer they reach"
            module = node.module or ""
            yield module
            if module == "kog_dist":
                yield from (f"kog_dist.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(ROOT)
    own = FOLDERS.get(relative.parts[0], "core")
    if relative.parts[:2] in (("kog_dist", "bench"), ("kog_dist", "doctor")):
        own = "launch"  # benchmarks drive whole engines, and the doctor asks about all parts of them
    tree = parsed(path)
    for name in imports(tree):
        assert name.split(".")[0] not in BANNED, f"{relative} imports {name}: no pickle anywhere"
        target = layer_of_module(name)
        if target is not None:
            assert LAYERS.index(target) >= LAYERS.index(own), (
                f"{relative} ({own}) imports {name} ({target}): imports point down only"
            )


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    if relative in TORCH_MODULES or relative.startswith(("kog_dist/train/",)):
        return
    tree = parsed(path)
    for name in imports(tree, top_only=True):
        assert name.split(".")[0] not in HEAVY, (
            f"{relative} imports {name} at its top; import it inside the function that needs it"
        )


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_code_from_text(path: Path) -> None:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            name = (
                node.func.id
                if isinstance(node.func, ast.Name)
                else node.func.attr
                if isinstance(node.func, ast.Attribute)
                else ""
            )
            is_method = isinstance(node.func, ast.Attribute)
            if name in ("eval", "exec") and is_method:
                continue  # module.eval() of torch
            assert name not in BANNED_CALLS, f"{path.relative_to(ROOT)}:{node.lineno} calls {name}"


def test_router_knows_no_model_and_no_engine() -> None:
    allowed = ("kog_dist.router", "kog_dist.rpc", "kog_dist.errors")
    for path in sorted((ROOT / "kog_dist" / "router").glob("*.py")):
        ours = {name for name in imports(parsed(path)) if name.startswith("kog_dist.")}
        assert all(name.startswith(allowed) for name in ours), f"{path.name} imports {ours}"


def test_client_needs_only_messages_and_transport() -> None:
    allowed = {"kog_dist", "kog_dist.errors", "kog_dist.rpc", "kog_dist.rpc.messages", "kog_dist.rpc.transport", "kog_dist.wait"}
    path = ROOT / "kog_dist" / "rpc" / "client.py"
    ours = {name for name in imports(parsed(path)) if name.startswith("kog_dist")}
    assert ours <= allowed | {name for name in ours if name.rsplit(".", 1)[0] in allowed - {"kog_dist", "kog_dist.rpc"}}
