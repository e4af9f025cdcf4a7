"""An engine that can be started beside ours: its program, and the words of its command line (peers.toml)."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.quoting import printable, short
from kog_dist.records import dataclass

OWN: Final = "kog"
_FILE: Final = "peers.toml"
_VERSION_S: Final = 120.0  # some import torch and all of themselves
_MOST_VERSION: Final = 80  # characters
_KEYS: Final = ("model", "port", "context", "all_context", "slots", "devices", "script")


@dataclass(frozen=True, slots=True)
class Peer:
    """See peers.toml. `whole`: a command line that was given, instead of program and words."""

    name: str
    title: str
    program: str = ""
    words: tuple[str, ...] = ()
    gpu: tuple[str, ...] | None = None
    cpu: tuple[str, ...] | None = None
    plain: tuple[str, ...] = ()
    version: tuple[str, ...] = ()
    drafts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    script: str = ""
    reads_gguf: bool = False
    whole: tuple[str, ...] = ()

    def found(self) -> str:
        """Path of its program. Raises LaunchError if there is none."""
        program = self.whole[0] if self.whole else self.program
        beside = Path(sysconfig.get_path("scripts")) / program  # or the program itself, by its whole path
        path = str(beside) if beside.exists() else shutil.which(program)
        if path is None:
            raise LaunchError(f"there is no {short(program)} here; give one with --start {self.name}=PROGRAM")
        return path

    def found_version(self) -> str:
        """The last line of what it says of its version. Raises LaunchError if it is not there, or cannot say."""
        program = self.found()
        if self.whole or not self.version:
            return ""
        try:
            done = subprocess.run(
                [program, *self.version], capture_output=True, text=True, errors="replace", timeout=_VERSION_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"{self.program} does not say its version: {error}") from None
        if done.returncode != 0:
            last = last_line(done.stdout + done.stderr) or "(nothing)"
            raise LaunchError(f"{self.program} {self.version[0]} ended with code {done.returncode}: {short(last, 200)}")
        named = re.search(r"^version:? .+$", done.stdout + done.stderr, re.MULTILINE)  # llama.cpp says more behind it
        return printable(named[0] if named else last_line(done.stdout) or last_line(done.stderr), _MOST_VERSION)

    def command(self, model: str, port: int, *, context: int, slots: int, devices: int, on_gpus: bool, drafts: str) -> list[str]:
        """Its command line. `drafts`: a name of `drafts`, or none. Raises LaunchError where it has no such kind of device."""
        with_or_without = self.drafts[drafts] if drafts else self.plain
        words: Sequence[str] = self.whole[1:]
        if not self.whole:
            kind = self.gpu if on_gpus else self.cpu
            if kind is None:
                raise LaunchError(f"{self.title} is not started on {'GPUs' if on_gpus else 'a CPU'} here")
            words = (*self.words, *kind, *with_or_without)
        values = (model, port, context, context * slots, slots, devices, str(Path(__file__).parent / self.script))
        pairs = [(f"{{{key}}}", str(value)) for key, value in zip(_KEYS, values, strict=True)]
        return [self.found(), *(_filled(word, pairs) for word in words)]


def last_line(text: str) -> str:
    """The last one that says something, or nothing."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _filled(word: str, pairs: Sequence[tuple[str, str]]) -> str:
    for key, value in pairs:
        word = word.replace(key, value)
    return word


@cache
def known() -> Mapping[str, Peer]:
    """Those of peers.toml, in its order."""
    parsed = tomllib.loads(resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8"))
    return {name: _peer_of(name, raw) for name, raw in parsed.items()}


def _peer_of(name: str, raw: Mapping[str, object]) -> Peer:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    return Peer(name, **fields)


def chosen(against: str, starts: Sequence[str]) -> list[Peer]:
    """Ours, and those of a list with commas. `starts`: NAME=PROGRAM or NAME=COMMAND LINE, which is the whole of it.

    A name that is not known needs a command line. Raises ConfigError.
    """
    given = dict[str, tuple[str, ...]]()
    for start in starts:
        name, is_there, command = start.partition("=")
        try:
            given[name] = tuple(shlex.split(command))
        except ValueError as error:
            raise ConfigError(f"--start {short(start)} cannot be read: {error}") from None
        if not is_there or not name or not given[name]:
            raise ConfigError(f"--start must be NAME=PROGRAM or NAME=COMMAND, got {short(start)}")
    names = list(dict.fromkeys([OWN, *(name for name in against.split(",") if name), *given]))
    return [_chosen(name, given.get(name, ())) for name in names]


def _chosen(name: str, given: tuple[str, ...]) -> Peer:
    peer = known().get(name)
    if len(given) > 1:
        return Peer(name, peer.title if peer else name, reads_gguf=peer is not None and peer.reads_gguf, whole=given)
    if peer is None:
        raise ConfigError(
            f"no engine is called {short(name)}; known: {', '.join(known())}. Or give --start {name}='COMMAND LINE'"
        )
    return replace(peer, program=given[0]) if given else peer
