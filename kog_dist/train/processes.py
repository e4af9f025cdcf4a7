"""More processes of a command, spread over the GPUs of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kog_dist.errors import KogError
from kog_dist.system import python_child

_POLL_S = 0.5
_SAVED_S = 120.0  # longest time that a process may take to save and end


@contextmanager
def companions(arguments: Sequence[str], count: int, device: str, stop: Callable[[], bool]) -> Iterator[None]:
    """Beside the block, run `python -m kog_dist.train ARGUMENTS --first K` for K from 1 to `count`, on GPU K modulo their number.

    At the end of the block they are waited for. They are asked to save and end when `stop` says so, and when the block raises.
    What they print to stdout is dropped. Raises KogError if one of them failed.
    """
    processes = [
        subprocess.Popen(
            python_child.command("kog_dist.train", *arguments, "--first", str(number)),
            stdout=subprocess.DEVNULL,
            env=os.environ | (_on_gpu(number) if device == "cuda" else {}),
            process_group=0,  # a Ctrl-C at the terminal is for this process, which passes one signal on
        )
        for number in range(1, count + 1)
    ]
    try:
        yield
        _wait(processes, stop)
    finally:
        _end(processes)
    failed = [process for process in processes if process.returncode != 0]
    if failed:
        raise KogError(f"{len(failed)} of {count} further processes failed (code {failed[0].returncode}); their errors are above")


def _wait(processes: Sequence[subprocess.Popen[bytes]], stop: Callable[[], bool]) -> None:
    for process in processes:
        while process.poll() is None and not stop():
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to save and end; kill those that do not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(_SAVED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _on_gpu(number: int) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": names[number % len(names)]}
