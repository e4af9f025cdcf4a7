"""`python -m kog_dist.bench.engine.delta_rule`: milliseconds of a delta net's state in one layer of Qwen3.5-9B on a CPU rank.

All its lanes on one rank, a pass of 1 to 64 tokens, in C and in NumPy, in turn, each time behind 256 MiB of other memory, as
between two tokens of an answer. The least of several times. The last line is one JSON object.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kog_dist.bench.report import commit, machine, print_json
from kog_dist.decode.cpu import delta_rule
from kog_dist.decode.cpu.delta_rule import DeltaOperands, DeltaState, LaneNets
from kog_dist.decode.cpu.scratch import Scratch

_LANES, _KEY_HEADS, _HEADS, _DIM, _WIDTH = 8, 2, 4, 128, 4  # Qwen3.5-9B
_SIZES, _REPEATS, _OTHER_BYTES = (1, 4, 16, 64), 9, 256 << 20


def main() -> None:
    """Measure and print."""
    rng, channels = np.random.default_rng(1), (2 * _KEY_HEADS + _HEADS) * _DIM

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((_LANES, *shape)).astype(np.float32)

    nets = LaneNets(normal(channels, _WIDTH), -np.abs(normal(_HEADS)), normal(_HEADS) - 2, normal(_DIM), _KEY_HEADS, _DIM, 1e-6)
    other = np.ones(_OTHER_BYTES // 8, np.int64)
    found: dict[str, dict[str, float]] = {"C": {}, "NumPy": {}}
    for size in _SIZES:
        state = DeltaState(normal(_HEADS, _DIM, _DIM) * 0, normal(_WIDTH - 1, channels))
        operands = DeltaOperands(normal(size, channels + _HEADS * _DIM + 2 * _HEADS), [state], normal(size, _HEADS, _DIM))
        forms: dict[str, Callable[[int, int, int, int], None]] = {
            "C": delta_rule.bound(nets, operands, Scratch()),
            "NumPy": delta_rule.bound_in_numpy(nets, operands),
        }
        times_s: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(_REPEATS):
            for name, run in forms.items():
                other += 1
                begin_s = time.thread_time()
                run(0, 0, size, size)
                times_s[name].append(time.thread_time() - begin_s)
        for name, of_form in times_s.items():
            found[name][str(size)] = round(1e3 * min(of_form), 3)
        print(f"{size:3} tokens: {found['C'][str(size)]:8.3f} ms in C, {found['NumPy'][str(size)]:8.3f} ms in NumPy")
    print_json({"benchmark": "delta_rule", "commit": commit(), "machine": machine(), "ms_of_a_layer": found})


if __name__ == "__main__":
    main()
