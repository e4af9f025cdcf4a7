"""Drafts of requests with processors on a CPU (processors_twin/): tokens, masks, penalties, reports of the definition.

The logits come from here, as in test_processors_twin.py; builds of one token and of several take turns as in
test_drafts_twin.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kog_dist.decode import lookup
from kog_dist.decode.pass_drafts import SHARE, UNIT, PassDrafts, in_units
from kog_dist.decode.sampling import NO_CANDIDATE, Sampler, token_logprobs
from kog_dist.runtime.masks import NUM_SLOTS, num_words
from kog_dist.runtime.ring import Finish
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.build import device_sources
from kog_dist.workers.cuda.draft_builds import NOWHERE, PASS_TOKENS, draft_headers, drafting_shape
from kog_dist.workers.cuda.kernel_abi import DECODE_PARAMS, DECODE_STATE, DRAFT_PARAMS, REPORT_WORDS
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.processors import IN_PROMPT, ProcessedRequest, read_report, request_params
from tests.sweeps import cases
from tests.unit.cpu_compiler import BOTH_TWINS, build, needs_compiler
from tests.unit.test_decode_twin import Model
from tests.unit.test_drafts_twin import PROMPT as WHOLE_PROMPT
from tests.unit.test_drafts_twin import SPEC as WHOLE_SPEC
from tests.unit.test_drafts_twin import Build, LastOfPass
from tests.unit.test_drafts_twin import Twin as WholeTwin
from tests.unit.test_passes_twin import DENSE
from tests.unit.test_processors_twin import mask_of

pytestmark = needs_compiler

VOCAB: Final = 96
SHAPE = KernelShape(replace(DENSE, num_layers=1, vocab_size=VOCAB, max_context=128), range(DENSE.num_lanes), max_ctas=3)
PROMPT, TAG, EPOCH = (7, 3, 90, 12, 7, 3, 41), 5, 9
EXTRA, EDGE, WAIT, STEPS = 90, 30, 200, 40  # costs in parts of 1024 of a pass; passes of a launch
MOST_FORCED = 4  # that a pass needs of a grammar: the token that it chooses, and the drafts of the next one
CARRIED = ("state", "ring", "reports", "choices", "masks", "forced", "history", "raw", "tokens", "told")
EVERYTHING = SamplingParams(
    temperature=2.0, seed=2**63 - 11, top_k=30, top_p=0.8, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3,
    frequency_penalty=0.1, logit_bias=((5, -3.0), (60, 4.0)), min_tokens=3, logprobs=7,
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request whose logits are known. `masks`: of each token the ids that it may be; None: it has no grammar. `told`: what is
    said to be forced from each token on, where that is something else than what the masks leave.
    """

    sampling: SamplingParams
    logits: Any  # (tokens, vocab)
    masks: Sequence[Sequence[int]] | None = None
    stop_ids: tuple[int, ...] = ()
    told: Sequence[Sequence[int]] | None = None

    @property
    def wait(self) -> int:
        """For a mask, in parts of a pass."""
        return 0 if self.masks is None else WAIT

    def answer(self) -> tuple[list[int], Finish]:
        """As the definition has it."""
        sampler, found = Sampler(VOCAB, PROMPT, self.sampling, self.stop_ids), list[int]()
        for index, logits in enumerate(self.logits):
            mask = None if self.masks is None else mask_of(VOCAB, self.masks[index])
            chosen = sampler.choose(logits, len(PROMPT) - 1 + index, mask)
            if chosen == NO_CANDIDATE:
                return found, Finish.NO_MASK
            sampler.accept(chosen.token_id)
            found.append(chosen.token_id)
            if chosen.token_id in self.stop_ids:
                return found, Finish.STOP
        return found, Finish.LENGTH

    def forced(self, index: int) -> list[int]:
        """From token `index` on, those of which there is only one."""
        if self.told is not None:
            return [*self.told[index]]
        found = list[int]()
        for ids in (self.masks or ())[index:]:
            if len(ids) != 1:
                break
            found += ids
        return found


@dataclass
class Given:
    """What the kernel made of it. `num_passes`: of one token, and of several."""

    token_ids: list[int]
    finish: Finish
    num_passes: tuple[int, int]
    drafted: list[LastOfPass] = field(default_factory=list)


class Twin:
    """Builds whose launches take turns, in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.programs = [self._program(folder / f"{i}", headers) for i, headers in enumerate(draft_headers(SHAPE))]
        self.reports = np.zeros((0, REPORT_WORDS), np.uint64)

    def _program(self, folder: Path, headers: dict[str, str]) -> Path:
        folder.mkdir()
        for name, text in {**device_sources(), **headers}.items():
            (folder / name).write_text(text)
        here = Path(__file__).parent
        for twin in (BOTH_TWINS, here / "kccl_twin", here / "processors_twin"):
            shutil.copytree(twin, folder, dirs_exist_ok=True)
        shutil.copy(here / "decode_twin" / "files.h", folder)
        return build(folder / "processor_drafts.cpp", "processor_drafts")

    def give(
        self, asked: Asked, folder: Path, drafts: PassDrafts, prediction: Sequence[int] = (), *,
        seed: int = 1, most_masks: int | None = None, first: int = 0, is_cancelled: bool = False,
    ) -> Given:  # fmt: skip
        """`first`: tokens of the answer that are there when passes begin, 1 behind an LM head alone."""
        folder.mkdir()
        answer, num_tokens = asked.answer()[0], len(asked.logits)
        most_masks = num_tokens if most_masks is None else most_masks
        numbers = [num_tokens, num_words(VOCAB), most_masks, int(is_cancelled), asked.wait]
        self._write_request(asked, folder, answer, prediction, numbers)
        state = self._state(drafts, num_tokens, answer[:first])
        empty = {
            "ring": 2 * num_tokens, "reports": num_tokens * REPORT_WORDS, "masks": NUM_SLOTS * num_words(VOCAB),
            "choices": NUM_SLOTS * SHAPE.words.lists["Choice"][0], "forced": 8, "told": 1, "raw": VOCAB,
        }  # fmt: skip
        carried: dict[str, Any] = {name: np.zeros(count, np.uint64) for name, count in empty.items()}
        carried["history"] = np.zeros(VOCAB, np.uint32)
        carried["history"][list(PROMPT)] = IN_PROMPT
        if first:
            assert not asked.sampling.has_penalties
            carried["ring"][:2] = TAG << 32 | answer[0], TAG << 32
        tokens = [*prediction, NOWHERE, *PROMPT]
        carried["tokens"] = np.array([*tokens, *[0] * (num_tokens + 8)], np.uint32)
        carried["state"] = state
        for name, array in carried.items():
            array.tofile(folder / f"{name}.bin")
        sizes = (SHAPE.words.num_words, drafting_shape(SHAPE).words.num_words)
        for number, num in enumerate(sizes):
            np.zeros(num, np.uint64).tofile(folder / f"words.{number}.bin")
        for round_ in range(4 * num_tokens):
            for number, program in enumerate(self.programs):
                self._launch(program, folder, number, seed + round_)
            state = np.fromfile(folder / "state.bin", DECODE_STATE.dtype)
            if state["finish"][0]:
                break
        self.reports = np.fromfile(folder / "reports.bin", np.uint64).reshape(-1, REPORT_WORDS)
        ring = np.fromfile(folder / "ring.bin", np.uint64).reshape(-1, 2)
        ids, endings = (ring[ring[:, 0] != 0] & np.uint64(0xFFFFFFFF)).T.tolist()
        drafted = [LastOfPass(i, e >> 8 & 0xFF, e >> 16 & 0xFF, bool(e >> 24)) for i, e in enumerate(endings) if e >> 8]
        passes = int(state["epoch"][0]), int(state["pass_epoch"][0])
        return Given([one for one in ids if one != 0xFFFFFFFF], Finish(endings[-1] & 0xFF), passes, drafted)

    def _launch(self, program: Path, folder: Path, number: int, seed: int) -> None:
        words = folder / "words.bin"
        words.unlink(missing_ok=True)
        words.symlink_to(folder / f"words.{number}.bin")
        command = [str(program), str(folder), f"{seed}", f"{STEPS}"]
        done = subprocess.run(command, capture_output=True, timeout=100, check=False)
        assert done.returncode == 0, f"ended with {done.returncode} (4: too slow, 6: all threads wait for each other)"

    def _write_request(
        self, asked: Asked, folder: Path, answer: Sequence[int], prediction: Sequence[int], numbers: Sequence[int]
    ) -> None:
        sampling, params, drafts = asked.sampling, np.zeros((), DECODE_PARAMS.dtype), np.zeros((), DRAFT_PARAMS.dtype)
        params["seed"], params["wait_limit_us"], params["request_tag"] = sampling.seed, 2000, TAG
        if sampling.temperature > 0:
            params["inverse_temperature_bits"] = (np.float32(1.0) / np.float32(sampling.temperature)).view(np.uint32)
        params["num_stop_ids"] = len(asked.stop_ids)
        params["stop_ids"][: len(asked.stop_ids)] = asked.stop_ids
        drafts["num_predicted"], drafts["pass_tokens"], drafts["extra"], drafts["edge"] = (
            len(prediction),
            PASS_TOKENS,
            EXTRA,
            EDGE,
        )
        request = ProcessedRequest(sampling, EPOCH if asked.masks is not None else 0)
        parts = [params, request_params(SHAPE, request, sampling), drafts, np.array(numbers, np.uint32)]
        (folder / "request.bin").write_bytes(b"".join(part.tobytes() for part in parts))
        bias = np.zeros(VOCAB, np.float32)
        for token_id, value in sampling.logit_bias:
            bias[token_id] = value
        bias.tofile(folder / "bias.bin")
        count = len(asked.logits)
        np.array([mask_of(VOCAB, ids) for ids in asked.masks or [()] * count]).tofile(folder / "allowed.bin")
        known = np.zeros((count, 1 + MOST_FORCED), np.uint32)
        for index in range(count):
            forced = asked.forced(index)
            known[index, : 1 + min(len(forced), MOST_FORCED)] = [len(forced), *forced[:MOST_FORCED]]
        known.tofile(folder / "known.bin")
        np.array([*PROMPT, *answer], np.uint32).tofile(folder / "text.bin")
        asked.logits.astype(np.float32).tofile(folder / "logits.bin")

    def _state(self, drafts: PassDrafts, max_tokens: int, answer: Sequence[int]) -> Any:
        state = np.zeros(1, DECODE_STATE.dtype)
        state["num_prompt"], state["max_tokens"] = len(PROMPT), max_tokens
        state["token"], state["position"] = (answer[0], len(PROMPT)) if answer else (PROMPT[0], 0)
        state["pass_tokens"], state["draft_balance"], state["draft_idle"] = drafts.per_pass, drafts.balance, drafts.num_idle
        state["draft_looked"] = len(PROMPT) - 1
        state["draft_place"] = state["draft_start"] = drafts.start if drafts.start >= 0 else NOWHERE
        state["draft_tokens"] = drafts.num_found
        return state


def drafts_of(num_tokens: int, prediction: Sequence[int] = (), wait: int = 0) -> PassDrafts:
    costs = {"extra": EXTRA, "edge": EDGE, "wait": wait}
    return PassDrafts(PROMPT, prediction, num_tokens, PASS_TOKENS, num_left=len(PROMPT), **costs)


def wanted(asked: Asked, prediction: Sequence[int] = ()) -> Given:
    """The answer of the definition, in passes with the drafts that are defined."""
    answer, finish = asked.answer()
    drafts, small = drafts_of(len(asked.logits), prediction, asked.wait), 0
    large, given = (len(PROMPT) - 1) // PASS_TOKENS, 0
    drafted = list[LastOfPass]()
    while given < len(answer):
        small, large = (small + 1, large) if drafts.per_pass == 1 else (small, large + 1)
        draft = drafts.draft if drafts.per_pass > 1 else []
        rest = answer[given:]
        right = next((i for i, token in enumerate(draft) if i + 1 >= len(rest) or token != rest[i]), len(draft))
        new = rest[: right + 1]
        given += len(new)
        if draft:
            drafted.append(LastOfPass(given - 1, len(draft), len(new) - 1, drafts.is_predicted))
        drafts.took(new, asked.forced(given - 1))
    return Given(answer, finish, (small, large), drafted)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("twins"))


@pytest.fixture(autouse=True)
def _all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_LOOKED_AT", 10**6)  # the kernel compares more places


def logits_of(num_tokens: int, scale: float = 3.0) -> Any:
    return (np.random.default_rng(num_tokens).standard_normal((num_tokens, VOCAB)) * scale).astype(np.float32)


def masks_of(num_tokens: int) -> list[list[int]]:
    """Free tokens, and runs of which there is only one: names of fields, of more tokens than a pass has, and of fewer."""
    chance, masks = np.random.default_rng(7), list[list[int]]()
    while len(masks) < num_tokens:
        masks += [sorted(map(int, chance.choice(VOCAB, 20, replace=False))) for _ in range(int(chance.integers(1, 3)))]
        masks += [[int(token)] for token in chance.integers(0, VOCAB, int(chance.integers(1, 9)))]
    return masks[:num_tokens]


def check_reports(twin: Twin, asked: Asked, token_ids: Sequence[int]) -> None:
    num_top = asked.sampling.logprobs
    for index, token_id in enumerate(token_ids if num_top is not None else ()):
        found = read_report(twin.reports[index], TAG, min(num_top or 0, VOCAB))
        assert found == token_logprobs(asked.logits[index], token_id, num_top or 0), f"token {index}"


def test_what_a_grammar_forces_is_drafted_where_it_pays() -> None:
    """And as long as it comes: what turns out to be wrong costs a pass, once."""
    dear = PassDrafts((1, 2), (), 40, PASS_TOKENS, num_left=1, extra=in_units(1.4), edge=in_units(0.1))
    dear.took([5], [5, 6])
    assert (dear.draft, dear.per_pass) == ([], 1), "one token takes longer than it saves"
    dear.took([6], [7, 8, 9, 10])
    assert dear.draft == [], "another token was chosen than the one in front of these"
    dear.took([7], [7, 8, 9, 10, 11])
    assert (dear.draft, dear.per_pass, dear.is_predicted) == ([8, 9, 10], PASS_TOKENS, False)
    dear.took([12], [12, 13, 14, 15])
    assert dear.balance < 0
    assert (dear.draft, dear.per_pass) == ([], 1)
    slow = PassDrafts((1, 2), (), 40, PASS_TOKENS, num_left=1, extra=in_units(0.4), edge=0, wait=in_units(0.7))
    slow.took([5], [5, 6])
    assert slow.draft == [], "its mask takes longer to come than it saves"
    slow.took([6], [6, 7, 8])
    assert slow.draft == [7, 8]
    before = slow.balance
    slow.took([7, 8, 9])
    assert slow.balance == before + 2 * (UNIT - in_units(0.7)) - in_units(0.4) + 3 * SHARE
    last = PassDrafts((1, 2), (), 3, PASS_TOKENS, num_left=1, extra=in_units(0.1), edge=0)
    last.took([5], [5, 6, 7, 8])
    assert last.draft == [6], "the answer has two tokens more"


@pytest.mark.parametrize("sampling", [SamplingParams(), EVERYTHING], ids=["greedy", "everything"])
def test_what_a_grammar_forces_is_drafted_and_the_answer_is_that_of_the_definition(
    twin: Twin, sampling: SamplingParams, tmp_path: Path
) -> None:
    """Each token by its own mask, penalties with what the same pass has accepted, and a report of each."""
    asked = Asked(sampling, logits_of(40), masks_of(40))
    found = twin.give(asked, tmp_path / "given", drafts_of(40))
    assert found == wanted(asked)
    check_reports(twin, asked, found.token_ids)
    assert sum(found.num_passes) < 30, "forced tokens share passes"
    assert sum(one.num_right for one in found.drafted) > 12


@pytest.mark.parametrize("sampling", [EVERYTHING, SamplingParams(logprobs=2)], ids=["everything", "logprobs"])
def test_drafts_that_are_more_or_less_right_change_no_token_and_no_report(
    twin: Twin, sampling: SamplingParams, tmp_path: Path
) -> None:
    """Logits behind wrong drafts are no numbers, so whoever looked at them would end the answer."""
    asked = Asked(sampling, logits_of(30))
    prediction = [(token + (index % 6 == 4)) % VOCAB for index, token in enumerate(asked.answer()[0])]
    found = twin.give(asked, tmp_path / "given", drafts_of(30, prediction), prediction)
    assert found == wanted(asked, prediction)
    check_reports(twin, asked, found.token_ids)
    assert sum(one.num_right for one in found.drafted) > 12
    assert any(one.num_right < one.num_drafted for one in found.drafted)


def test_what_is_said_to_be_forced_and_is_not_costs_no_token(twin: Twin, tmp_path: Path) -> None:
    """It is drafted if it begins with the token that was chosen."""
    every: Any = [range(VOCAB)] * 30
    answer = Asked(SamplingParams(temperature=0.5, seed=3), logits_of(30), every).answer()[0]
    told = [
        [(token + (index % 3 == 0)) % VOCAB, *answer[index + 1 : index + 1 + index % 5], 7] for index, token in enumerate(answer)
    ]
    asked = Asked(SamplingParams(temperature=0.5, seed=3), logits_of(30), every, told=told)
    found = twin.give(asked, tmp_path / "given", drafts_of(30))
    assert found == wanted(asked)
    assert any(0 < one.num_right < one.num_drafted for one in found.drafted)


def test_a_stop_within_a_pass_ends_the_answer_there(twin: Twin, tmp_path: Path) -> None:
    asked = Asked(SamplingParams(), logits_of(24), [*masks_of(8), *[[token] for token in range(16)]], stop_ids=(9,))
    found = twin.give(asked, tmp_path / "given", drafts_of(24))
    assert found == wanted(asked)
    assert (found.finish, found.token_ids[-1]) == (Finish.STOP, 9)


def test_a_mask_that_does_not_come_within_a_pass_ends_the_answer_there(twin: Twin, tmp_path: Path) -> None:
    """Its slot has an older one, and so has that of what is forced."""
    masks = [[index] for index in range(24)]
    asked = Asked(SamplingParams(), logits_of(24), masks)
    ends = twin.give(asked, tmp_path / "given", drafts_of(24), most_masks=14)
    assert (ends.token_ids, ends.finish) == (list(range(14)), Finish.NO_MASK)
    assert 14 % PASS_TOKENS not in (0, 1), "it is missed between two tokens of a pass"


def test_a_mask_that_allows_nothing_within_a_pass_ends_the_answer_there(twin: Twin, tmp_path: Path) -> None:
    masks: list[list[int]] = [[index] for index in range(24)]
    masks[15] = []
    asked = Asked(SamplingParams(logprobs=1), logits_of(24), masks)
    ends = twin.give(asked, tmp_path / "given", drafts_of(24))
    assert (ends.token_ids, ends.finish) == (list(range(15)), Finish.NO_MASK)
    check_reports(twin, asked, ends.token_ids)


def test_drafts_go_on_behind_an_lm_head_alone(twin: Twin, tmp_path: Path) -> None:
    asked = Asked(SamplingParams(temperature=1.0, seed=4), logits_of(24), masks_of(24))
    found = twin.give(asked, tmp_path / "given", drafts_of(24), first=1)
    assert (found.token_ids, found.finish) == asked.answer()
    assert sum(found.num_passes) < 20


def test_a_cancel_ends_the_answer_behind_the_token_that_is_chosen(twin: Twin, tmp_path: Path) -> None:
    asked = Asked(EVERYTHING, logits_of(24), masks_of(24))
    found = twin.give(asked, tmp_path / "given", drafts_of(24), is_cancelled=True)
    assert (found.token_ids, found.finish) == ([], Finish.CANCELLED)


# ---- the whole kernel ----
KERNEL_TOKENS: Final = 30


class ProcessorsTwin(WholeTwin):
    """Of whole kernels with processors. What they share with each other is what the prompt, penalties and reports need."""

    def __init__(self, folder: Path, sampling: SamplingParams, *builds: Build) -> None:
        super().__init__(folder, *builds, shared=("history", "choices", "reports"))
        for one in builds:
            request_params(one.shape, ProcessedRequest(sampling), sampling).tofile(one.folder / "processors.bin")

    def reports(self) -> Any:
        """Of the answer's tokens."""
        return np.fromfile(self.folder / "reports.bin", np.uint64).reshape(-1, REPORT_WORDS)[:KERNEL_TOKENS]


@pytest.mark.parametrize("warm", cases([True, False], [False]), ids=["warm", "greedy"])
def test_kernels_with_processors_give_the_answer_of_one_token_in_a_pass(
    warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties count what the same pass has accepted; reports are the same words."""
    sampling = SamplingParams(temperature=1 / 30 if warm else 0, repetition_penalty=1.3, frequency_penalty=0.05, logprobs=3)
    if warm:
        sampling = replace(sampling, top_k=20, top_p=0.95)
    settings = {"INVERSE_TEMPERATURE": str(np.float32(30).view(np.uint32))} if warm else {}
    model, flags = Model(WHOLE_SPEC, "bfloat16", monkeypatch), ("-DKOG_PROCESSORS=1",)
    plain_twin = ProcessorsTwin(tmp_path / "plain", sampling, Build(model, tmp_path / "0", flags=flags))
    plain = plain_twin.answer(WHOLE_PROMPT, KERNEL_TOKENS, settings)
    assert len(plain.tokens) == KERNEL_TOKENS
    assert len(set(plain.tokens)) > 10
    small = Build(model, tmp_path / "1", flags=flags, drafts=True)
    twin = ProcessorsTwin(tmp_path / "both", sampling, small, Build(model, tmp_path / "2", flags=flags, tokens=PASS_TOKENS))
    wrong = [(token + (index % 6 == 4)) % 76 for index, token in enumerate(plain.tokens)]
    costs = {"extra": EXTRA, "edge": EDGE, "num_left": len(WHOLE_PROMPT)}
    drafts = PassDrafts(WHOLE_PROMPT, wrong, KERNEL_TOKENS, PASS_TOKENS, **costs)
    of_costs = {"PASS_TOKENS": f"{PASS_TOKENS}", "EXTRA": f"{EXTRA}", "EDGE": f"{EDGE}"}
    found = twin.answer(WHOLE_PROMPT, KERNEL_TOKENS, settings | of_costs, drafts, wrong)
    assert (found.tokens, found.finish) == (plain.tokens, plain.finish)
    np.testing.assert_array_equal(twin.reports(), plain_twin.reports())
    assert sum(one.num_right for one in found.drafted) > KERNEL_TOKENS // 3
