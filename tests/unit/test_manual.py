"""Man pages and completion have every flag, and are what their readers take: man without a warning, shells without an error."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kog_dist.manual.__main__ import main
from kog_dist.manual.bash import bash_completion
from kog_dist.manual.fish import fish_completion
from kog_dist.manual.man_page import man_page
from kog_dist.manual.programs import Command, Flag, programs
from kog_dist.manual.zsh import zsh_completion
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
    assert ("[OPTIONS] COMMAND [OPTIONS]\n" in page) == bool(PROGRAMS[name].commands)
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


OFFERED: list[tuple[str, str, list[str]]] = [
    ("kog-launch", "kog-launch --det", ["--detach"]),
    ("kog-launch", "kog-launch --device ", ["auto", "cpu", "cuda"]),
    ("kog-launch", "kog-launch MODEL --launcher m", ["mpi"]),
    ("kog-client", "kog-client s", ["status", "stop"]),
    ("kog-client", "kog-client stop --n", ["--now"]),
    ("kog-client", "kog-client stop --instance ", ["default", "prod"]),
    ("kog-client", "kog-client --v", ["--version"]),
    ("kog-chat", "kog-chat --instance p", ["prod"]),
    ("kog-bench", "kog-bench --json lat", ["latency"]),
    ("kog-bench", "kog-bench first-token --chunk", ["--chunks-ms"]),
    ("kog-doctor", "kog-doctor --", ["--json", "--version", "--help"]),
]


def make_instances(folder: Path, names: Sequence[str] = ("prod", "default"), mode: int = 0o700) -> Path:
    """The folder of all engines of a user whose XDG_RUNTIME_DIR is `folder`."""
    root = folder / "kog"
    root.mkdir()
    root.chmod(mode)
    for name in names:
        (root / name).mkdir()
        (root / name / "lease").touch()
    (root / "no-engine").mkdir()
    return root


@pytest.mark.parametrize(
    ("program", "line", "offered"),
    [
        *OFFERED,
        ("kog-launch", "kog-launch MODEL", []),  # files
        ("kog-launch", "kog-launch --log-dir -", []),
    ],
)
def test_bash_completes(tmp_path: Path, program: str, line: str, offered: list[str]) -> None:
    make_instances(tmp_path)
    assert completed(program, line, tmp_path) == offered


@pytest.mark.parametrize(
    ("line", "offered"), [("kog-launch --device=", ["auto", "cpu", "cuda"]), ("kog-launch --device=c", ["cpu", "cuda"])]
)
def test_bash_takes_the_equals_sign_for_a_word(tmp_path: Path, line: str, offered: list[str]) -> None:
    assert completed("kog-launch", line, tmp_path, splits_equals=True) == offered


def option_names(command: Command) -> set[str]:
    return {name for flag in command.flags if not flag.is_argument for name in flag.names} | {"--help"}


def zsh_calls(program: Command) -> dict[str, list[str]]:
    """What `_arguments` is told, by command; "" is the program itself."""
    calls: dict[str, list[str]] = {}
    command, is_call = "", False
    for word in shlex.split(zsh_completion(program), comments=True):
        if word == "_arguments":
            calls[command], is_call = [], True
        elif is_call and word in (";;", "&&", "}"):
            is_call = False
        elif is_call and word not in ("-C", "\n"):
            calls[command].append(word)
        elif word.endswith(")") and word[:-1] in {one.word for one in program.commands}:
            command = word[:-1]
    return calls


def zsh_names(specs: list[str]) -> set[str]:
    found = (re.match(r"\*?(?:\([^)]*\))?(-[-\w]+)[=+]?\[", spec) for spec in specs)
    return {match[1] for match in found if match is not None}


@pytest.mark.parametrize("name", PROGRAMS)
def test_zsh_gets_the_flags_of_each_command(name: str) -> None:
    program = PROGRAMS[name]
    calls = zsh_calls(program)
    assert zsh_completion(program).startswith(f"#compdef {name}\n")
    assert {command: zsh_names(specs) for command, specs in calls.items()} == {
        command.word: option_names(command) for command in (program, *program.commands)
    }
    if program.commands:
        (commands,) = (spec for spec in calls[""] if spec.startswith("1:command:"))
        assert re.findall(r'([\w-]+)\\:"', commands) == [command.word for command in program.commands]


def fish_lines(program: Command) -> dict[str, list[list[str]]]:
    """The words behind `complete -c NAME`, by command; "" is the program itself."""
    lines: dict[str, list[list[str]]] = {}
    for line in fish_completion(program).splitlines():
        if line.startswith("complete "):
            words = shlex.split(line)
            assert words[:3] == ["complete", "-c", program.name]
            condition = words[4] if words[3] == "-n" else ""
            command = condition.partition("__fish_seen_subcommand_from ")[2]
            lines.setdefault(command, []).append(words[5:] if condition else words[3:])
    return lines


@pytest.mark.parametrize("name", PROGRAMS)
def test_fish_gets_the_flags_of_each_command(name: str) -> None:
    program = PROGRAMS[name]
    lines = fish_lines(program)
    dashes = {"-l": "--", "-s": "-"}
    found = {
        command: {dashes[sign] + word for words in own for sign, word in itertools.pairwise(words) if sign in dashes}
        for command, own in lines.items()
    }
    assert found == {command.word: option_names(command) for command in (program, *program.commands)}
    assert [words[2] for words in lines[""] if words[:2] == ["-f", "-a"]] == [command.word for command in program.commands]


HOSTILE = Command(
    "kog-x", "What it's. More.",
    (Flag(("--a", "-a"), "[x]:y", "A 'quoted' ]: \\ $word `run` \"it\". More."), Flag(("MODEL",), "", "")),
    (Command("kog-x do", "Do \"it\" for $1: `now`'s.", (Flag(("--bit",), "B", "", "", ("x", "y"), is_repeatable=True),)),),
)  # fmt: skip


def test_text_ends_no_specification_of_zsh_and_no_word_of_fish() -> None:
    called, lines = zsh_calls(HOSTILE), fish_lines(HOSTILE)
    of_a = r"""[A 'quoted' \]\: \\ $word `run` "it"]:\[x\]\:y:_files"""
    assert called[""][:3] == [f"(--a -a)--a={of_a}", f"(--a -a)-a+{of_a}", ":MODEL:_files"]
    assert called[""][-2:] == [r"""1:command:((do\:"Do \"it\" for \$1\: \`now\`'s"))""", "*::argument:->argument"]
    assert called["do"][0] == "*--bit=[]:B:(x y)"
    described = "A 'quoted' ]: \\\\ $word `run` \"it\""
    assert lines[""][1] == ["-l", "a", "-s", "a", "-r", "-d", described]
    assert lines["do"][0] == ["-l", "bit", "-x", "-a", "x y", "-d", ""]


@pytest.mark.parametrize(("shell", "text_of"), [("zsh", zsh_completion), ("fish", fish_completion)])
def test_the_shells_themselves_read_it(shell: str, text_of: Callable[[Command], str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    for program in (*PROGRAMS.values(), HOSTILE):
        script = tmp_path / program.name
        script.write_text(text_of(program), encoding="utf-8")
        done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (0, ""), program.name


def completed_by_fish(program: str, line: str, folder: Path) -> list[str]:
    if shutil.which("fish") is None:
        pytest.skip("there is no fish")
    script = folder / "script.fish"
    script.write_text(f"{fish_completion(PROGRAMS[program])}complete -C {shlex.quote(line)}\n", encoding="utf-8")
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    command = ["fish", "--no-config", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, env=environ, cwd=folder / "kog")
    assert done.stderr == ""
    return sorted(text.partition("\t")[0] for text in done.stdout.splitlines())


@pytest.mark.parametrize(("program", "line", "offered"), OFFERED)
def test_fish_completes(tmp_path: Path, program: str, line: str, offered: list[str]) -> None:
    make_instances(tmp_path)
    assert completed_by_fish(program, line, tmp_path) == sorted(offered)


def instances_of_bash(folder: Path) -> list[str]:
    return completed("kog-client", "kog-client stop --instance ", folder)


def instances_of_zsh(folder: Path) -> list[str]:
    """What its function for names of engines hands on; the rest of the completion system needs a terminal."""
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh")
    functions = zsh_completion(PROGRAMS["kog-client"]).rpartition("\n_kog_client ")[0]
    script = f"compadd() {{ print -rl -- ${{(P)2}} }}\n{functions}\n_kog_client_instances\n"
    environ = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(folder)}
    done = subprocess.run(["zsh", "-f"], input=script, capture_output=True, text=True, timeout=30, env=environ, check=False)
    assert done.stderr == ""
    return sorted(done.stdout.split())


def instances_of_fish(folder: Path) -> list[str]:
    return completed_by_fish("kog-client", "kog-client stop --instance ", folder)


INSTANCES_OF = {"bash": instances_of_bash, "zsh": instances_of_zsh, "fish": instances_of_fish}
ACTING = (
    "$(touch ran)", "`touch ran`", ";touch ran", "${x:=$(touch ran)}", "<(touch ran)", "a$(touch ran)", "-n", "a\nb", "a\tb", "~",
    "a b", "*", "\x1b]0;x\x07", "'", '"', "\\", "!!", "é", "x" * 65, "a\n",
)  # fmt: skip


@pytest.mark.parametrize("shell", INSTANCES_OF)
def test_names_of_engines_are_never_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.chdir(tmp_path)
    make_instances(tmp_path, (*ACTING, "default", "prod"))
    assert INSTANCES_OF[shell](tmp_path) == ["default", "prod"]
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("shell", INSTANCES_OF)
@pytest.mark.parametrize("mode", [0o770, 0o705, 0o711, 0o777, 0o1777])
def test_an_open_folder_offers_no_names(tmp_path: Path, shell: str, mode: int) -> None:
    make_instances(tmp_path, mode=mode)
    assert INSTANCES_OF[shell](tmp_path) == []


@pytest.mark.parametrize("shell", INSTANCES_OF)
def test_a_link_and_a_folder_of_somebody_else_offer_no_names(tmp_path: Path, shell: str) -> None:
    (tmp_path / "other").mkdir()
    made = make_instances(tmp_path / "other")
    (tmp_path / "kog").symlink_to(made)
    assert INSTANCES_OF[shell](tmp_path) == []
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "kog").unlink()
    made.rename(tmp_path / "kog")
    assert INSTANCES_OF[shell](tmp_path) == ["default", "prod"]
    os.chown(tmp_path / "kog", 12345, -1)
    assert INSTANCES_OF[shell](tmp_path) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_bash_expands_no_list_of_words(name: str) -> None:
    assert not re.search(r"\bcompgen\b|\beval\b", bash_completion(PROGRAMS[name]))


def test_files_lie_where_man_and_the_shells_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "share")]) == 0
    made = {str(path.relative_to(tmp_path / "share")) for path in tmp_path.rglob("*") if path.is_file()}
    assert made == {
        path.format(name)
        for name in PROGRAMS
        for path in (
            "man/man1/{}.1", "bash-completion/completions/{}", "zsh/site-functions/_{}", "fish/vendor_completions.d/{}.fish"
        )
    }  # fmt: skip
    assert "completion of zsh: " in capsys.readouterr().out
    assert main([os.devnull]) == 3
    assert capsys.readouterr().err == f"kog_dist.manual: {os.devnull} cannot be written: Not a directory; choose another folder\n"
