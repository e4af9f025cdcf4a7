"""tests/gpu/counted_bytes.py without a GPU: what it makes of what ncu and the counted process print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kog_dist.errors import KogError
from tests.gpu import counted_bytes

HEAD = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
ROW = '"0","1234","kog_decode","Command line profiler metrics","dram__bytes_read.sum","byte","{}"'
LOG = "\n".join(["==PROF== Connected to process 1234 (/usr/bin/python3)", HEAD, ROW.format("6,400"), ""])


def test_bytes_of_one_launch_are_read() -> None:
    assert counted_bytes.counted(LOG) == 6400


@pytest.mark.parametrize(
    "log", ["==ERROR== ERR_NVGPUCTRPERM", HEAD, f"{LOG}{ROW.format(1)}\n", LOG.replace('"byte"', '"Gbyte"')],
    ids=["no permission", "no launch", "two launches", "another unit"],
)  # fmt: skip
def test_anything_else_is_an_error_that_has_the_log(log: str) -> None:
    with pytest.raises(KogError, match="of one launch") as caught:
        counted_bytes.counted(log)
    assert log.strip()[-20:] in str(caught.value)


def fake_ncu(folder: Path, num_bytes: int, code: int = 0) -> str:
    """A program in place of ncu, which starts nothing: it writes the log, and prints what the counted process would."""
    said = json.dumps({"weight_bytes": 32 * 150, "kv_bytes": 32 * 50, "gpu": "played"})
    program = folder / "ncu"
    program.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != --log-file ]; do shift; done\n'
        f"cat > \"$2\" <<'END'\n{HEAD}\n{ROW.format(num_bytes)}\nEND\n"
        f"echo '{said}'\nexit {code}\n"
    )
    program.chmod(0o755)
    return str(program)


def test_what_was_counted_stands_beside_what_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = fake_ncu(tmp_path, 32 * 202)
    monkeypatch.setattr("shutil.which", lambda name: program)
    counted_bytes.run(["shape"])
    line, *_, last = capsys.readouterr().out.splitlines()
    assert line.startswith("shape, played, context 512: ")
    assert line.endswith("ratio 1.0100")
    (figure,) = json.loads(last)["figures"]
    assert (figure["weight_bytes"], figure["kv_bytes"], figure["counted_bytes"]) == (150, 50, 202)


def test_a_counted_process_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KogError, match="ended with 3"):
        counted_bytes.measured("shape", fake_ncu(tmp_path, 1, code=3))


def test_a_counted_process_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho Connected\nsleep 60 &\nwait\n")  # what it counts keeps the pipe open, too
    program.chmod(0o755)
    monkeypatch.setattr(counted_bytes, "_LIMIT_S", 0.5)
    with pytest.raises(KogError, match=r"^shape under ncu took more than 0\.5 s; "):
        counted_bytes.measured("shape", str(program))


def test_without_ncu_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(KogError, match="install it"):
        counted_bytes.run(["shape"])
