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
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.layers import Experts
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.coded_source import is_coded
from kog_dist.workers.cuda.device_weights import to_values
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base.matrices import Matrices, plain_ops
from kog_dist.workers.prefill.buffers.prompt import misfit
from kog_dist.workers.prefill.expand.expand_abi import EXPAND_PARAMS, expand_header
from kog_dist.workers.prefill.expand.expanded import expanded_layers
from kog_dist.workers.prefill.memory import expanded_bytes
from kog_dist.workers.prefill.tape.tape_abi import is_multiplied_on_tape
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.delta_rank import StoredRank, Wanted
from tests.unit.prefill.emulated import compiled, emulated_delta, launcher
from tests.unit.prefill.models import relative_error, token_ids
from tests.unit.test_delta_codes_twin import MIXTURE, ODD, PUBLISHED, USUAL, CodedNets
from tests.unit.test_kinds_twin import NET, SMALL, spec_of

pytestmark = needs_compiler
CASES = {
    "FP8, blocks": (USUAL, WeightFormat("E4M3", 128, 128, "BF16")),
    "FP8, a scale for each row, odd shapes": (ODD, WeightFormat("E4M3", 1, 0, "F32")),
    "INT4, published heads": (PUBLISHED, WeightFormat("INT4", 1, 128, "BF16")),
    "FP8, experts beside a shared one": (MIXTURE, WeightFormat("E4M3", 128, 128, "BF16")),
}
PLAIN = {  # what is not in codes
    "INT4, nets in 16 bit": (WeightFormat("INT4", 1, 128, "BF16"), ("plain_inputs", "plain_outputs")),
    "FP8, a scale for each row, inputs in 16 bit": (WeightFormat("E4M3", 1, 0, "F32"), ("plain_inputs",)),
}


class CodedRank(StoredRank):
    """Whose matrices are expanded by the kernel, which runs here."""

    def __init__(
        self, spec: ModelSpec, form: WeightFormat, folder: Path, patch: pytest.MonkeyPatch, *, plain: Any = None, **options: Any
    ) -> None:
        """`plain`: of `Coding`."""
        self.folder, self.model = folder, CodedNets(spec, "bfloat16", form, patch)
        self.coding = replace(Coding.of(form), **(plain or {}))
        values, layouts = self.model.values, tensor_layouts(spec)
        self.model.values = {name: of_codes for name, of_codes in values.items() if is_coded(layouts, self.coding, name)}
        self.terms = 1 if self.coding.plain_inputs else self.coding.terms
        super().__init__(spec, **options)

    def made_tensors(self) -> dict[str, Any]:
        return {name: to_values(words, "bfloat16") for name, words in self.model.words.items()} | self.model.values

    def made_matrices(self, lanes: range, dtype: DTypeLike) -> list[Any]:
        self.shape = shape = KernelShape(self.spec, lanes, max_ctas=5, coding=self.coding)
        header = expand_header(self.coding, shape.tape.scale_rows)
        library = ctypes.CDLL(str(compiled(self.folder, "expand", header, ["expand"], "KogExpandParams", "-Og")))
        launch = launcher(library, "expand", EXPAND_PARAMS.size_bytes)
        plain = Matrices(self.spec, dtype, routers_only=True, plain_ops=plain_ops(self.coding))
        for name in filter(plain.wants, self.model.words):
            plain.take(name, self.tensors[name])
        return expanded_layers(shape, self.model.weights(shape), launch, "cpu", plain.layers())


@pytest.mark.parametrize("name", [*CASES, *PLAIN])
def test_prompts_have_the_logits_of_the_interpreter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, form = CASES[name] if name in CASES else (USUAL, PLAIN[name][0])
    plain = dict.fromkeys(PLAIN[name][1] if name in PLAIN else (), True)
    (tmp_path / "expand").mkdir()
    spec, folder = replace(spec, max_context=64), tmp_path / "expand"
    rank = CodedRank(spec, form, folder, monkeypatch, plain=plain, dtype=np.float16, sizes=(8, 16))
    assert misfit(rank.spec, rank.coding) == ""
    assert not is_multiplied_on_tape(rank.shape)
    assert rank.delta is not None
    assert (rank.delta.matrix_rows > rank.delta.rows) == ("plain_inputs" not in plain)
    assert rank.shape.delta is not None
    assert rank.shape.delta.terms == rank.terms
    ids = token_ids(rank.spec, 40)
    wanted = Wanted(rank, ids)
    for end, start in ((20, 0), (40, 20)):
        assert rank.run(ids[:end], start) == end
        assert relative_error(rank.logits(), wanted.logits[end - 1]) < 6e-3, "what roundings to binary16 make of so small a model"
    for found, of_net in zip(rank.states_of(40), wanted.states[40], strict=True):
        assert relative_error(found[0], of_net[0]) < 6e-3
    held = [getattr(layer, field) for layer in rank.matrices for field in ("attention_norm", "ffn_norm", "head_norms")]
    held += [getattr(layer, f"delta_{field}") for layer in rank.matrices for field in ("taps", "factors", "norm")]
    parts = [layer.plain for layer in rank.matrices if layer.plain is not None]
    assert len(parts) == (len(rank.delta.layers) if plain else len(rank.matrices) if spec.experts is not None else 0)
    held += [one for part in parts for one in (part.wqkv, part.wo, part.router, part.shared_gate)]
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


def test_what_stands_beside_codes_in_other_ways_is_refused() -> None:
    coding = Coding.of(CASES["INT4, published heads"][1])
    biased = spec_of(NET, replace(SMALL, qkv_bias=True), hidden_size=160)
    assert misfit(biased) == ""
    assert misfit(biased, coding) == "biases in layers of several kinds beside codes of INT4"
    wide = spec_of(NET, SMALL, ffn=Experts(512, ExpertsSpec(16, 3), 5120), hidden_size=160)
    assert misfit(wide) == ""
    assert misfit(wide, coding) == "a shared expert with 1280 columns in a lane beside codes of INT4 (at most 1024)"
