"""Prefill of quantised delta nets: matrices are expanded from the kernel's tape, where factors of heads are sums of rows."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike

from kog_dist.decode.coding import Coding
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.device_weights import to_values
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.buffers.prompt import misfit
from kog_dist.workers.prefill.expand.expand_abi import EXPAND_PARAMS, expand_header
from kog_dist.workers.prefill.expand.expanded import expanded_layers
from kog_dist.workers.prefill.memory import expanded_bytes
from kog_dist.workers.prefill.tape.tape_abi import is_multiplied_on_tape
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.delta_rank import StoredRank, Wanted
from tests.unit.prefill.emulated import compiled, emulated_delta, launcher
from tests.unit.prefill.models import relative_error, token_ids
from tests.unit.test_delta_codes_twin import ODD, PUBLISHED, USUAL, CodedNets

pytestmark = needs_compiler
CASES = {
    "FP8, blocks": (USUAL, WeightFormat("E4M3", 128, 128, "BF16")),
    "FP8, a scale for each row, odd shapes": (ODD, WeightFormat("E4M3", 1, 0, "F32")),
    "INT4, published heads": (PUBLISHED, WeightFormat("INT4", 1, 128, "BF16")),
}


class CodedRank(StoredRank):
    """Whose matrices are expanded by the kernel, which runs here."""

    def __init__(self, spec: ModelSpec, form: WeightFormat, folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self.folder, self.model, self.coding = folder, CodedNets(spec, "bfloat16", form, patch), Coding.of(form)
        self.terms = self.coding.terms
        super().__init__(spec, **options)

    def made_tensors(self) -> dict[str, Any]:
        return {name: to_values(words, "bfloat16") for name, words in self.model.words.items()} | self.model.values

    def made_matrices(self, lanes: range, dtype: DTypeLike) -> list[Any]:
        self.shape = shape = KernelShape(self.spec, lanes, max_ctas=5, coding=self.coding)
        header = expand_header(self.coding, shape.tape.scale_rows)
        library = ctypes.CDLL(str(compiled(self.folder, "expand", header, ["expand"], "KogExpandParams", "-Og")))
        launch = launcher(library, "expand", EXPAND_PARAMS.size_bytes)
        return expanded_layers(shape, self.model.weights(shape), launch, "cpu", [None] * self.spec.num_layers)


@pytest.mark.parametrize("name", CASES)
def test_prompts_have_the_logits_of_the_interpreter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, form = CASES[name]
    (tmp_path / "expand").mkdir()
    rank = CodedRank(replace(spec, max_context=64), form, tmp_path / "expand", monkeypatch, dtype=np.float16, sizes=(8, 16))
    assert misfit(rank.spec, rank.coding) == ""
    assert not is_multiplied_on_tape(rank.shape)
    assert rank.delta is not None
    assert rank.delta.matrix_rows > rank.delta.rows
    ids = token_ids(rank.spec, 40)
    wanted = Wanted(rank, ids)
    for end, start in ((20, 0), (40, 20)):
        assert rank.run(ids[:end], start) == end
        assert relative_error(rank.logits(), wanted.logits[end - 1]) < 6e-3, "what roundings to binary16 make of so small a model"
    for found, of_net in zip(rank.states_of(40), wanted.states[40], strict=True):
        assert relative_error(found[0], of_net[0]) < 6e-3
    held = [getattr(layer, field) for layer in rank.matrices for field in ("attention_norm", "ffn_norm", "head_norms")]
    held += [getattr(layer, f"delta_{field}") for layer in rank.matrices for field in ("taps", "factors", "norm")]
    assert expanded_bytes(rank.shape) == rank.matrices[0].matrices.num_bytes + sum(one.nbytes for one in held if one is not None)


def test_kernels_sum_the_terms_of_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "expand").mkdir()
    spec, form = CASES["FP8, a scale for each row, odd shapes"]
    rank = CodedRank(replace(spec, max_context=64), form, tmp_path / "expand", monkeypatch, dtype=np.float16, sizes=(16,))
    kernels, buffers = emulated_delta(rank.buffers, rank.states, tmp_path), rank.buffers
    rows, given = buffers.rows(16), np.random.default_rng(1)
    assert rows.nets is not None
    assert rows.mixed is not None
    projected = given.standard_normal(rows.nets.projected.shape).astype(np.float32)
    rank.operations.product = lambda x, matrix, out: np.copyto(out, projected.reshape(out.shape))
    rows.place[0], buffers.last_position[0] = 0, 15
    wanted = rank.operations.recur(rows, rank.matrices[0], 0).copy()
    rows.nets.projected[...], rows.mixed[...] = projected, 0
    kernels.run(rows, rank.matrices[0], 0)
    assert relative_error(rows.mixed, wanted) < 1e-3


def test_nets_in_16_bit_beside_codes_are_refused() -> None:
    coding = Coding.of(CASES["INT4, published heads"][1])
    for plain in ({"plain_inputs": True}, {"plain_outputs": True}):
        assert "delta nets in 16 bit beside codes of INT4" in misfit(PUBLISHED, replace(coding, **plain))  # type: ignore[arg-type]
