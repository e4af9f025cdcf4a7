"""What came of each engine, as rows and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Final

from kog_dist.bench.peers.loads import PeerLoad
from kog_dist.bench.peers.peer import OWN, Peer
from kog_dist.bench.service.answers import RequestRecord
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass


@dataclass(slots=True)
class Variant:
    """An engine with or without drafts, and what came of it: of each load the figures of each process."""

    peer: Peer
    drafts: str
    version: str = ""
    error: str = ""
    start_s: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    answers: dict[str, list[RequestRecord]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The engine, and its drafts."""
        return label_of(self.peer.title, self.drafts or _NONE)


def rows_of(loads: Sequence[PeerLoad], variants: Sequence[Variant], tokenizer: Tokenizer | None) -> list[dict[str, object]]:
    """A row for each load of each engine. Answers are compared with ours without drafts."""
    own = next((one for one in variants if one.peer.name == OWN and not one.drafts), None)
    return [
        _row(variant, load, own.answers.get(load.label, []) if own else [], tokenizer) for load in loads for variant in variants
    ]


def _row(variant: Variant, load: PeerLoad, wanted: Sequence[RequestRecord], tokenizer: Tokenizer | None) -> dict[str, Any]:
    results = variant.results.get(load.label, [])
    error = variant.failures.get(load.label) or (variant.error if not results else "")
    if not results and not error:
        error = "not measured"
    return {
        "load": load.label,
        "engine": variant.peer.title,
        "drafts": variant.drafts or _NONE,
        "version": variant.version,
        "tokens_per_s": _median(results, "median_decode_tokens_per_s"),
        "total_tokens_per_s": _median(results, "output_throughput"),
        "first_ms": _median(results, "median_ttft_ms"),
        "gap_ms": _median(results, "median_itl_ms"),
        "gap_p99_ms": _median(results, "p99_itl_ms"),
        "prompt_tokens": results[0]["total_input_tokens"] // len(load.prompts) if results else None,
        "answer_tokens": results[0]["total_output_tokens"] // len(load.prompts) if results else None,
        "drafted_right": _median(results, "spec_decode_accepted_tokens"),
        "memory_gb": statistics.median(variant.memory_bytes) / 1e9 if variant.memory_bytes else None,
        "start_s": statistics.median(variant.start_s) if variant.start_s else None,
        "differs_at": first_difference(wanted, variant.answers.get(load.label, []), tokenizer),
        "tokens_per_s_runs": [result["median_decode_tokens_per_s"] for result in results],
        "error": error,
    }


def _median(results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [result[name] for result in results if result[name] is not None]
    return float(statistics.median(values)) if values else None


def first_difference(wanted: Sequence[RequestRecord], found: Sequence[RequestRecord], tokenizer: Tokenizer | None) -> int | None:
    """The first token, from 0, at which an answer is not ours; of all requests the earliest. None: there is none."""
    earliest = None
    for ours, theirs in zip(wanted, found, strict=False):
        if ours.text == theirs.text or tokenizer is None:
            continue
        pairs = zip(_ids(tokenizer, ours.text), _ids(tokenizer, theirs.text), strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None and (earliest is None or place < earliest):
            earliest = place
    return earliest


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


_NONE: Final = "none"  # drafts
_COLUMNS: Final = {  # by heading: a figure of a row, and its digits
    "tokens/s": ("tokens_per_s", 1),
    "of all": ("total_tokens_per_s", 1),
    "first ms": ("first_ms", 1),
    "gap ms": ("gap_ms", 2),
    "p99": ("gap_p99_ms", 2),
    "GB": ("memory_gb", 2),
    "start s": ("start_s", 1),
    "differs at": ("differs_at", 0),
}


def label_of(engine: str, drafts: str) -> str:
    """As a row is called."""
    return engine if drafts == _NONE else f"{engine}, {drafts}"


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a person reads: a part for each load, the fastest engine first; at the end what was not measured, and why."""
    lines = list[str]()
    for load in dict.fromkeys(row["load"] for row in rows):
        of_load = [row for row in rows if row["load"] == load and not row["error"]]
        about = f", {of_load[0]['prompt_tokens']} + {of_load[0]['answer_tokens']} tokens" if of_load else ": no figures"
        lines += ["", f"{load}{about}", f"{'':<34}" + "".join(f"{heading:>11}" for heading in _COLUMNS)]
        for row in sorted(of_load, key=lambda row: -(row["tokens_per_s"] or 0)):
            cells = ("-" if row[key] is None else f"{row[key]:.{digits}f}" for key, digits in _COLUMNS.values())
            lines.append(f"{label_of(row['engine'], row['drafts']):<34}" + "".join(f"{cell:>11}" for cell in cells))
    missing = dict[tuple[str, str], list[str]]()  # by engine and reason
    for row in rows:
        if row["error"]:
            missing.setdefault((row["engine"], row["error"]), []).append(label_of(row["load"], row["drafts"]))
    lines += ["", "not measured"] if missing else []
    lines += [f"{engine} ({'; '.join(of)}): {error}" for (engine, error), of in missing.items()]
    return "\n".join(lines)
