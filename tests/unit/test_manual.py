"""Man pages and completion have every flag, and are what their readers take: man without a warning, bash without an error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.manual.__main__ import main
from kog_dist.manual.completion import bash_completion
from kog_dist.manual.man_page import man_page
from kog_dist.manual.programs import Command, Flag, programs
from tests import settings_page

PROGRAMS = {program.name: program for program in programs()}


def every_flag(command: Command) -> Iterator[Flag]:
    yield from command.flags
    for below in command.commands:
        yield from every_flag(below)


def test_all_programs_are_there() -> None:
    text = (settings_page.PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert set(PROGRAMS) == set(re.findall(r"^(kog-\w+) = ", text, re.MULTILINE))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_flag_has_a_meaning(name: str) -> None:
    assert [flag.names for flag in every_flag(PROGRAMS[name]) if len(flag.meaning) < 5 or flag.meaning[-1] not in ".)"] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_flag_is_in_the_settings_page(name: str) -> None:
    section = settings_page.page().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    missing = [flag.names for flag in every_flag(PROGRAMS[name]) if not all(f"`{one}`" in section for one in flag.names)]
    assert missing == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_man_page_has_every_flag_and_no_mistake(name: str) -> None:
    page = man_page(PROGRAMS[name])
    for flag in every_flag(PROGRAMS[name]):
        assert all(f"\\fB{one.replace('-', chr(92) + '-')}\\fR" in page for one in flag.names), flag
    assert page.count(".SS ") == len(PROGRAMS[name].commands)
    if shutil.which("groff") is None:
        pytest.skip("there is no groff")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z"], input=page, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""


def test_text_is_never_an_instruction() -> None:
    flag = Flag(("--x",), "FILE", ".PP 'quoted' `code` \\n a-b", "1")
    page = man_page(Command("kog-x", "First. Second.", (flag, Flag(("MODEL",), "", ""))))
    assert "\\&.PP \\(aqquoted\\(aq \\(gacode\\(ga \\en a\\-b Default: 1." in page
    assert "kog\\-x \\- First\n" in page
    assert "[OPTIONS] [MODEL]\n" in page


def completed(program: str, line: str, folder: Path, *, splits_equals: bool = False) -> list[str]:
    """What bash offers behind this line; the last word is the one that is completed."""
    words = re.findall(r"=|[^\s=]+", line) if splits_equals else line.split()
    words += [""] if line.endswith((" ", "=")) and words[-1] != "=" else []
    script = (
        f"{bash_completion(PROGRAMS[program])}\nCOMP_WORDS=({' '.join(repr(word) for word in words)})\n"
        f"COMP_CWORD={len(words) - 1}\n_{program.replace('-', '_')}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    )
    done = subprocess.run(
        ["bash", "-e", "-u"], input=script, capture_output=True, text=True, timeout=30, check=True,
        env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(folder)},
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("program", "line", "offered"),
    [
        ("kog-launch", "kog-launch --det", ["--detach"]),
        ("kog-launch", "kog-launch --device ", ["auto", "cpu", "cuda"]),
        ("kog-launch", "kog-launch MODEL --launcher m", ["mpi"]),
        ("kog-launch", "kog-launch MODEL", []),  # files
        ("kog-launch", "kog-launch --log-dir -", []),
        ("kog-client", "kog-client s", ["status", "stop"]),
        ("kog-client", "kog-client stop --n", ["--now"]),
        ("kog-client", "kog-client stop --instance ", ["default", "prod"]),
        ("kog-client", "kog-client --v", ["--version"]),
        ("kog-chat", "kog-chat --instance p", ["prod"]),
        ("kog-bench", "kog-bench --json lat", ["latency"]),
        ("kog-bench", "kog-bench first-token --chunk", ["--chunks-ms"]),
        ("kog-doctor", "kog-doctor --", ["--json", "--version", "--help"]),
    ],
)
def test_bash_completes(tmp_path: Path, program: str, line: str, offered: list[str]) -> None:
    for name in ("prod", "default"):
        (tmp_path / "kog" / name).mkdir(parents=True)
        (tmp_path / "kog" / name / "lease").touch()
    (tmp_path / "kog" / "no-engine").mkdir()
    assert completed(program, line, tmp_path) == offered


@pytest.mark.parametrize(
    ("line", "offered"), [("kog-launch --device=", ["auto", "cpu", "cuda"]), ("kog-launch --device=c", ["cpu", "cuda"])]
)
def test_bash_takes_the_equals_sign_for_a_word(tmp_path: Path, line: str, offered: list[str]) -> None:
    assert completed("kog-launch", line, tmp_path, splits_equals=True) == offered


def test_files_lie_where_man_and_bash_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "share")]) == 0
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert made == sorted(
        [*(f"share/man/man1/{name}.1" for name in PROGRAMS), *(f"share/bash-completion/completions/{name}" for name in PROGRAMS)]
    )
    assert main([os.devnull]) == 3
    assert capsys.readouterr().err == f"kog_dist.manual: {os.devnull} cannot be written: Not a directory; choose another folder\n"
