"""A small healing experiment on the CPU: what it compares, and that it goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kog_dist.errors import ConfigError
from kog_dist.train.__main__ import app
from kog_dist.train.distributed import Ranks
from kog_dist.train.healing import PLAIN, REFERENCE, REGROUPED, Healing, read_healing_config, table
from kog_dist.train.intervals import paired
from tests.unit.train.tokens import write_tokens

SHIPPED = Path(__file__).parents[3] / "configs" / "train" / "healing.toml"
SMALL = """
[model]
hidden_size = 32
num_layers = 3
num_heads = 4
num_kv_heads = 4
intermediate_size = 64
vocab_size = 320
max_context = 64
num_lanes = 4
delay = 0
[run]
num_steps = 20
batch = 2
time = 32
learning_rate = 1e-2
adam_learning_rate = 1e-2
warmup_steps = 2
[heal]
delay = 1
num_steps = 4
seeds = [0, 1]
warmup_steps = 1
final_batches = 2
"""


def test_the_command_heals_and_goes_on(tmp_path: Path) -> None:
    config, data, out = tmp_path / "small.toml", write_tokens(tmp_path / "tokens"), tmp_path / "out"
    config.write_text(SMALL, encoding="utf-8")
    command = ["healing", f"--config={config}", f"--data={data}", f"--out={out}", "--device=cpu"]

    def outcome(*more: str) -> dict[str, object]:
        result = CliRunner().invoke(app, [*command, *more], catch_exceptions=False)
        parsed: dict[str, object] = json.loads(result.stdout.strip().split("\n")[-1])
        return parsed

    assert outcome("--call-seconds=0") == {"finished": False, "table": str(out / "table.md"), "losses": {}}
    assert outcome()["finished"]
    written = json.loads((out / "results.json").read_text(encoding="utf-8"))
    runs = {(run["start"], run["seed"]): run for run in written["runs"]}
    assert len(runs) == 6
    # all begin with the same function or the same function with delay; regrouped it is another one with delay
    before = {start: runs[start, 0]["loss_before"] for start in (REFERENCE, PLAIN, REGROUPED)}
    assert [runs[start, 1]["loss_before"] for start in before] == list(before.values())
    assert before[PLAIN] > before[REFERENCE]
    assert before[REGROUPED] not in (before[PLAIN], before[REFERENCE])
    assert all(run["loss"] != run["loss_before"] for run in runs.values())
    assert written["coupling_inside_lanes"]["share_after"] > written["coupling_inside_lanes"]["share_before"]
    kept = (out / "runs" / "regrouped-seed0.json").read_bytes()
    (out / "runs" / "regrouped-seed1.json").unlink()
    assert outcome()["finished"]
    again = json.loads((out / "runs" / "regrouped-seed1.json").read_text(encoding="utf-8"))
    assert again["loss"] == runs[REGROUPED, 1]["loss"]
    assert (out / "runs" / "regrouped-seed0.json").read_bytes() == kept
    config.write_text(SMALL.replace("num_steps = 4", "num_steps = 5"), encoding="utf-8")
    with pytest.raises(ConfigError, match="other settings or data"):
        Healing(read_healing_config(config), data, out, Ranks(0, 1, torch.device("cpu")))


def test_differences_are_taken_seed_by_seed() -> None:
    results = [
        {"start": start, "seed": seed, "loss_before": 3.0, "loss": 2.0 + seed + extra}
        for start, extra in ((REFERENCE, 0.0), (PLAIN, 0.1), (REGROUPED, 0.05))
        for seed in (0, 1, 2)
    ]
    difference = paired({seed: 2.1 + seed for seed in range(3)}, {seed: 2.0 + seed for seed in range(3)})
    assert difference is not None
    assert difference.value == pytest.approx(0.1)
    assert "| as the units lie | 3 | 3.0000 | 3.1000 ± 2.4843 | +0.1000 ± 0.0000 |" in table(results)


def test_shipped_configuration_and_wrong_ones(tmp_path: Path) -> None:
    config = read_healing_config(SHIPPED)
    assert config.heal_settings(0).seed != config.settings.seed
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(SMALL.replace("delay = 0", "delay = 1"), encoding="utf-8")
    with pytest.raises(ConfigError, match="starts from a model of delay 0"):
        read_healing_config(wrong)
