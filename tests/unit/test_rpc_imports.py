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
        "errors", "foreign_file", "quoting", "records", "runtime", "runtime.folder_file", "runtime.instance",
        "runtime.process_arguments", "runtime.stages", "runtime.wait", "sampling_params", "speculation", "strict_json",
    )  # fmt: skip
    assert done.stdout.strip() == str([f"kog_dist.{name}" for name in core])


@pytest.mark.parametrize(
    "module", ["kog_dist.workers.worker, kog_dist.workers.engines.cpu", "kog_dist.workers.coordinator.process"]
)
def test_an_engine_on_cpus_imports_nothing_for_others(module: str) -> None:
    others = ("torch", "asyncio", "pydantic", "typer", "psutil", "tomllib")
    program = f"import sys, {module}; print(*[name for name in {others!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_who_starts_serves_and_hands_out_does_without_numpy() -> None:
    program = """
import sys
from kog_dist.config import LaunchConfig
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.runtime.ring import Finish
from kog_dist.gateway import server, service
from kog_dist.launch import supervisor
from kog_dist.launch.replicas import launch as replicas
from kog_dist.launch.target import choose_target
from kog_dist.router import process
from kog_dist.runtime.abi import WaitRecord
from kog_dist.runtime.control import ControlPage
from kog_dist.workers.coordinator import process as coordinator
from kog_dist.workers.coordinator.model_folder import ModelFolder

target = choose_target(LaunchConfig(device="cpu", ranks=2))
model = ModelFolder.from_folder(target.folder, target.model_name, 0)
assert model.tokenizer.decode(model.tokenizer.encode("a word")) == "a word"
page = ControlPage.create(2, model.spec.max_context, vocab_size=model.spec.vocab_size)
page.ring.put(1, 0, 7, 1, None, Finish.LENGTH, TokenLogprobs(-1.0, (7,), (-1.0,)))
assert page.ring.get(1, 0).logprobs.top_ids == (7,)
page.request_abort(1)
page.close()
print(*[name for name in ("numpy", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
