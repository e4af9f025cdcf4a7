"""The monokernel with quantised weights on a CPU (test_decode_twin.py), against the oracle with the values of the codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.steps import Phase
from kog_dist.model.formats.rounding import rounded
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.model.layout import is_layer_matrix, tensor_layouts
from kog_dist.workers.cuda.device_weights import DeviceWeights, from_tensors, needed_rows
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.sweeps import cases
from tests.unit.test_decode_twin import PROMPT, RUNS, SPEC, Model, answer, pytestmark  # noqa: F401

DENSE = replace(
    SPEC, shared_norm_scale=True, delay=0, hidden_size=160, num_heads=16, own_head_dim=16, intermediate_size=640, num_lanes=2,
    num_kv_heads=4,
)  # fmt: skip
FORMS = {
    "FP8, blocks": WeightFormat("E4M3", 128, 128, "F32"),
    "FP8, a scale for each row": WeightFormat("E4M3", 1, 0, "F32"),
    "INT4": WeightFormat("INT4", 1, 128, "BF16"),
    "INT4, a scale for each row": WeightFormat("INT4", 1, 0, "BF16"),
    "INT4, groups of 32 with zero points": WeightFormat("INT4", 1, 32, "F16", has_zeros=True),
    "MXFP4": WeightFormat("E2M1", 1, 32, "E8M0"),
}
SWEPT = ("FP8, a scale for each row", "INT4, a scale for each row")
# The protocol is that of their neighbours, which run in every way.
ONCE = ("FP8, a scale for each row", "INT4", "INT4, a scale for each row", "MXFP4")


class CodedModel(Model):
    """A random model whose layers' matrices are quantised."""

    def __init__(self, spec: Any, dtype: str, form: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(spec, dtype, monkeypatch)
        self.form = form
        self.coded: dict[tuple[str, int], CodedMatrix] = {}
        layouts = tensor_layouts(spec)
        self.values: dict[str, Any] = {}
        for name, words in self.words.items():
            if not is_layer_matrix(layouts, name):
                continue
            values = (words.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else words.view(np.float16)
            lanes = [rounded(lane.astype(np.float32), form) for lane in values]
            self.coded |= {(name, i): lane for i, lane in enumerate(lanes)}
            self.values[name] = np.stack([lane.values() for lane in lanes])

    def weights(self, shape: KernelShape) -> DeviceWeights:
        def codes(name: str, lane: int) -> Codes:
            return Codes.of(self.coded[name, shape.hosted_lanes[lane]], np.asarray)

        return from_tensors(shape, lambda name: self.words[name][slice(*needed_rows(shape, name))], codes)


@pytest.mark.parametrize("form", cases(FORMS, SWEPT))
def test_logits_are_those_of_the_values_of_codes(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CodedModel(DENSE, "bfloat16", FORMS[form], monkeypatch)
    num_runs = 1 if form in ONCE else len(RUNS)
    tokens, logits = answer(model, 2, tmp_path / "2", coding=Coding.of(FORMS[form]), num_runs=num_runs)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    error = np.linalg.norm(logits - wanted[-1]) / np.linalg.norm(wanted[-1])
    print(form, error)
    assert error < 2e-3
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()


def test_digits_of_x_do_not_depend_on_the_lanes_that_are_gathered_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank gathers both lanes' inputs of OUT together."""
    coding = Coding.of(FORMS["INT4"])
    shapes = [KernelShape(DENSE, range(lanes), coding=coding, max_ctas=12) for lanes in (1, 2)]
    assert [shape.gathered_lanes(Phase.OUT) for shape in shapes] == [1, 2]
    model = CodedModel(DENSE, "bfloat16", FORMS["INT4"], monkeypatch)
    tokens, logits = answer(model, 2, tmp_path / "2", coding=coding, num_runs=1, max_ctas=12)
    others, other_logits = answer(model, 1, tmp_path / "1", coding=coding, num_runs=1, max_ctas=12)
    assert others == tokens
    assert other_logits.tobytes() == logits.tobytes()
