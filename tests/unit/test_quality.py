"""`kog-bench quality` on the demo model: losses of the definition, and what it says of formats."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kog_dist.bench import quality
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.errors import ConfigError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import Laneformer
from tests.unit.formats.folders import made

DEMO = Path(__file__).parents[2] / "kog_dist" / "models" / "demo"
IDS = [17, 300, 42, 7, 99, 1024, 5, 6]


def test_losses_and_choices_are_those_of_the_oracle() -> None:
    checkpoint = open_checkpoint(DEMO)
    engine = Interpreter(make_plan(checkpoint.spec, 1), 0, checkpoint.rank_weights(range(checkpoint.spec.num_lanes)), None)
    with torch.no_grad():
        logits = Laneformer.from_checkpoint(DEMO, torch.float64)(torch.tensor([IDS]))[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(IDS[1:]), reduction="none")
    scores = quality._scores(engine, IDS)
    assert np.allclose(quality._losses(scores, IDS), expected.numpy(), rtol=1e-4)
    uneven = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], np.float32))
    assert np.allclose(quality._divergences(uneven[:1], uneven[1:]), 0.25 * np.log(2))
    told = quality._choices(engine, IDS[:3], 5, IDS[3:])
    assert told == logits[2:-1].argmax(-1).tolist()
    own = quality._choices(engine, IDS[:3], 5, None)
    assert own[0] == told[0]
    assert quality._choices(engine, IDS[:3], 5, own) == own


def test_every_form_has_a_line_and_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def area(radius):\n    return 3.14 * radius ** 2\n" * 4)
    quality.run(DEMO, text, num_tokens=40, answer_tokens=3, forms=("fp8-block", "int4-32", "none+head8"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["none", "fp8-block", "int4-32", "none+head8"]
    figures = json.loads(lines[-1])["figures"]
    plain, fp8, int4, head = figures
    assert head["bits_per_weight"] == plain["bits_per_weight"]
    spec = open_checkpoint(DEMO).spec
    assert math.isclose(plain["mb_per_token"] - head["mb_per_token"], spec.vocab_size * (spec.hidden_size - 2) / 1e6)
    assert 0 == plain["kl"] < head["kl"] < fp8["kl"] < int4["kl"]
    assert (plain["same_tokens_percent"], plain["same_answers"]) == (100.0, 20)
    assert 8 < fp8["bits_per_weight"] < 8.1
    assert 4.5 <= int4["bits_per_weight"] < 4.6
    assert plain["mb_per_token"] > fp8["mb_per_token"] > int4["mb_per_token"]
    assert math.isclose(fp8["perplexity"], plain["perplexity"], rel_tol=0.05)
    assert 50 < int4["same_tokens_percent"] <= fp8["same_tokens_percent"] <= 100


def test_quantised_models_are_refused(tmp_path: Path) -> None:
    made(tmp_path, "awq")
    for name in ("tokenizer.json",):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    with pytest.raises(ConfigError, match="are quantised already"):
        quality.run(tmp_path, tmp_path / "config.json", num_tokens=2, answer_tokens=1, forms=())
