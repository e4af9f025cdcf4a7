"""What a small file asks for is refused before it is made: seconds and memory of a process with little of both."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kog_dist import model_limits
from kog_dist.config import read_file
from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.launch import flags, inspection
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.published_config import read_config, spec_of_folder
from kog_dist.model.shards import INDEX_NAME

BIG = 2**28
CONFIG: dict[str, Any] = {
    "model_type": "laneformer_tp", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64, "num_lanes": 8, "broadcast_delay": 1,
}  # fmt: skip
# Runs a flag of kog-launch with 100 MB more than the imports take, and prints its exit code.
BOUNDED = """
import resource, sys
from kog_dist.launch import flags, inspection
from kog_dist.model import checkpoint
from kog_dist.decode.plan import plan
from kog_dist.decode.plan import validate
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000, used + 100_000_000))
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
sys.exit(flags.run(sys.argv[1:]))
"""


def written(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_lanes": BIG, "num_attention_heads": BIG, "num_key_value_heads": BIG, "intermediate_size": BIG,
          "hidden_size": 2 * BIG, "vocab_size": BIG}, "hidden_size"),
        ({"num_lanes": 256, "num_attention_heads": 256, "num_key_value_heads": 256, "intermediate_size": 256,
          "hidden_size": 1024}, "num_lanes"),
        ({"num_attention_heads": 2 * model_limits.MAX_HEADS, "hidden_size": 4 * model_limits.MAX_HEADS}, "num_attention_heads"),
        ({"num_hidden_layers": BIG}, "num_hidden_layers"),
        ({"num_hidden_layers": model_limits.MAX_LAYERS}, "times num_lanes 8 must be at most"),
        ({"vocab_size": model_limits.MAX_VOCAB_SIZE + 1}, "vocab_size"),
        ({"intermediate_size": 2 * model_limits.MAX_INTERMEDIATE_SIZE}, "intermediate_size"),
        ({"max_position_embeddings": model_limits.MAX_CONTEXT + 1}, "max_position_embeddings"),
        ({"broadcast_delay": model_limits.MAX_LAYERS + 1}, "broadcast_delay"),
        ({"sliding_window": model_limits.MAX_WINDOW + 1, "swa_layers": [0]}, "sliding_window"),
    ],
)  # fmt: skip
def test_every_size_has_a_bound_that_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        spec_of_folder(written(tmp_path, **changes))


LANES = dict.fromkeys(("num_lanes", "num_attention_heads", "num_key_value_heads", "intermediate_size"), 128)
HEADS = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4096)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (LANES | {"hidden_size": 256}, dict.fromkeys(LANES, 256) | {"hidden_size": 512}),
        ({"num_hidden_layers": 2048}, {"num_hidden_layers": 2049}),
        ({"num_hidden_layers": 4096, "num_lanes": 4}, {"num_hidden_layers": 4097, "num_lanes": 1}),
        (HEADS | {"hidden_size": 8192}, dict.fromkeys(HEADS, 8192) | {"hidden_size": 16_384}),
        ({"hidden_size": 65_536}, {"hidden_size": 65_552}),
        ({"intermediate_size": 1_048_576}, {"intermediate_size": 1_048_584}),
        ({"vocab_size": 1_048_576}, {"vocab_size": 1_048_577}),
        ({"max_position_embeddings": 1_048_576}, {"max_position_embeddings": 1_048_577}),
        ({"broadcast_delay": 4096}, {"broadcast_delay": 4097}),
        ({"sliding_window": 2**31, "swa_layers": [0]}, {"sliding_window": 2**31 + 1, "swa_layers": [0]}),
    ],
)
def test_every_size_is_taken_up_to_its_bound(good: dict[str, Any], bad: dict[str, Any]) -> None:
    """As numbers: who changes a bound in kog_dist/model_limits.py changes it here."""
    read_config(CONFIG | good)
    with pytest.raises(ConfigError, match="must be at most"):
        read_config(CONFIG | bad)


def test_the_bounds_themselves_are_taken() -> None:
    spec = read_config(CONFIG | {"max_position_embeddings": model_limits.MAX_CONTEXT, "vocab_size": model_limits.MAX_VOCAB_SIZE})
    assert (spec.max_context, spec.vocab_size) == (model_limits.MAX_CONTEXT, model_limits.MAX_VOCAB_SIZE)
    lanes = model_limits.MAX_LANES
    layers = model_limits.MAX_LANES_OF_LAYERS // lanes
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_lanes"), lanes)
    assert read_config(CONFIG | sizes | {"hidden_size": 2 * lanes, "num_hidden_layers": layers}).num_lanes == lanes


@pytest.mark.parametrize("flag", ["--check", "--dry-run"])
def test_a_small_config_takes_little_memory_and_time(tmp_path: Path, flag: str) -> None:
    sizes = dict.fromkeys(("num_lanes", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"), BIG)
    written(tmp_path, hidden_size=2 * BIG, **sizes)
    command = [sys.executable, "-c", BOUNDED, flag, "--device", "cpu", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert "hidden_size must be at most" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_launcher_that_may_have_little_memory_says_so() -> None:
    for limit_kib in (100_000, 200_000):

        def lower(limit_bytes: int = limit_kib << 10) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

        command = [sys.executable, "-m", "kog_dist.launch.cli", "--check"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=lower)
        assert done.returncode == 3, done.stderr
        assert "raise its limit (ulimit -v)" in done.stderr
        assert done.stderr.count("\n") == 1


def test_memory_that_runs_out_later_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_out(*_: object, **__: object) -> str:
        raise MemoryError

    monkeypatch.setattr(inspection, "check", run_out)
    assert flags.run(["--check"]) == 3
    assert capsys.readouterr().err == "kog-launch: there is not enough memory; raise its limit (ulimit -v), or free some\n"


# ---- other files ----
def test_a_lone_surrogate_in_the_index_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (written(tmp_path) / INDEX_NAME).write_text('{"weight_map": {"a": "\\ud800.safetensors"}}')
    with pytest.raises(CheckpointError, match="lone surrogate"):
        open_checkpoint(tmp_path)


def test_an_index_of_too_many_files_is_refused(tmp_path: Path) -> None:
    places = {f"t{i}": f"{i}.safetensors" for i in range(model_limits.MAX_SHARDS + 1)}
    (written(tmp_path) / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match="names 1025 files, at most 1024 are accepted"):
        open_checkpoint(tmp_path)


def test_an_index_of_as_many_files_and_tensors_as_there_may_be_is_read(tmp_path: Path) -> None:
    for num_tensors, num_files, finding in (
        (1024, 1024, "0.safetensors"), (2**18, 1, "0.safetensors"), (2**18 + 1, 1, "at most 262144 are accepted")
    ):  # fmt: skip
        places = {f"t{i}": f"{i % num_files}.safetensors" for i in range(num_tensors)}
        (written(tmp_path) / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match=finding):  # a file that is not there comes after the bounds
            open_checkpoint(tmp_path)


def test_a_config_of_many_bytes_is_refused(tmp_path: Path) -> None:
    written(tmp_path, architectures=["x" * model_limits.FILES["config.json"].num_bytes])
    with pytest.raises(CheckpointError, match="it has more than 1048576 bytes"):
        spec_of_folder(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["ranks = " + "9" * 10_000, "a = " + "[" * 100_000, "a = " + "[" * 30_000, "a = " + "{b=" * 3_000,
     "a" + ".a" * 50_000 + " = 1", "a" + ".a" * 20_000 + " = 1", "[a" + ".a" * 20_000 + "]", "\n".join(["[[a]]"] * 100)],
    ids=["digits", "brackets", "few brackets", "braces", "parts", "few parts", "parts of a table", "tables"],
)  # fmt: skip
def test_hostile_settings_are_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hostile.toml"
    path.write_text(text)
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    why = r"hostile\.toml (is not valid TOML: |cannot be read: it has more than 65536 bytes)"
    with pytest.raises(ConfigError, match=why) as caught:
        read_file(path)
    assert len(str(caught.value)) < 1500
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before_bytes < 50 << 20
