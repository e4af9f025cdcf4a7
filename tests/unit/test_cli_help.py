"""Commands answer at once: what they import before they need it is watched here; the time itself is a benchmark's matter."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = ("torch", "numpy", "zmq", "tokenizers", "safetensors", "jinja2", "rich", "psutil")


@pytest.mark.parametrize("module", ["kog_dist.launch.cli", "kog_dist.rpc.cli", "kog_dist.bench.cli"])
def test_help_imports_nothing_slow(module: str) -> None:
    program = (
        f"import sys; sys.argv = ['command', '--help']\n"
        f"from {module} import main\n"
        f"try:\n    main()\n"
        f"finally:\n    print('SLOW', *[name for name in {SLOW!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout
    assert done.stdout.splitlines()[-1] == "SLOW", "--help must not import these"


def test_entry_point_is_safe_from_ctrl_c_before_it_imports_anything() -> None:
    program = "import sys, kog_dist.launch.cli; print(sorted(set(sys.modules) & {'typer', 'json', 'pathlib', 'subprocess'}))"
    bare = subprocess.run([sys.executable, "-S", "-c", "import sys; print('typer' in sys.modules)"], capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert bare.stdout.strip() == "False"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "typer" not in done.stdout
