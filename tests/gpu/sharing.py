"""How many ranks share a GPU in tests of several ranks: RANKS_PER_GPU of the environment, else one.

With 2, tests marked `gpu(4, may_share=True)` run on two GPUs, and with 4 those that need eight: kernels of a GPU take turns, so
nothing is known of their speed, but all of what they send, wait for and compute.
"""

from __future__ import annotations

import os

VARIABLE = "RANKS_PER_GPU"


def _ranks_per_gpu() -> int:
    text = os.environ.get(VARIABLE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{VARIABLE}={text}: must be a number of ranks, at least 1")
    return int(text)


RANKS_PER_GPU = _ranks_per_gpu()
