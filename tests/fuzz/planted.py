"""A target that has every kind of finding: the runner must notice them all."""

from __future__ import annotations

import time


def one_input(data: bytes) -> None:
    """What the input says."""
    if data == b"raise":
        raise ValueError("planted")
    if data == b"slow":
        begun_s = time.process_time()
        while time.process_time() - begun_s < 1.2:
            pass
    if data == b"memory":
        bytearray(200 << 20)
    if data == b"stuck":
        time.sleep(60)
