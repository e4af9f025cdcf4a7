"""The choice among algorithms of a product, and where cuBLASLt is looked for."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from kog_dist.cuda import cublas_lt
from kog_dist.errors import LaunchError
from kog_dist.workers.prefill.base.arrays import Array, repeated
from kog_dist.workers.prefill.gemm import cublas_autotune as products
from kog_dist.workers.prefill.gemm.algorithm_cache import AlgorithmCache
from kog_dist.workers.prefill.gemm.cublas_autotune import Products, fastest
from tests.unit.fake_cupy import PlayedDevice


@pytest.mark.parametrize(
    ("times", "wanted"),
    [([1.0], 0), ([1.0, 0.999, 0.95], 2), ([1.0, 0.995], 0), ([1.0, math.inf, 0.5, 0.497], 2), ([2.0, 1.0, 1.5], 1)],
)
def test_fastest_of_those_with_the_same_bits(times: list[float], wanted: int) -> None:
    assert fastest(times) == wanted


def random(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float16)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is loaded, in turn; nothing is found."""
    asked: list[str] = []

    def load(path: str) -> ctypes.CDLL:
        asked.append(path)
        raise OSError(path)

    runtime = SimpleNamespace(runtimeGetVersion=lambda: 13010)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(ctypes, "CDLL", load)
    cublas_lt.library.cache_clear()
    yield asked
    cublas_lt.library.cache_clear()


def test_cublaslt_is_looked_for_in_packages_then_in_the_system(
    loader: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packaged = tmp_path / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda program: f"/toolkit/bin/{program}")
    with pytest.raises(LaunchError, match=r"libcublasLt\.so\.13 cannot be loaded; pip install nvidia-cublas"):
        cublas_lt.library()
    system = ["libcublasLt.so.13", "/toolkit/lib64/libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"]
    assert loader == [str(packaged), *system]
    found: Any = object()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: found)
    assert cublas_lt.library() is found


def test_products_need_cublaslt(loader: list[str]) -> None:
    with pytest.raises(LaunchError, match="cannot be loaded"):
        Products()


class PlayedProduct:
    """Algorithm 1 adds in another order, those of `refusing` do not run; all others multiply."""

    num_algorithms = 6
    found = True
    refusing: ClassVar[set[int]] = {2, 5}
    proposed = "abcdef"  # their names

    def __init__(self, *_: Any, **__: Any) -> None:
        if not self.found:
            raise LaunchError("no algorithm")

    def name(self, algorithm: int) -> str | None:
        return self.proposed[algorithm] if self.proposed else None

    def index(self, name: str) -> int | None:
        return self.proposed.index(name) if name in self.proposed else None

    def play(self, algorithm: int, x: Array, matrix: Array, out: Array) -> None:
        if algorithm in self.refusing:
            raise LaunchError(f"algorithm {algorithm} does not run")
        out[...] = x.astype(np.float32) @ matrix.astype(np.float32).swapaxes(1, 2) + (algorithm == 1)


class PlayedTrial:
    """Algorithms take less time the later they come."""

    def __init__(self) -> None:
        self.times = iter(range(100, 0, -10))

    def aside(self) -> Any:
        return nullcontext()

    def values(self, x: Array) -> Array:
        return random(*x.shape) if x.strides[0] or len(x) == 1 else repeated(random(1, *x.shape[1:]), len(x))

    def time_ms(self, run: Callable[[], None], *, is_flushed: bool, best_ms: float) -> float:
        return float(next(self.times))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Products]:
    """Products on a CPU, which keep choices in one folder."""
    monkeypatch.setattr(products, "GemmProblem", PlayedProduct)
    monkeypatch.setattr(products, "Trial", PlayedTrial)
    monkeypatch.setattr(Products, "_run", lambda _, product, *rest: product.play(*rest))
    monkeypatch.setattr(cublas_lt, "library", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", np)

    def made(**made_for: str) -> Products:
        return Products(AlgorithmCache({"GPU": "a", **made_for}, folder=tmp_path))

    return made


def _multiply(multiply: Products, rows: int = 3, *, is_shared: bool = False) -> int:
    """The algorithm that is used in the end."""
    x, matrix, out = aligned(random(2, rows, 8)), aligned(random(2, 5, 8)), aligned(np.zeros((2, rows, 5), np.float32))
    x = repeated(x[:1], 2) if is_shared else x
    multiply(x, matrix, out)
    assert np.allclose(out, x.astype(np.float32) @ matrix.astype(np.float32).swapaxes(1, 2), rtol=1e-2, atol=1e-2)
    return list(multiply._plans.values())[-1][1]


def aligned(array: Array) -> Array:
    """A copy where a GPU's allocator would have it."""
    memory = np.empty(array.nbytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_the_fastest_with_the_bits_of_the_first_is_taken_once_for_each_shape(make: Callable[..., Products]) -> None:
    played = make()
    assert _multiply(played) == 4, "0, 3 and 4 give the same bits; 4 took the least time"
    _multiply(played)
    assert (played.num_shapes, played.num_tried) == (1, 1)
    _multiply(played, rows=4)
    assert (played.num_shapes, played.num_tried) == (2, 2)


def test_one_x_for_all_lanes_has_the_bits_of_lanes_with_their_own(
    make: Callable[..., Products], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(PlayedProduct, "refusing", set())
    played = make()
    assert _multiply(played, is_shared=True) == 5, "1, the first that is tried here, gives others"
    assert played.num_shapes == 2, "lanes with their own have chosen, too"


@pytest.mark.parametrize(("found", "message"), [(False, "no algorithm"), (True, r"of \(2, 3, 8\) and \(2, 5, 8\) values")])
def test_a_product_that_no_algorithm_runs_is_named(
    make: Callable[..., Products], monkeypatch: pytest.MonkeyPatch, found: bool, message: str
) -> None:
    monkeypatch.setattr(PlayedProduct, "found", found)
    monkeypatch.setattr(PlayedProduct, "refusing", set(range(6)))
    with pytest.raises(LaunchError, match=message):
        _multiply(make())


def test_the_next_start_tries_nothing(make: Callable[..., Products], monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    chosen = [_multiply(first), _multiply(first, is_shared=True)]
    first.end_trials()
    assert first._trial is None
    monkeypatch.delattr(products, "Trial")
    second = make()
    assert [_multiply(second), _multiply(second, is_shared=True)] == chosen
    assert (second.num_shapes, second.num_tried) == (2, 0)
    second.end_trials()


def test_an_algorithm_is_found_by_its_name(make: Callable[..., Products], monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    assert _multiply(first) == 4
    first.end_trials()
    monkeypatch.setattr(PlayedProduct, "proposed", "abcedf")
    assert _multiply(make()) == 3, "which `e` is now"


@pytest.mark.parametrize(
    ("attribute", "value", "wanted"),
    [("proposed", "ABCDEF", 4), ("refusing", {2, 4, 5}, 3)],  # it is not proposed any more; it does not run any more
)
def test_what_was_kept_and_cannot_be_had_is_chosen_again(
    make: Callable[..., Products], monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, wanted: int
) -> None:
    first = make()
    assert _multiply(first) == 4
    first.end_trials()
    monkeypatch.setattr(PlayedProduct, attribute, value)
    second = make()
    assert _multiply(second) == wanted
    assert second.num_tried == 1
    second.end_trials()
    third = make()
    assert _multiply(third) == wanted
    assert third.num_tried == 0


def test_what_has_no_name_is_not_kept(make: Callable[..., Products], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedProduct, "proposed", "")
    for _ in range(2):
        played = make()
        assert _multiply(played) == 4
        played.end_trials()
        assert played.num_tried == 1


def test_other_gpus_and_other_code_choose_by_themselves(make: Callable[..., Products]) -> None:
    first = make()
    _multiply(first)
    first.end_trials()
    for other in ({"GPU": "b"}, {"cuBLASLt": "130200"}):
        played = make(**other)
        _multiply(played)
        assert played.num_tried == 1


def test_ranks_that_choose_at_the_same_time_keep_all(make: Callable[..., Products]) -> None:
    ranks = [make(), make()]
    for rows, rank in enumerate(ranks, 3):
        _multiply(rank, rows)
    for rank in ranks:
        rank.end_trials()
    last = make()
    _multiply(last, 3)
    _multiply(last, 4)
    assert last.num_tried == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"algorithms": []}', '{"algorithms": {"a": 1}}', "[" * 100_000])
def test_a_file_that_is_something_else_counts_as_absent(make: Callable[..., Products], tmp_path: Path, text: str) -> None:
    path = AlgorithmCache({"GPU": "a"}, folder=tmp_path).path
    path.write_text(text)
    for num_tried in (1, 0):
        played = make()
        _multiply(played)
        played.end_trials()
        assert played.num_tried == num_tried
    assert json.loads(path.read_text())["made for"] == {"GPU": "a"}


def test_a_folder_that_cannot_be_written_is_said_and_nothing_more(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    cache = AlgorithmCache({}, folder=tmp_path / "file")
    cache.put("a", "b")
    cache.save()
    assert cache.get("a") == "b"
    assert "note: the fastest algorithms of products are not kept" in capfd.readouterr().err


def test_what_cannot_be_kept_leaves_no_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = AlgorithmCache({}, folder=tmp_path).path
    path.mkdir()
    for _ in range(2):
        cache = AlgorithmCache({}, folder=tmp_path)
        cache.put("a", "b")
        cache.save()
    assert capfd.readouterr().err.count("are not kept") == 2
    assert list(tmp_path.iterdir()) == [path]


def test_algorithms_are_kept_beside_the_cubins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert AlgorithmCache({}).path.parent == tmp_path / "kog_dist" / "algorithms"


@pytest.mark.parametrize(
    ("times", "best_ms", "wanted", "num_replays"),
    [
        ([1.5, 1.6, 1.4, 0.9], math.inf, 1.4, 3),  # 4 ms are enough
        ([0.3, 0.2, 0.1, 0.15], math.inf, 0.1, 4),
        ([0.3, 0.2, 0.1, 0.1], 0.15, 0.2, 2),  # hopeless
        ([9, 8, 7], math.inf, 8, 2),
    ],
)
def test_times_are_measured_as_often_as_it_matters(
    monkeypatch: pytest.MonkeyPatch, times: list[float], best_ms: float, wanted: float, num_replays: int
) -> None:
    happened = list[str]()

    class Event:
        def record(self, stream: Any) -> None: ...

        def synchronize(self) -> None:
            happened.append("replay")

    class Graph:
        @contextmanager
        def captured_from(self, stream_ptr: int) -> Iterator[None]:
            happened.append(f"begin {stream_ptr}")
            yield
            happened.append("end")

        def launch(self, stream_ptr: int) -> None:
            happened.append(f"launch {stream_ptr}")

    cuda = SimpleNamespace(
        Stream=lambda non_blocking: SimpleNamespace(ptr=3), Event=Event, Device=PlayedDevice,
        get_elapsed_time=lambda begin, end: times[happened.count("replay") - 1],
    )  # fmt: skip
    kernel = lambda *_: lambda *_: happened.append("flush")  # noqa: E731
    arrays = {name: getattr(np, name) for name in ("empty", "zeros", "asarray")}
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ElementwiseKernel=kernel, **arrays))
    monkeypatch.setattr(products, "_NUM_FLUSHED", products._NUM_READERS)
    monkeypatch.setattr(products, "Graph", Graph)
    found = products.Trial().time_ms(lambda: happened.append("run"), is_flushed=True, best_ms=best_ms)
    assert found == wanted
    assert happened == ["flush", "begin 3", *["flush", "run"] * 4, "end", *["launch 3", "replay"] * num_replays]


class _Library:
    """Notes what is called, with numbers; `states`: of the algorithms that it finds; a code for one function.

    The first number of an algorithm's name is 100 and more, of `names` if they are given; the others are 7 to 14.
    """

    def __init__(self, states: tuple[int, ...], failing: str = "", names: tuple[int, ...] = ()) -> None:
        self.states, self.failing, self.names = states, failing, names or tuple(range(100, 100 + len(states)))
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            values = [getattr(getattr(argument, "_obj", argument), "value", argument) for argument in arguments]
            self.calls.append((name, *values))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                found = arguments[-2]
                for index, state in enumerate(self.states):
                    found[index].state, found[index].algorithm[0] = state, self.names[index]
                arguments[-1]._obj.value = len(self.states)
            if name == "cublasLtMatmulAlgoConfigGetAttribute":
                algorithm, attribute, number, size, written = arguments
                written._obj.value = wanted = 2 if attribute in (7, 8) else 4
                assert size.value in ((wanted,) if number else (0,)), "it refuses another size"
                if number:
                    number._obj.value = attribute + 6 if attribute else algorithm._obj[0]
            if name == "cublasLtMatmul":
                self.algorithm = arguments[12]._obj[0]
            return 7 if name == self.failing else 0

        return call

    def numbers(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of each call of a function that are numbers."""
        return [tuple(value for value in call[1:] if isinstance(value, int)) for call in self.calls if call[0] == name]


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_lt, "_handle", ctypes.c_void_p)


def _made(monkeypatch: pytest.MonkeyPatch, library: _Library) -> cublas_lt.GemmProblem:
    monkeypatch.setattr(cublas_lt, "library", lambda: library)
    x, w, y = (cublas_lt.Operand(*sizes) for sizes in ((3, 8, 16, 48, 2), (5, 8, 8, 40, 2), (3, 5, 5, 15, 0)))
    return cublas_lt.GemmProblem(x, w, y, count=2, alignment=16)


@pytest.mark.usefixtures("handle")
def test_row_major_matrices_are_described_as_transposed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library((0,))
    _made(monkeypatch, library)
    assert library.numbers("cublasLtMatrixLayoutCreate") == [(2, 8, 5, 8), (2, 8, 3, 16), (0, 5, 3, 5)]  # w, x, y: columns first
    attributes = library.numbers("cublasLtMatrixLayoutSetAttribute")
    assert attributes == [(kind, value, size) for stride in (40, 48, 15) for kind, value, size in ((5, 2, 4), (6, stride, 8))]
    assert library.numbers("cublasLtMatmulDescSetAttribute") == [(3, 1, 4)], "w is read transposed"
    alignments = [(kind, 16, 4) for kind in (5, 6, 7, 8)]
    assert library.numbers("cublasLtMatmulPreferenceSetAttribute") == [(1, 32 << 20, 8), (3, 0, 4), *alignments]


@pytest.mark.usefixtures("handle")
def test_only_algorithms_that_were_found_usable_run(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library((15, 0, 0))
    product = _made(monkeypatch, library)
    assert product.num_algorithms == 2
    for algorithm, wanted in enumerate((101, 102)):
        product.run(algorithm, 0, 0, 0, 0, 0)
        assert library.algorithm == wanted
        assert product.name(algorithm) == f"{wanted}.7.8.9.10.11.12.13.14"
        assert product.index(f"{wanted}.7.8.9.10.11.12.13.14") == algorithm
    assert product.index("100.7.8.9.10.11.12.13.14") is None


@pytest.mark.usefixtures("handle")
def test_names_that_two_algorithms_have_find_none(monkeypatch: pytest.MonkeyPatch) -> None:
    product = _made(monkeypatch, _Library((0, 0, 0), names=(5, 6, 5)))
    product._usable[2].algorithm[3] = 1  # what the numbers do not tell
    assert [product.index(product.name(i) or "") for i in range(3)] == [0, 1, 2]
    product._usable[2].algorithm[3] = 0
    assert [product.index(product.name(i) or "") for i in range(3)] == [None, 1, None]
    product = _made(monkeypatch, _Library((0, 0), "cublasLtMatmulAlgoConfigGetAttribute"))
    assert (product.name(0), product.index("100.7.8.9.10.11.12.13.14")) == (None, None)


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (_Library(()), "no algorithm for a product"),
        (_Library((15,)), "no algorithm for a product"),
        (_Library((0, 0), "cublasLtMatmul"), r"cublasLtMatmul failed \(7\)"),
        (_Library((0, 0), "cublasLtMatrixLayoutCreate"), r"cublasLtMatrixLayoutCreate failed \(7\)"),
    ],
)
@pytest.mark.usefixtures("handle")
def test_what_cublaslt_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch, library: _Library, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        _made(monkeypatch, library).run(1, 0, 0, 0, 0, 0)


def test_results_of_the_search_have_the_size_of_cublaslt_h() -> None:
    assert ctypes.sizeof(cublas_lt._Heuristic) == 96
