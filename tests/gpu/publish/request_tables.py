"""Tables of whole requests and of several GPUs' promises in docs/results.md, and what others publish in docs/published.md."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller

from kog_dist.bench.collectives.table import WANTED_US
from kog_dist.bench.engine.requests import OBEYED_MS, WANTED_JSON_PER_S, WANTED_MS
from tests.gpu.publish.figures import KEPT, Figure, FiguresOf
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
from tests.gpu.publish.rows import PROMPTS, SHAPES

_ABORTED_MS, _CLEAN_MS, _STALLED_MS = 250.0, 2000.0, 1250.0
_SAMPLINGS = {
    "greedy": "greedy",
    "temperature": "temperature", "top-p-logprobs": "top-p with log-probabilities", "mask": "grammar mask, written ahead",
    "penalties": "penalties", "top-p": "top-p", "top-k-top-p": "top-k and top-p",
}  # fmt: skip


def first_tokens(publication: Publication) -> list[str]:
    """Milliseconds in a row and after a pause, by prompt; the target of both."""
    lines: list[str] = []
    names = [*(f"{prompt:,}" for prompt in PROMPTS), KEPT]
    for of, numbers in publication.by_numbers(lambda one, gpus: one.first_tokens(gpus)):
        rows = []
        for index, name in enumerate(names):
            cells, met = [], []
            for gpus in numbers:
                wanted = WANTED_MS.get(gpus, {}).get(PROMPTS[index] if index < len(PROMPTS) else None)
                found = of.first_tokens(gpus).get(name)
                cells += [number(wanted, 1), "" if found is None else " / ".join(at_most(ms, wanted, 2) for ms in found)]
                met.append(verdict(max(found), wanted) if found else "")
            rows.append([name, *cells, verdicts(met)])
        head = ["prompt", *(word for gpus in numbers for word in (f"{WORDS[gpus]}: target", "result")), "met?"]
        lines += ["", *caption(of, numbers), *table(head, rows, text_columns=(0, len(head) - 1))]
    return [*lines[1:], "", *_first_tokens_of_others(publication)]


def _first_tokens_of_others(publication: Publication) -> list[str]:
    found = publication.peers["first_tokens"]
    rows = [
        [f"{one['engine']}, {cards(one['gpu'], [int(gpus)])}", *(number(ms, 1) for ms in times)]
        for one in found
        for gpus, times in one["ms"].items()
    ]
    return table(["others, measured here", *(f"{prompt:,}" for prompt in PROMPTS)], rows)


def prompts(publication: Publication) -> list[str]:
    """gpt-oss-120b's prompts by the kernels alone."""
    shape = "gpt-oss-120b"
    of = publication.newest(lambda one: one.prompts(shape))
    if of is None:
        return missing([f"prompts of {shape}"])
    rows = []
    for prompt, ms in of.prompts(shape).items():
        wanted = publication.target("prompts", shape, prompt)
        rows.append([f"{shape}, {prompt:,} tokens", number(wanted), at_most(ms, wanted, 1), verdict(ms, wanted)])
    return [*caption(of, [1]), *table(["prompt", "target, ms", "first token", "met?"], rows, text_columns=(0, 3))]


def sampling(publication: Publication) -> list[str]:
    """Kinds of sampling in the kernel, next to greedy decoding by the plain kernel."""
    of = publication.newest(lambda one: one.sampling())
    if of is None:
        return missing(["kinds of sampling"])
    found, rows = of.sampling(), []
    for kind, name in _SAMPLINGS.items():
        if kind in found:
            percent, wanted = 100 * (float(found[kind]["ratio"]) - 1), publication.target("percent", f"sampling_{kind}")
            cells = [f"{number(wanted)} %" if wanted else "", f"{at_most(percent, wanted, 1)} %"]
            rows.append([name, *cells, number(float(found[kind]["us_per_token"]), 1), _met(percent, wanted)])
    return [*caption(of, [1]), *table(["", "target", "more than greedy", "us", "met?"], rows, text_columns=(0, 4))]


def whole_requests(publication: Publication) -> list[str]:
    """Answers of whole requests, by the engine's stamps, next to the bare kernel."""
    lines: list[str] = []
    for of, numbers in publication.by_numbers(lambda one, gpus: one.kinds(gpus)):
        rows = []
        for kind in dict.fromkeys(kind for gpus in numbers for kind in of.kinds(gpus)):
            wanted = publication.target("percent", kind)
            cells, met = [], []
            for gpus in numbers:
                cell, said = _answer(of.kinds(gpus).get(kind), wanted, gpus if kind.startswith("JSON") else 0)
                cells.append(cell)
                met.append(said)
            name = kind.replace("logprobs", "log-probabilities")
            rows.append([name, f"{number(wanted)} %" if wanted else "", *cells, verdicts(met)])
        head = ["400 tokens at context 512", "target", *(cards(of.run.kind, [gpus]) for gpus in numbers), "met?"]
        lines += ["", *caption(of, numbers), *table(head, rows, text_columns=(0, len(head) - 1))]
    return lines[1:]


def _answer(one: Figure | None, wanted: float | None, json_gpus: int) -> tuple[str, str]:
    """A cell, and whether its target was met: percent next to the bare kernel, or a rate with a schema."""
    if one is None:
        return "", ""
    percent = 100 * (float(one["of_bare"]) - 1)
    best = f" (best {100 * (float(one['of_bare_best']) - 1):+.1f})" if "of_bare_best" in one else ""
    shown = f"{float(one['us']):,.1f} us, {percent:+.1f} %{best}"
    if (wanted_rate := WANTED_JSON_PER_S.get(json_gpus)) is not None:
        rate = float(one["tokens_per_s"])
        return f"{shown}, {at_least(rate, wanted_rate)} tokens/s ({wanted_rate:,})", verdict(rate, wanted_rate, least=True)
    return (f"**{shown}**" if wanted is not None and percent > wanted else shown), _met(percent, wanted)


def cancels(publication: Publication) -> list[str]:
    """How soon a cancel and an abort are obeyed: the longest."""
    lines: list[str] = []
    for of, numbers in publication.by_numbers(lambda one, gpus: one.requests(gpus)):
        rows = []
        for name, part, key, wanted in (
            ("cancel, the client has its end", "cancels", "most_told_ms", OBEYED_MS),
            ("first token of a short request behind a cancel", "cancels", "most_free_ms", OBEYED_MS),
            ("abort, the client has its end", "aborts", "told_ms", _ABORTED_MS),
            ("abort, nothing is left", "aborts", "clean_ms", _CLEAN_MS),
        ):
            found = [of.most_ms(gpus, part, key) for gpus in numbers]
            cells = [at_most(ms, wanted, 1) for ms in found]
            rows.append([name, number(wanted), *cells, verdicts(verdict(ms, wanted) for ms in found)])
        head = ["ms, at most", "target", *(cards(of.run.kind, [gpus]) for gpus in numbers), "met?"]
        lines += ["", *caption(of, numbers), *table(head, rows, text_columns=(0, len(head) - 1))]
    return lines[1:]


def promises(publication: Publication) -> list[str]:
    """What several GPUs promise: bits, hashes, sums, lost ranks. A table for each kind of card that was measured."""
    lines: list[str] = []
    for kind in KINDS:
        of = publication.newest(lambda one: any(one.endurance(gpus) or one.lost(gpus) for gpus in (4, 2)), kind)
        if of is not None:
            gpus = next(count for count in (4, 2) if of.endurance(count) or of.lost(count))
            rows = [*_bits(of, publication, gpus), *_sums(of, gpus), *_lost(of, gpus)]
            head = [cards(kind, [gpus]), "target", "result", "met?"]
            lines += ["", *caption(of, [gpus]), *table(head, rows, text_columns=(0, 2, 3))]
    return lines[1:]


def _bits(of: FiguresOf, publication: Publication, gpus: int) -> list[list[str]]:
    rows = []
    if repeats := of.repeats():
        numbers, count, same = repeats
        on = joined([WORDS[one] for one in numbers])
        name = f"bits of logits and tokens of 2B on {on}, {count} launches at each context"
        rows.append([name, "equal", "equal" if same else "**others**", "met" if same else "**missed**"])
    if found := of.endurance(gpus):
        hashes, cost = found
        percent, wanted = 100 * float(cost["cost"]), publication.target("percent", "hashes")
        said = ["equal", "met"] if hashes["same"] else ["**others**", "**missed**"]
        rows.append([f"{hashes['tokens']:,} tokens, hashes of all ranks", "equal", *said])
        rows.append(["what the hashes cost", f"{wanted} %", f"{percent:+.2f} %", _met(percent, wanted)])
    return rows


def _sums(of: FiguresOf, gpus: int) -> list[list[str]]:
    figures = of.collectives(gpus)
    if figures is None:
        return []
    best, worst, others = [], [], []
    for size in (6144, 12288):
        sums = [float(one["median_us"]) for one in figures["kccl"] if one["everyone"] and 4 * one["length"] == size]
        best.append(min(sums))
        worst.append(max(sums))
        times = [by_size.get(str(size)) for methods in figures["libraries"].values() for by_size in methods.values()]
        others.append(min(float(us) for us in times if isinstance(us, float | int)))
    wanted = [WANTED_US.get((gpus, size)) for size in (6144, 12288)]
    limits = " / ".join(f"{limit:g}" for limit in wanted if limit)
    libraries = f"; the best library {' / '.join(f'{us:.2f}' for us in others)}"
    rows = []
    for name, found, more in (("best", best, libraries), ("worst", worst, "")):
        pairs = list(zip(found, wanted, strict=True))
        said = " / ".join(at_most(us, limit, 2) for us, limit in pairs) + f" us{more}"
        met = verdicts(verdict(us, limit) for us, limit in pairs)
        rows.append([f"all-reduce of 6 / 12 KB, the {name} number of thread blocks", f"{limits} us" if limits else "", said, met])
    return rows


def _lost(of: FiguresOf, gpus: int) -> list[list[str]]:
    rows = []
    for name, wanted_ms, clean_ms in (("SIGKILL", _ABORTED_MS, _CLEAN_MS), ("SIGSTOP", _STALLED_MS, None)):
        one = of.lost(gpus).get(name)
        if one is None:
            continue
        error_s, clean_s = one["from_to"]["error_s"], one["from_to"]["clean_s"]
        said = f"{_span(error_s)} ms; nothing left after {_span(clean_s)} ms; {one['lost']} rounds"
        said += "" if one.get("prefill", True) else ", without prefill"
        met = verdicts([verdict(1e3 * error_s[1], wanted_ms), verdict(1e3 * clean_s[1], clean_ms)])
        limits = f"{wanted_ms:,.0f} ms" + (f"; {clean_ms:,.0f} ms" if clean_ms else "")
        rows.append([f"{name} of a rank: client told; nothing left", limits, said, met])
    return rows


def _span(seconds: Sequence[float]) -> str:
    return f"{1e3 * seconds[0]:,.0f} to {1e3 * seconds[1]:,.0f}"


def _met(percent: float, wanted: float | None) -> str:
    return "" if wanted is None else "met" if percent <= wanted else "**missed**"


def published(publication: Publication) -> list[str]:
    """Figures that others publish, next to ours on the same kind of card at the nearest context."""
    rows = []
    for one in publication.peers["published"]:
        context = 8000 if one["context"] == 8000 else 512
        ours = publication.newest(methodcaller("us", one["shape"], 1, context), one["gpu"])
        us = None if ours is None else ours.us(one["shape"], 1, context)
        here = "" if ours is None or us is None else f"{number(us)} at {context:,}, {ours.run.commit}"
        times = "" if us is None else f"{float(one['us']) / us:.2f}"
        source = f"[source]({one['source']})" if one["source"] else "not recorded"
        cells = [SHAPES[one["shape"]], one["engine"], one["gpu"], number(one["us"]), here, times, one["conditions"], source]
        rows.append(cells)
    head = ["shape", "engine", "GPU", "us per token", "here, us", "times ours", "their conditions", "source"]
    return table(head, rows, text_columns=(0, 1, 2, 6, 7))


def measured_others(publication: Publication) -> list[str]:
    """Other engines on our machines."""
    rows = []
    for one in publication.peers["measured"]:
        us = "; ".join(f"{WORDS[int(gpus)]}: {value}" for gpus, value in one["us"].items())
        rows.append([SHAPES.get(one["shape"], "Laneformer 2B"), one["engine"], one["gpu"], us, one["conditions"]])
    return table(["shape", "engine", "GPU", "us per token", "conditions"], rows, text_columns=range(5))


def kv_cache(publication: Publication) -> list[str]:
    """What others say of FP8 caches."""
    one = publication.peers["kv_cache"]
    return prose(f"{one['engine']}: {one['percent']} % ({one['conditions']}; {one['source']}).")
