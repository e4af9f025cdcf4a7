"""More processes of a command, spread over the GPUs of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

_POLL_S = 0.5


def start_processes(arguments: Sequence[str], count: int, device: str) -> list[subprocess.Popen[bytes]]:
    """Start `count` times `python -m kog_dist.train ARGUMENTS --first K`, K from 1 on, process K on GPU K modulo their number.

    What they print to stdout is dropped.
    """
    return [
        subprocess.Popen(
            [sys.executable, "-m", "kog_dist.train", *arguments, "--first", str(number)],
            stdout=subprocess.DEVNULL,
            env=os.environ | (_on_gpu(number) if device == "cuda" else {}),
        )
        for number in range(1, count + 1)
    ]


def wait_for_processes(processes: Sequence[subprocess.Popen[bytes]], stop: Callable[[], bool]) -> None:
    """Wait until all have ended. Once `stop` says so they are asked to end, too."""
    asked = False
    for process in processes:
        while process.poll() is None:
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if stop() and not asked:
                    asked = True
                    for other in processes:
                        other.terminate()


def _on_gpu(number: int) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": names[number % len(names)]}
