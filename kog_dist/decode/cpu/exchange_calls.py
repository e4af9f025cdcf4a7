"""The calls of a rank that exchange with its peers: sums over lanes, the head's input, logits, and the choice of a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.cpu import lane_math
from kog_dist.decode.cpu.cursor import Choose, Chosen, Cursor, PassPart
from kog_dist.decode.cpu.groups import Finder, Group
from kog_dist.decode.plan.steps import Kind, Message, Phase, Site
from kog_dist.decode.sampling import NO_CANDIDATE, Candidate, candidate, gumbel, pick
from kog_dist.errors import PlanError
from kog_dist.late_numpy import Array
from kog_dist.model.weights import RankWeights
from kog_dist.sampling_params import SamplingParams

Run = Callable[[], None]
Row = NDArray[np.float32]
Offer: TypeAlias = tuple[list[Candidate], bool]  # of each slice, and whether rank 0 wants to stop
WORD_BITS: Final = 22  # of what rank 0 says with a pass: float32 holds whole numbers of 24 bits


class RankExchange(Protocol):
    """What the interpreter needs of a communicator; `collectives.api.Communicator` has it."""

    rank: int
    world_size: int

    def publish(self, mailbox: str, slot: int, epoch: int, values: Row) -> None:
        """Push this rank's row to every peer."""

    def collect(self, mailbox: str, slot: int, epoch: int, own: Row) -> Row:
        """Wait for every rank's row: (world_size, length)."""

    def delayed_reduce(self, mailbox: str, slot: int, epoch: int, own: Row) -> Row:
        """Wait for every rank's row; their tree sum (length,)."""


class ExchangeCalls:
    """Makes the calls of the phases that publish or wait. On one rank nothing is exchanged and `comm` may be None."""

    def __init__(self, find: Finder, weights: RankWeights, cursor: Cursor, comm: RankExchange | None) -> None:
        self.find, self.memory, self.weights = find, find.memory, weights
        self.plan, self.spec, self.cursor, self.comm = cursor.plan, cursor.plan.spec, cursor, comm
        self.tree = self.memory.empty(max(1, self.spec.num_lanes // 2), find.num_tokens, self.spec.hidden_size)
        self.makers: dict[Phase, Callable[[Group], Run]] = {
            Phase.SUM: self._sum,
            Phase.TOTAL: self._total,
            Phase.HEAD_INPUT: self._head_input,
            Phase.GATHER: self._gather,
            Phase.SAMPLE: self._sample,
        }

    def _sum(self, group: Group) -> Run:
        step = group.steps[0]
        terms = self.find.own_rows(step, Kind.STREAM if self.spec.pre_norm_lane_agg and step.site == Site.FINAL else Kind.PARTIAL)
        own_sum, scratch = self.memory.rows(step.writes[0], self.find.num_tokens), self.tree
        publish, flat = self.publisher(step.publishes), own_sum.reshape(-1)

        def run() -> None:
            lane_math.tree_sum(terms, scratch, own_sum)
            publish(flat)

        return run

    def _total(self, group: Group) -> Run:
        (own_sum,), (total,) = self.find.of(group, (Kind.OWN_SUM,), (Kind.TOTAL,))
        message, comm = group.steps[0].waits, self.comm
        if message is None or comm is None:
            return lambda: np.copyto(total, own_sum)
        address, flat_sum, flat_total = self._address(message), own_sum.reshape(-1), total.reshape(-1)

        def run() -> None:
            slot, epoch = address()
            np.copyto(flat_total, comm.delayed_reduce(message.mailbox, slot, epoch, flat_sum))

        return run

    def _head_input(self, group: Group) -> Run:
        step = group.steps[0]
        if step.reads and step.reads[0].kind is Kind.TOTAL:
            (total,), (target,) = self.find.of(group, (Kind.TOTAL,), (Kind.HEAD_INPUT,))
            if self.spec.pre_norm_lane_agg:
                weight, eps, inverse = self.weights.norms[0], self.spec.norm_eps, self.memory.empty(self.find.num_tokens, 1)
                return lambda: lane_math.rms_norm(total, weight, eps, inverse, target)
            share = self.memory.dtype.type(1.0 / self.spec.num_lanes)  # exact: a power of two
            return lambda: _scale_into(total, share, target)
        own, num_tokens, num_lanes = self.find.own_rows(step, Kind.PARTIAL).reshape(-1), self.find.num_tokens, self.spec.num_lanes
        target = self.memory.rows(step.writes[0], num_tokens).reshape(num_tokens, num_lanes, -1)
        publish, collect = self.publisher(step.publishes), self.collector(step.waits)

        def run() -> None:
            publish(own)
            np.copyto(target, collect(own).reshape(num_lanes, num_tokens, -1).swapaxes(0, 1))

        return run

    def _gather(self, group: Group) -> Run:
        step, spec, cursor = group.steps[0], self.spec, self.cursor
        own, num_tokens = self.find.own_rows(step, Kind.LOGITS), self.find.num_tokens
        publish, collect, is_root = self.publisher(step.publishes), self.collector(step.waits), bool(step.writes)
        slices = [spec.vocab_slice(lane) for lane in range(spec.num_lanes)]

        def run() -> None:
            publish(own.reshape(-1))
            if is_root:
                rows = collect(own.reshape(-1)).reshape(spec.num_lanes, num_tokens, -1)
                parts = [row[:, : last - first] for row, (first, last) in zip(rows, slices, strict=True)]
                cursor.all_logits = np.concatenate(parts, axis=1)

        return run

    def _sample(self, group: Group) -> Run:
        step, cursor, num_chosen = group.steps[0], self.cursor, max(1, self.find.num_chosen)
        rows = self.find.own_rows(step, Kind.LOGITS, num_chosen)
        publish, collect = self.publisher(step.publishes), self.collector(step.waits)
        bounds = [self.spec.vocab_slice(lane) for lane in self.memory.lanes]
        slices = [row[:, : last - first] for row, (first, last) in zip(rows, bounds, strict=True)]
        nothing = [NO_CANDIDATE] * len(slices)
        # Of each token: candidates, and whether to stop; with the first one's what rank 0 says with the pass.
        own = np.zeros((num_chosen, 2 * len(slices) + 1), np.float32)
        single = step.waits is None

        def run() -> None:
            found: list[Offer] = []
            for part in cursor.parts:
                offers = [(nothing, part.stop)] if part.sampling is None or part.stop else own_choices(part, part.sampling)
                found += [*offers, *[(nothing, False)] * (len(part.token_ids) - len(offers))]
            cursor.heard = cursor.word
            if not single:
                found = exchanged(found[: 1 if cursor.reads else num_chosen])
            for part in cursor.parts:
                for idx, (candidates, stopped) in enumerate(found[part.first : part.first + len(part.token_ids)]):
                    best = pick(candidates)
                    part.chosen.append(Chosen(best.token_id, not math.isnan(best.value), stopped))
                    if cursor.reads or ends(part, idx, best, stopped):
                        break

        def ends(part: PassPart, idx: int, best: Candidate, stopped: bool) -> bool:
            return stopped or math.isnan(best.value) or not part.goes_on(idx, best.token_id)

        def own_choices(part: PassPart, sampling: SamplingParams) -> list[Offer]:
            """Candidates behind each token, and whether to stop there; as far as this rank can know that they matter."""
            found: list[Offer] = []
            for idx in range(len(part.token_ids)):
                candidates = own_candidates(part, sampling, idx)
                found.append((candidates or nothing, candidates is None))
                if (single or part.choose is not None) and ends(part, idx, pick(found[idx][0]), found[idx][1]):
                    break
            return found

        def exchanged(found: list[Offer]) -> list[Offer]:
            """Candidates of all slices behind these tokens, and what rank 0 wants."""
            num = len(found)
            for row, (candidates, stopped) in zip(own, found):  # noqa: B905
                row[0:-1:2], row[1:-1:2] = zip(*candidates, strict=True)
                row[-1] = stopped
            own[0, -1] += 2 * cursor.word
            mine = own[:num].reshape(-1)
            publish(mine)
            gathered = collect(mine).reshape(-1, num, own.shape[1])
            of_slices = gathered[:, :, :-1].swapaxes(0, 1).reshape(num, -1, 2).tolist()
            told = [[Candidate(value, int(token_id)) for value, token_id in row] for row in of_slices]
            said = [int(value) for value in gathered[0, :, -1].tolist()]
            cursor.heard = said[0] >> 1
            return [(row, bool(stop & 1)) for row, stop in zip(told, said, strict=True)]

        def own_candidates(part: PassPart, sampling: SamplingParams, idx: int) -> list[Candidate] | None:
            """None: rank 0 finds nothing to choose."""
            position, row = part.position + idx, part.first + idx
            if part.choose is not None:
                best = self._chosen(part.choose, row, position)
                return None if best is None else [best, *nothing[1:]]
            noise = None
            if sampling.temperature > 0:  # of all own slices at once: they are neighbours
                noise = gumbel(sampling.seed, position, bounds[0][0], bounds[-1][1] - bounds[0][0])
            found = []
            for logits, (first, last) in zip(slices, bounds, strict=True):
                own_noise = None if noise is None else noise[first - bounds[0][0] : last - bounds[0][0]]
                found.append(candidate(logits[row], first, position, sampling, own_noise))
            return found

        return run

    def _chosen(self, choose: Choose, row: int, position: int) -> Candidate | None:
        """Rank 0's choice from all logits behind token `row` of the pass, as a candidate that beats those of every slice."""
        cursor = self.cursor
        if cursor.all_logits is None:
            raise PlanError(f"pass {cursor.token}: SAMPLE needs all logits, and no GATHER has run before it")
        best = choose(cursor.all_logits[row], position)
        return best if best is None or math.isnan(best.value) else Candidate(math.inf, best.token_id)

    # ---- messages ----
    def _address(self, message: Message) -> Callable[[], tuple[int, int]]:
        """Slot and epoch of a message of the current token."""
        box, cursor = self.plan.mailbox_by_name[message.mailbox], self.cursor
        per_token, num_slots, sequence = box.per_token, box.num_slots, message.sequence

        def address() -> tuple[int, int]:
            epoch = cursor.token * per_token + sequence
            return epoch % num_slots, epoch

        return address

    def publisher(self, message: Message | None) -> Callable[[Array], None]:
        """A call that publishes this rank's row as a message of the current token."""
        comm = self.comm
        if message is None or comm is None:
            return lambda values: None
        address = self._address(message)

        def publish(values: Array) -> None:
            slot, epoch = address()
            comm.publish(message.mailbox, slot, epoch, values)

        return publish

    def collector(self, message: Message | None) -> Callable[[Array], Array]:
        """A call with this rank's row, which waits for those of all ranks; on one rank it gives the row itself."""
        comm = self.comm
        if message is None or comm is None:
            return lambda own: own
        address = self._address(message)

        def collect(own: Array) -> Array:
            slot, epoch = address()
            return comm.collect(message.mailbox, slot, epoch, own)

        return collect


def _scale_into(total: Array, share: Any, target: Array) -> None:
    np.multiply(total, share, out=target)
