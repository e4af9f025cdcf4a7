"""Tables of the bare kernel: README's, and of docs/results.md those of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller

from kog_dist.bench.kernel.scaling_run import WANTED_EXPOSED_US, WANTED_PER_S
from tests.gpu.publish.figures import FiguresOf
from tests.gpu.publish.publication import (
    KINDS,
    WORDS,
    Publication,
    at_least,
    at_most,
    caption,
    cards,
    joined,
    missing,
    number,
    prose,
    table,
    verdict,
    verdicts,
)
from tests.gpu.publish.rows import CONTEXTS, KV_FORMATS, NUMBERS, SHAPES

_README = (("llama-3.2-1b", 512), ("qwen3-4b", 8000), ("llama-3.1-8b", 512), ("qwen3-8b", 512), ("gpt-oss-120b", 512))
_2B_CONTEXTS = (64, 512, 4000)
_MEMORY_B_S = {"H200": 4.57e12, "H100": 3.01e12}  # the most that the kernel's loader has read on a card, docs/kv-cache.md
_KV_NAMES = {"bfloat16": "16 bit", "fp8": "FP8", "int4": "INT4"}


# ---- README ----
def readme(publication: Publication) -> list[str]:
    """A table of one commit. Numbers of GPUs that it lacks are a sentence of another one, so that the page stays short."""
    parts = publication.by_numbers(lambda of, gpus: all(of.us(shape, gpus, at) for shape, at in _README))
    if not parts:
        return missing(["README's shapes"])
    first, numbers = parts[0]
    times = [(first.memory_us(shape, at), first.us(shape, numbers[0], at)) for shape, at in _README]
    shares = [100 * memory / ours for memory, ours in times if memory and ours]
    said = [
        f"*Memory alone*: the loader by itself; {min(shares):.0f} to {max(shares):.0f} % are reached.",
        "Bold misses its [target](docs/results.md#models).",
    ]
    for of, others in parts[1:]:
        columns = [f"{cards(of.run.kind, [gpus])} {', '.join(_column(publication, of, gpus))}" for gpus in others]
        said.append(f"At {of.run.commit}, row by row: {'; '.join(columns)}.")
    if newer := _since(publication, first, _README):
        said.append(newer)
    if rates := [(gpus, us) for gpus in NUMBERS if (us := first.us("2b", gpus, 64))]:
        counts = joined([WORDS[gpus] for gpus, _ in rates])
        speeds = joined([number(1e6 / us) for _, us in rates])
        said.append(f"Laneformer 2B decodes {speeds} tokens/s on {counts} at context 64.")
    return [*_readme_table(publication, first, numbers), "", *prose(" ".join(said))]


def _column(publication: Publication, of: FiguresOf, gpus: int) -> list[str]:
    return [at_most(of.us(shape, gpus, at), _target(publication, shape, gpus, at)) for shape, at in _README]


def _readme_table(publication: Publication, of: FiguresOf, numbers: Sequence[int]) -> list[str]:
    columns = [_column(publication, of, gpus) for gpus in numbers]
    names = [SHAPES[shape] + ("" if context == 512 else f" at context {context:,}") for shape, context in _README]
    memory = [number(of.memory_us(shape, context)) for shape, context in _README]
    best = [_best(publication, shape, context) for shape, context in _README]
    heads = [cards(of.run.kind, numbers[:1]), *(WORDS[gpus] for gpus in numbers[1:])]
    head = [f"us per token at context 512, commit {of.run.commit}", *heads, "memory alone, one", "best published"]
    return table(head, zip(names, *columns, memory, best, strict=True))


def _best(publication: Publication, shape: str, context: int) -> str:
    """The best published figure, and ours where it is of a H100."""
    found = [one for one in publication.peers["published"] if one["shape"] == shape]
    if not found:
        return ""
    best = min(found, key=lambda one: float(one["us"]))
    said = f"{best['short']} {best['us']:,}".strip()
    if best["gpu"] == "H200":
        return said
    ours = publication.newest(lambda of: of.us(shape, 1, context), best["gpu"])
    here = "" if ours is None else f" (here {number(ours.us(shape, 1, context))})"
    return f"{said} on an {best['gpu']}{here}"


def _since(publication: Publication, of: FiguresOf, rows: Sequence[tuple[str, int]]) -> str:
    """Figures of newer commits, which stand in no row: the newest of each."""
    said: dict[str, list[str]] = {}
    for shape, at in rows:
        newer = next((one for one in publication.since(of) if one.us(shape, 1, at)), None)
        if newer is not None:
            us = [number(found) for gpus in NUMBERS if (found := newer.us(shape, gpus, at))]
            said.setdefault(newer.run.commit, []).append(f"{_at(shape, at)} {', '.join(us)}")
    texts = [f"at {commit} {'; '.join(found)}" for commit, found in said.items()]
    return f"Measured since, on {joined([WORDS[n] for n in NUMBERS])}: {'; '.join(texts)}." if texts else ""


def _at(shape: str, context: int) -> str:
    return SHAPES[shape] + ("" if context == 512 else f" at {context:,}")


def _target(publication: Publication, shape: str, gpus: int, context: int) -> float | None:
    name = {512: "decode", 8000: "decode_8000"}[context]
    return publication.target(name, shape, gpus)


# ---- docs/results.md ----
def lanes(publication: Publication) -> list[str]:
    """2B on one GPU, by hosted lanes."""
    of = publication.newest(lambda one: one.lanes())
    if of is None:
        return missing(["2B by hosted lanes"])
    rows = []
    for count, by_context in of.lanes().items():
        us = {context: float(one["us_per_token"]) for context, one in by_context.items()}
        others = " / ".join(number(us.get(context), 1) for context in (64, 2048, 4000))
        for context, wanted in publication.targets["lanes"].get(str(count), {}).items():
            at = int(context)
            is_first = at == 512
            rest = [others, number(float(by_context[at]["ceiling_us"]), 1)] if is_first else ["", ""]
            cells = [f"{count}, context {at:,}", number(wanted), at_most(us[at], wanted, 1), verdict(us[at], wanted)]
            rows.append([*cells, *rest])
    head = ["lanes", "target", "result", "met?", "context 64 / 2,048 / 4,000", "memory alone"]
    return [*caption(of, [1]), *table(head, rows, text_columns=(0, 3))]


def engines(publication: Publication) -> list[str]:
    """2B next to other engines on the same kind of card."""
    lines: list[str] = []
    for of, numbers in publication.by_numbers(lambda one, gpus: one.us("2b", gpus, 512)):
        ours = [number(of.us("2b", gpus, 512), 1) for gpus in numbers]
        rows = [[f"this kernel, commit {of.run.commit}", *ours]]
        for peer in (one for one in publication.peers["measured"] if one["shape"] == "2b"):
            rows.append([peer["engine"], *(peer["us"].get(str(gpus), "") for gpus in numbers)])
        lines += ["", *table(["engine", *(cards(of.run.kind, [gpus]) for gpus in numbers)], rows)]
    return lines[1:]


def several(publication: Publication) -> list[str]:
    """2B on several GPUs: tokens per second, and what delayed sums cost. Targets in brackets."""
    lines: list[str] = []
    for of, numbers in publication.by_numbers(lambda one, gpus: one.us("2b", gpus, 512)):
        rows, head = [], ["2B", *(cards(of.run.kind, [gpus]) for gpus in numbers), "met?"]
        for context in _2B_CONTEXTS:
            found = {gpus: us for gpus in numbers if (us := of.us("2b", gpus, context))}
            rates = {gpus: round(1e6 / us, 1) for gpus, us in found.items()}
            rows.append(_rates(f"tokens/s at context {context:,}", rates, numbers, context))
        for context in _2B_CONTEXTS:
            rates = {gpus: of.long_run(gpus)[context] for gpus in numbers if context in of.long_run(gpus)}
            rows += [_rates(f"in one long launch, at {context:,}", rates, numbers, context)] if rates else []
        for context in _2B_CONTEXTS:
            costs = {gpus: us for gpus in numbers if (us := of.exposed_us(gpus, context)) is not None}
            if costs:
                wanted = {gpus: WANTED_EXPOSED_US.get(gpus) for gpus in costs}
                cells = [_with_target(at_most(costs.get(n), wanted.get(n), 1), wanted.get(n)) for n in numbers]
                met = verdicts(verdict(costs[n], wanted[n]) for n in costs)
                rows.append([f"us that delayed sums cost, at {context:,}", *cells, met])
        lines += ["", *caption(of, numbers), *table(head, rows, text_columns=(0, len(head) - 1))]
    return lines[1:]


def _rates(name: str, rates: dict[int, float], numbers: Sequence[int], context: int) -> list[str]:
    wanted = {gpus: WANTED_PER_S.get((gpus, context)) for gpus in numbers}
    cells = [_with_target(at_least(rates.get(n), wanted[n]), wanted[n]) for n in numbers]
    return [name, *cells, verdicts(verdict(rates.get(n), wanted[n], least=True) for n in numbers)]


def _with_target(shown: str, wanted: float | None) -> str:
    return f"{shown} ({number(wanted)})" if shown and wanted else shown


def long_contexts(publication: Publication) -> list[str]:
    """Qwen3-4B far into a context, by format of the KV cache: a table for each run that has the newest of one."""
    lines: list[str] = []
    for kind in KINDS:
        found: dict[str, list[str]] = {}
        for kv_dtype in KV_FORMATS:
            of = publication.newest(methodcaller("long", kv_dtype), kind)
            if of is not None:
                found.setdefault(of.run.name, []).append(kv_dtype)
        for run in (run for run in publication.runs if run.name in found):
            lines += ["", *_long_table(publication, FiguresOf(run), found[run.name])]
    return lines[1:]


def _long_table(publication: Publication, of: FiguresOf, formats: Sequence[str]) -> list[str]:
    kind, contexts = of.run.kind, (8000, 32000, 64000, 128000)
    wanted_share = publication.target("percent", "long_share")
    rows = []
    for kv_dtype in formats:
        by_context = of.long(kv_dtype)
        cells = []
        for context in contexts:
            one = by_context.get(context)
            share = None if one is None else 100 * float(one["bytes_per_token"]) / _MEMORY_B_S[kind] / one["us_per_token"] * 1e6
            cells.append("" if one is None else f"{number(one['us_per_token'])}, {at_least(share, wanted_share, 1)} %")
        wanted = publication.target("long", kv_dtype) if kind == "H200" else None
        at, note = _at_65536({context: float(one["us_per_token"]) for context, one in by_context.items()})
        rows.append([_KV_NAMES[kv_dtype], *cells, number(wanted), at_most(at, wanted) + note, verdict(at, wanted)])
    head = ["KV cache", *(f"{context:,}" for context in contexts), "65,536: target", "result", "met?"]
    return [*caption(of, [1], _note(of)), *table(head, rows, text_columns=(0, len(head) - 1))]


def _note(of: FiguresOf) -> str:
    return f" {of.run.note}" if of.run.note else ""


def _at_65536(us: dict[int, float]) -> tuple[float | None, str]:
    """Measured there, or by the slope from 64,000 to 128,000."""
    if 65536 in us:
        return us[65536], ""
    if 64000 in us and 128000 in us:
        return us[64000] + (us[128000] - us[64000]) * 1536 / 64000, ", by slope"
    return None, ""


def models(publication: Publication) -> list[str]:
    """All shapes at both contexts: of a run that has README's, and below it what other runs have."""
    lines: list[str] = []
    for kind in KINDS:
        parts = publication.by_numbers(lambda of, gpus: all(of.us(shape, gpus, at) for shape, at in _README), kind)
        for of, numbers in parts:
            lines += ["", *_models_table(publication, of, numbers)]
    return lines[1:]


def _models_table(publication: Publication, of: FiguresOf, numbers: Sequence[int]) -> list[str]:
    rows, absent, others = [], list[str](), set[str]()
    for shape, name in SHAPES.items():
        if not any(of.us(shape, gpus, 512) for gpus in numbers):
            absent.append(name + _elsewhere(publication, shape, of.run.kind))
            continue
        context = _context(publication, shape)
        wanted = {gpus: _target(publication, shape, gpus, context) if of.run.kind == "H200" else None for gpus in numbers}
        cells = [_both(of, shape, gpus, wanted[gpus], context) for gpus in numbers]
        memory, commit = of.memory_us(shape, context), of.memory_commit(shape, context)
        others |= {commit} - {""}
        met = verdicts(verdict(of.us(shape, gpus, context), wanted[gpus]) for gpus in numbers)
        limits = " / ".join(number(limit) for limit in wanted.values() if limit)
        at = "" if context == 512 or not limits else f" at {context:,}"
        rows.append([name, number(memory), *cells, _shares(publication, of, shape, context, numbers), limits + at, met])
    head = ["shape", "memory alone, one", *(cards(of.run.kind, [n]) for n in numbers), "share, %", "targets", "met?"]
    if not any(row[-1] for row in rows):  # a kind of card without targets
        head, rows = head[:-2], [row[:-2] for row in rows]
    note = _note(of) + (f" Memory alone in part of {', '.join(sorted(others))}." if others else "")
    texts = (0, len(head) - 1) if head[-1] == "met?" else (0,)
    lines = [*caption(of, numbers, note), *table(head, rows, text_columns=texts), *missing(absent)]
    newer = _since(publication, of, [(shape, _context(publication, shape)) for shape in SHAPES])
    return [*lines, *(["", *prose(newer)] if newer else [])]


def _context(publication: Publication, shape: str) -> int:
    """At which a shape has its targets."""
    return 8000 if shape in publication.targets["decode_8000"] else 512


def _elsewhere(publication: Publication, shape: str, kind: str) -> str:
    """What one card took at another commit."""
    of = publication.newest(lambda one: one.us(shape, 1, 512), kind)
    context = _context(publication, shape)
    wanted = _target(publication, shape, 1, context) if kind == "H200" else None
    return "" if of is None else f", at {of.run.commit} {_both(of, shape, 1, wanted, context)}"


def _both(of: FiguresOf, shape: str, gpus: int, wanted: float | None, context: int) -> str:
    shown = [at_most(of.us(shape, gpus, at), wanted if at == context else None) for at in CONTEXTS]
    return " / ".join(filter(None, shown))


def _shares(publication: Publication, of: FiguresOf, shape: str, context: int, numbers: Sequence[int]) -> str:
    """Of the memory's rate, for each number of GPUs; 80 % are wanted of what is quantised on one and two."""
    memory = of.memory_us(shape, context)
    if memory is None:
        return ""
    is_quantised = "+" in shape or shape.startswith("gpt-oss")
    said = []
    for gpus in numbers:
        us = of.us(shape, gpus, context)
        wanted = publication.target("percent", "quantised_share") if is_quantised and gpus <= 2 else None
        said.append(at_least(None if us is None else 100 * memory / gpus / us, wanted))
    return ", ".join(filter(None, said))
