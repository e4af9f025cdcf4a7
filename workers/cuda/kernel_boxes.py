"""What the monokernel's ranks exchange through the symmetric heap, and the header that tells the kernel where it lies.

    attention, mlp   float32 sums of the own lanes' outputs of a sublayer, row owner to row owner; a slot for each summed layer
    streams          the residual streams before the LM head, pair words, copies for all readers: every rank reads all lanes; none
                     with `vocab_parallel`, where each rank has logits of its own lanes, or where the lanes share one stream
    candidates       best token of each thread block of each rank, copies for all readers; two slots in turn
    pass_attention, pass_mlp, pass_candidates
                     the same of a build whose passes have several tokens, one behind the other (in each copy of candidates)
    company2_attention, ...
                     the same of builds whose passes have tokens of 2 or 4 requests: each has boxes of its own
    choices          what thread blocks exchange to choose a token with processors (device/quads.cuh); two slots in turn
    reports          masses and best tokens of each thread block, for log-probabilities; rank 0's are used

Epochs of the sums are those of the plan (`decode/plan`): token * summed layers + place of the layer among them. Tokens count
from 1, and the slot is that place. Candidates have the token's number as epoch. Builds with several tokens count passes. Their
boxes lie behind those of a build with one, which are where they are in its heap: so both may use one. Those with several
requests have all of these, and behind them their own. See docs/kccl.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.mailbox import Mailbox
from kog_dist.collectives.words import WORD_BYTES
from kog_dist.decode.plan.schedule import is_summed
from kog_dist.model.spec import ModelSpec, Sublayer
from kog_dist.records import dataclass
from kog_dist.runtime.abi import LINE_BYTES
from kog_dist.sampling_params import MAX_TOP_LOGPROBS

_LINE_WORDS = LINE_BYTES // WORD_BYTES
_BY_TOKEN = (*(sublayer.name.lower() for sublayer in Sublayer), "candidates")  # boxes that have as much for each token of a pass
_OF_PASSES, _DRAFTED = "pass_", 4  # tokens of a pass with drafts
_OF_COMPANY, COMPANY_SIZES = "company", (2, 4)


@dataclass(frozen=True)
class KernelBoxes:
    """The mailboxes of a model on `world_size` ranks whose kernels have `num_ctas` thread blocks and `replicas` of vectors.

    `tokens`: of a pass; with `company` each is of another request.
    """

    spec: ModelSpec
    world_size: int
    num_ctas: int
    replicas: int
    tokens: int = 1
    company: bool = False

    @property
    def lanes_per_rank(self) -> int:
        """Hosted lanes of each rank."""
        return len(self.spec.lanes_of_rank(0, self.world_size))

    @property
    def stream_copy_words(self) -> int:
        """Words of one copy of a stream, in whole lines."""
        return -(-self.spec.hidden_size // 2 // _LINE_WORDS) * _LINE_WORDS

    @property
    def candidate_copy_words(self) -> int:
        """Words of one copy of a rank's candidates, in whole lines."""
        return -(-2 * self.num_ctas // _LINE_WORDS) * _LINE_WORDS

    @property
    def choice_words(self) -> int:
        """Words of a rank's choices: four from each thread block, in whole lines, in every copy; and one beside them."""
        copy, beside = (-(-words // _LINE_WORDS) * _LINE_WORDS for words in (4 * self.num_ctas, self.num_ctas))
        return self.replicas * copy + beside

    @property
    def report_words(self) -> int:
        """Words of a rank's reports: four, and a list of tokens, from each thread block."""
        return -(-self.num_ctas * (4 + 2 * MAX_TOP_LOGPROBS) // _LINE_WORDS) * _LINE_WORDS

    def summed_layers(self, sublayer: Sublayer) -> tuple[int, ...]:
        """Layers whose outputs of this sublayer are summed over lanes, now or later."""
        return tuple(layer for layer in range(self.spec.num_layers) if is_summed(self.spec, layer, sublayer))

    def specs(self) -> list[MailboxSpec]:
        """The mailboxes; none for one rank. Whoever makes the heap may declare others behind them."""
        if self.world_size == 1:
            return []
        sums = [
            MailboxSpec(b.name.lower(), len(self.summed_layers(b)), self.spec.hidden_size)
            for b in Sublayer
            if self.summed_layers(b)
        ]
        if self.spec.gathers_streams:
            sums.append(MailboxSpec("streams", 1, self.lanes_per_rank * self.replicas * self.stream_copy_words))
        candidates = MailboxSpec("candidates", 2, self.replicas * self.candidate_copy_words)
        return [*sums, candidates, *self._processed_specs(), *self._pass_specs([*sums, candidates])]

    def name_of(self, name: str) -> str:
        """What the box is called that a build uses as one of a single token is used that has this name."""
        if self.tokens == 1 or name not in _BY_TOKEN:
            return name
        return f"{_OF_COMPANY}{self.tokens}_{name}" if self.company else f"{_OF_PASSES}{name}"

    def label_of(self, index: int) -> str:
        """The name of a box, for people: of one for several tokens that of the one for a single token."""
        name = self.specs()[index].name
        return next((one for one in _BY_TOKEN if name.endswith(f"_{one}")), name)

    def _pass_specs(self, alone: Sequence[MailboxSpec]) -> list[MailboxSpec]:
        """Of a build with several tokens, given those of a single one."""
        if self.tokens == 1:
            return []
        builds = [replace(self, tokens=_DRAFTED, company=False), *(replace(self, tokens=n) for n in COMPANY_SIZES)]
        boxes = [box for box in alone if box.name in _BY_TOKEN]
        return [
            MailboxSpec(build.name_of(box.name), box.num_slots, build.tokens * box.length)
            for build in (builds if self.company else [self])
            for box in boxes
        ]

    def _processed_specs(self) -> list[MailboxSpec]:
        return [MailboxSpec("choices", 2, self.choice_words), MailboxSpec("reports", 1, self.report_words)]

    def header(self, placed: Sequence[Mailbox]) -> str:
        """`peers_shape.cuh`, to be included behind peers.cuh; `placed`: the heap's mailboxes, these among them."""
        by_name = {mailbox.spec.name: mailbox for mailbox in placed}
        # One rank has no heap: each of these lies by itself among the kernel's words.
        alone = {spec.name: Mailbox(spec, 0, 0, spec.length, 1) for spec in self._processed_specs()}
        choices, reports = (by_name.get(name, alone[name]) for name in ("choices", "reports"))
        mask_type = f"LayerMask<{self.spec.num_layers}>"
        masks = [f"{mask_type}{layer_mask(self.summed_layers(sublayer), self.spec.num_layers)}" for sublayer in Sublayer]
        lines = [
            "// Generated by kog_dist.workers.cuda.kernel_boxes; do not edit.",
            "#pragma once",
            '#include "layer_mask.cuh"',
            "namespace kog {",
            f"constexpr int kRanks = {self.world_size};",
            f"constexpr u32 kStreamCopyWords = {self.stream_copy_words}, kCandidateCopyWords = {self.candidate_copy_words};",
            "// By kind of sublayer: layers that are summed. A layer's slot is its place among them.",
            by_kind(mask_type, "summed_mask", masks),
            by_kind("u32", "sums_per_token", [f"{len(self.summed_layers(sublayer))}u" for sublayer in Sublayer]),
            by_kind("Mailbox", "sum_box", [_box(by_name.get(self.name_of(sublayer.name.lower()))) for sublayer in Sublayer]),
            f"__device__ __forceinline__ Mailbox stream_box() {{ return {_box(by_name.get('streams'))}; }}",
            f"__device__ __forceinline__ Mailbox candidate_box() {{ return {_box(by_name.get(self.name_of('candidates')))}; }}",
            f"__device__ __forceinline__ Mailbox choice_box() {{ return {_box(choices)}; }}",
            f"__device__ __forceinline__ Mailbox report_box() {{ return {_box(reports)}; }}",
            "__device__ __forceinline__ u32 sum_slot(u32 kind, u32 layer) {",
            "    return summed_mask(kind).num_before(layer);",
            "}",
            "// Epoch of a layer's sums while token number `token` (from 1) is decoded.",
            "__device__ __forceinline__ u32 sum_tag(u32 kind, u32 token, u32 slot) {",
            "    return token * sums_per_token(kind) + slot;",
            "}",
            "}  // namespace kog",
        ]
        return "\n".join(lines) + "\n"


def layer_mask(layers: Iterable[int], num_layers: int) -> str:
    """The initialiser of a `LayerMask` (phases/layer_mask.cuh) of a model with so many layers."""
    words = [0] * (1 if num_layers <= 64 else 2)
    for layer in layers:
        words[layer // 64] |= 1 << layer % 64
    return "{" + ", ".join(f"{word:#x}ull" for word in words) + "}"


def by_kind(kind_of_value: str, name: str, values: Sequence[str]) -> str:
    """A device function that gives the attention's or the MLP's value."""
    attention, mlp = values
    return f"__device__ __forceinline__ {kind_of_value} {name}(u32 kind) {{ return kind == 0 ? {attention} : {mlp}; }}"


def _box(mailbox: Mailbox | None) -> str:
    if mailbox is None:
        return "Mailbox{0, 0, 1, 0}"
    return f"Mailbox{{{mailbox.first_word}, {mailbox.row_words}, {mailbox.spec.num_slots}, {mailbox.index}}}"
