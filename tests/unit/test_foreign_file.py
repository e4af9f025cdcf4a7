"""Files that others have named or made: opened in one way, which waits for nobody and reads no more than is wanted."""

from __future__ import annotations

import ast
import errno
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from kog_dist.foreign_file import append_fd, open_fd, opened, read_file, read_text
from tests.unit.test_layering import ROOT, nodes, source_files

OPENERS = {"open", "io.open", "os.open", "codecs.open", "np.load", "np.fromfile", "np.memmap", "shutil.copyfile", "load_file"}
METHODS = {"open", "read_text", "read_bytes", "from_file"}  # of a Path, and of libraries that open a file by its name
OF_THE_SYSTEM = re.compile(r"'/proc/|'/sys/|os\.devnull|resources\.files\(|^proc /|^\(proc /")
OURS = {"SafetensorsFile.open", "HttpGateway.open", "file.open", "self.launcher.open", "memory.open", "Access.from_file"}
# What else is opened, and where: nothing of it has a name or a content that a user, or another process, has chosen.
OWN: dict[str, set[str]] = {
    "collectives/heap.py": {"path"},  # a descriptor of a peer, below /proc
    "kog_dist/bench/engine/decode.py": {"task / 'schedstat'"},
    "kog_dist/bench/engine/session.py": {  # in a folder that it has made for itself alone
        "self.folder / f'{name}.out'", "self.folder / f'{name}.err'", "self.folder / f'{name}.{stream}'", "path",
    },
    "kog_dist/chat/history.py": {"path"},  # made, and not read
    "kog_dist/cuda/build.py": {"entry", "folder / 'out.cubin'"},  # of this package, and of a compiler's folder that it has made
    "kog_dist/decode/cpu/host_library.py": {"made_here"},
    "kog_dist/doctor/cgroups.py": {"own", "folder / name"},
    "kog_dist/doctor/gpus.py": {"device / leaf"},
    "kog_dist/doctor/processors.py": {"_HUGE_PAGES"},
    "kog_dist/doctor/software.py": {"_ROOT / 'pyproject.toml'", "Path(spec.origin).parent / 'version.py'"},
    "kog_dist/foreign_file.py": {"path"},
    "kog_dist/gateway/pages.py": {"entry"},  # of this package
    "kog_dist/hardware/cpus.py": {"path"},
    "kog_dist/rpc/messages/codec.py": {"source"},  # of this package
    "kog_dist/system/files.py": {"unfinished"},  # which must not have been there
    "kog_dist/runtime/instance.py": {"folder / LEASE_FILE"},  # which is locked; without waiting, and not through a link
    "kog_dist/runtime/socket_file.py": {"folder"},
    "kog_dist/train/ablation.py": {"self.out / 'lock'"},  # which are locked
    "kog_dist/train/licences.py": {"distribution", "path"},  # of packages that are installed
    "kog_dist/train/state.py": {"file"},  # of a run that this program has saved
    "kog_dist/train/tokens.py": {"stream"},
    "launch/events.py": {"folder"},
    "launch/gpu_leases.py": {"file"},
    "launch/oom.py": {"proc / str(pid) / 'cgroup'", "path"},
}  # fmt: skip


def opened_names(code: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and expression of what is opened by its name."""
    for node in code:
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in OPENERS:
            yield node.lineno, ast.unparse(node.args[0])
        elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and name not in OURS:
            receiver = ast.unparse(node.func.value)
            yield node.lineno, ast.unparse(node.args[0]) if node.func.attr == "from_file" else receiver.strip("()")


def test_there_is_one_way_to_open_files_of_others() -> None:
    wrong, unused = [], {(file, name) for file, names in OWN.items() for name in names}
    for path in source_files():
        relative = str(path.relative_to(ROOT))
        for line, name in opened_names(nodes(path)):
            unused.discard((relative, name))
            if name not in OWN.get(relative, ()) and not OF_THE_SYSTEM.search(name):
                wrong.append(f"{relative}:{line} opens {name}")
    assert wrong == [], "open it with kog_dist/foreign_file.py"
    assert unused == set()


@pytest.mark.parametrize(
    "code",
    [
        "open(path)", "open(path, 'rb').read()", "os.open(path, os.O_RDONLY)", "path.open()", "Path(given).read_text()",
        "(folder / name).read_bytes()", "np.load(file)", "Tokenizer.from_file(str(path))", "io.open(path)",
    ],
)  # fmt: skip
def test_the_search_finds_every_way(code: str) -> None:
    (found,) = opened_names(ast.walk(ast.parse(code)))
    assert not OF_THE_SYSTEM.search(found[1])


# ---- what is opened, and what is not ----
def fifo(path: Path) -> None:
    os.mkfifo(path)


def fed_fifo(path: Path) -> None:
    """One that somebody writes into."""
    os.mkfifo(path)
    os.write(os.open(path, os.O_RDWR | os.O_NONBLOCK), b"{}")


def local_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def linked(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (fifo, "it is a FIFO, not a regular file"),
    "fed fifo": (fed_fifo, "it is a FIFO, not a regular file"),
    "socket": (local_socket, "it is a socket, not a regular file"),
    "device": (linked("/dev/zero"), "it is a device, not a regular file"),
    "no end": (linked("/dev/random"), "it is a device, not a regular file"),
    "folder": (Path.mkdir, "Is a directory"),
    "nothing": (lambda path: None, "No such file or directory"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    make, why = NO_FILES[kind]
    make(tmp_path / "given")
    for read in (open_fd, lambda path: read_file(path, 10), read_text):
        with pytest.raises(OSError, match="given") as caught:
            read(tmp_path / "given")
        assert caught.value.strerror == why
    if kind != "nothing":
        with pytest.raises(OSError, match="given"):
            append_fd(tmp_path / "given")


@pytest.mark.parametrize(("num_bytes", "most"), [(0, 0), (1, 1), (3 << 20, 3 << 20)])
def test_a_file_is_read_whole_and_never_beyond_its_limit(tmp_path: Path, num_bytes: int, most: int) -> None:
    path = tmp_path / "given"
    path.write_bytes(b"x" * num_bytes)
    assert read_file(path, most) == b"x" * num_bytes
    path.write_bytes(b"x" * (num_bytes + 1))
    with pytest.raises(OSError, match=f"it has more than {most} bytes") as caught:
        read_file(path, most)
    assert caught.value.errno == errno.EFBIG


def test_a_file_of_the_kernels_that_has_no_size_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "given").symlink_to("/proc/self/maps")
    with pytest.raises(OSError, match="it has more than 16 bytes"):
        read_file(tmp_path / "given", 16)


def test_a_link_is_followed_unless_it_must_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("Größe", encoding="utf-8")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "Größe"
    with pytest.raises(OSError, match="it is a link"):
        open_fd(tmp_path / "link", follows_link=False)


def test_what_is_no_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(b"ab\xff")
    with pytest.raises(OSError, match=r"it is not UTF-8 text \(invalid start byte at byte 2\)"):
        read_text(tmp_path / "given")


def test_what_is_appended_to_is_private_and_keeps_what_it_has(tmp_path: Path) -> None:
    for text in (b"a", b"b"):
        fd = append_fd(tmp_path / "log")
        os.write(fd, text)
        os.close(fd)
    assert (tmp_path / "log").read_bytes() == b"ab"
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_stream_is_closed_with_its_block(tmp_path: Path) -> None:
    (tmp_path / "given").touch()
    with opened(tmp_path / "given") as stream:
        assert not stream.closed
    assert stream.closed
