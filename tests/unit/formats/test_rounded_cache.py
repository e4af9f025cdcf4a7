"""What `--quantize` rounded is the same from the cache; whatever is wrong with the cache costs time and nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kog_dist.config import LaunchConfig
from kog_dist.doctor import caches
from kog_dist.launch.inspection import check, dry_run
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.formats import lanes, rounded_cache, rounding
from kog_dist.model.formats.lanes import lane_codes
from kog_dist.model.formats.rounded_cache import RoundedCache, kept_models, rounded_folder
from kog_dist.model.formats.weight_format import CodedMatrix
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.system.files import is_ours_alone
from kog_dist.system.python_child import interpreter
from tests.unit.gguf_files import random_tensors as gguf_tensors
from tests.unit.gguf_files import write_gguf

SPEC = ModelSpec(
    hidden_size=160, num_layers=2, num_heads=8, num_kv_heads=4, intermediate_size=270, vocab_size=36, num_lanes=2, delay=1
)  # fmt: skip
NAME = "model.layers.1.feed_forward.w2.weight"
NUM_PARTS = SPEC.num_layers * 7 * SPEC.num_lanes
LIMIT = 2**30


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    home = tmp_path / "cache"
    home.mkdir(mode=0o700)
    if not is_ours_alone(home):
        pytest.skip("others can write to the folders of tests")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", SPEC, random_tensors(SPEC, seed=4), manifest=False)
    return tmp_path / "model"


@pytest.fixture
def roundings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every matrix that is rounded."""
    shapes: list[tuple[int, ...]] = []

    def counted(values: Any, form: Any) -> CodedMatrix:
        shapes.append(values.shape)
        return rounding.rounded(values, form)

    monkeypatch.setattr(lanes, "rounded", counted)
    return shapes


class Started:
    """A checkpoint as a rank opens it, and what its cache told."""

    def __init__(self, folder: Path, choice: str = "fp8", *, verify: bool = True, limit: int = LIMIT) -> None:
        self.told: list[str] = []
        opened = open_checkpoint(folder, quantize=choice, verify=verify)
        self.cache = RoundedCache.of(opened, limit, self.told.append)
        self.checkpoint = replace(opened, cache=self.cache)

    def load(self) -> list[CodedMatrix]:
        """Every part."""
        assert self.cache is not None
        return [lane_codes(self.checkpoint, name, lane) for name, lane in self.cache.parts()]

    @property
    def folder(self) -> Path:
        """The model's in the cache."""
        assert self.cache is not None
        return self.cache.folder

    def files(self) -> list[Path]:
        """Of the parts that are kept."""
        return sorted(self.folder.glob("*.codes"))


def plain(folder: Path, choice: str) -> list[CodedMatrix]:
    checkpoint = open_checkpoint(folder, quantize=choice)
    return [lane_codes(checkpoint, n, lane) for n in checkpoint.layouts if checkpoint.is_rounded(n) for lane in (0, 1)]


def assert_equal(ours: list[CodedMatrix], theirs: list[CodedMatrix]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.form, one.zeros) == (other.form, other.zeros)
        for name in ("codes", "scales", "groups"):
            found, expected = getattr(one, name), getattr(other, name)
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)
        assert np.array_equal(one.values(), other.values())


@pytest.mark.parametrize("choice", ["fp8", "int4"])
def test_what_is_kept_is_what_was_rounded(folder: Path, choice: str, roundings: list[tuple[int, ...]]) -> None:
    expected = plain(folder, choice)
    roundings.clear()
    cold = Started(folder, choice)
    assert_equal(cold.load(), expected)
    assert len(roundings) == NUM_PARTS == len(cold.files())
    warm = Started(folder, choice)
    assert_equal(warm.load(), expected)
    assert len(roundings) == NUM_PARTS
    assert cold.told == warm.told == []
    weights = warm.checkpoint.rank_weights([1]).lanes[1].layers[1]
    assert len(roundings) == NUM_PARTS
    without = open_checkpoint(folder, quantize=choice).rank_weights([1]).lanes[1].layers[1]
    for name in ("wqkv", "wo", "w13", "w2"):
        assert np.array_equal(getattr(weights, name), getattr(without, name))


def test_codes_of_an_odd_number_of_columns_are_kept(folder: Path) -> None:
    assert SPEC.lane_ffn % 2
    Started(folder, "int4").load()
    assert_equal(Started(folder, "int4").load(), plain(folder, "int4"))


def test_a_gguf_file_has_a_cache(tmp_path: Path, roundings: list[tuple[int, ...]]) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", gguf_tensors("llama"), form="Q8_0")
    first = Started(path).load()
    roundings.clear()
    assert_equal(Started(path).load(), first)
    assert roundings == []


def test_what_is_kept_belongs_to_this_version_of_the_rounding() -> None:
    # Other bits need another ROUNDING_VERSION, since caches of users hold these: raise it together with the hashes here.
    values = np.random.default_rng(7).standard_normal((200, 300), dtype=np.float32)
    found = {}
    for choice in ("fp8", "int4"):
        form = rounding.chosen_format(choice, "bfloat16")
        assert form is not None
        coded = rounding.rounded(values, form)
        found[choice] = hashlib.sha256(coded.codes.tobytes() + coded.scales.tobytes()).hexdigest()[:16]
    assert (rounding.ROUNDING_VERSION, found) == (1, {"fp8": "9ddd1f597d9aa846", "int4": "dc2228b06738300c"})


# ---- the key ----
def another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    shutil.copy2(path, folder / "copy")  # the same bytes and time of change
    (folder / "copy").replace(path)


def touched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def other_rounding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_cache, "ROUNDING_VERSION", 2)


def other_groups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "ROUNDED_COLUMNS", 64)
    form = rounding.chosen_format("fp8", "bfloat16")
    assert form is not None
    monkeypatch.setattr("kog_dist.model.checkpoint.chosen_format", lambda choice, dtype: replace(form, block_columns=64))


@pytest.mark.parametrize("change", [another_file, touched, moved, other_rounding, other_groups])
def test_each_part_of_the_key_counts(
    change: Callable[[Path, pytest.MonkeyPatch], None], folder: Path, roundings: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Started(folder).load()
    roundings.clear()
    Started(folder).load()
    assert roundings == []
    change(folder, monkeypatch)
    Started(folder).load()
    assert len(roundings) == NUM_PARTS


def test_format_checks_tensor_and_lane_are_of_the_key(folder: Path) -> None:
    started = [Started(folder), Started(folder, verify=False), Started(folder, "int4")]
    for one in started:
        one.load()
    assert len({one.folder for one in started}) == 3
    names = [path.name for one in started for path in one.files()]
    assert len(set(names)) == len(names) == 3 * NUM_PARTS


def test_other_rotary_halves_are_another_key(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", gguf_tensors("llama"), form="F16")
    name = "model.layers.0.attention.wq.weight"
    started = Started(path)
    lane_codes(started.checkpoint, name, 0)
    other = Started(path)
    stored = other.checkpoint.names[name]
    assert stored.half_pairs
    names = dict(other.checkpoint.names) | {name: replace(stored, half_pairs=stored.half_pairs // 2)}
    cache = RoundedCache.of(replace(other.checkpoint, names=names), LIMIT, other.told.append)
    assert cache is not None
    assert other.cache is not None
    assert other.cache.read(name, 0) is not None
    assert cache.read(name, 0) is None


def test_with_a_manifest_hashes_are_the_key(folder: Path, roundings: list[tuple[int, ...]], tmp_path: Path) -> None:
    tensors = random_tensors(SPEC, seed=4)
    write_checkpoint(folder, SPEC, tensors, manifest=True)
    Started(folder).load()
    shutil.copytree(folder, tmp_path / "twin")
    roundings.clear()
    Started(tmp_path / "twin").load()
    assert roundings == []
    tensors[NAME][1, 0, 0] += 1
    write_checkpoint(folder, SPEC, tensors, manifest=True)
    lane_codes(Started(folder).checkpoint, NAME, 1)
    assert len(roundings) == 1


def test_values_that_were_not_checked_are_not_taken_for_checked_ones(folder: Path) -> None:
    started = Started(folder)
    lanes.rounded_codes(started.checkpoint, NAME, 0, verify=False)
    assert not started.folder.exists()


# ---- damage ----
def flipped(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)

    return damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def another_part(path: Path) -> None:
    others = [other for other in path.parent.glob("*.codes") if other != path]
    path.write_bytes(next(other for other in others if other.stat().st_size == path.stat().st_size).read_bytes())


@pytest.mark.parametrize(
    "damage", [flipped(3), flipped(1000), flipped(-10), flipped(-1), cut, empty, longer, link, fifo, another_part]
)
def test_a_damaged_file_is_made_anew_and_said_once(
    damage: Callable[[Path], None], folder: Path, roundings: list[tuple[int, ...]]
) -> None:
    expected = Started(folder).load()
    started = Started(folder)
    bad = started.files()[:2]
    good = [path.read_bytes() for path in bad]
    for path in bad:
        damage(path)
    roundings.clear()
    assert_equal(started.load(), expected)
    assert len(roundings) == 2
    assert len(started.told) == 1
    assert started.told[0].startswith("rounded weights that were kept cannot be used, and are made anew: ")
    assert [path.read_bytes() for path in bad] == good
    last = Started(folder)
    last.load()
    assert (len(roundings), last.told) == (2, [])


def test_a_part_that_lies_under_another_name_is_refused_by_its_head(folder: Path) -> None:
    started = Started(folder)
    started.load()
    assert started.cache is not None
    first, second = ("model.layers.0.attention.wk.weight", "model.layers.0.attention.wv.weight")
    paths = {}
    for name in (first, second):
        paths[name] = started.folder / rounded_cache._file_name(started.cache._head(name, 0))
    content, head = paths[first].read_bytes(), started.cache._head(second, 0)
    padded = content + b"\0" * (len(paths[second].read_bytes()) - len(content))
    paths[second].write_bytes(padded)
    assert len(head) == len(started.cache._head(first, 0))
    assert started.cache.read(second, 0) is None
    assert "is of other weights than its name says" in started.told[0]


# ---- several at once ----
def test_threads_and_caches_share_a_folder(folder: Path, roundings: list[tuple[int, ...]]) -> None:
    expected = plain(folder, "fp8")
    started = [Started(folder) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        for loaded in [pool.submit(one.load) for one in started for _ in range(2)]:
            assert_equal(loaded.result(), expected)
    assert [one.told for one in started] == [[]] * 4
    assert len(started[0].files()) == NUM_PARTS
    assert [path.name for path in started[0].folder.iterdir() if path.suffix != ".codes"] == ["model.json"]
    assert len(list(started[0].folder.parent.iterdir())) == 1
    roundings.clear()
    assert_equal(Started(folder).load(), expected)
    assert roundings == []


LOADS = """
import hashlib, sys
from dataclasses import replace
from pathlib import Path
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.formats.rounded_cache import RoundedCache
opened = open_checkpoint(Path(sys.argv[1]), quantize="fp8")
checkpoint = replace(opened, cache=RoundedCache.of(opened, 2**30, lambda text: print(text, file=sys.stderr)))
print("ready", flush=True)
sys.stdin.read()
loaded = [checkpoint.tensor(name).tobytes() for name in checkpoint.layouts]
print(hashlib.sha256(b"".join(loaded)).hexdigest())
"""


def test_processes_share_a_folder(folder: Path, roundings: list[tuple[int, ...]]) -> None:
    command = [*interpreter("-c", LOADS), str(folder)]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=environ, cwd=folder)
            )
            for _ in range(3)
        ]
        for process in processes:
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        ends = [process.communicate(timeout=60) for process in processes]
    checkpoint = open_checkpoint(folder, quantize="fp8")
    expected = hashlib.sha256(b"".join(checkpoint.tensor(name).tobytes() for name in checkpoint.layouts)).hexdigest()
    assert ends == [(f"{expected}\n", "")] * 3
    roundings.clear()
    Started(folder).load()
    assert roundings == []


# ---- bounds ----
def reserved(folder: Path) -> int:
    return next(kept.reserved_bytes for kept in kept_models(rounded_folder()) if kept.folder == folder)


def test_what_is_reserved_is_what_is_written(folder: Path) -> None:
    started = Started(folder)
    started.load()
    assert sum(path.stat().st_size for path in started.files()) == reserved(started.folder)


def test_the_least_recently_used_model_goes_first(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for seed, one in enumerate(folders):
        write_checkpoint(one, SPEC, random_tensors(SPEC, seed=seed), manifest=False)
    a, b = Started(folders[0]), Started(folders[1])
    a.load()
    b.load()
    about = [one.folder / "model.json" for one in (a, b)]
    for number, path in enumerate(about):
        os.utime(path, (1000 + number, 1000 + number))
    need = reserved(a.folder)
    Started(folders[0]).load()  # used again, and so b is the oldest
    assert about[0].stat().st_mtime > about[1].stat().st_mtime
    c = Started(folders[2], limit=2 * need + need // 2)
    c.load()
    assert [kept.folder for kept in kept_models(rounded_folder())] == [a.folder, c.folder]
    assert not b.folder.exists()
    assert c.told == []
    assert len(list(rounded_folder().iterdir())) == 2


def test_a_model_that_is_larger_than_the_limit_is_not_kept_and_evicts_nothing(folder: Path, tmp_path: Path) -> None:
    Started(folder).load()
    write_checkpoint(tmp_path / "b", SPEC, random_tensors(SPEC, seed=1), manifest=False)
    large = Started(tmp_path / "b", limit=1000)
    large.load()
    assert not large.folder.exists()
    assert len(large.told) == 1
    assert large.told[0].endswith("every start rounds them; allow more, or turn it off")
    assert len(kept_models(rounded_folder())) == 1


def test_what_lies_there_and_is_not_ours_stays(folder: Path) -> None:
    root = rounded_folder()
    (root / "notes").mkdir(parents=True, mode=0o700)
    (root / "fp8-0123456789abcdef").mkdir()
    Started(folder, limit=10**6).load()
    assert (root / "notes").is_dir()
    assert (root / "fp8-0123456789abcdef").is_dir()


def test_what_killed_processes_left_goes_after_an_hour(folder: Path) -> None:
    Started(folder).load()
    started = Started(folder)
    started.files()[0].unlink()
    left = [started.folder / ".x.codes.0011.new", started.folder.parent / ".0011.new", started.folder.parent / ".2.removed"]
    young = started.folder / ".y.new"
    for path in (left[0], young):
        path.write_bytes(b"x")
    for path in left[1:]:
        path.mkdir()
        (path / "file").write_bytes(b"x")
    for path in left:
        os.utime(path, (1000, 1000))
    started.load()
    assert not any(path.exists() for path in left)
    assert young.exists()
    assert len(started.files()) == NUM_PARTS


def test_a_folder_that_another_process_removed_is_not_made_again(folder: Path) -> None:
    started = Started(folder)
    lane_codes(started.checkpoint, NAME, 0)
    shutil.rmtree(started.folder)
    started.load()
    assert not started.folder.exists()
    assert len(started.told) == 1


# ---- disks ----
def test_a_disk_that_is_nearly_full_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(f_blocks=10**9, f_frsize=4096, f_bavail=10 * 2**30 // 4096)  # what must stay free, and no more
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    expected = plain(folder, "fp8")
    started = Started(folder)
    assert_equal(started.load(), expected)
    assert started.files() == []
    assert started.told == [
        f"rounded weights are not kept in {started.folder}: its disk would have less than 10.0 GiB left; "
        "the next start rounds them again"
    ]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_nothing_costs_a_sentence(folder: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(folder, "fp8")
    started = Started(folder)
    lane_codes(started.checkpoint, NAME, 0)
    calls = []

    def fails(path: Path, content: bytes, *, is_private: bool) -> None:
        calls.append(path)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(rounded_cache, "write_at_once", fails)
    assert_equal(started.load(), expected)
    assert len(calls) == 1
    assert started.told == [
        f"rounded weights are not kept in {started.folder}: {os.strerror(code)}; the next start rounds them again"
    ]
    assert len(started.files()) == 1


def test_a_folder_that_cannot_be_made_costs_a_sentence(folder: Path, cache_home: Path) -> None:
    (cache_home / "kog_dist").write_text("a file")
    started = Started(folder)
    assert_equal(started.load(), plain(folder, "fp8"))
    assert len(started.told) == 1
    assert "Not a directory" in started.told[0]


def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(
    folder: Path, cache_home: Path, roundings: list[tuple[int, ...]]
) -> None:
    Started(folder).load()
    rounded_folder().chmod(0o777)
    roundings.clear()
    started = Started(folder)
    started.load()
    assert len(roundings) == NUM_PARTS
    assert started.told == [f"rounded weights are not kept: somebody else can write to {rounded_folder()}; set XDG_CACHE_HOME"]


def test_files_are_for_this_user_alone(folder: Path) -> None:
    started = Started(folder)
    started.load()
    assert {path.stat().st_mode & 0o777 for path in started.folder.iterdir()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (started.folder, started.folder.parent)} == {0o700}


def test_without_a_home_folder_weights_are_rounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    started = Started(folder)
    assert started.cache is None
    assert started.told == ["rounded weights are not kept: this user has no home folder, and XDG_CACHE_HOME is not set"]


# ---- what users see ----
def test_off_is_off(folder: Path, cache_home: Path, roundings: list[tuple[int, ...]]) -> None:
    assert LaunchConfig(quantize_cache="off").quantize_cache_bytes == 0
    assert LaunchConfig(quantize_cache="1.5").quantize_cache_bytes == 3 << 29
    assert LaunchConfig().quantize_cache_bytes == 64 << 30
    started = Started(folder, limit=0)
    assert started.cache is None
    for _ in range(2):
        lane_codes(started.checkpoint, NAME, 0)
    assert len(roundings) == 2
    assert list(cache_home.iterdir()) == []
    assert RoundedCache.of(open_checkpoint(folder), LIMIT, started.told.append) is None


def test_a_check_and_a_dry_run_say_what_is_kept(folder: Path) -> None:
    settings = LaunchConfig(model=str(folder), device="cpu", ranks=1, quantize="fp8")
    started = Started(folder)
    for count, said in ((0, f"0 of {NUM_PARTS}"), (1, f"1 of {NUM_PARTS}"), (None, f"all {NUM_PARTS}")):
        assert started.cache is not None
        for name, lane in list(started.cache.parts())[:count]:
            lane_codes(started.checkpoint, name, lane)
        kept = f"{said} rounded matrices of lanes kept in {started.folder}"
        assert check(settings).endswith(f", {kept}")
        assert f"note       {kept}" in dry_run(settings).splitlines()
    assert "kept in" not in check(replace(settings, quantize_cache="off"))


def test_the_doctor_says_what_it_takes_and_how_to_be_rid_of_it(folder: Path, cache_home: Path) -> None:
    root = rounded_folder()
    (found,) = caches.rounded_weights()
    assert (found.level, found.text) == ("ok", f"weights that --quantize rounds will be kept in {root}")
    Started(folder).load()
    Started(folder, "int4").load()
    (found,) = caches.rounded_weights()
    assert found.text == f"weights of 2 models that --quantize has rounded take 0.0 GiB in {root}; remove it to be rid of them"
    models = cast("list[dict[str, Any]]", found.details["models"])
    assert [(one["model"], one["format"][:4]) for one in models] == [(str(folder), "FP8 "), (str(folder), "INT4")]
    assert all(one["bytes"] > 10_000 for one in models)
    root.chmod(0o777)
    (found,) = caches.rounded_weights()
    assert found.level == "warning"
    assert found.text.endswith("or others can write to it; set XDG_CACHE_HOME")


@pytest.mark.parametrize("about", ["", "[]", "{}", json.dumps({"model": 1, "format": "x", "bytes": 2}), '{"bytes": -1}'])
def test_a_description_that_is_damaged_is_made_anew(about: str, folder: Path) -> None:
    Started(folder).load()
    started = Started(folder)
    started.files()[0].unlink()
    (started.folder / "model.json").write_text(about)
    assert kept_models(rounded_folder()) == []
    started.load()
    assert [kept.folder for kept in kept_models(rounded_folder())] == [started.folder]
    assert len(started.files()) == NUM_PARTS
