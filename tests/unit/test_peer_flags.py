"""What `kog-launch` says of flags that other servers have."""

from __future__ import annotations

import pytest

from kog_dist import config
from kog_dist.launch.flags import run
from kog_dist.launch.peer_flags import PEER_FLAGS


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-model-len", "4096"], "--max-model-len is --context here"),
        (["MODEL", "--max-model-len=4096"], "--max-model-len is --context here"),
        (["-c", "512"], "-c is --context here"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is --gpus here, or --ranks on CPUs"),
        (["--tp", "2"], "--tp is --gpus here, or --ranks on CPUs"),
        (["-tp", "2"], "-tp is --gpus here, or --ranks on CPUs"),
        (["serve", "MODEL"], "`serve` is not needed here: kog-launch MODEL"),
        (["serve", "MODEL", "--tp=2", "--port", "1"], "`serve` is not needed here: kog-launch MODEL; --tp is --gpus here"),
        (["run", "MODEL"], "`run` is not needed here: kog-launch MODEL"),
        (["-m", "x.gguf", "-ngl", "99"], "-m is not needed here: kog-launch MODEL; -ngl is --gpus here"),
        (["--trust-remote-code"], "--trust-remote-code is not needed here; omit it"),
    ],
)
def test_flags_of_others_are_answered_with_ours(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kog-launch: {sentence}")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["MODEL", "second"], ["--frobnicate", "--", "--tp"]])
def test_other_mistakes_stay_what_they_are(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert "Error: " in capsys.readouterr().err


def test_no_flag_of_theirs_is_one_of_ours() -> None:
    ours = {config.flag_name(name) for name in config.SETTINGS}
    assert not ours & PEER_FLAGS.keys()
