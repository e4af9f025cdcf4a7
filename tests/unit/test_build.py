"""Device programs: found in the package, compiled once, and every error carries the compiler's words."""

from __future__ import annotations

import errno
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from kog_dist.cuda import build as build_module
from kog_dist.errors import CompileError, LaunchError
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.startup import StartStage, StartTeller
from kog_dist.workers.cuda.build import build, device_sources, program
from kog_dist.workers.cuda.kernel_abi import KERNEL_STRUCTS, abi_header
from kog_dist.workers.cuda.kernel_header import headers as kernel_headers
from kog_dist.workers.cuda.kernel_shape import KernelShape

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def headers(**options: int) -> dict[str, str]:
    spec = ModelSpec(64, 2, 4, 4, 128, 100, max_context=128, num_lanes=2, delay=1)
    return kernel_headers(KernelShape(spec, range(2), **options))  # type: ignore[arg-type]


def test_device_sources_are_packaged() -> None:
    sources = device_sources()
    assert {"decode.cu", "stream.cu", "layout.cuh", "words.cuh", "wait.cuh", "ptx.cuh"} <= set(sources)
    assert all(sources.values())


def test_abi_header_asserts_every_offset() -> None:
    text = abi_header()
    for struct in KERNEL_STRUCTS:
        for name, offset in struct.offsets.items():
            assert f"offsetof(Kog{struct.name}, {name}) == {offset}" in text


@needs_nvcc
def test_kernel_builds_once_and_keeps_its_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(headers(), folder=tmp_path)
    assert "Compiling entry function 'kog_decode'" in first.log
    assert "setmaxnreg ignored" not in first.log
    monkeypatch.setattr(build_module, "_with_nvcc", None)  # from here on compiling would fail
    assert build(headers(), folder=tmp_path).path == first.path
    with pytest.raises(TypeError):
        build(headers(keeps_hashes=True), folder=tmp_path)


@needs_nvcc
def test_programs_that_are_missing_are_compiled_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one stage of the start, which waits for all of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both, told = threading.Barrier(2, timeout=30), list[StartStage]()

    def compiled(compiler: str, kernel: str, sources: Mapping[str, str]) -> tuple[bytes, str]:
        both.wait()
        return sources["shape.cuh"].encode(), ""

    monkeypatch.setattr(build_module, "_with_nvcc", compiled)
    programs = [headers(), headers(keeps_hashes=True)]
    with StartTeller(lambda report: told.append(report.stage)).hearing_compilers():
        build_module.prebuild(map(program, programs))
        assert told == [StartStage.COMPILING, StartStage.INTERPRETER]
        build_module.prebuild(map(program, programs))
        assert [build(one).path.read_bytes() for one in programs] == [one["shape.cuh"].encode() for one in programs]
    assert len(told) == 2, "nothing is compiled again"


@needs_nvcc
def test_a_program_that_does_not_compile_is_left_to_whoever_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a start goes on without prefill."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def compiled(compiler: str, kernel: str, sources: Mapping[str, str]) -> tuple[bytes, str]:
        if kernel == "dense.cu":
            raise CompileError("no", "")
        return kernel.encode(), ""

    monkeypatch.setattr(build_module, "_with_nvcc", compiled)
    programs = [build_module.Program({"shape.cuh": ""}, name) for name in ("dense.cu", "decode.cu")]
    build_module.prebuild(programs)
    with pytest.raises(CompileError):
        build_module.build(*programs[0])
    monkeypatch.setattr(build_module, "_with_nvcc", None)
    assert build_module.build(*programs[1]).path.read_text() == "decode.cu"


@needs_nvcc
def test_ceiling_kernel_builds(tmp_path: Path) -> None:
    assert build(headers(), "stream.cu", folder=tmp_path).path.stat().st_size > 0


@needs_nvcc
def test_a_compile_error_carries_the_log(tmp_path: Path) -> None:
    broken = {**headers(), "shape.cuh": "this is not a header"}
    with pytest.raises(CompileError) as caught:
        build(broken, "stream.cu", folder=tmp_path)
    assert "shape.cuh" in caught.value.log
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_nvcc", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    with pytest.raises(CompileError, match="install nvcc"):
        build(headers(), folder=tmp_path)


def test_a_cache_that_cannot_be_written_is_said_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_nvcc", lambda: None)
    monkeypatch.setattr(build_module, "_version", lambda compiler: "13")
    monkeypatch.setattr(build_module, "_with_nvrtc", None)
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot be kept in .*/file/cubins: Not a directory; .* set XDG_CACHE_HOME"):
        build(headers(), folder=tmp_path / "file" / "cubins")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as root may write where others may not
    with pytest.raises(LaunchError, match=r"cannot be kept in .*: it cannot be written; "):
        build(headers(), folder=tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(path: Path, target: Path) -> None:
        assert path.exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_module, "_nvcc", lambda: None)
    monkeypatch.setattr(build_module, "_version", lambda compiler: "13")
    monkeypatch.setattr(build_module, "_with_nvrtc", lambda kernel, sources: (b"cubin", ""))
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", replace)
        with pytest.raises(LaunchError, match="No space left on device; make room there"):
            build(headers(), folder=tmp_path)
    assert not list(tmp_path.iterdir())
    assert build(headers(), folder=tmp_path).path.read_bytes() == b"cubin"
    assert len(list(tmp_path.iterdir())) == 1
