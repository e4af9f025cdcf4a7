"""`kog-bench collectives` without a GPU: what is measured, and what is printed of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.collectives import shapes
from kog_dist.bench.collectives_table import rows_of, table, write
from kog_dist.collectives.cuda_kernels import ChainShape
from kog_dist.errors import ConfigError

SIZES = (6144, 12288)


def figures() -> dict[str, Any]:
    kccl = [
        {
            "length": length,
            "rows": rows,
            "everyone": everyone,
            "median_us": length / 1000 + everyone,
            "min_us": 1.0,
            "max_us": 2.0,
        }
        for length, rows, everyone in shapes(SIZES)
    ]
    libraries = {
        "default": {"nccl": {"6144": 33.0, "12288": 34.0}, "torch one-shot": {"6144": 6.4, "12288": "RuntimeError: not here"}},
        "tuned": "no such environment",
    }
    kills = [{"good": True, "survivors": [{"left_ms": 70.123, "how": "AbortedError", "usable": True}]}]
    return {"world_size": 4, "kccl": kccl, "libraries": libraries, "kills": kills}


def test_every_shape_can_be_compiled() -> None:
    found = [ChainShape(4, *shape) for shape in shapes((4096, *SIZES))]
    assert {shape.num_ctas for shape in found} >= {1, 16, 48, 128}
    for shape in found:
        assert shape.num_threads <= 1024
        assert shape.num_ctas <= 132, "thread blocks of a cooperative launch"
        assert 4 * shape.length + 2000 < 48 << 10, "static shared memory"
        if shape.everyone:
            assert shape.shift % shape.length >= shape.rows, "the next input is owned by another thread block"
            assert shape.shift + shape.rows <= shape.length


@pytest.mark.parametrize("rows", [0, 1, 7, 48, 1024, 100])
def test_rows_that_do_not_divide_are_refused(rows: int) -> None:
    with pytest.raises(ConfigError, match="rows"):
        ChainShape(4, 3072, rows, False)


def test_table_has_every_figure_and_says_what_did_not_work(tmp_path: Path) -> None:
    text = "\n".join(table(figures(), SIZES))
    line = next(line for line in text.splitlines() if line.startswith("KCCL, to every thread block, 128 thread blocks"))
    assert line.split()[-2:] == ["2.54", "4.07"]
    assert "nccl (default), CUDA graph" in text
    assert "torch one-shot (default): RuntimeError: not here" in text
    assert "tuned" in text
    assert "no such environment" in text
    assert "left after 70.1 ms" in text
    assert dict(rows_of(figures(), SIZES))["torch one-shot (default), CUDA graph"] == [6.4, None]
    pytest.importorskip("matplotlib", reason="draws a picture")
    write(tmp_path, figures(), SIZES)
    assert json.loads((tmp_path / "collectives.json").read_text())["world_size"] == 4
    assert (tmp_path / "collectives.png").stat().st_size > 1000
