"""How many ranks share a GPU in tests of several ranks: RANKS_PER_GPU of the environment, else one.

With 2, tests that need four GPUs run on two, and with 4 those that need eight: kernels of a GPU take turns, so nothing is known
of their speed, but all of what they send, wait for and compute.
"""

from __future__ import annotations

import os

RANKS_PER_GPU = int(os.environ.get("RANKS_PER_GPU", "1"))
