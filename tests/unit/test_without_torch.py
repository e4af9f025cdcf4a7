"""Serving needs no torch, which has 700 MB and takes seconds to import; what needs it says which extra brings it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kog_dist.errors import LaunchError, install, naming_extra

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "kog_dist" / "models" / "demo"


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment whose processes, and theirs, find no torch."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}


def test_cpu_ranks_decode_without_torch(without_torch: dict[str, str]) -> None:
    command = [str(BIN / "kog-launch"), *"--device cpu --ranks 2 --max-tokens 3 --prompt".split(), "def area("]
    done = subprocess.run(command, env=without_torch, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 generated" in done.stdout + done.stderr


PREFILL = """
import sys
from pathlib import Path
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.workers.engines import cuda, cuda_start
from kog_dist.workers.prefill import gpu
from kog_dist.workers.prefill.exchange import peer_exchange
from tests.unit.prefill.models import Rank
assert Rank(open_checkpoint(Path(sys.argv[1]), verify=False)).run([1, 2, 3]) == 3
"""


def test_prefill_runs_without_torch(without_torch: dict[str, str]) -> None:
    command = [sys.executable, "-c", PREFILL, str(DEMO)]
    done = subprocess.run(command, env=without_torch, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ["workers", "collectives", "launch", "kog_dist/cuda", "kog_dist/decode", "kog_dist/runtime"])
def test_what_a_rank_is_made_of_never_imports_torch(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 3
    wanted = [str(path.relative_to(ROOT)) for path in files if re.search(r"^\s*(from|import) torch\b", path.read_text(), re.M)]
    assert wanted == []


def test_training_without_torch_names_the_extra(without_torch: dict[str, str], tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, "-m", "kog_dist.train", "evaluate", "--functions", tmp_path / "none.json"]
    command += ["--tokenizer", DEMO / "tokenizer.json", "--model", DEMO]
    done = subprocess.run(command, env=without_torch, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == LaunchError.exit_code
    assert done.stderr == f"python -m kog_dist.train: this needs torch, which is not installed: {install('train')}\n"


def test_a_module_that_no_extra_brings_is_an_error_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError, match="frobnicate"), naming_extra("train"):
        raise ModuleNotFoundError("No module named 'frobnicate'", name="frobnicate")
