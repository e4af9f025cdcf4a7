"""Figures out of the raw results of a run, by what the tables call them. What was not measured is None, or missing in a dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.gpu.publish.runs import MeasuredRun

Figure = Mapping[str, Any]
KEPT = "3,900 kept, 50 new"


@dataclass(frozen=True)
class FiguresOf:
    """The figures of one run. Of a number of GPUs those count that were measured with most GPUs side by side."""

    run: MeasuredRun

    # ---- the bare kernel ----
    def us(self, shape: str, gpus: int, context: int) -> float | None:
        """Microseconds per token."""
        return self._decoded(shape, gpus, context, "us_per_token")

    def memory_us(self, shape: str, context: int) -> float | None:
        """What one GPU takes to read the same bytes and do nothing else."""
        return self._decoded(shape, 1, context, "memory_us")

    def memory_commit(self, shape: str, context: int) -> str:
        """The commit of `memory_us`, if it is another one."""
        found = next(self._of(f"decode_{shape}", context=context, gpus=1, has="memory_us"), {})
        return str(found.get("memory_commit", ""))

    def long_run(self, gpus: int) -> dict[int, float]:
        """Tokens per second inside one long launch of 2B, by context."""
        found = next(self._of("decode_2b", gpus=gpus, has="long_run"), None)
        return {} if found is None else {int(at): float(rate) for at, rate in found["tokens_per_s"].items()}

    def exposed_us(self, gpus: int, context: int) -> float | None:
        """What delayed sums of 2B cost."""
        found = next(self._of("decode_2b", gpus=gpus, at=context, has="exposed_us"), None)
        return None if found is None else float(found["exposed_us"])

    def repeats(self) -> tuple[list[int], int, bool] | None:
        """Of 2B: the numbers of GPUs, repeats of each, and whether all bits and tokens were the same."""
        rows = self.run.results("decode_2b")
        figures = [one for one in rows[0].result["figures"] if "gpus" in one] if rows else []
        same = all(one.get("same_bits", True) and one.get("same", True) and not one.get("different_repeats") for one in figures)
        counts = [int(one["repeats"]) for one in figures if "repeats" in one]
        return (sorted({int(one["gpus"]) for one in figures}), min(counts), same) if counts else None

    def lanes(self) -> dict[int, dict[int, Figure]]:
        """2B's lanes on one GPU: by hosted lanes and context."""
        found: dict[int, dict[int, Figure]] = {}
        for one in self._of("lanes_2b", has="lanes"):
            found.setdefault(int(one["lanes"]), {})[int(one["context"])] = one
        return found

    def long(self, kv_dtype: str) -> dict[int, Figure]:
        """Qwen3-4B far into a context, by position."""
        return {int(one["context"]): one for one in self._of(f"long_{kv_dtype}", has="context")}

    def prompts(self, shape: str) -> dict[int, float]:
        """Milliseconds to the first token by kernels alone, of prompts of which nothing is cached."""
        rows = self.run.results(f"prompts_{shape}")
        prompts = rows[0].result["figures"]["prompts"] if rows else []
        return {int(one["prompt"]): float(one["first_token_ms"]) for one in prompts if not one.get("cached")}

    def sampling(self) -> dict[str, Figure]:
        """Kinds of sampling next to greedy decoding."""
        return {str(one["sampling"]): one for one in self._of("sampling", has="sampling")}

    # ---- whole requests ----
    def requests(self, gpus: int) -> Figure | None:
        return next(self._of("requests", gpus=gpus), None)

    def first_tokens(self, gpus: int) -> dict[str, tuple[float, float]]:
        """By prompt: milliseconds in a row and after a pause."""
        found = (self.requests(gpus) or {}).get("first_tokens", [])
        return {f"{one['prompt']:,}" if "kept" not in one else KEPT: (float(one["ms"]), float(one["rested_ms"])) for one in found}

    def kinds(self, gpus: int) -> dict[str, Figure]:
        """Answers by kind of sampling, and those with a JSON schema."""
        whole = self.requests(gpus) or {}
        return {str(one["kind"]): one for name in ("kinds", "constrained") for one in whole.get(name, [])}

    def most_ms(self, gpus: int, part: str, name: str) -> float | None:
        """The longest of `cancels` or `aborts`."""
        found = [float(one[name]) for one in (self.requests(gpus) or {}).get(part, [])]
        return max(found) if found else None

    # ---- several GPUs ----
    def endurance(self, gpus: int) -> tuple[Figure, Figure] | None:
        """100,000 tokens: the hashes, and what they cost."""
        figures = list(self._of("endurance", gpus=gpus))
        hashes, cost = (next((one for one in figures if name in one), None) for name in ("hashes", "cost"))
        return None if hashes is None or cost is None else (hashes, cost)

    def collectives(self, gpus: int) -> Figure | None:
        return next((row.result["figures"] for row in self.run.results("collectives") if row.gpus == gpus), None)

    def lost(self, gpus: int) -> dict[str, Figure]:
        """Ranks that were killed or stopped, by signal."""
        return {str(one["signal"]): one for one in self._of("lost", gpus=gpus)}

    def _decoded(self, shape: str, gpus: int, context: int, name: str) -> float | None:
        found = next(self._of(f"decode_{shape}", gpus=gpus, context=context, has=name), None)
        return None if found is None else float(found[name])

    def _of(self, row: str, has: str = "", **wanted: int) -> Iterator[Figure]:
        """Figures of a row that have these values."""
        for measured in self.run.results(row):
            figures: Sequence[Figure] = measured.result["figures"]
            yield from (one for one in figures if (not has or has in one) and all(one.get(k) == v for k, v in wanted.items()))
