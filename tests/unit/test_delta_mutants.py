"""Damaged configs and indexes of models with gated delta nets: refused in a sentence, or read as transformers reads them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5MoeConfig, Qwen3NextConfig

from kog_dist.errors import KogError
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.families.computation import COMPUTATION
from kog_dist.model.shards import INDEX_NAME
from tests.fuzz.json_mutation import mutate_json
from tests.unit.delta_models import CONFIGS, published, random_model
from tests.unit.test_delta_families import run

PROMPT = [3, 1, 4, 1, 5]
FAMILIES = {"qwen3_5": Qwen3_5Config, "qwen3_5_moe": Qwen3_5MoeConfig, "qwen3_next": Qwen3NextConfig}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 0.5, 0.25, 1.0, 1e-9, 1e-5, 1e9, 2**70, "x", "", "silu", "swish", "sigmoid", "float32",
    "bfloat16", [], [1], {}, {"a": 1}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.2}, ["full_attention"] * 4,
    ["linear_attention"] * 4, ["linear_attention"] * 3 + ["full_attention"], [*["full_attention"] * 3, "linear_attention"],
]  # fmt: skip
NUM_QUICK, NUM_ALL = 24, 500  # of each family, configs and indexes: 3,000 in all
how_many = pytest.mark.parametrize(
    ("first", "last"), [(0, NUM_QUICK), pytest.param(NUM_QUICK, NUM_ALL, marks=[pytest.mark.service, pytest.mark.timeout(1200)])]
)
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp("m")
        published(family, made[family])
    return made


def accepted(folder: Path) -> Checkpoint | None:
    """None if an error of ours refuses it, in one sentence; any other error ends the test."""
    try:
        return open_checkpoint(folder)
    except KogError as error:
        said = str(error)
        assert 20 < len(said) < 1000, said
        assert "\n" not in said
        return None


def configs(intact: dict[str, Any], first: int, last: int) -> Iterator[dict[str, Any]]:
    """Values of the model's own keys, keys that are gone, misspelt or new; and any change of the document."""
    raw = json.dumps(intact).encode()
    for number in range(first, last):
        rng = random.Random(number)
        config = json.loads(raw)
        text = config.get("text_config", config)
        key = rng.choice(sorted(text))
        match number % 6:
            case 0 | 1:
                text[key] = rng.choice(VALUES)
            case 2:
                del text[key]
            case 3:
                text[rng.choice([*COMPUTATION, "a_name_of_next_year"])] = rng.choice(VALUES)
            case 4:
                at = rng.randrange(len(key))
                text[key[:at] + rng.choice("abz_") + key[at + rng.randrange(2) :]] = text.pop(key)
            case _:
                mutated = mutate_json(raw, rng)
                try:
                    config = json.loads(mutated or b"{}")
                except (ValueError, RecursionError):
                    config = {}
        yield config if isinstance(config, dict) else {}


def text_of(kind: Any, config: dict[str, Any]) -> Any:
    """As transformers reads it."""
    read = kind.from_dict(json.loads(json.dumps(config)))
    return getattr(read, "text_config", read)


@how_many
@families
def test_a_config_is_read_as_transformers_reads_it_or_refused(
    folders: dict[str, Path], family: str, first: int, last: int, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[family], tmp_path / "mutant"))
    intact = json.loads((folder / "config.json").read_text())
    plain, whole = text_of(FAMILIES[family], intact).to_dict(), open_checkpoint(folder)
    largest, state = np.abs(run(whole, PROMPT)).max(), random_model(family).float().state_dict()
    num_accepted = num_compared = 0
    for config in configs(intact, first, last):
        (folder / "config.json").write_text(json.dumps(config))
        if (checkpoint := accepted(folder)) is None:
            continue
        num_accepted += 1
        try:
            theirs = text_of(FAMILIES[family], config)
            is_same = {key: theirs.to_dict().get(key) for key in plain} == plain
            if is_same and checkpoint.spec == whole.spec:
                continue
            model = CONFIGS[family][0](theirs).eval()
            model.load_state_dict(state)
            with torch.no_grad():
                wanted = np.asarray(model(torch.tensor([PROMPT])).logits[0].float().numpy())
        except Exception:  # transformers refuses it, in one of many ways, or has tensors of another shape
            continue
        num_compared += 1
        if checkpoint.spec.max_context >= len(PROMPT):
            found = run(checkpoint, PROMPT)
            assert np.abs(found - wanted).max() < 1e-4 * largest, (config, checkpoint.spec)
    assert num_accepted > (last - first) // 10
    assert num_compared >= (last - first) // 100


@how_many
@families
def test_an_index_places_tensors_or_is_refused(
    folders: dict[str, Path], family: str, first: int, last: int, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[family], tmp_path / "mutant"))
    raw, whole = (folder / INDEX_NAME).read_bytes(), open_checkpoint(folder)
    num_accepted = 0
    for number in range(first, last):
        rng = random.Random(number)
        flipped = bytearray(raw)
        flipped[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        (folder / INDEX_NAME).write_bytes((mutate_json(raw, rng) if number % 2 else None) or bytes(flipped))
        if (checkpoint := accepted(folder)) is None:
            continue
        num_accepted += 1
        assert checkpoint.spec == whole.spec
        for name in rng.sample(sorted(whole.layouts), 4):
            assert np.array_equal(checkpoint.tensor(name), whole.tensor(name)), name
    assert num_accepted >= (last - first) // 100
