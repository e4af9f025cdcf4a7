"""`kog-bench quality --kv` and `--needle` on the demo model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kog_dist.bench import kv_quality, needle
from kog_dist.decode.kv_formats import KV_FORMATS
from kog_dist.errors import ConfigError
from kog_dist.model.laneformer import KvCache, Laneformer
from kog_dist.model.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "kog_dist" / "models" / "demo"
TEXT = "def area(radius):\n    return 3.14 * radius ** 2\n" * 8


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(DEMO)
    assert found is not None
    return found


def test_every_type_has_a_line_and_a_row(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kv_quality.run(DEMO, text, num_tokens=60)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["float16", "bfloat16", *KV_FORMATS]
    plain, bfloat16, fp8, int4 = json.loads(lines[-1])["figures"]
    assert (plain["kl"], plain["same_tokens_percent"]) == (0.0, 100.0)
    assert 0 < bfloat16["kl"] < fp8["kl"]
    assert int4["kl"] > fp8["kl"]
    errors = [one["logit_error"] for one in (plain, bfloat16, fp8, int4)]
    assert 0 == errors[0] < errors[1] < errors[2] < errors[3] < 0.2
    assert all(one["logit_error"] < one["most_logit_error"] for one in (bfloat16, fp8, int4))
    ids = torch.tensor([tokenizer().encode(TEXT)[:60]])
    with torch.no_grad():
        logits = Laneformer.from_checkpoint(DEMO)(ids)[0]
    expected = math.exp(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).item())
    assert math.isclose(plain["perplexity"], expected, rel_tol=1e-3)


def test_kl_and_errors_of_logits_are_those_of_the_definition() -> None:
    """Of logits, to which 7 and -3 were added: that changes no probability, and counts as an error of logits."""
    ours, theirs = np.log([0.5, 0.25, 0.25]) + 7, np.log([0.25, 0.5, 0.25]) - 3
    loss, error, kl, same = kv_quality._compared(ours, theirs, 2)
    assert math.isclose(error, math.dist(ours, theirs) / math.hypot(*theirs))
    assert math.isclose(loss, math.log(4))
    assert math.isclose(kl, 0.25 * math.log(2))
    assert not same
    assert kv_quality._compared(theirs, theirs, 0)[1:] == (0.0, 0.0, True)


@pytest.mark.parametrize(
    ("name", "bits"), [("float16", (16, 16)), ("fp8", (8.25, 8.125)), ("int4", (5.25, 5.125))]
)  # of head_dim 64 and 128
def test_bits_count_scales(name: str, bits: tuple[float, float]) -> None:
    assert tuple(kv_quality.bits_per_value(name, dim) for dim in (64, 128)) == bits


def test_numbers_are_hidden_in_equal_distances() -> None:
    ids = needle.haystack(tokenizer(), TEXT, 600)
    assert len(ids) == 600
    whole = tokenizer().decode(ids)
    at = [whole.index(f"The secret number of {city} is {number}.") / len(whole) for city, number in needle.NUMBERS.items()]
    assert np.allclose(at, np.arange(0.05, 1, 0.1), atol=0.05)
    with pytest.raises(ConfigError, match="100 tokens have no room for 10 numbers"):
        needle.haystack(tokenizer(), TEXT, 100)


def test_answers_are_those_of_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in chunks, and asked again and again behind the same text."""
    monkeypatch.setattr(needle, "_CHUNK_TOKENS", 24)
    ids, questions = tokenizer().encode(TEXT)[:70], [[17, 300, 42], [7, 99]]
    oracle = Laneformer.from_checkpoint(DEMO)
    with torch.no_grad():
        for form in (torch.float16, "int4"):
            oracle.round_keys_and_values(form)
            found = needle._answers(oracle, ids, questions, 3)
            for question, answer in zip(questions, found, strict=True):
                logits = oracle(torch.tensor([[*ids, *question, *answer[:-1]]]), KvCache())[0]
                assert logits[-3:].argmax(-1).tolist() == answer


def test_a_text_beyond_the_context_is_refused(text: Path) -> None:
    with pytest.raises(ConfigError, match=r"exceed the model's context of \d+; lower --tokens"):
        needle.run(DEMO, text, num_tokens=Laneformer.from_checkpoint(DEMO).spec.max_context)
