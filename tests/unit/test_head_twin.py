"""The monokernel with its LM head in INT8 on a CPU (test_decode_twin.py), against the oracle with the values of the codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.coding import HEAD_CODING, Coding
from kog_dist.model.formats.head import head_format, round_in_place
from kog_dist.model.layout import EMBEDDING, head_name
from kog_dist.model.spec import HeadType
from kog_dist.workers.cuda.device_weights import to_values
from tests.sweeps import cases
from tests.unit.test_coded_twin import DENSE, FORMS, CodedModel
from tests.unit.test_decode_twin import PROMPT, RUNS_ALL, SPEC, Model, answer, pytestmark  # noqa: F401

TIED = replace(DENSE, tied_embeddings=True)
# By name: what is usual has layers of 16 bit with twelve warps, three heads that lanes have parts of, and tied embeddings.
HEADS = {
    "replicate, twelve warps": (SPEC, "bfloat16", None),
    "lane": (replace(SPEC, head_type=HeadType.LANE), "bfloat16", None),
    "vocab_parallel": (replace(SPEC, head_type=HeadType.VOCAB_PARALLEL), "bfloat16", None),
    "tied, float16": (TIED, "float16", None),
    "tied, FP8": (TIED, "bfloat16", "FP8, blocks"),
    "FP8, a scale for each row": (DENSE, "bfloat16", "FP8, a scale for each row"),
    "INT4": (DENSE, "bfloat16", "INT4"),
    "MXFP4": (DENSE, "bfloat16", "MXFP4"),
}
ON_ONE_RANK_TOO = ("replicate, twelve warps", "lane", "INT4")
SWEPT = ("vocab_parallel", "tied, float16", "FP8, a scale for each row", "MXFP4")
LIMIT = 2e-3
Change = Callable[[Mapping[str, str]], dict[str, str]]


def with_coded_head(base: type[Model], *args: Any) -> Model:
    """A model of a class of twins whose oracle has the values of the head's codes."""

    class HeadModel(base):  # type: ignore[misc, valid-type]
        def logits(self, ids: list[int]) -> Any:
            untied = replace(self.spec, tied_embeddings=False)
            name, form = head_name(untied), head_format("int8", self.spec)
            assert form is not None
            words = self.words.get(name, self.words[EMBEDDING])
            values = to_values(words, self.dtype).copy()
            round_in_place(values.reshape(-1, values.shape[-1]), form.block_columns)
            self.oracle_spec, self.values[name] = untied, values
            return super().logits(ids)

    return HeadModel(*args)


def made(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, dict[str, Any]]:
    """A model, and the options of `answer` for it."""
    spec, dtype, form = HEADS[name]
    options: dict[str, Any] = {"head_coding": HEAD_CODING, "num_runs": 3 if RUNS_ALL else 1}
    if "twelve" in name:
        options["matrix_warps"] = 12
    if form is None:
        return with_coded_head(Model, spec, dtype, monkeypatch), options
    return with_coded_head(CodedModel, spec, dtype, FORMS[form], monkeypatch), options | {"coding": Coding.of(FORMS[form])}


def relative_error(logits: Any, wanted: Any) -> float:
    return float(np.linalg.norm(logits - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", cases(HEADS, SWEPT))
def test_logits_are_those_of_the_values_of_codes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks; some have the bits of one, too."""
    model, options = made(name, monkeypatch)
    tokens, logits = answer(model, 2, tmp_path / "2", **options)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    error = relative_error(logits, wanted[-1])
    print(name, error)
    assert error < LIMIT
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    if name in ON_ONE_RANK_TOO:
        others, other_logits = answer(model, 1, tmp_path / "1", **options)
        assert others == tokens
        assert other_logits.tobytes() == logits.tobytes()
