"""What an engine needs of the monokernel, and the launches of one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kog_dist.cuda.device_array import DeviceEvent, DeviceStream, DeviceValues
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.runtime.ring import Drafted, Finish
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.draft_builds import NOWHERE, PassCosts
from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.cuda.kernel_shape import CHOICE_POSITIONS
from kog_dist.workers.cuda.processors import ProcessedRequest

PROMPT_STEPS = 64  # of a launch of nothing but prompt tokens: progress is told when it ends
ANSWER_STEPS = 256  # of any other; between two of them a token takes longer, so not too few, and the driver is not kept for long
CHUNKS_QUEUED = 2  # the next one starts without the host
# Where requests take turns: steps of a launch that nothing ends early, if its request is alone, and at most in company, where one
# is queued at a time. Who comes waits for what is queued, and the edges of a launch take some 3 % of a step.
ALONE_STEPS, COMPANY_STEPS = 8, 4
RANKS_STEPS = 32  # of a request that is alone, whose ranks meet behind each turn


class Token(Protocol):
    """One entry that the kernel wrote."""

    @property
    def token_id(self) -> int:
        """The token, or NO_TOKEN."""

    @property
    def finish(self) -> Finish:
        """Not NONE: the last entry."""

    @property
    def drafted(self) -> Drafted:
        """Of the pass whose last token this is."""


class DecodeKernel(Protocol):
    """What this engine needs of `monokernel.Monokernel`."""

    @property
    def stream(self) -> DeviceStream:
        """Its launches' stream."""

    @property
    def logits(self) -> DeviceValues:
        """float32 of the last token that had logits, this rank's rows."""

    def rouse(self) -> None:
        """Let the GPU do next to nothing, so that it wakes."""

    def use(self, slot: int) -> None:
        """Let what follows be of the request of this decode slot."""

    def begin(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        stop_ids: tuple[int, ...] = (),
        *,
        first_position: int = 0,
        processed: ProcessedRequest | None = None,
        streams: LastStreams | None = None,
        prediction: Sequence[int] | None = None,
        cache: int = 0,
    ) -> None:
        """Set up a request whose first tokens are in this KV cache already. `prediction`: for drafts; None: there are none.

        `streams`: of its last token, if prefill runs that one's layers, too; if they turn out to be invalid, launches do
        nothing.
        """

    def launch(self, num_steps: int, *, stop_position: int = NOWHERE) -> None:
        """Queue steps, with drafts passes: of several tokens, and fewer than so many where their number changes, or where so many
        positions are held. They do nothing once the request has ended.
        """

    def most_together(self) -> int:
        """How many requests a pass may have."""

    def try_together(self) -> None:
        """Run each build for several requests. No request is under way."""

    def launch_together(self, slots: Sequence[int], num_steps: int) -> None:
        """Queue passes that have a token of each of these decode slots' requests, without drafts. Others that have the same slots
        may be under way.
        """

    def token(self, index: int) -> Token | None:
        """A token of the answer, None if it is not there yet."""

    def logprobs(self, index: int) -> TokenLogprobs | None:
        """Those of a token of a request that wants them, None if they are not there yet; on rank 0."""

    def choices(self, first: int, end: int) -> NDArray[np.uint64]:
        """Experts chosen at positions [first, end), of a kernel that keeps them: see `Monokernel.choices`."""

    def copy_beginning(self, source: int, cache: int, num_positions: int) -> None:
        """Queue that a KV cache gets the first positions of another one."""

    def copy_state(self, source: int, cache: int) -> None:
        """Queue that a KV cache gets the state of another one, of a model whose every token changes one."""

    def cancel(self) -> None:
        """End the request after the current token."""

    def leave_early(self) -> None:
        """Let launches that are queued end behind a pass each, if they have drafts, or are of several requests."""

    def abort(self) -> None:
        """Leave all waits."""

    def is_idle(self) -> bool:
        """Whether all launches have ended; raises when one has failed."""

    def finish(self) -> None:
        """Wait for all launches; DeviceError if a wait ran out of time."""

    def state(self) -> np.void:
        """What the last launch left; its `position` counts those in the KV cache."""

    def measure_drafts(self) -> PassCosts:
        """Find out what passes of several tokens cost, in a kernel that has them. No request is under way. Collective."""

    def set_draft_costs(self, costs: PassCosts) -> None:
        """Let requests go by these costs: on all ranks the same."""

    def recover(self) -> None:
        """Forget the request's KV cache, and on one rank with one decode slot all words, in which values that are not finite may
        stand.
        """

    def close(self) -> None:
        """Let go of memory that is not the kernel's; it has left."""


class Launches:
    """The launches of one request: a few queued at a time, so that the kernel never waits for the host.

    With `one_by_one` every answer token is a launch of its own, queued when the one before was taken: its logits can be read.
    So it is with `check`, which is called when a launch has ended, before the next one is queued. Then no launch has more
    positions than the kernel keeps choices of experts of.

    With `takes_turns` a launch has few steps, more with `has_peers`, and many if it `leaves_early`; in company one is queued, of
    at most `company_steps`; 0: the request is alone.

    A launch ends behind each of `stops`, ascending numbers of steps from `first_position` on, and the next one is queued when
    `at_stop` was called there, also of a request that has ended before.

    With `has_drafts` nobody knows how many tokens a launch gives, but one at least: they are queued until the answer has ended;
    one at a time while there are `stops`, since only its end says how far it came. With `check` as well each is of one pass of
    each build, of the prompt, too.
    """

    def __init__(
        self,
        kernel: DecodeKernel,
        num_prompt_steps: int,
        max_tokens: int,
        *,
        one_by_one: bool,
        check: Callable[[], None] | None = None,
        has_drafts: bool = False,
        takes_turns: bool = False,
        has_peers: bool = False,
        leaves_early: bool = False,
        company_steps: int = 0,
        stops: Sequence[int] = (),
        at_stop: Callable[[], None] = lambda: None,
        first_position: int = 0,
    ) -> None:
        assert all(stop > 0 for stop in stops), "a launch has steps"
        self._stops, self._at_stop, self._num_steps_queued = deque(stops), at_stop, 0
        self._kernel, self._check, self._leaves_early, self._company_steps = kernel, check, leaves_early, company_steps
        self._most_queued = CHUNKS_QUEUED if check is None else 1
        self._answer_steps = ANSWER_STEPS  # of a launch
        self._num_prompt_steps, self._num_steps_ended = num_prompt_steps, 0
        self._has_drafts, self._first_position = has_drafts, first_position
        self._queued: deque[tuple[DeviceEvent, int]] = deque()  # event and steps of each launch under way
        if one_by_one or check is not None:
            most = PROMPT_STEPS if check is None else 1 if has_drafts else CHOICE_POSITIONS
            prompt_steps = _chunks(num_prompt_steps, most)
            plan = [(steps, 0) for steps in prompt_steps] + [(1, index) for index in range(max_tokens)]
        elif takes_turns:
            self._answer_steps = ANSWER_STEPS if leaves_early else RANKS_STEPS if has_peers else ALONE_STEPS
            plan = [(steps, 0) for steps in _chunks(num_prompt_steps, ALONE_STEPS) + _chunks(max_tokens, self._answer_steps)]
        else:
            num_whole = num_prompt_steps // PROMPT_STEPS
            rest = num_prompt_steps % PROMPT_STEPS + max_tokens
            plan = [(PROMPT_STEPS, 0)] * num_whole + [(steps, 0) for steps in _chunks(rest, ANSWER_STEPS)]
        self._waiting = deque(plan)  # steps of a launch, and tokens that must have been taken before it
        # Launches behind them, at most.
        self._num_more = num_prompt_steps + max_tokens if has_drafts and check is None else 0
        self.refill(0)

    @property
    def all_ended(self) -> bool:
        """Whether nothing is queued and nothing is left to queue."""
        return not self._queued and not self._waiting and not self._num_more

    @property
    def num_prompt_steps_ended(self) -> int:
        """Steps of the prompt whose launches have ended."""
        return min(self._num_steps_ended, self._num_prompt_steps)

    @property
    def none_under_way(self) -> bool:
        """Whether all that was queued has ended, as far as `refill` has seen."""
        return not self._queued

    @property
    def num_steps_to_stop(self) -> int | None:
        """Steps from what has ended to the next stop; None: there is none."""
        return self._stops[0] - self._num_steps_ended if self._stops else None

    def went_on(self, position: int) -> None:
        """Passes that the request has shared have brought it to `position`, no further than its next stop. None of its own
        launches is under way.
        """
        assert not self._queued
        self._num_steps_ended = self._num_steps_queued = position - self._first_position
        self._stop_if_due()

    def _stop_if_due(self) -> None:
        if self._stops and self._num_steps_ended == self._stops[0]:
            self._stops.popleft()
            self._at_stop()

    def turn(self, num_taken: int, company_steps: int) -> None:
        """A turn begins: queue what it has."""
        self._company_steps = company_steps
        self.refill(num_taken)

    def leave_early(self) -> None:
        """Let what is queued end soon, if it can: others wait. Nobody counts what is left out, so no step may be the prompt's."""
        if self._leaves_early and not self._company_steps:
            self._kernel.leave_early()

    def refill(self, num_taken: int, *, holds: bool = False) -> bool:
        """Forget launches that have ended and queue the next ones, or none if it `holds`; whether any had ended."""
        by_position = self._has_drafts and bool(self._stops)
        ended, most_queued = False, 1 if self._company_steps or by_position else self._most_queued
        while self._queued and self._queued[0][0].done:
            self._num_steps_ended += self._queued.popleft()[1]
            ended = True
        if ended and by_position:
            self._num_steps_ended = int(self._kernel.state()["position"]) - self._first_position
        if ended and self._check is not None:
            self._check()
        self._stop_if_due()
        if holds:
            return ended
        if not self._waiting and self._num_more and len(self._queued) < most_queued:
            self._num_more -= 1
            self._waiting.append((self._answer_steps, 0))
        while self._waiting and len(self._queued) < most_queued and self._waiting[0][1] <= num_taken:
            steps, after = self._waiting.popleft()
            most = self._company_steps or steps
            if self._stops and not self._has_drafts and not (most := min(most, self._stops[0] - self._num_steps_queued)):
                self._waiting.appendleft((steps, after))
                break
            if steps > most:
                self._waiting.appendleft((steps - most, after))
                steps = most
            if self._stops and self._has_drafts:
                self._kernel.launch(steps, stop_position=self._first_position + self._stops[0])
            else:
                self._kernel.launch(steps)
            self._num_steps_queued += steps
            self._queued.append((self._kernel.stream.record(), steps))
        return ended


def _chunks(num_steps: int, most: int) -> list[int]:
    return [min(most, num_steps - start) for start in range(0, num_steps, most)]
