"""The import rules of docs/architecture.md, checked on the syntax tree."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From top to bottom; a file may import from its own layer and from those below it.
LAYERS = ("launch", "workers", "collectives", "core")
FOLDERS = {"launch": "launch", "workers": "workers", "collectives": "collectives"}
TOP = ("bench", "doctor", "manual", "train")  # folders of kog_dist that may import everything, and that nothing else imports
# Never imported by a rank process or the client when it starts, so never at the top of a module there.
HEAVY = {"torch", "ray", "cupy", "mpi4py", "matplotlib", "transformers", "llguidance"}
TORCH_MODULES = {f"kog_dist/model/{name}.py" for name in ("laneformer", "lane_linear", "lane_experts", "kv_oracle")}
BANNED = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
# Who may name the interpreter: what starts children, and what only says where it is or looks for mpirun next to it.
NAMES_INTERPRETER = {
    "kog_dist/system/python_child.py",
    "kog_dist/doctor/mpi.py",
    "kog_dist/doctor/software.py",
    "launch/mpi/pair.py",
}
BANNED_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj"}
WRITES_METHODS = "kog_dist/records.py"  # `__init__` of the fields that a class names: nothing comes from outside


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


@functools.cache
def nodes(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Call | ast.Attribute]:
    """Those of a file's syntax tree that rules are about: walking through all trees takes longer than all rules."""
    wanted = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute)
    return [node for node in ast.walk(parsed(path)) if isinstance(node, wanted)]


def layer_of_module(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "kog_dist":
        return None
    return FOLDERS.get(parts[1], "core") if len(parts) > 1 else "core"


def imports(path: Path, *, top_only: bool = False) -> Iterator[str]:
    for node in ast.iter_child_nodes(parsed(path)) if top_only else nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which layer they reach"
            module = node.module or ""
            yield module
            if module == "kog_dist":
                yield from (f"kog_dist.{alias.name}" for alias in node.names)


def test_imports_point_down() -> None:
    wrong = []
    for path in source_files():
        relative = path.relative_to(ROOT)
        own = FOLDERS.get(relative.parts[0], "core")
        if relative.parts[0] == "kog_dist" and relative.parts[1] in TOP:
            own = "launch"  # benchmarks drive whole engines, and the doctor asks about all parts of them
        for name in imports(path):
            target = layer_of_module(name)
            if name.split(".")[0] in BANNED:
                wrong.append(f"{relative} imports {name}: no pickle anywhere")
            elif target is not None and LAYERS.index(target) < LAYERS.index(own):
                wrong.append(f"{relative} ({own}) imports {name} ({target}): imports point down only")
    assert not wrong


def test_nothing_imports_what_stands_on_top() -> None:
    wrong = []
    for path in source_files():
        relative = path.relative_to(ROOT)
        if relative.parts[0] == "kog_dist" and relative.parts[1] in TOP:
            continue
        names = [name for name in imports(path) if name.split(".")[0] == "kog_dist" and name.split(".")[1:2] != []]
        wrong += [f"{relative} imports {name}" for name in names if name.split(".")[1] in TOP]
    assert not wrong, f"product code imports none of {', '.join(TOP)}"


def module_name(path: Path) -> str:
    """`kog_dist.launch.cli` for launch/cli.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "kog_dist" else ("kog_dist", *parts))
    return name.removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Every module with those that it imports, also inside of functions and for types alone."""
    paths = {module_name(path): path for path in source_files()}
    graph: dict[str, set[str]] = {name: set() for name in paths}
    for own, path in paths.items():
        for node in nodes(path):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                names = {name if name in paths else node.module or "" for name in full}
            else:
                continue
            graph[own] |= {name for name in names if name in paths}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"{' -> '.join(error.args[1])}: move what both need below both")


def folder_graph() -> dict[str, set[str]]:
    """Every folder with those that its modules import, but for what is imported for types alone; a folder and what lies inside it
    are one house, and import each other as they like.
    """
    paths = {module_name(path): path for path in source_files()}
    folders = {name: str(path.parent.relative_to(ROOT)) for name, path in paths.items()}
    graph: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for own, imported in import_graph().items():
        imported = imported - imported_for_types(paths[own])
        targets = {folders[name] for name in imported}
        graph[folders[own]] |= {target for target in targets if not is_one_house(target, folders[own])}
    return graph


def imported_for_types(path: Path) -> set[str]:
    found = set[str]()
    for node in parsed(path).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found |= {f"{one.module}.{alias.name}" for one in node.body if isinstance(one, ast.ImportFrom) for alias in one.names}
            found |= {one.module or "" for one in node.body if isinstance(one, ast.ImportFrom)}
    return found


def is_one_house(folder: str, other: str) -> bool:
    return f"{folder}/".startswith(f"{other}/") or f"{other}/".startswith(f"{folder}/")


def test_no_folders_import_each_other_in_a_circle() -> None:
    graph = folder_graph()
    assert "workers/prefill/base" in graph["workers/prefill/dense"]
    assert "workers/prefill" not in graph["workers/prefill/dense"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"{' -> '.join(error.args[1])}: move what both need below both")


def test_sampling_reaches_the_engine_without_the_protocol() -> None:
    """What decodes knows SamplingParams; how they travel is RPC's."""
    below = ("kog_dist/runtime/abi.py", "kog_dist/decode/", "collectives/", "workers/cuda/")
    paths = [path for path in source_files() if str(path.relative_to(ROOT)).startswith(below)]
    assert len(paths) > 20
    wrong = [str(path) for path in paths if "kog_dist.rpc.fields" in set(imports(path))]
    assert not wrong


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    wrong = []
    for path in source_files():
        relative = str(path.relative_to(ROOT))
        if relative not in TORCH_MODULES and not relative.startswith("kog_dist/train/"):
            names = imports(path, top_only=True)
            wrong += [f"{relative} imports {name} at its top" for name in names if name.split(".")[0] in HEAVY]
    assert not wrong, "import it inside the function that needs it"


def test_no_code_from_text() -> None:
    wrong = []
    for path in source_files():
        for node in nodes(path):
            if isinstance(node, ast.Call):
                is_method = isinstance(node.func, ast.Attribute)  # such as module.eval() of torch
                name = getattr(node.func, "attr" if is_method else "id", "")
                is_own = name == "exec" and path == ROOT / WRITES_METHODS
                if name in BANNED_CALLS and not is_own and not (is_method and name in ("eval", "exec")):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {name}")
    assert not wrong


def test_children_are_started_in_one_place() -> None:
    wrong = []
    for path in source_files():
        if (relative := str(path.relative_to(ROOT))) in NAMES_INTERPRETER:
            continue
        for node in nodes(path):
            names = set()
            if isinstance(node, ast.Attribute):
                is_named = node.attr == "executable" and isinstance(node.value, ast.Name) and node.value.id == "sys"
                names = {"executable"} if is_named else set()
            elif isinstance(node, ast.ImportFrom) and node.module == "sys":
                names = {alias.name for alias in node.names} & {"executable"}
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names} & {"multiprocessing", "runpy"}
            wrong += [f"{relative} names {name}" for name in names]
    assert not wrong, "start Python with python_child.command"


def test_kccl_knows_no_model() -> None:
    """KCCL moves words between ranks: it gets mailboxes, and what they mean is said above it."""
    known = {"cuda", "errors", "records", "runtime", "system", "collectives"}
    for path in sorted((ROOT / "collectives").rglob("*.py")):
        ours = {name for name in imports(path) if name.startswith("kog_dist.")}
        assert {name.split(".")[1] for name in ours} <= known, f"{path.name} imports {ours}"


def test_router_knows_no_model_and_no_engine() -> None:
    allowed = (
        "kog_dist.router",
        "kog_dist.rpc",
        "kog_dist.errors",
        "kog_dist.records",
        "kog_dist.runtime.process_arguments",
        "kog_dist.runtime.process_page",
        "kog_dist.runtime.rounds",
    )
    for path in sorted((ROOT / "kog_dist" / "router").glob("*.py")):
        ours = {name for name in imports(path) if name.startswith("kog_dist.")}
        assert all(name.startswith(allowed) for name in ours), f"{path.name} imports {ours}"


def test_client_needs_only_messages_and_its_connection() -> None:
    own = {f"kog_dist.rpc.{name}" for name in ("messages", "connection", "transport")}
    loose = {"kog_dist.errors", "kog_dist.sampling_params", "kog_dist.speculation", "kog_dist.runtime.wait"}
    allowed = {"kog_dist", "kog_dist.rpc"} | loose | own
    path = ROOT / "kog_dist" / "rpc" / "client.py"
    ours = {name for name in imports(path) if name.startswith("kog_dist")}
    assert ours <= allowed | {name for name in ours if name.rsplit(".", 1)[0] in allowed - {"kog_dist", "kog_dist.rpc"}}
