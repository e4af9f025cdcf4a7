"""Processes of an engine and clients start at once: what they import is watched."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_a_client_needs_neither_numpy_nor_a_model() -> None:
    program = (
        "import sys, kog_dist.rpc.client, kog_dist.rpc.commands, kog_dist.rpc.transport as t; t.Access.of_instance('x')\n"
        "ours = {name for name in sys.modules if name.startswith('kog_dist.') and not name.startswith('kog_dist.rpc')}\n"
        "others = 'numpy', 'torch', 'tokenizers', 'psutil', 'typer', 'asyncio'\n"
        "print(sorted(ours), *[name for name in others if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    core = (
        "errors", "foreign_file", "quoting", "runtime", "runtime.folder_file", "runtime.instance", "runtime.process_arguments",
        "runtime.stages", "runtime.wait", "sampling_params", "strict_json",
    )  # fmt: skip
    assert done.stdout.strip() == str([f"kog_dist.{name}" for name in core])


@pytest.mark.parametrize("module", ["kog_dist.workers.worker, kog_dist.workers.engines.cpu", "kog_dist.workers.coordinator"])
def test_an_engine_on_cpus_imports_nothing_for_others(module: str) -> None:
    others = ("torch", "asyncio", "pydantic", "typer", "psutil", "tomllib")
    program = f"import sys, {module}; print(*[name for name in {others!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
