"""Drafts of the monokernel on a CPU (decode_twin/): as `PassDrafts` says, and with the answers of plain decoding."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.decode import lookup
from kog_dist.decode.pass_drafts import PLACES, PassDrafts, in_units
from kog_dist.runtime.ring import Finish
from kog_dist.workers.cuda.kernel_abi import DECODE_STATE
from kog_dist.workers.cuda.kernel_header import headers
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_decode_twin import Model, build_twin, command_of, decode_sources, twin_sources
from tests.unit.test_passes_twin import DENSE, arrays_of

pytestmark = needs_compiler

SPEC = replace(DENSE, num_lanes=1, num_layers=1, max_context=256)
OF_BOTH = ("state", "kv", "nets", "ring", "tokens", "heap")  # of each rank, the same memory for the builds that take turns
NOWHERE = 0xFFFFFFFF  # and the gap
EXTRA, EDGE = 90, 30  # in parts of 1024 of a pass
STEPS = 40  # of a launch
PROMPT = [3, 70, 11, 5, 42, 9, 70, 11, 5, 8, 33]


class LastOfPass(NamedTuple):
    """What the ring says with the last token of a pass that had a draft. `place`: of that token in the answer."""

    place: int
    num_drafted: int
    num_right: int
    is_predicted: bool


@dataclass(frozen=True)
class Answer:
    """`num_passes`: of one token, and of several."""

    tokens: list[int]
    finish: Finish
    scores: bytes
    drafted: list[LastOfPass]
    num_passes: tuple[int, int]


class Build:
    """A program in a folder. `flags`: for the compiler."""

    def __init__(self, model: Model, folder: Path, num_ranks: int = 1, flags: Sequence[str] = (), **options: Any) -> None:
        shapes = [
            TrialShape(
                model.spec, model.spec.lanes_of_rank(rank, num_ranks), max_ctas=2, copies=2, max_slots=6, keeps_hashes=True,
                num_ranks=num_ranks, **options,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        self.shape, self.folder = shapes[0], folder
        folder.mkdir(parents=True)
        build_twin("decode", decode_sources(headers(self.shape)), folder, *flags)
        for rank, shape in enumerate(shapes):
            for name, array in arrays_of(model.weights(shape), rank).items():
                array.tofile(folder / f"{name}.bin")

    @property
    def heap_words(self) -> int:
        """Of a rank's heap, as this build has it."""
        return int(command_of(self.shape)[-1])

    def launch(self, max_tokens: int, heap_words: int, environ: Mapping[str, str]) -> None:
        program, there, _, *sizes, _ = command_of(self.shape)
        done = subprocess.run(
            [program, there, f"{max_tokens}", *sizes, f"{heap_words}"], cwd=self.folder,
            env={**os.environ, "RESUME": f"{STEPS}", **environ}, capture_output=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, "see decode.cpp"


class Twin:
    """Builds whose launches take turns. `shared`: names of files that all have, besides those of each rank."""

    def __init__(self, folder: Path, *builds: Build, shared: Sequence[str] = ()) -> None:
        self.folder, self.builds, self._shared = folder, builds, shared
        self.ranks = range(builds[0].shape.num_ranks)
        self.heap_words = max(build.heap_words for build in builds)
        self.num_rounds = 0  # of launches that the last answer took
        folder.mkdir()
        for build in builds:
            for name in ("prompt", *shared, *(f"{name}.{rank}" for name in OF_BOTH for rank in self.ranks)):
                (build.folder / f"{name}.bin").symlink_to(folder / f"{name}.bin")

    def answer(
        self, prompt: Sequence[int], max_tokens: int, environ: Mapping[str, str], drafts: PassDrafts | None = None,
        prediction: Sequence[int] = (), stops: Sequence[int] = (),
    ) -> Answer:  # fmt: skip
        """`stops`: positions at which launches end, of a model with delta nets."""
        context = self.builds[0].shape.spec.max_context
        np.array(prompt, np.uint32).tofile(self.folder / "prompt.bin")
        for rank in self.ranks:
            np.array([*prediction, NOWHERE, *prompt, *[0] * (context + 4)], np.uint32).tofile(self.folder / f"tokens.{rank}.bin")
            left = [self.folder / f"{name}.{rank}.bin" for name in ("kv", "nets", "ring", "heap")]
            left += [self.folder / f"{name}.bin" for name in self._shared]
            for path in (*left, *(build.folder / f"words.{rank}.bin" for build in self.builds)):
                path.unlink(missing_ok=True)
        state = np.zeros(1, DECODE_STATE.dtype)
        state["token"], state["num_prompt"], state["max_tokens"] = prompt[0], len(prompt), max_tokens
        state["draft_place"] = state["draft_start"] = NOWHERE
        if drafts is not None:
            state["pass_tokens"], state["draft_balance"], state["draft_idle"] = drafts.per_pass, drafts.balance, drafts.num_idle
            state["draft_looked"] = len(prompt) - 1
            if drafts.start >= 0:
                state["draft_place"] = state["draft_start"] = drafts.start
                state["draft_tokens"] = drafts.num_found
        for rank in self.ranks:
            state.tofile(self.folder / f"state.{rank}.bin")
        for self.num_rounds in range(1, context):
            stop = {"STOP": f"{stops[0]}"} if stops else {}
            for build in self.builds:
                build.launch(max_tokens, self.heap_words, {"PREDICTED": f"{len(prediction)}", **stop, **environ})
                for name in ("state", "ring", "tokens"):  # each rank has found them by itself
                    files = [(self.folder / f"{name}.{rank}.bin").read_bytes() for rank in self.ranks]
                    assert files == files[:1] * len(files), name
            state = np.fromfile(self.folder / "state.0.bin", DECODE_STATE.dtype)
            assert drafts is None or state["draft_looked"][0] == state["position"][0], "all tokens are looked up"
            assert not stops or state["position"][0] <= stops[0]
            stops = stops[1:] if stops and state["position"][0] == stops[0] else stops
            if state["finish"][0]:
                break
        assert not stops
        ring = np.fromfile(self.folder / "ring.0.bin", np.uint64).reshape(-1, 2)
        ids, endings = (ring[ring[:, 0] != 0] & np.uint64(0xFFFFFFFF)).T.tolist()
        drafted = [LastOfPass(i, e >> 8 & 0xFF, e >> 16 & 0xFF, bool(e >> 24)) for i, e in enumerate(endings) if e >> 8]
        return Answer(
            ids,
            Finish(endings[-1] & 0xFF),
            state["hash"].tobytes(),
            drafted,
            (int(state["epoch"][0]), int(state["pass_epoch"][0])),
        )


def wanted(plain: Answer, num_prompt: int, per_pass: int, drafts: PassDrafts) -> Answer:
    """The same answer as passes with these drafts give it."""
    num_prompt_passes = (num_prompt - 1) // per_pass
    small, large, given = 0, num_prompt_passes, 0
    drafted: list[LastOfPass] = []
    while given < len(plain.tokens):
        small, large = (small + 1, large) if drafts.per_pass == 1 else (small, large + 1)
        draft = drafts.draft if drafts.per_pass > 1 else []
        rest = plain.tokens[given:]
        right = next((i for i, token in enumerate(draft) if i + 1 >= len(rest) or token != rest[i]), len(draft))
        new = rest[: right + 1]
        given += len(new)
        if draft:
            drafted.append(LastOfPass(given - 1, len(draft), len(new) - 1, drafts.is_predicted))
        drafts.took(new)
    return replace(plain, drafted=drafted, num_passes=(small, large))


@pytest.mark.parametrize(("per_pass", "num_ranks"), [(2, 1), (4, 1), (4, 2)])
def test_builds_that_take_turns_give_the_answer_of_plain_decoding(
    per_pass: int, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token and score by score, in the passes that are defined; greedy, which repeats itself, and warm."""
    monkeypatch.setattr(lookup, "_LOOKED_AT", 10**6)  # the kernel compares more places
    model = Model(SPEC if num_ranks == 1 else replace(SPEC, num_lanes=num_ranks), "bfloat16", monkeypatch)
    plain_twin = Twin(tmp_path / "plain", Build(model, tmp_path / "0"))
    small = Build(model, tmp_path / "1", num_ranks, drafts=True)
    twin = Twin(tmp_path / "both", small, Build(model, tmp_path / "2", num_ranks, tokens=per_pass))
    passes = list[tuple[int, int]]()
    for settings, max_tokens in (({}, 40), ({"INVERSE_TEMPERATURE": str(np.float32(30).view(np.uint32))}, 25)):
        plain = plain_twin.answer(PROMPT, max_tokens, settings)
        assert len(plain.tokens) == max_tokens
        wrong = [(token + (index % 6 == 4)) % 76 for index, token in enumerate(plain.tokens)]
        for prediction in ((), wrong):
            costs = {"extra": EXTRA, "edge": EDGE, "num_left": len(PROMPT)}
            of_costs = {"PASS_TOKENS": f"{per_pass}", "EXTRA": f"{EXTRA}", "EDGE": f"{EDGE}"}
            drafts = [PassDrafts(PROMPT, prediction, max_tokens, per_pass, **costs) for _ in range(2)]
            found = twin.answer(PROMPT, max_tokens, settings | of_costs, drafts[0], prediction)
            assert found == wanted(plain, len(PROMPT), per_pass, drafts[1])
            passes.append(found.num_passes)
    num_rounds = twin.num_rounds
    drafts = [PassDrafts(PROMPT, wrong, max_tokens, per_pass, **costs) for _ in range(2)]
    early = twin.answer(PROMPT, max_tokens, settings | of_costs | {"OTHERS_WAIT": "1"}, drafts[0], wrong)
    assert early == found
    assert twin.num_rounds > 2 * num_rounds, "launches end early where others wait"
    assert any(small and large > len(PROMPT) // per_pass for small, large in passes)  # there and back


@pytest.mark.parametrize("num_left", range(1, 10))
def test_what_the_prompt_needs_is_no_loss_of_drafts(num_left: int) -> None:
    """A right prediction is used from the start, wherever the prompt ends within a pass; without one, passes have one token."""
    prompt, answer = range(100, 120), list(range(40))
    costs = {"num_left": num_left, "extra": in_units(0.6), "edge": in_units(0.1)}
    drafts = PassDrafts(prompt, answer, 40, 4, **costs)
    given, passes = 0, list[int]()
    while given < 40:
        num_new = 1 + len(drafts.draft)
        drafts.took(answer[given : given + num_new])
        given += num_new
        passes.append(num_new)
    of_prompt = (num_left - 1) % 4
    assert passes == [4 - of_prompt, *[4] * (9 + (of_prompt == 0)), *[of_prompt] * (of_prompt > 0)][: len(passes)]
    drafts = PassDrafts(prompt, (), 40, 4, **costs)
    assert drafts.per_pass == (4 if num_left > 1 else 1)
    drafts.took([7])
    assert drafts.per_pass == 1


@pytest.mark.parametrize("per_pass", [2, 4])
def test_the_kernel_looks_up_and_decides_as_is_defined(per_pass: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In answers that are known, which repeat themselves, the prompt, and predictions that are more or less right."""
    monkeypatch.setattr(lookup, "_LOOKED_AT", 10**6)
    shape = TrialShape(SPEC, range(1), max_ctas=2, copies=2, max_slots=6, tokens=4)
    build_twin("lookups", twin_sources(headers(shape)), tmp_path)
    cases, all_wanted = list[int](), list[tuple[int, ...]]()
    num_cases = num_small = num_large = num_predicted = 0
    for seed in range(400):
        chance = np.random.default_rng(seed)
        prompt, answer = texts_of(chance)
        prediction = changed(answer, chance) if chance.random() < 0.5 else []
        known = [*prediction, NOWHERE, *prompt, *answer]
        if max(Counter(pairwise(known)).values()) > PLACES:  # the kernel compares fewer places then
            continue
        num_cases += 1
        extra, edge, num_left = (
            int(chance.integers(10, 400)),
            int(chance.integers(0, 200)),
            int(chance.integers(1, len(prompt) + 1)),
        )
        made = PassDrafts(prompt, prediction, len(answer), per_pass, num_left=num_left, extra=extra, edge=edge)
        place = made.start if made.start >= 0 else NOWHERE
        cases += [per_pass, extra, edge, num_left, len(prediction), len(prompt), len(answer)]
        cases += [made.per_pass, place, place, made.num_found, made.balance, made.num_idle, *known]
        given = 0
        while given < len(answer):
            draft, size = made.draft if made.per_pass > 1 else [], made.per_pass
            rest = answer[given:]
            right = next((i for i, token in enumerate(draft) if i + 1 >= len(rest) or token != rest[i]), len(draft))
            all_wanted.append((size, len(draft), right, bool(draft) and made.is_predicted))
            num_small, num_large = num_small + (size == 1), num_large + (size > 1)
            num_predicted += bool(draft) and made.is_predicted
            made.took(rest[: right + 1])
            given += right + 1
    np.array(cases, np.uint32).tofile(tmp_path / "cases.bin")
    done = subprocess.run(["./lookups", "."], cwd=tmp_path, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, "see lookups.cpp"
    found = np.fromfile(tmp_path / "passes.bin", np.uint32).reshape(-1, 4)
    assert found.tolist() == [list(map(int, one)) for one in all_wanted]
    assert num_cases > 200
    assert min(num_small, num_large, num_predicted) > 500
    rights, drafted = found[:, 2].sum(), found[:, 1].sum()
    assert 0.3 * drafted < rights < 0.9 * drafted


def texts_of(chance: np.random.Generator) -> tuple[list[int], list[int]]:
    """A prompt and an answer."""
    vocabulary = int(chance.choice([5, 40, 1000]))

    def new(most: int) -> list[int]:
        return [int(token) for token in chance.integers(0, vocabulary, int(chance.integers(1, most)))]

    prompt, answer = new(60), list[int]()
    while len(answer) < chance.integers(20, 200):
        kind = chance.integers(0, 4)
        known = prompt + answer
        if kind == 0:
            answer += new(8)
        elif kind == 1:
            answer += new(4) * int(chance.integers(2, 12))
        else:
            first = int(chance.integers(0, len(known)))
            answer += changed(known[first : first + int(chance.integers(1, 60))], chance)
    return prompt, answer


def changed(tokens: Sequence[int], chance: np.random.Generator) -> list[int]:
    """With others, fewer and more of them here and there; or as they are."""
    share = float(chance.choice([0, 0.02, 0.1]))
    found = list[int]()
    for token in tokens:
        draw = float(chance.random()) / share if share else 3.0
        found += [] if draw < 1 / 3 else [token + 1] if draw < 2 / 3 else [token, 7] if draw < 1 else [token]
    return found
