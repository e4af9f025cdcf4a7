"""What `--quantize` rounds, kept on disk for the next start: the codes and scales of every lane's part of a matrix.

`kog_dist/rounded` in the user's cache folder has a folder for each model and format, and that a file for each part: a head, which
says all that the codes follow from, the codes, the scales, and a CRC-32 of everything before it. A reader knows the head and the
length that it must find; what differs in any byte is not believed. Nothing here can end a start: where the cache is of no use,
weights are rounded as without it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kog_dist.errors import CheckpointError
from kog_dist.foreign_file import open_fd, opened
from kog_dist.late_numpy import np
from kog_dist.model.exact_file import read_exactly
from kog_dist.model.formats.numbers import NUMBERS, nibbles
from kog_dist.model.formats.rounding import ROUNDING_VERSION
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.model.safetensors_file import SafetensorsFile
from kog_dist.records import dataclass
from kog_dist.strict_json import parse_object
from kog_dist.system.files import is_ours_alone, user_cache_folder, write_at_once

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint

_MAGIC: Final = "kog_dist rounded weights, layout 1"
_ABOUT: Final = "model.json"  # of each model's folder; when it was last used is its time of change
_ABOUT_BYTES: Final = 2**16
_FOLDER_NAME: Final = re.compile(r"[0-9a-z]+-[0-9a-f]{16}")
_FREE_SHARE, _FREE_BYTES = 20, 10 * 2**30  # a twentieth of the disk, and no more than 10 GiB, stay free
_UNFINISHED_S: Final = 3600.0  # what a killed process was writing goes when it is as old
_CRC_BYTES, _SCALE_BYTES = 4, 4
_GIB: Final = 2**30


def rounded_folder() -> Path:
    """Where the folders of all models are. Raises OSError: there is no home."""
    return user_cache_folder() / "rounded"


@dataclass(frozen=True, slots=True)
class KeptModel:
    """The folder of a model in one format. `reserved_bytes`: what it takes when all is kept; `used_s`: when it was last used."""

    folder: Path
    model: str
    form: str
    reserved_bytes: int
    used_s: float

    @property
    def num_bytes(self) -> int:
        """What it takes now."""
        total = 0
        with suppress(OSError), os.scandir(self.folder) as entries:  # another process may be removing it
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_size
        return total


def kept_models(root: Path) -> list[KeptModel]:
    """Those of a `rounded_folder`, the least recently used one first. What is not of this program is left out."""
    found = []
    with suppress(OSError):
        for folder in root.iterdir():
            if _FOLDER_NAME.fullmatch(folder.name) and (model := _described(folder)) is not None:
                found.append(model)
    return sorted(found, key=lambda model: (model.used_s, model.folder.name))


def _described(folder: Path) -> KeptModel | None:
    try:
        with opened(folder / _ABOUT) as stream:
            used_s, about = os.fstat(stream.fileno()).st_mtime, parse_object(stream.read(_ABOUT_BYTES), 16)
        model, form, reserved = about["model"], about["format"], about["bytes"]
    except (OSError, ValueError, KeyError):
        return None
    if not (isinstance(model, str) and isinstance(form, str) and type(reserved) is int and reserved >= 0):
        return None
    return KeptModel(folder, model, form, reserved, used_s)


class RoundedCache:
    """The rounded parts of one checkpoint. Threads may use it at the same time, and so may processes use one folder."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, limit_bytes: int, tell: Callable[[str], None]) -> RoundedCache | None:
        """None if nothing is rounded, the limit is 0, or there is no place for it. Writes nothing yet.

        `limit_bytes`: of all models together. `tell` gets one sentence when the cache is of no use, and one when it is damaged.
        """
        if checkpoint.rounding is None or not limit_bytes or not checkpoint.files:
            return None
        try:
            return cls(checkpoint, checkpoint.rounding, rounded_folder(), limit_bytes, tell)
        except OSError as error:
            tell(f"rounded weights are not kept: {error.strerror}")
            return None

    def __init__(
        self, checkpoint: Checkpoint, form: WeightFormat, root: Path, limit_bytes: int, tell: Callable[[str], None]
    ) -> None:
        self._checkpoint, self._form, self._limit_bytes, self._tell = checkpoint, form, limit_bytes, tell
        self._paths = {file.path: os.path.realpath(file.path) for file in checkpoint.files}
        self.folder = root / self._folder_name()
        self._lock = threading.Lock()
        self._is_read: bool | None = None  # None: nobody has asked yet
        self._is_written: bool | None = None
        self._has_told_damage = False

    def parts(self) -> Iterator[tuple[str, int]]:
        """All parts that are rounded, by tensor and lane."""
        for name, layout in self._checkpoint.layouts.items():
            if self._checkpoint.is_rounded(name):
                yield from ((name, lane) for lane in range(len(layout.parts)))

    def num_kept(self) -> tuple[int, int]:
        """How many of the parts there are files of, and of how many. None of them is read."""
        there = set(os.listdir(self.folder)) if self.folder.is_dir() else set()
        kept = [_file_name(self._head(name, lane)) in there for name, lane in self.parts()]
        return sum(kept), len(kept)

    # ---- reading ----
    def read(self, name: str, lane: int) -> CodedMatrix | None:
        """What `keep` was given; None if there is none that can be believed."""
        if not self._may_read():
            return None
        head = self._head(name, lane)
        path = self.folder / _file_name(head)
        _, rows, columns = self._checkpoint.layouts[name].shape
        try:
            payload = _checked(path, head, _payload_bytes(self._form, rows, columns))
        except FileNotFoundError:
            return None
        except (OSError, CheckpointError) as error:
            with self._lock:
                is_first, self._has_told_damage = not self._has_told_damage, True
            if is_first:
                self._tell(f"rounded weights that were kept cannot be used, and are made anew: {error}")
            return None
        return _unpacked(self._form, rows, columns, payload)

    def _may_read(self) -> bool:
        """Whether the folder is there and nobody else can write to it. Notes that the model is used."""
        with self._lock:
            if self._is_read is None:
                with suppress(OSError):  # there is none, or it is on a disk that cannot be written
                    os.utime(self.folder / _ABOUT)
                self._is_read = self.folder.is_dir() and is_ours_alone(self.folder)
            return self._is_read

    # ---- writing ----
    def keep(self, name: str, lane: int, coded: CodedMatrix) -> None:
        """Write what a part was rounded to, unless there is no room for it."""
        if not self._may_write():
            return
        head = self._head(name, lane)
        content = b"".join([head, *_packed(coded)])
        try:
            _check_room(self.folder, len(content))
            write_at_once(
                self.folder / _file_name(head), content + zlib.crc32(content).to_bytes(_CRC_BYTES, "little"), is_private=True
            )
        except OSError as error:
            self._give_up(error)

    def _may_write(self) -> bool:
        with self._lock:
            if self._is_written is None:
                self._is_written = self._is_begun()
                self._is_read = self._is_read or self._is_written
            return self._is_written

    def _is_begun(self) -> bool:
        """Make the folder, and room for it among those of other models. Tells why not."""
        needed = sum(self._part_bytes(name, lane) for name, lane in self.parts())
        if needed > self._limit_bytes:
            self._tell(
                f"the rounded weights of this model, {needed / _GIB:.1f} GiB, are not kept, since --quantize-cache allows "
                f"{self._limit_bytes / _GIB:g} GiB: every start rounds them; allow more, or turn it off"
            )
            return False
        root = self.folder.parent
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_ours_alone(root):
                self._tell(f"rounded weights are not kept: somebody else can write to {root}; set XDG_CACHE_HOME")
                return False
            self._make_folder(needed)
            self._make_room(needed)
            _check_room(self.folder, 0)
        except OSError as error:
            self._tell_not_kept(error)
            return False
        return True

    def _make_folder(self, needed: int) -> None:
        """It appears together with the file that says what it is, so that one without is nobody's."""
        about = json.dumps({"model": str(self._checkpoint.folder), "format": str(self._form), "bytes": needed}).encode()
        if not self.folder.is_dir():
            unfinished = self.folder.parent / f".{secrets.token_hex(8)}.new"
            unfinished.mkdir(mode=0o700)
            try:
                write_at_once(unfinished / _ABOUT, about, is_private=True)
                with suppress(OSError):  # another process was first
                    unfinished.replace(self.folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        if _described(self.folder) is None:
            write_at_once(self.folder / _ABOUT, about, is_private=True)

    def _make_room(self, needed: int) -> None:
        """Remove what was used least recently, until all that is promised is within the limit; and what nobody finished."""
        root, now_s = self.folder.parent, time.time()
        for folder in (root, self.folder):
            for path in folder.iterdir():
                with suppress(OSError):
                    if path.name.startswith(".") and now_s - path.lstat().st_mtime > _UNFINISHED_S:
                        _remove(path)
        others = [model for model in kept_models(root) if model.folder != self.folder]
        promised = needed + sum(model.reserved_bytes for model in others)
        for model in others:
            if promised <= self._limit_bytes:
                return
            gone = root / f".{secrets.token_hex(8)}.removed"  # under its name it is whole or not there
            with suppress(OSError):
                model.folder.replace(gone)
            shutil.rmtree(gone, ignore_errors=True)
            promised -= model.reserved_bytes

    def _give_up(self, error: OSError) -> None:
        """Write nothing more, and say so once. If the folder is gone, another process has needed its room."""
        with self._lock:
            is_first, self._is_written = bool(self._is_written), False
        if is_first:
            self._tell_not_kept(error)

    def _tell_not_kept(self, error: OSError) -> None:
        self._tell(f"rounded weights are not kept in {self.folder}: {error.strerror}; the next start rounds them again")

    # ---- what a file is of ----
    def _folder_name(self) -> str:
        checkpoint, manifest = self._checkpoint, self._checkpoint.manifest
        source: object = sorted(map(self._identity, checkpoint.files))
        if manifest is not None:
            source = sorted(manifest.tensors.items())
        lanes, verify = checkpoint.spec.num_lanes, checkpoint.verify
        said = json.dumps([_MAGIC, ROUNDING_VERSION, asdict(self._form), lanes, verify, source])
        return f"{self._form.number.lower()}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"

    def _identity(self, file: SafetensorsFile) -> list[object]:
        """What tells whether a file is still the one that was read, where no manifest has hashes of its values."""
        _, inode, num_bytes, changed_ns = file.identity
        return [self._paths[file.path], inode, num_bytes, changed_ns, file.header_sha256]

    def _head(self, name: str, lane: int) -> bytes:
        """All that a part's codes follow from."""
        checkpoint, layout = self._checkpoint, self._checkpoint.layouts[name]
        stored, file, manifest = checkpoint.names[name], checkpoint.owner[name], checkpoint.manifest
        said = {
            "rounding": ROUNDING_VERSION,
            "format": asdict(self._form),
            "source": self._identity(file) if manifest is None else manifest.tensors[name][lane],
            "verified": checkpoint.verify,
            "tensor": stored.name,
            "dtype": file.tensors[stored.name].dtype,
            "box": stored.box(layout, lane),
            "rotary halves": stored.half_pairs if stored.turned in (0, stored.half_pairs) else [stored.half_pairs, stored.turned],
            "shape": layout.shape[1:],
        }
        return f"{_MAGIC}\n{json.dumps(said)}\n".encode()

    def _part_bytes(self, name: str, lane: int) -> int:
        _, rows, columns = self._checkpoint.layouts[name].shape
        return len(self._head(name, lane)) + _payload_bytes(self._form, rows, columns) + _CRC_BYTES


def _file_name(head: bytes) -> str:
    return f"{hashlib.sha256(head).hexdigest()[:32]}.codes"


def _check_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError where a file of so many bytes would leave the disk too full for others."""
    disk = os.statvfs(folder)
    spare = min(disk.f_blocks * disk.f_frsize // _FREE_SHARE, _FREE_BYTES)
    if disk.f_bavail * disk.f_frsize - num_bytes < spare:
        raise OSError(errno.ENOSPC, f"its disk would have less than {spare / _GIB:.1f} GiB left")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


# ---- the bytes of a part ----
def _is_packed(form: WeightFormat, columns: int) -> bool:
    return NUMBERS[form.number].bits == 4 and columns % 2 == 0


def _payload_bytes(form: WeightFormat, rows: int, columns: int) -> int:
    down, across = form.num_blocks(rows, columns)
    return (rows * columns >> _is_packed(form, columns)) + down * across * _SCALE_BYTES


def _packed(coded: CodedMatrix) -> tuple[bytes, bytes]:
    """Codes, of 4 bit two in a byte, and the scale of each block in float32."""
    form = coded.form
    assert coded.zeros is None
    codes = coded.packed() if _is_packed(form, coded.codes.shape[1]) else coded.codes
    return codes.tobytes(), coded.scales[:: form.block_rows].astype("<f4").tobytes()


def _unpacked(form: WeightFormat, rows: int, columns: int, payload: memoryview) -> CodedMatrix:
    down, across = form.num_blocks(rows, columns)
    num_codes = len(payload) - down * across * _SCALE_BYTES
    raw = np.frombuffer(payload, np.uint8, num_codes).reshape(rows, -1)
    codes = nibbles(raw) if _is_packed(form, columns) else raw
    blocks = np.frombuffer(payload, "<f4", offset=num_codes).reshape(down, across)
    _, _, groups = form.groups_of(0, columns)
    return CodedMatrix(form, codes, blocks[np.arange(rows) // form.block_rows], groups)


def _checked(path: Path, head: bytes, payload_bytes: int) -> memoryview:
    """The payload of a file. Raises OSError if it cannot be read, CheckpointError if it is not what it must be."""
    fd = open_fd(path, follows_link=False)
    try:
        found, num_bytes = os.fstat(fd), len(head) + payload_bytes + _CRC_BYTES
        if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
            raise CheckpointError(f"{path} has {found.st_size} bytes, expected {num_bytes}")
        whole = memoryview(bytearray(num_bytes))
        read_exactly(path, fd, whole, 0, "rounded weights")
    finally:
        os.close(fd)
    content, crc = whole[:-_CRC_BYTES], int.from_bytes(whole[-_CRC_BYTES:], "little")
    if content[: len(head)] != head:
        raise CheckpointError(f"{path} is of other weights than its name says")
    if zlib.crc32(content) != crc:
        raise CheckpointError(f"{path} differs from its checksum")
    return content[len(head) :]
