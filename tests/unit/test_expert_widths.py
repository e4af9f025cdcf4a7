"""Families with experts against transformers at the widths of real models, in float32 as CPU ranks compute.

Two layers, or one where they are largest. Experts that have their width are a few, and where there are all 128 they are narrow: a
test has no 60 GB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kog_dist.bench.shapes import MOE
from kog_dist.decode.cpu import host_library
from tests.unit import moe_models
from tests.unit.moe_models import Reference
from tests.unit.test_moe_families import MARGIN, SINGLE, Run, force_choices, is_clear, relative_error

pytestmark = pytest.mark.sweep
LAYERS, VOCABULARY = 2, 512
CONTEXT = 160
MXFP4_SCALES = (119, 120)  # 2^-8 and 2^-7: codes have a mean square of 8.6, so 2,880 products have that of what is multiplied
needs_library = pytest.mark.skipif(host_library.library() is None, reason="needs a C compiler")
# Changes of a real shape, and how many tokens: in one case more than gpt-oss's window of 128 has.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "Qwen3-30B-A3B, 12 experts": ("qwen3-30b-a3b", {"num_experts": 12}, 12),
    "Qwen3-30B-A3B, narrow experts": ("qwen3-30b-a3b", {"moe_intermediate_size": 32}, 24),
    "gpt-oss, 6 experts": ("gpt-oss-20b", {"num_local_experts": 6, "num_hidden_layers": 1}, 8),
    "gpt-oss-120b, narrow experts": ("gpt-oss-120b", {"intermediate_size": 64}, 140),
}
KINDS: dict[str, tuple[Any, Any]] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}


def written(said: dict[str, Any], folder: Path) -> Any:
    """Write a folder of such a config with random weights; the same model of transformers in float64."""
    make_config, kind = KINDS[said["model_type"]]
    model = moe_models.plain(kind, make_config(**{key: value for key, value in said.items() if key != "quantization_config"}))
    torch.manual_seed(5)
    stored: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3 and name.endswith("_proj") and "quantization_config" in said:
                experts, inputs, outputs = parameter.shape
                stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
                stored[f"{name}_scales"] = torch.randint(
                    MXFP4_SCALES[0], MXFP4_SCALES[1] + 1, (experts, outputs, inputs // 32)
                ).byte()
                parameter.copy_(convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"]))
                continue
            noise = torch.randn(parameter.shape)
            if "norm" in name:
                noise = 1 + 0.2 * noise
            elif not name.endswith(("bias", "sinks")):
                noise *= parameter.shape[-1] ** -0.5 * (moe_models.ROUTER_SCALE if ".gate." in name or ".router." in name else 1)
            halves = noise.bfloat16()
            parameter.copy_(halves)
            stored |= by_expert(name, halves) if parameter.ndim == 3 and said["model_type"] == "qwen3_moe" else {name: halves}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said))
    save_file(stored, folder / "model.safetensors")
    return model


def by_expert(name: str, stack: torch.Tensor) -> dict[str, torch.Tensor]:
    """What files of Qwen3 have for the stack of all experts of a layer, (experts, rows, columns)."""
    prefix, _, matrix = name.rpartition(".")
    parts = (
        {"down_proj": stack} if matrix == "down_proj" else dict(zip(("gate_proj", "up_proj"), stack.chunk(2, dim=1), strict=True))
    )
    return {f"{prefix}.{idx}.{key}.weight": one.clone() for key, rows in parts.items() for idx, one in enumerate(rows)}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[int], Reference]]:
    """A folder, a prompt, and what transformers makes of it in float64."""
    name, changes, num_tokens = CASES[request.param]
    said = {**MOE[name], "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, **changes}
    folder = tmp_path_factory.mktemp("widths") / "model"
    prompt = np.random.default_rng(3).integers(0, VOCABULARY, num_tokens).tolist()
    yield folder, prompt, moe_models.reference(written(said, folder), prompt)
    (folder / "model.safetensors").unlink()


@needs_library
@pytest.mark.timeout(300)
def test_choices_are_the_same_where_the_margin_exceeds_rounding(case: tuple[Path, list[int], Reference]) -> None:
    folder, prompt, expected = case
    num_clear = 0
    for position, (_, router, chosen) in enumerate(Run(folder, np.float32, keeps_halves=True).tokens(prompt)):
        exact = np.stack([rows[position] for rows in expected.router])
        wanted = np.stack([rows[position] for rows in expected.chosen])
        assert np.abs(router - exact).max() < MARGIN / 2
        if is_clear(exact, wanted.shape[1]):
            num_clear += 1
            assert np.array_equal(chosen, wanted)
    assert num_clear > 0.9 * len(prompt)


@needs_library
@pytest.mark.timeout(300)
def test_with_transformers_choices_logits_agree(case: tuple[Path, list[int], Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    """Teacher-forced routing."""
    folder, prompt, expected = case
    calls = force_choices(monkeypatch, expected)
    run = Run(folder, np.float32, keeps_halves=True)
    errors = [relative_error(logits, expected.logits[position]) for position, (logits, _, _) in enumerate(run.tokens(prompt))]
    assert calls == [len(expected.chosen) * len(prompt)]
    assert max(errors) < SINGLE
