"""The folder of instance folders: whether it is private and has room, which engines run, what dead ones have left."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from kog_dist.doctor.report import Finding, ok, problem, warning
from kog_dist.errors import LaunchError
from kog_dist.runtime.instance import MAX_SOCKET_PATH_BYTES, instances_root, is_stale, read_holder

_LEAST_BYTES = 2**20
_NAME_BYTES = 52  # a name of 40 characters and the socket's


def instances() -> Iterator[Finding]:
    """One finding for the folder, one for engines that run, one for each that is stale."""
    try:
        root = instances_root()
    except LaunchError as error:
        yield problem(str(error))
        return
    details = {"folder": str(root)}
    free = shutil.disk_usage(root).free
    if free < _LEAST_BYTES:
        yield problem(f"{root} has no room for sockets ({free} bytes); free some or set XDG_RUNTIME_DIR", **details)
    elif len(str(root)) + _NAME_BYTES > MAX_SOCKET_PATH_BYTES:
        yield warning(f"{root} is a long path for sockets, so instance names must be short; set XDG_RUNTIME_DIR", **details)
    else:
        yield ok(f"instance folders: {root}, mode 0700", **details)
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    stale = [folder for folder in folders if is_stale(folder)]
    running = [folder for folder in folders if folder not in stale]
    if running:
        holders = {folder.name: str(read_holder(folder) or "a process that is starting") for folder in running}
        yield ok(f"running: {'; '.join(f'{name}, {holder:.100}' for name, holder in holders.items())}", instances=holders)
    for folder in stale:
        yield warning(f"{folder} is left of an engine that was killed; the next kog-launch removes it", instance=folder.name)
