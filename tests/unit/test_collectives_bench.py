"""`kog-bench collectives` without a GPU: what is measured, and what is printed of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.collectives import run as collectives
from kog_dist.bench.collectives.run import shapes
from kog_dist.bench.collectives.table import kccl_table, kill_line, library_table, rows_of, write
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
    lines = [*kccl_table(figures(), SIZES), *library_table(figures(), SIZES), *map(kill_line, figures()["kills"])]
    text = "\n".join(lines)
    line = next(line for line in lines if line.startswith("KCCL, to every thread block, 128 thread blocks"))
    assert line.split()[-2:] == ["2.54", "4.07"]
    assert [line.split()[-2:] for line in lines if line.startswith("  ")][1:] == [["2.54", "4.07"], ["2.00", "2.30"]]
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


def test_what_was_measured_survives_other_libraries_and_an_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_part(world_size: int, body: str, arguments: Any, environ: Any) -> list[Any]:
        if body.endswith(":chains"):
            return [figures()["kccl"]]
        if arguments["methods"] == ["nccl window"]:
            raise subprocess.TimeoutExpired("ranks", 160)
        return [{method: {"6144": 5.0, "12288": 6.0} for method in arguments["methods"]}]

    def kill(world_size: int) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(collectives, "require_gpus", lambda count: "played")
    monkeypatch.setattr(collectives, "_run", run_part)
    monkeypatch.setattr(collectives, "_kill", kill)
    with pytest.raises(KeyboardInterrupt):
        collectives.run(4, SIZES, steps=1, repeats=1, libraries=True, kills=1, folder=str(tmp_path))
    *lines, last = capsys.readouterr().out.splitlines()
    assert any("timed out" in line for line in lines)
    for found in (json.loads(last)["figures"], json.loads((tmp_path / "collectives.json").read_text())):
        assert found["libraries"]["tuned"] == {"nccl": {"6144": 5.0, "12288": 6.0}}
        assert len(found["kccl"]) == len(shapes(SIZES))
