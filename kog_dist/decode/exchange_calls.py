"""The calls of a rank that exchange with its peers: sums over lanes, the head's input, logits, and the choice of a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode import lane_math
from kog_dist.decode.cursor import Choose, Cursor
from kog_dist.decode.groups import Array, Finder, Group
from kog_dist.decode.sampling import NO_CANDIDATE, Candidate, candidate, gumbel, pick
from kog_dist.decode.steps import Kind, Message, Phase, Site
from kog_dist.errors import PlanError
from kog_dist.model.weights import RankWeights
from kog_dist.sampling_params import SamplingParams

Run = Callable[[], None]
Row = NDArray[np.float32]


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
            Phase.SUM: self._sum, Phase.TOTAL: self._total, Phase.HEAD_INPUT: self._head_input, Phase.GATHER: self._gather,
            Phase.SAMPLE: self._sample,
        }  # fmt: skip

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
                weight, eps, inverse = self.weights.norms[0], self.spec.norm_eps, self.memory.empty(1, 1)
                return lambda: lane_math.rms_norm(total, weight, eps, inverse, target)
            share = self.memory.dtype.type(1.0 / self.spec.num_lanes)  # exact: a power of two
            return lambda: _scale_into(total, share, target)
        own = self.find.own_rows(step, Kind.PARTIAL).reshape(-1)
        target = self.memory.row(step.writes[0])
        publish, collect = self.publisher(step.publishes), self.collector(step.waits)

        def run() -> None:
            publish(own)
            np.copyto(target, collect(own).reshape(-1))

        return run

    def _gather(self, group: Group) -> Run:
        step, spec, cursor = group.steps[0], self.spec, self.cursor
        own = self.find.own_rows(step, Kind.LOGITS)
        publish, collect, is_root = self.publisher(step.publishes), self.collector(step.waits), bool(step.writes)
        slices = [spec.vocab_slice(lane) for lane in range(spec.num_lanes)]

        def run() -> None:
            publish(own.reshape(-1))
            if is_root:
                rows = collect(own.reshape(-1)).reshape(spec.num_lanes, -1)
                cursor.all_logits = np.concatenate([row[: last - first] for row, (first, last) in zip(rows, slices, strict=True)])

        return run

    def _sample(self, group: Group) -> Run:
        step, cursor = group.steps[0], self.cursor
        rows = self.find.own_rows(step, Kind.LOGITS, 1)  # a pass of several tokens has none
        publish, collect = self.publisher(step.publishes), self.collector(step.waits)
        bounds = [self.spec.vocab_slice(lane) for lane in self.memory.lanes]
        slices = [row[0, : last - first] for row, (first, last) in zip(rows, bounds, strict=True)]
        own = np.zeros(2 * len(slices) + 1, np.float32)
        single = step.waits is None

        def run() -> None:
            sampling = cursor.sampling
            found = [NO_CANDIDATE] * len(slices) if sampling is None else own_candidates(sampling, cursor.position)
            if not single:
                own[0:-1:2], own[1:-1:2] = zip(*found, strict=True)
                own[-1] = cursor.stopped
                publish(own)
                gathered = collect(own)
                cursor.stopped = bool(gathered[0, -1])
                found = [Candidate(float(value), int(token_id)) for value, token_id in gathered[:, :-1].reshape(-1, 2)]
            if sampling is not None:
                best = pick(found)
                cursor.finite, cursor.next_token = not math.isnan(best.value), best.token_id

        def own_candidates(sampling: SamplingParams, position: int) -> list[Candidate]:
            if cursor.choose is not None:
                return [self._chosen(cursor.choose), *[NO_CANDIDATE] * (len(slices) - 1)]
            noise = None
            if sampling.temperature > 0:  # of all own slices at once: they are neighbours
                noise = gumbel(sampling.seed, position, bounds[0][0], bounds[-1][1] - bounds[0][0])
            found = []
            for logits, (first, last) in zip(slices, bounds, strict=True):
                own_noise = None if noise is None else noise[first - bounds[0][0] : last - bounds[0][0]]
                found.append(candidate(logits, first, position, sampling, own_noise))
            return found

        return run

    def _chosen(self, choose: Choose) -> Candidate:
        """Rank 0's choice from all logits, as a candidate that beats those of every slice."""
        cursor = self.cursor
        if cursor.all_logits is None:
            raise PlanError(f"token {cursor.token}: SAMPLE needs all logits, and no GATHER has run before it")
        best = choose(cursor.all_logits)
        if best is None:
            cursor.stopped = True
            return NO_CANDIDATE
        return best if math.isnan(best.value) else Candidate(math.inf, best.token_id)

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
