"""Folders that benchmarks write as gpt-oss is published: an engine reads all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.fakes.published_gpt_oss import folder_bytes, write_gpt_oss
from kog_dist.bench.shapes import MOE
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.formats.lanes import lane_codes
from kog_dist.workers.cuda.coded_source import coding_of

SMALL = {
    **MOE["gpt-oss-20b"], "hidden_size": 128, "num_hidden_layers": 2, "num_local_experts": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 192, "vocab_size": 97,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpt-oss")
    write_gpt_oss(made, SMALL)
    return made


def test_every_tensor_is_there_as_the_config_says(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    coding = coding_of(checkpoint)
    assert coding is not None
    assert coding.is_of_experts
    assert (checkpoint.spec.num_layers, checkpoint.spec.hidden_size) == (2, 128)
    codes = lane_codes(checkpoint, "model.layers.1.feed_forward.experts.3.w2.weight", 0, may_split=True)
    assert codes.codes.shape[0] == 128


def test_its_size_is_foreseen(folder: Path) -> None:
    headers = 2**16
    assert 0 <= sum(file.stat().st_size for file in folder.glob("*.safetensors")) - folder_bytes(SMALL) < headers


def test_values_are_finite_and_differ(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in ("model.layers.0.feed_forward.experts.2.w1.weight", "model.tok_embeddings.weight"):
        values = checkpoint.tensor(name)
        assert np.isfinite(values).all()
        assert 1e-3 < np.std(values) < 1
        assert len(np.unique(values)) > 15
