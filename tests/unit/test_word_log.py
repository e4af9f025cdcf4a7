"""The declared protocol of words is the kernel's: who stores and who finds which word, with which tag, when it runs on a CPU.

The twin (decode_twin/) logs all accesses of a few tokens. Stores must be those of the declaration, one for each word and tag.
Each declared read must have happened, and who looks at a word without reading it then must be one who reads a later one there.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.bench.kernel.yardsticks import replaced
from kog_dist.decode.coding import Coding
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kernel_words import CheckedToken, TokenEvents
from kog_dist.workers.cuda.word_places import SOMEBODY, Word
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_coded_twin import FORMS, CodedModel
from tests.unit.test_decode_twin import NAMES, OF_EXPERTS, SPEC, Model, build_twin, command_of, decode_sources, twin_sources
from tests.unit.test_delta_codes_twin import USUAL as CODED_NETS
from tests.unit.test_expert_twin import VARIANTS as OF_MODELS_WITH_EXPERTS
from tests.unit.test_kinds_twin import SPECS as STORED
from tests.unit.test_passes_twin import CODED_SPEC, DENSE

pytestmark = needs_compiler
ACCESS = np.dtype([(name, np.uint32) for name in ("memory", "offset", "cta", "rank", "is_store", "tag", "upper", "pad")])
TOKENS = 4
CODED_FORM = "INT4"
Log = np.ndarray[tuple[int], np.dtype[np.void]]


@dataclass(frozen=True)
class Case:
    """Four tokens from position `first` on; the first two are inner ones of a prompt. Nothing is drafted for the others.

    `has_head_alone`: the third is decoded twice, the second time by a launch of the LM head alone, from the streams of the first.
    With company each token of a pass is of another request, at the position behind that of the one before; all end together.
    """

    spec: ModelSpec
    first: int = 0
    has_head_alone: bool = False
    num_ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    passes: tuple[tuple[int, bool], ...] = ()  # of several tokens: each one's first position, and whether it has a head

    @property
    def has_company(self) -> bool:
        return bool(self.options.get("company"))


CASES = {
    "experts, windows and sinks": Case(OF_MODELS_WITH_EXPERTS["gpt_oss"], 3, options={"max_ctas": 4, "splits": 15}),
    "four experts of forty": Case(OF_MODELS_WITH_EXPERTS["qwen3_moe, weights of all"], options={"max_ctas": 4}),
    "three experts of sixteen, in shares": Case(OF_MODELS_WITH_EXPERTS["qwen3_moe, three of sixteen"], options={"max_ctas": 4}),
    "gated attention, lanes that share a KV head": Case(STORED["gated attention"], 2),
    "delta nets": Case(STORED["delta nets"]),
    "delta nets, experts beside a shared one": Case(STORED["experts beside a shared one"]),
    "ten experts of 512 beside a shared one on two ranks": Case(STORED["ten experts of 512 beside a shared one"], num_ranks=2),
    "delta nets on four ranks, heads in slices": Case(STORED["delta nets"], num_ranks=4),
    "delta nets of codes on two ranks": Case(
        CODED_NETS, num_ranks=2, options={"coding": Coding.of(FORMS[CODED_FORM]), "max_ctas": 12}
    ),
    "lanes with a delay": Case(SPEC),
    "lanes that share products": Case(replace(SPEC, shared_norm_scale=True, delay=0, intermediate_size=432)),
    "partitions that are reached, beside windows": Case(
        replace(SPEC, num_layers=3, max_context=400, sliding_window=40, window_layers=(0, 2)),
        126,
        options={"partition_batches": 1},
    ),
    "passes of two tokens": Case(DENSE, options={"tokens": 2}, passes=((0, False), (2, True), (3, True))),
    "passes of four tokens": Case(DENSE, options={"tokens": 4}, passes=((0, True), (3, True))),
    "passes of two tokens on two ranks": Case(
        DENSE, num_ranks=2, options={"tokens": 2}, passes=((0, False), (2, True), (3, True))
    ),
    "passes of four tokens on four ranks": Case(
        replace(DENSE, num_lanes=4), num_ranks=4, options={"tokens": 4}, passes=((0, True), (3, True))
    ),
    "passes of four tokens, of codes": Case(
        CODED_SPEC, options={"tokens": 4, "coding": Coding.of(FORMS[CODED_FORM])}, passes=((0, True), (3, True))
    ),
    "passes of two tokens, with experts, windows and sinks": Case(
        OF_MODELS_WITH_EXPERTS["gpt_oss"],
        options={"tokens": 2, "max_ctas": 4, "splits": 15},
        passes=((0, False), (2, True), (3, True)),
    ),
    "passes of four tokens with experts on two ranks": Case(
        OF_MODELS_WITH_EXPERTS["qwen3_moe, weights of all"],
        num_ranks=2,
        options={"tokens": 4, "max_ctas": 4},
        passes=((0, True), (3, True)),
    ),
    "passes of four tokens with delta nets on two ranks": Case(
        STORED["delta nets"], num_ranks=2, options={"tokens": 4}, passes=((0, True), (3, True))
    ),
    "passes of two tokens with experts beside a shared one": Case(
        STORED["experts beside a shared one"], options={"tokens": 2}, passes=((0, False), (2, True), (3, True))
    ),
    "passes of two requests": Case(DENSE, options={"tokens": 2, "company": True}, passes=((0, False), (1, True), (2, True))),
    "passes of two requests with delta nets on two ranks": Case(
        STORED["delta nets"], num_ranks=2, options={"tokens": 2, "company": True}, passes=((0, False), (1, True), (2, True))
    ),
    "passes of four requests with experts on two ranks": Case(
        OF_MODELS_WITH_EXPERTS["qwen3_moe, weights of all"],
        num_ranks=2,
        options={"tokens": 4, "company": True, "max_ctas": 4},
        passes=((0, True), (1, True)),
    ),
    "an LM head alone": Case(SPEC, has_head_alone=True),
    "two ranks, sums that are late, and an LM head alone": Case(SPEC, num_ranks=2, has_head_alone=True),
    "two ranks, sums for all": Case(OF_MODELS_WITH_EXPERTS["qwen3_moe"], num_ranks=2, options={"max_ctas": 4}),
    "four ranks, sums that are awaited": Case(replace(SPEC, shared_norm_scale=True, delay=0), num_ranks=4),
}


def shapes_of(case: Case) -> list[KernelShape]:
    """Of all ranks."""
    options: dict[str, Any] = {"max_ctas": 5, "copies": 2, "max_slots": 6, "keeps_hashes": True, "num_ranks": case.num_ranks}
    lanes = [case.spec.lanes_of_rank(rank, case.num_ranks) for rank in range(case.num_ranks)]
    options |= case.options
    return [TrialShape(case.spec, hosted, "bfloat16", "bfloat16", **options) for hosted in lanes]


def log_of(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, changed: Callable[[Mapping[str, str]], dict[str, str]] = dict
) -> Log:
    """The accesses of the case's tokens, of sources that `changed` has changed."""
    shapes, model = shapes_of(case), Model(case.spec, "bfloat16", monkeypatch)
    if "coding" in case.options:
        model = CodedModel(case.spec, "bfloat16", FORMS[CODED_FORM], monkeypatch)
    program, sources = ("company", twin_sources) if case.has_company else ("decode", decode_sources)
    build_twin(program, changed(sources(headers(shapes[0]))), folder)
    prompt = np.random.default_rng(1).integers(0, case.spec.vocab_size, case.first + TOKENS - 1).astype(np.uint32)
    prompt.tofile(folder / "prompt.bin")
    for rank, shape in enumerate(shapes):
        weights = model.weights(shape)
        for name in (*NAMES, *OF_EXPERTS):
            held = getattr(weights.experts, OF_EXPERTS[name], None) if name in OF_EXPERTS else getattr(weights, name)
            np.ascontiguousarray(np.zeros(0, np.uint16) if held is None else held).tofile(folder / f"{name}.{rank}.bin")
        weights.embedding.tofile(folder / "embedding.bin")
        np.ascontiguousarray(weights.rope, np.float32).tofile(folder / "rope.bin")
    _, there, _, *sizes = command_of(shapes[0])
    environ = {**os.environ, "LOG": "1", "FIRST": f"{case.first}", "LIMIT_US": "100000"}
    if case.has_company:
        return _log_of_company(case, shapes[0].tokens, [there, *sizes], folder, environ)
    if case.passes:  # a token is expected at each position, and none of them is right
        np.zeros(case.spec.max_context, np.uint32).tofile(folder / "drafts.bin")
        environ["DRAFTS"] = "1"
    options = ["head"] if case.has_head_alone else []
    done = subprocess.run(
        ["./decode", there, "2", *sizes, *options], cwd=folder, env=environ, timeout=100, check=False, capture_output=True
    )
    assert done.returncode == 0, "see decode.cpp"
    return np.fromfile(folder / "accesses.bin", ACCESS)


def _log_of_company(case: Case, tokens: int, arguments: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Log:
    """In a single launch."""
    num_inner = sum(not has_head for _, has_head in case.passes)
    requests = [
        (first, first + num_inner + 1, *[1] * (first + num_inner + 1), len(case.passes) - num_inner, 0, 0, 0)
        for first in range(tokens)
    ]
    (folder / "requests.txt").write_text("\n".join(" ".join(map(str, request)) for request in requests))
    (folder / "launches.txt").write_text(f"{len(case.passes) + 1} -1 {' '.join(map(str, range(tokens)))}")
    done = subprocess.run(["./company", *arguments], cwd=folder, env=environ, timeout=100, check=False, capture_output=True)
    assert done.returncode == 0, "see company.cpp"
    return np.fromfile(folder / "accesses.bin", ACCESS)


Place = tuple[int, int]  # a memory, those of ranks' words and then heaps, and the word's number in it
Doer = tuple[int, int]  # a rank and a thread block
Accesses = set[tuple[Place, int, Doer]]  # with the tag


class Declared:
    """What the declaration says of a case: for each rank what is stored and read in all memories."""

    def __init__(self, case: Case) -> None:
        self.stores, self.reads = Accesses(), Accesses()
        self.kinds, self.values = dict[Place, str](), set[Place]()  # of places; those of words with tags of 32 bits
        shape, num_ranks = shapes_of(case)[0], case.num_ranks
        events = TokenEvents(shape, heads=range(shape.spec.lane_kv_heads))
        tokens = [CheckedToken(case.first + number, has_head=number + 2 >= TOKENS) for number in range(TOKENS)]
        if case.passes:
            tokens = [CheckedToken(position, has_head=has_head) for position, has_head in case.passes]
        if case.has_head_alone:
            tokens.insert(TOKENS - 1, replace(tokens[TOKENS - 2], is_head_alone=True))
        for token in tokens:
            position = token.position
            for event in events.of([token]):
                for version in (write.version for write in event.writes if event.name != "last streams"):  # another kernel's
                    for word in events.words_of(version, position):
                        for reader in range(num_ranks):
                            place, writer = self._place(word, reader, num_ranks)
                            self.kinds[place] = version.kind.name
                            self.values |= {place} if word.is_value else set()
                            if writer != reader or word.is_own_too:
                                self.stores.add((place, version.tag, (writer, word.writer)))
                for version in (read.version for read in event.reads):
                    for word in events.words_of(version, position):
                        for reader in range(num_ranks):
                            place, writer = self._place(word, reader, num_ranks)
                            if writer != reader or word.is_own_too:
                                self.reads |= {(place, version.tag, (reader, cta)) for cta in word.readers}

    @staticmethod
    def _place(word: Word, reader: int, num_ranks: int) -> tuple[Place, int]:
        """Where a rank reads it, and who writes it there."""
        if word.source is None:
            return (reader, word.offset), reader
        return (num_ranks + reader, word.offset), word.source


def differences(case: Case, log: Log) -> list[str]:
    """Between the log and the declaration."""
    declared = Declared(case)
    stores, reads = Accesses(), Accesses()
    for memory, offset, cta, rank, is_store, tag, upper, _ in log.tolist():  # ints of Python, far faster one by one
        place = memory, offset
        tag = upper if place in declared.values else tag
        if not is_store:
            reads.add((place, tag, (rank, cta)))
            continue
        by_somebody = place, tag, (rank, SOMEBODY)
        if by_somebody in declared.stores and by_somebody not in stores:
            cta = SOMEBODY  # the first one that stores it; there must be no second one
        stores.add((place, tag, (rank, cta)))
    if shapes_of(case)[
        0
    ].sends_sums_directly:  # what the first thread block leaves of the last stream for `inspect`, who is no reader
        stores = {one for one in stores if one[0] in declared.kinds or one[2][1] > 0}
    undeclared = reads - declared.reads
    last = {(place, doer): 0 for place, _, doer in undeclared}  # the last tag that somebody reads where he looked too early, too
    for place, tag, doer in declared.reads if last else ():
        if tag > last.get((place, doer), tag):
            last[place, doer] = tag
    early = {(place, tag, doer) for place, tag, doer in undeclared if tag < last[place, doer]}

    def listed(what: str, accesses: Accesses) -> list[str]:
        return [
            f"{what}: {declared.kinds.get(place, 'a word of no kind')} at {place}, tag {tag}, rank and thread block {doer}"
            for place, tag, doer in sorted(accesses)
        ]

    return [
        *listed("stored and not declared", stores - declared.stores),
        *listed("declared and not stored", declared.stores - stores),
        *listed("declared and not read", declared.reads - reads),
        *listed("read and not declared", undeclared - early),
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_stores_and_reads_the_declared_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = differences(CASES[name], log_of(CASES[name], tmp_path, monkeypatch))
    assert not found, "\n".join([f"{len(found)} differences", *found[:10]])


# A case, the file, a piece of it and what takes its place, and what is found.
FAULTS = {
    "partitions that nobody reads are not written": (
        "partitions that are reached, beside windows", "attend.cuh",
        "if (!kHeadOnly) keep_apart(", "if (false) keep_apart(",
        "declared and not stored: part of attention",
    ),
    "all thread blocks read one copy": (
        "four experts of forty", "finalize_experts.cuh",
        "logit_words(rows) + (rows.role.cta % kReplicas * kTokens + token) * kRouterLogitsStride;",
        "logit_words(rows);",
        "read and not declared: router logit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_planted_shows(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, file, piece, instead, finding = FAULTS[fault]
    log = log_of(CASES[name], tmp_path, monkeypatch, lambda sources: replaced(sources, file, piece, instead))
    assert any(one.startswith(finding) for one in differences(CASES[name], log))
