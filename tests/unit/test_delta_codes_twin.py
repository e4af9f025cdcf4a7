"""Monokernels with quantised delta nets on a CPU, against the interpreter in float64 with the values of the codes.

Decays and betas have 16 bit, as published folders have them: in the kernel each of their rows is a sum of rows of codes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import Coding
from kog_dist.decode.kv_formats import KV_FORMATS
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.formats.lanes import lane_codes
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.coded_source import coding_of, is_coded
from kog_dist.workers.cuda.device_weights import DeviceWeights, from_tensors, needed_rows, to_values, to_words
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.delta_models import QUANTISED, WITHOUT_DELTA, published
from tests.unit.formats.writers import INT4, compressed, fp8_blocks, gptq
from tests.unit.test_coded_twin import CodedModel
from tests.unit.test_decode_twin import PROMPT, Model, answer
from tests.unit.test_delta_families import run
from tests.unit.test_delta_formats import quantise_outputs
from tests.unit.test_kinds_twin import NET, SMALL, interpreted, spec_of

pytestmark = needs_compiler
# Thread blocks own words of terms of several lanes, and the last one has fewer rows; three value heads to a key head.
ODD = spec_of(DeltaNet(4, 12, 64, 16, 3), AttentionMixer(12, 4, 16), DeltaNet(4, 12, 64, 16, 3), hidden_size=160)
USUAL = spec_of(NET, SMALL, NET, hidden_size=160)
PUBLISHED = spec_of(
    DeltaNet(4, 8, 128, 128, 4), AttentionMixer(4, 2, 256, qk_norm=True, rotary_dim=64, gated=True), hidden_size=160
)
# Parts of 128 columns: of each expert one, of the shared one two, so that warps have parts in two turns; and ten experts.
OF_EXPERTS = spec_of(NET, SMALL, ffn=Experts(512, ExpertsSpec(12, 8), 1024), hidden_size=160)
OF_MANY = spec_of(NET, SMALL, ffn=Experts(128, ExpertsSpec(40, 10), 256), hidden_size=160)
CASES: dict[str, tuple[ModelSpec, WeightFormat, tuple[int, ...]]] = {
    "FP8, blocks": (USUAL, WeightFormat("E4M3", 128, 128, "BF16"), (1, 4)),
    "FP8, a scale for each row, odd shapes": (ODD, WeightFormat("E4M3", 1, 0, "F32"), ()),
    "FP8, published heads and a cache of FP8": (PUBLISHED, WeightFormat("E4M3", 128, 128, "BF16"), ()),
    "FP8, experts beside a shared one": (OF_EXPERTS, WeightFormat("E4M3", 128, 128, "BF16"), (1,)),
    "INT4, experts beside a shared one": (OF_MANY, WeightFormat("INT4", 1, 32, "F16", has_zeros=True), (1,)),
    "INT4": (USUAL, WeightFormat("INT4", 1, 128, "BF16"), (1,)),
    "INT4, groups of 32 with zero points, odd shapes": (ODD, WeightFormat("INT4", 1, 32, "F16", has_zeros=True), ()),
}
# Such that keep delta nets in 16 bit: their first matrices, or all.
PLAIN = {
    "FP8, a scale for each row, plain nets": (WeightFormat("E4M3", 1, 0, "F32"), True, True),
    "INT4, plain nets": (WeightFormat("INT4", 1, 128, "BF16"), True, True),
    "INT4, plain inputs": (WeightFormat("INT4", 1, 32, "F16", has_zeros=True), True, False),
    "MXFP4, plain nets": (WeightFormat("E2M1", 1, 32, "E8M0"), True, True),
}
CACHES = {"FP8, published heads and a cache of FP8": "fp8"}


class CodedNets(CodedModel):
    """A random model with quantised delta nets."""

    def logits(self, ids: list[int]) -> Any:
        """See `interpreted`."""
        values = {name: to_values(words, self.dtype) for name, words in self.words.items()}
        return interpreted(self.spec, values | self.values, ids, self.kv_dtype)


@pytest.mark.parametrize("name", PLAIN)
def test_nets_have_16_bit_beside_codes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, *plain = PLAIN[name]
    coding = replace(Coding.of(form), plain_inputs=plain[0], plain_outputs=plain[1])
    model = CodedNets(USUAL, "bfloat16", form, monkeypatch)
    model.values = {tensor: values for tensor, values in model.values.items() if is_coded(tensor_layouts(USUAL), coding, tensor)}
    tokens, logits = answer(model, 2, tmp_path / "2", coding=coding, num_runs=1, begins_at_head=False)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    error = np.linalg.norm(logits - wanted[-1]) / np.linalg.norm(wanted[-1])
    print(name, error)
    assert error < 2e-3
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    if name == "INT4, plain nets":
        others, other_logits = answer(model, 1, tmp_path / "1", coding=coding, num_runs=1, begins_at_head=False)
        assert others == tokens
        assert other_logits.tobytes() == logits.tobytes()


class PublishedFolder(Model):
    """A model folder as an engine finds it: its forms decide what is in codes."""

    def __init__(self, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(checkpoint.spec, "bfloat16", monkeypatch)
        self.checkpoint = checkpoint

    def weights(self, shape: KernelShape) -> DeviceWeights:
        checkpoint, asked = self.checkpoint, list[str]()

        def tensor(name: str) -> Any:
            asked.append(name)
            return to_words(checkpoint.tensor(name), "bfloat16")[slice(*needed_rows(shape, name))]

        def codes(name: str, lane: int) -> Codes:
            return Codes.of(lane_codes(checkpoint, name, shape.hosted_lanes[lane]), np.asarray, shape.coding)

        made = from_tensors(shape, tensor, codes)
        plain = [name for name in checkpoint.layouts if not is_coded(checkpoint.layouts, shape.coding, name)]
        assert sorted(asked) == sorted(plain), "each once, and nothing else is read"
        return made

    def logits(self, ids: list[int]) -> Any:
        """Of the folder as CPU ranks read it, in float64."""
        return run(self.checkpoint, ids, np.float64)


INT4_IN_GROUPS = compressed("pack-quantized", **INT4, strategy="group", group_size=32)
FOLDERS = {
    "official FP8": (fp8_blocks(128, 128, scales=torch.bfloat16), QUANTISED, "none"),
    "rounded to INT4": (None, (), "int4"),
    "GPTQ of all but delta nets": (gptq(128), WITHOUT_DELTA, "none"),
    "INT4 of all but their inputs": (INT4_IN_GROUPS, (*WITHOUT_DELTA, "out_proj"), "none"),
    "INT4 in groups of two sizes": (
        compressed("pack-quantized", **INT4, strategy="group", group_size=128),
        WITHOUT_DELTA,
        "none",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_published_folder_computes_what_cpu_ranks_make_of_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, ends, quantize = FOLDERS[name]
    tensors = published("qwen3_5, on devices", tmp_path / "folder", method=method, ends=ends)
    if name == "INT4 in groups of two sizes":
        quantise_outputs(tmp_path / "folder", tensors, INT4_IN_GROUPS)
    checkpoint = open_checkpoint(tmp_path / "folder", quantize=quantize)
    assert checkpoint.spec.num_lanes == 2
    model = PublishedFolder(checkpoint, monkeypatch)
    tokens, logits = answer(model, 2, tmp_path / "2", coding=coding_of(checkpoint), num_runs=1, begins_at_head=False)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    error = np.linalg.norm(logits - wanted[-1]) / np.linalg.norm(wanted[-1])
    print(name, error)
    assert error < 2e-3
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_values_of_codes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits on any number of ranks."""
    spec, form, other_ranks = CASES[name]
    model = CodedNets(spec, "bfloat16", form, monkeypatch)
    model.kv_dtype = CACHES.get(name, "bfloat16")
    assert not any(name.endswith((".delta.wa.weight", ".delta.wb.weight")) for name in model.values)
    tokens, logits = answer(model, 2, tmp_path / "2", coding=Coding.of(form), begins_at_head=False)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    error = np.linalg.norm(logits - wanted[-1]) / np.linalg.norm(wanted[-1])
    print(name, error)
    assert error < (1.5e-2 if model.kv_dtype in KV_FORMATS else 2e-3), "a code may fall on the other side of a boundary"
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    for num_ranks in other_ranks:
        others, other_logits = answer(
            model, num_ranks, tmp_path / str(num_ranks), coding=Coding.of(form), num_runs=1, begins_at_head=False
        )
        assert others == tokens
        assert other_logits.tobytes() == logits.tobytes(), f"{num_ranks} ranks"
