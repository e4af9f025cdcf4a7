"""`kog-bench compare`: two results of `kog-bench serve` (or of `vllm bench serve --save-detailed`) side by side.

A ratio is B / A of the median of a metric over requests (of the sum, for throughput). Its interval comes from a bootstrap over
requests, not over tokens: the gaps within an answer depend on one another. A difference is called one only if 1 is outside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kog_dist.bench.report import print_json
from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.late_numpy import Array
from kog_dist.records import dataclass
from kog_dist.rpc.output import write_out

NUM_RESAMPLES: Final = 2000
LEAST_REQUESTS: Final = 5  # fewer say nothing about how much they vary
CONFIDENCE: Final = 0.95
_BLOCK = 1 << 20  # drawn values at a time
_NEEDED = ("errors", "ttfts", "itls", "output_lens")
# What should be equal for the figures to mean the same; the names are those of the result.
_SAME = ("model_id", "backend", "num_prompts", "request_rate", "burstiness", "max_concurrency")
_SAME_CONFIGURATION = ("output_len", "num_warmups", "seed", "temperature", "ignore_eos", "extra_body")
_SAME_MACHINE = ("cpu", "cores")
_LOAD: Final = 0.5  # processes that wanted a core in the minute before; a difference of less is as good as none


@dataclass(frozen=True, slots=True)
class Ratio:
    """One line of the comparison. `low` and `high` bound the ratio with CONFIDENCE."""

    name: str
    unit: str
    first: float
    second: float
    ratio: float
    low: float | None  # None: too few requests to say
    high: float | None
    more_is_better: bool

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 1: these samples do not tell the two apart."""
        return self.low is None or self.high is None or self.low <= 1.0 <= self.high

    @property
    def is_slower(self) -> bool:
        """Whether the second is worse beyond the noise."""
        return not self.is_noise and (self.ratio < 1.0) == self.more_is_better

    @property
    def slower_percent(self) -> float:
        """By how much the second is worse; 0 within the noise."""
        if not self.is_slower:
            return 0.0
        return (1.0 / self.ratio - 1.0 if self.more_is_better else self.ratio - 1.0) * 100

    @property
    def verdict(self) -> str:
        """In words."""
        if self.low is None:
            return "too few requests to say"
        return "within noise" if self.is_noise else "slower" if self.is_slower else "faster"

    @property
    def interval(self) -> str:
        """Both bounds."""
        return "" if self.low is None or self.high is None else f"{self.low:.3f} to {self.high:.3f}"


def read_result(path: Path) -> dict[str, Any]:
    """A result with its details. Raises ConfigError if the file is not one."""
    try:
        lines = read_text(path).splitlines()
        parsed: Any = json.loads(lines[-1] if lines and lines[-1].startswith('{"') else "\n".join(lines))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read as a result of kog-bench serve: {why}") from None
    missing = [name for name in _NEEDED if not isinstance(parsed, dict) or not isinstance(parsed.get(name), list)]
    if missing:
        remedy = "write it with kog-bench serve --output FILE, or vllm bench serve --save-result --save-detailed"
        raise ConfigError(f"{path} has no {', '.join(missing)}; {remedy}")
    if len({len(parsed[name]) for name in _NEEDED}) != 1:
        raise ConfigError(f"{path} is damaged: its lists of requests have different lengths")
    if all(parsed["errors"]):
        raise ConfigError(f"{path} has no request that was answered; there is nothing to compare")
    return dict(parsed)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What is not the same in the two configurations: then a ratio says more than one thing."""
    pairs = [(name, first.get(name), second.get(name)) for name in _SAME]
    for part, names in (("configuration", _SAME_CONFIGURATION), ("machine", _SAME_MACHINE)):
        pairs += [(name, _dict(first, part).get(name), _dict(second, part).get(name)) for name in names]
    found = [f"{name} is {one!r} and {other!r}" for name, one, other in pairs if one != other]
    one, other = (_dict(result, "machine").get("load_1min") for result in (first, second))
    if isinstance(one, int | float) and isinstance(other, int | float) and abs(one - other) > _LOAD:
        found.append(f"the machine's load at the start is {one} and {other}")
    for name in ("input_lens", "output_lens"):
        totals = [sum(result.get(name) or [0]) for result in (first, second)]
        if totals[0] != totals[1]:
            found.append(f"the sum of {name} is {totals[0]} and {totals[1]}")
    return found


def ratios(first: Mapping[str, object], second: Mapping[str, object], seed: int = 0) -> list[Ratio]:
    """All lines of the comparison; the same seed gives the same intervals."""
    import numpy as np

    found = []
    for name, unit, more_is_better, values_of in _METRICS:
        samples = [np.asarray(values_of(result), dtype=float) for result in (first, second)]
        if min(map(len, samples)) == 0 or not all(np.median(sample) > 0 for sample in samples):
            continue
        low, high = _interval(samples[0], samples[1], seed) if min(map(len, samples)) >= LEAST_REQUESTS else (None, None)
        one, other = (float(np.median(sample)) for sample in samples)
        found.append(Ratio(name, unit, one, other, other / one, low, high, more_is_better))
    return found


def _interval(first: Array, second: Array, seed: int) -> tuple[float, float]:
    """Bounds of the ratio of medians, by the percentile bootstrap (Efron and Tibshirani 1993, chapter 13)."""
    import numpy as np

    generator = np.random.default_rng(seed)
    medians = [_resampled_medians(sample, generator) for sample in (first, second)]
    ratio = medians[1] / medians[0]
    low, high = np.quantile(ratio, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _resampled_medians(sample: Array, generator: Any) -> Array:
    """(NUM_RESAMPLES,) medians of samples drawn with replacement, in blocks of bounded memory."""
    import numpy as np

    rows = max(1, _BLOCK // len(sample))
    blocks = [
        np.median(generator.choice(sample, (min(rows, NUM_RESAMPLES - start), len(sample))), axis=1)
        for start in range(0, NUM_RESAMPLES, rows)
    ]
    return np.concatenate(blocks)


def _dict(result: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = result.get(name)
    return value if isinstance(value, dict) else {}


def _good(result: Mapping[str, Any]) -> list[int]:
    return [idx for idx, error in enumerate(result["errors"]) if not error]


def _ttfts(result: Mapping[str, Any]) -> list[float]:
    return [result["ttfts"][idx] * 1e3 for idx in _good(result)]


def _latencies(result: Mapping[str, object]) -> list[float]:
    return [_latency(result, idx) * 1e3 for idx in _good(result)]


def _latency(result: Mapping[str, Any], idx: int) -> float:
    latencies = result.get("latencies")
    return float(latencies[idx] if latencies else result["ttfts"][idx] + sum(result["itls"][idx]))


def _tpots(result: Mapping[str, Any]) -> list[float]:
    lens = result["output_lens"]
    return [(_latency(result, idx) - result["ttfts"][idx]) / (lens[idx] - 1) * 1e3 for idx in _good(result) if lens[idx] > 1]


def _itl_tails(result: Mapping[str, Any]) -> list[float]:
    """The 99th percentile of the gaps of each answer."""
    tails = []
    for idx in _good(result):
        gaps = sorted(result["itls"][idx])
        if gaps:
            tails.append(gaps[max(0, math.ceil(0.99 * len(gaps)) - 1)] * 1e3)
    return tails


def _rates(result: Mapping[str, object]) -> list[float]:
    return [1e3 / tpot for tpot in _tpots(result) if tpot > 0]


_METRICS: Final[Sequence[tuple[str, str, bool, Callable[[Mapping[str, object]], list[float]]]]] = (
    ("ttft", "ms", False, _ttfts),
    ("tpot", "ms", False, _tpots),
    ("p99 itl of an answer", "ms", False, _itl_tails),
    ("e2el", "ms", False, _latencies),
    ("tokens/s of one reader", "", True, _rates),
)


def run(first_path: Path, second_path: Path, *, fail_if_slower: float | None, seed: int) -> bool:
    """Print the comparison and the JSON object; False if the second is slower by more than `fail_if_slower` percent."""
    first, second = read_result(first_path), read_result(second_path)
    lines, found = ratios(first, second, seed), differences(first, second)
    write_out(f"A {first_path}: {_origin(first)}\nB {second_path}: {_origin(second)}\n")
    write_out(f"{'median over requests':<26}{'A':>12}{'B':>12}{'B/A':>9}   {CONFIDENCE:.0%} interval\n")
    for line in lines:
        name = f"{line.name} {line.unit}".strip()
        write_out(f"{name:<26}{line.first:>12.3f}{line.second:>12.3f}{line.ratio:>9.3f}   {line.interval:<18} {line.verdict}\n")
    for difference in found:
        write_out(f"note: the configurations differ: {difference}\n")
    num_failed = [sum(map(bool, result["errors"])) for result in (first, second)]
    if any(num_failed):
        write_out(f"note: {num_failed[0]} requests of A failed and {num_failed[1]} of B; they are left out\n")
    limit = fail_if_slower
    too_slow = [line.name for line in lines if limit is not None and line.slower_percent > limit]
    if too_slow:
        write_out(f"B is slower than A by more than {limit:g}%: {', '.join(too_slow)}\n")
    whole = {
        "benchmark": "compare", "configuration": {"A": str(first_path), "B": str(second_path)},
        "differences": found, "num_failed": num_failed, "too_slow": too_slow,
        "ratios": [
            {"name": line.name, "a": line.first, "b": line.second, "ratio": line.ratio, "low": line.low, "high": line.high,
             "verdict": line.verdict} for line in lines
        ],
    }  # fmt: skip
    print_json(whole)
    return not too_slow


def _origin(result: Mapping[str, object]) -> str:
    num_good = len(_good(result))
    return f"{result.get('model_id')}, {num_good} requests, commit {result.get('commit', 'unknown')}"
