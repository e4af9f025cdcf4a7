"""Text from outside: escaped and bounded wherever an error or a line of the launcher shows it."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from kog_dist.bench.fakes.tiny_model import write_tiny_model
from kog_dist.errors import CheckpointError, CompileError, KogError
from kog_dist.launch import flags
from kog_dist.launch.events import EventLog, LogFile
from kog_dist.model.published_config import spec_of_folder
from kog_dist.quoting import MAX_MESSAGE_CHARS, escaped, escaped_bytes, printable, short

HOSTILE = "\x1b]0;owned\x07\r\x9b2J\u202e\ud800"


def acts(text: str) -> bool:
    return any(letter != "\n" and unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in text)


def test_an_error_shows_nothing_that_acts_and_keeps_other_letters() -> None:
    shown = str(KogError(f"Größe 東京 {HOSTILE}"))
    assert shown == "Größe 東京 \\x1b]0;owned\\x07\\r\\x9b2J\\u202e\\ud800"


@pytest.mark.parametrize(
    ("first", "last"),
    [(0x00, 0x09), (0x0B, 0x1F), (0x7F, 0x9F), (0x61C, 0x61C), (0x200E, 0x200F), (0x2028, 0x202E), (0x2066, 0x2069),
     (0xD800, 0xDFFF)],
)  # fmt: skip
def test_everything_that_acts_is_escaped_and_its_neighbours_are_not(first: int, last: int) -> None:
    for code in {first, last, (first + last) // 2}:
        assert escaped(chr(code)) == ascii(chr(code))[1:-1]
    for code in {first - 1, last + 1} - {-1, 0x0A}:
        assert escaped(chr(code)) == chr(code)
    assert escaped("a\nb") == "a\nb"


@pytest.mark.parametrize(
    ("chunk", "shown"),
    [(b"\x00\x08\x0b\x1f\x7f", b"\\x00\\x08\\x0b\\x1f\\x7f"), (b"\xc2\x80\xc2\x9f", b"\\xc2\\x80\\xc2\\x9f"),
     (b"\t\n ~\xc2\xa0\xc3\x80", b"\t\n ~\xc2\xa0\xc3\x80")],
)  # fmt: skip
def test_bytes_that_act_are_escaped_and_their_neighbours_are_not(chunk: bytes, shown: bytes) -> None:
    assert escaped_bytes(chunk) == shown


@pytest.mark.parametrize("most", [10, 80])
def test_short_cuts_what_is_longer_and_nothing_else(most: int) -> None:
    fits = "x" * (most - 2)  # and two quotes
    assert short(fits, most) == repr(fits)
    assert short(fits + "x", most) == "'" + "x" * (most - 5) + "..."


def test_a_line_feed_cannot_begin_a_line_of_the_log() -> None:
    assert printable("one\n2026-01-01T00:00:00Z forged\n") == "one\n  2026-01-01T00:00:00Z forged"


@pytest.mark.parametrize("text", ["a" * 10_000, "\x1b" * 10_000, "\n" * 10_000 + "a", "a" * (MAX_MESSAGE_CHARS + 1)])
def test_messages_are_bounded(text: str) -> None:
    assert len(str(KogError(text))) == MAX_MESSAGE_CHARS
    assert str(KogError(text)).endswith("(cut)")
    assert str(KogError("a" * MAX_MESSAGE_CHARS)) == "a" * MAX_MESSAGE_CHARS


def test_the_log_of_a_compiler_is_shown_whole() -> None:
    assert str(CompileError("nvcc failed", "line\n" * 5000)).count("line") == 5000


def test_short_is_one_quoted_line_of_bounded_length() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert short(nested) == "a list nested too deeply"
    for value in (HOSTILE, "x" * 10**6, list(range(10**6)), b"\x1b" * 500, {"\x1b": "\n"}):
        assert len(short(value)) <= 80
        assert "\n" not in short(value)
        assert short(value).isascii()
        assert not acts(short(value))


def test_launcher_lines_are_quoted_on_the_terminal_and_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(str(tmp_path)) as events:
        events.say(f"rank 0 said {HOSTILE}", error=True)
        events.note(f"note {HOSTILE}" + "y" * 5000)
    log = (tmp_path / "launcher.log").read_text()
    for text in (capsys.readouterr().err, log):
        assert "\\x1b]0;owned" in text
        assert not acts(text)
    assert max(map(len, log.splitlines())) < MAX_MESSAGE_CHARS + 30


def test_what_a_process_printed_is_escaped_in_its_log(tmp_path: Path) -> None:
    log = LogFile(tmp_path, "rank 0")
    log.write(f"one\ttwo Größe 東京 {HOSTILE[:-1]}\n".encode())
    log.close()
    last = (tmp_path / "rank-0.log").read_text().splitlines()[-1]
    assert last == "one\ttwo Größe 東京 \\x1b]0;owned\\x07\\r\\xc2\\x9b2J\u202e"


def test_a_folder_of_any_name_is_shown_escaped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model\x1b]0;x\x07"
    folder.mkdir()
    write_tiny_model(folder)
    assert flags.run(["--device", "cpu", "--check", str(folder)]) == 0
    settings = tmp_path / "settings.toml"
    settings.write_text('log_dir = "\\u001b[2J"')
    assert flags.run(["--print-config", "--config", str(settings)]) == 0
    shown = capfd.readouterr().out
    assert "model\\x1b]0;x\\x07: " in shown
    assert "\\x1b[2J" in shown
    assert not acts(shown)


def test_control_characters_of_a_model_folder_do_not_reach_the_message(tmp_path: Path) -> None:
    value, key = '{"model_type": "\\u001b]0;x\\u0007"}', '{"model_type": "laneformer", "\\u001b[2J": 1}'
    for text in (value, key, '{"\\u009b": 1, "\\u009b": 2}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError) as caught:
            spec_of_folder(tmp_path)
        assert not acts(str(caught.value))
