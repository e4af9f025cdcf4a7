"""A client costs little: what it imports is watched."""

from __future__ import annotations

import subprocess
import sys


def test_a_client_needs_neither_numpy_nor_a_model() -> None:
    program = (
        "import sys, kog_dist.rpc.client, kog_dist.rpc.commands, kog_dist.rpc.transport as t; t.Access.of_instance('x')\n"
        "ours = {name for name in sys.modules if name.startswith('kog_dist.') and not name.startswith('kog_dist.rpc')}\n"
        "print(sorted(ours), *[name for name in ('numpy', 'torch', 'tokenizers', 'psutil', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    core = (
        "errors", "foreign_file", "quoting", "runtime", "runtime.folder_file", "runtime.instance", "runtime.process_arguments",
        "runtime.stages", "runtime.wait", "sampling_params", "strict_json",
    )  # fmt: skip
    assert done.stdout.strip() == str([f"kog_dist.{name}" for name in core])
