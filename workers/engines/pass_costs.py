"""What passes of several tokens cost on CPU ranks, measured once at the start; all ranks go by rank 0's figures."""

from __future__ import annotations

import json
import math
import time
from typing import Any, Final

from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.draft_lengths import costs_between
from kog_dist.runtime.topology import Rendezvous
from kog_dist.runtime.wait import Deadline
from kog_dist.sampling_params import GREEDY

_SIZES: Final = (1, 2, 4, 8, 16)
_QUICK_S, _REPEATS = 0.05, 3  # a pass of one token that takes less is timed several times
_SLOW_S, _MOST_OF_SLOW = 0.25, 4  # one that takes more is not timed with more tokens than this


def pass_costs(interpreter: Interpreter, trial_s: float, rendezvous: Rendezvous, deadline: Deadline) -> list[float]:
    """As of `costs_between`. `trial_s`: what a token took. Collective. Nothing that the passes leave in a KV cache counts."""
    if interpreter.plan.num_tokens == 1:
        return costs_between({1: 1.0})
    trial_s = _of_rank_0(trial_s, rendezvous, deadline)
    most = min(interpreter.plan.num_tokens, _MOST_OF_SLOW if trial_s > _SLOW_S else _SIZES[-1])
    repeats = _REPEATS if trial_s < _QUICK_S else 1
    measured: dict[int, float] = {}
    for _ in range(repeats):  # in turn: what else the machine does for a moment makes all of them slower
        for size in (size for size in _SIZES if size <= most):
            interpreter.prepare(size)
            before_s = time.thread_time()  # other processes of the machine do not count, nor waits for peers
            interpreter.verify((0,) * size, 0, GREEDY)
            measured[size] = min(time.thread_time() - before_s, measured.get(size, math.inf))
    return costs_between(dict(_of_rank_0([*measured.items()], rendezvous, deadline)))


def _of_rank_0(value: object, rendezvous: Rendezvous, deadline: Deadline) -> Any:
    return json.loads(rendezvous.all_gather_bytes(json.dumps(value).encode(), deadline)[0])
