"""Rows of 16-bit values as sums of rows of codes: how near they come, by the definition of what codes stand for."""

from __future__ import annotations

import numpy as np
import pytest

from kog_dist.decode.coded_terms import TERMED, as_terms
from kog_dist.decode.coding import Coding
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.workers.cuda.device_weights import to_values, to_words

FORMS = {
    "FP8, blocks": WeightFormat("E4M3", 128, 128, "BF16"),
    "FP8, a scale for each row": WeightFormat("E4M3", 1, 0, "F32"),
    "INT8, groups of 32": WeightFormat("INT8", 1, 32, "F16"),
    "INT4": WeightFormat("INT4", 1, 128, "BF16"),
    "INT4, a scale for each row": WeightFormat("INT4", 1, 0, "F16"),
    "INT4, groups of 32 with zero points": WeightFormat("INT4", 1, 32, "F16", has_zeros=True),
}


@pytest.mark.parametrize("columns", [384, 200])
@pytest.mark.parametrize("name", FORMS)
def test_terms_sum_to_the_row(name: str, columns: int) -> None:
    form = FORMS[name]
    coding, width = Coding.of(form), form.block_columns or columns
    rng = np.random.default_rng(1)
    # Rows of many sizes; one of zeros, one whose values are far apart, one of powers of two.
    values = rng.standard_normal((7, columns), np.float32) * np.array([1e-4, 1e-2, 1, 30, 0, 1, 1], np.float32)[:, None]
    values[5] *= np.exp2(rng.integers(-13, 0, columns))
    values[6] = np.exp2(rng.integers(-9, 3, columns)) * rng.choice([-1, 1], columns)
    values = to_values(to_words(values, "bfloat16"), "bfloat16")
    terms = as_terms(values, coding)
    assert terms.codes.shape == (7 * coding.terms, columns)
    assert np.isfinite(NUMBERS[coding.number].values[terms.codes]).all()
    kept = {"BF16": 16, "F16": 13, "F32": 0}[form.scale]
    assert (terms.scales.view(np.uint32) & np.uint32((1 << kept) - 1) == 0).all(), "of fewer bits"
    assert (terms.scales >= 2.0**-24).all()
    groups = np.arange(columns) // width
    whole = CodedMatrix(form, terms.codes, terms.scales, groups, terms.zeros).values().astype(np.float64)
    error = np.abs(whole.reshape(7, coding.terms, columns).sum(axis=1) - values)
    starts = np.arange(0, columns, width)
    largest = np.repeat(np.maximum.reduceat(np.abs(values), starts, axis=1), width, axis=1)[:, :columns]
    if coding.number == "E4M3":
        assert (error[np.abs(values) >= largest * 2.0**-14] == 0).all()
        assert (error <= largest * 2.0**-21).all()
    else:
        assert (error <= np.maximum(largest * 2.0**-14, 2.0**-25)).all()
    assert (error[4] == 0).all()


def test_terms_have_the_bits_of_their_row() -> None:
    assert {Coding.of(form).terms * Coding.of(form).bits for form in FORMS.values()} == {16}
    assert {form.number for form in FORMS.values()} == set(TERMED)
