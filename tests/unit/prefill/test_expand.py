"""Quantised weights for prefill: what expand.cu makes of the monokernel's tape is the definition, bit for bit."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.decode.coding import Coding
from kog_dist.model.layout import layer_prefix, norm_name
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.device_weights import to_words
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base.matrices import Matrices
from kog_dist.workers.prefill.expand.expand_abi import EXPAND_PARAMS, expand_header
from kog_dist.workers.prefill.expand.expanded import expanded_layers
from kog_dist.workers.prefill.memory import expanded_bytes
from kog_dist.workers.prefill.tape.tape_abi import is_multiplied_on_tape
from tests.unit.prefill.emulated import compiled, launcher
from tests.unit.test_coded_twin import DENSE, FORMS, CodedModel
from tests.unit.test_decode_twin import SPEC, pytestmark  # noqa: F401
from tests.unit.test_expert_twin import QUANTISED

EXPERTS = QUANTISED.experts
assert EXPERTS is not None
LANEFORMER = replace(SPEC, hidden_size=160, own_head_dim=16, num_heads=8, num_kv_heads=4, intermediate_size=320)
SHAPES: dict[str, tuple[ModelSpec, int]] = {  # and the number of ranks
    "one stream": (DENSE, 1),
    "one stream, biases, normed heads, two ranks": (replace(DENSE, qkv_bias=True, qk_norm=True), 2),
    "one lane, most warps without columns": (replace(DENSE, num_lanes=1, hidden_size=64, intermediate_size=136), 1),
    "attention of a model with experts": (
        replace(QUANTISED, qkv_bias=True, out_bias=True, attention_sinks=True, experts=replace(EXPERTS, router_bias=True)),
        1,
    ),
    "the same, the second of two ranks": (replace(QUANTISED, out_bias=True), 2),
    "Laneformer": (LANEFORMER, 1),
    "Laneformer, norm scales per lane": (replace(LANEFORMER, shared_norm_scale=False), 1),
}
CASES = [
    *(("one stream", form, "bfloat16") for form in FORMS),
    *((shape, "FP8, blocks", "bfloat16") for shape in SHAPES if shape != "one stream"),
    ("one stream, biases, normed heads, two ranks", "INT4", "float16"),
    ("Laneformer", "INT4", "float16"),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """The kernel, by its header."""

    @functools.cache
    def made(header: str) -> ctypes.CDLL:
        return ctypes.CDLL(
            str(compiled(tmp_path_factory.mktemp("expand"), "expand", header, ["expand"], "KogExpandParams", "-Og"))
        )

    return made


@pytest.mark.parametrize(("shape_name", "form_name", "dtype"), CASES)
def test_expanded_weights_are_the_definition(
    libraries: Callable[[str], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch, shape_name: str, form_name: str, dtype: str
) -> None:
    (spec, num_ranks), form = SHAPES[shape_name], FORMS[form_name]
    model, rank = CodedModel(spec, dtype, form, monkeypatch), num_ranks - 1
    hosted = spec.lanes_of_rank(rank, num_ranks)
    shape = KernelShape(spec, hosted, dtype, num_ranks=num_ranks, max_ctas=4 if spec.experts else 5, coding=Coding.of(form))
    assert shape.coding is not None
    library = libraries(expand_header(shape.coding, shape.tape.scale_rows))
    weights = model.weights(shape)
    launch, routers = launcher(library, "expand", EXPAND_PARAMS.size_bytes), routers_of(model)
    layers = expanded_layers(shape, weights, launch, "cpu", routers)
    held = layers[0].matrices.num_bytes  # of a model that never asks for a matrix
    for found, wanted in zip(layers, twin(model, hosted), strict=True):
        for name in wanted.__slots__:
            expected = getattr(wanted, name)
            assert (expected is None) == (getattr(found, name) is None), name
            if expected is not None:
                assert getattr(found, name).tobytes() == expected.tobytes(), name
                assert getattr(found, name).dtype == expected.dtype, name
    vectors = [
        getattr(layer, field.name) for layer in layers for field in fields(layer) if field.name not in ("matrices", "layer")
    ]
    counted = 4 * spec.num_layers * spec.hidden_size if spec.out_bias and rank else 0  # of all ranks alike
    if not is_multiplied_on_tape(shape):
        held = layers[0].matrices.num_bytes
    assert expanded_bytes(shape) == held + sum(one.nbytes for one in vectors if one is not None) + counted


def routers_of(model: CodedModel) -> list[Any]:
    """Of each layer; None in a model without experts."""
    matrices = Matrices(model.spec, np.float16, routers_only=True)
    for name in filter(matrices.wants, model.words):
        matrices.take(name, widened(model.words[name], model.dtype))
    return matrices.layers()


def twin(model: CodedModel, hosted: range) -> list[Any]:
    """What prefill would hold of a model with these values in float32."""
    matrices = Matrices(model.spec, np.float16, has_first_lane=hosted[0] == 0)
    for name, words in model.words.items():
        if matrices.wants(name):
            whole = model.values[name] if name in model.values else widened(words, model.dtype)
            lanes = whole if len(whole) != model.spec.num_lanes or is_shared(model.spec, name) else whole[list(hosted)]
            matrices.take(name, np.ascontiguousarray(lanes))
    return matrices.layers()


def is_shared(spec: ModelSpec, name: str) -> bool:
    """Whether all lanes have the same of a tensor."""
    norms = {
        norm_name(spec, layer_prefix(layer) + part) for layer in range(spec.num_layers) for part in ("attention_norm", "ffn_norm")
    }
    heads = {f"{layer_prefix(layer)}attention.{part}.weight" for layer in range(spec.num_layers) for part in ("q_norm", "k_norm")}
    return name in heads or (name in norms and spec.shared_norm_scale)


def widened(words: NDArray[np.uint16], dtype: str) -> NDArray[np.float32]:
    values = (
        (words.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else words.view(np.float16).astype(np.float32)
    )
    assert np.array_equal(to_words(values, dtype), words)
    return values
