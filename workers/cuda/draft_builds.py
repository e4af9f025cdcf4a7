"""The monokernel's builds for requests with drafts: passes of one token and of several take turns. See docs/passes.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kog_dist.collectives.mailbox import place
from kog_dist.cuda.device_array import DeviceStream
from kog_dist.decode.pass_drafts import PATIENCE, PassDrafts, in_units
from kog_dist.errors import ConfigError
from kog_dist.late_numpy import np
from kog_dist.records import dataclass
from kog_dist.workers.cuda.build import PLAIN_SOURCE, PROCESSORS_SOURCE, build
from kog_dist.workers.cuda.kernel_abi import DRAFT_PARAMS
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.shared_memory import SHARED_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kog_dist.cuda.driver import Kernel

PASS_TOKENS, FEWEST_TOKENS = 4, 2  # of a pass with drafts; beside delta nets where there is no room for so many
GAP = NOWHERE = 0xFFFFFFFF
MEASURED_POSITION, _MEASURED_PASSES = 512, 8
_MASK_WAIT_MS = 0.2  # from a token that the kernel tells to its successor's mask: two processes of the host hear of it in turn
# Weights, without experts and with them, of which prose with drafts was measured next to prose without: docs/passes.md.
_MEASURED = {False: (None, "INT4", "E4M3"), True: ("E2M1",)}
_REFUSAL = "speculate lookup cannot be had on GPUs here: "
_ROOM = 8  # tokens behind the context that a pass may have, and the gap


def drafting_shape(shape: KernelShape) -> KernelShape:
    """What the build with several tokens is compiled for. Raises ConfigError naming what it cannot run."""
    try:
        return replace(shape, tokens=PASS_TOKENS)
    except ConfigError as error:
        if shape.delta is not None:
            with suppress(ConfigError):
                return replace(shape, tokens=FEWEST_TOKENS)
        cause = str(error).removesuffix("; use passes of one token")
        raise ConfigError(f"{_REFUSAL}{cause}; leave it out") from error


def obstacle_to_drafts(shape: KernelShape) -> str:
    """Why engines have none, or nothing."""
    try:
        drafting_shape(shape)
    except ConfigError as error:
        return str(error).removeprefix(_REFUSAL).removesuffix("; leave it out")
    return ""


def why_unasked_without(shape: KernelShape) -> str:
    """Why engines have none where nobody asks for them, or nothing."""
    if cause := obstacle_to_drafts(shape):
        return cause
    number, has_experts = shape.coding and shape.coding.number, shape.experts is not None
    if shape.head_coding is None and number in _MEASURED[has_experts] and shape.delta is None:
        return ""
    kind = "delta nets" if shape.delta is not None else "these experts" if has_experts else "these quantised weights"
    return f"with {kind} auto has none until prose is measured there; lookup has"


def drafts_processors(shape: KernelShape) -> bool:
    """Whether requests with processors have drafts, where others have them: on one rank, and without delta nets, beside which no
    GPU has run these builds.
    """
    return shape.num_ranks == 1 and shape.delta is None


def draft_bytes(shape: KernelShape) -> int:
    """GPU memory of both builds besides that of `Monokernel`, and what several ranks exchange."""
    large = drafting_shape(shape)
    first, end = shape.head.vocab_rows
    with_all, alone = (sum(box.num_words for box in place(one.words.boxes.specs(), one.num_ranks)) for one in (large, shape))
    num_words = large.words.num_words + with_all - alone
    return 8 * num_words + 4 * large.tokens * (end - first) + 4 * (2 * shape.spec.max_context + _ROOM)


def draft_headers(shape: KernelShape) -> list[dict[str, str]]:
    """What both builds are compiled with: `KernelShape` as generated headers."""
    return [headers(replace(shape, drafts=True)), headers(drafting_shape(shape))]


@dataclass(frozen=True)
class PassCosts:
    """In passes of one token: what a pass of several takes more, what it takes to begin with such passes and to end, and to
    wait for a mask within a pass, at most all of one.
    """

    extra: float = 0.12
    edge: float = 0.06
    mask_wait: float = 0.2

    def to_json(self) -> str:
        """For other ranks."""
        return json.dumps([self.extra, self.edge, self.mask_wait])

    @staticmethod
    def from_json(text: str) -> PassCosts:
        """What `to_json` has written, to the last bit."""
        return PassCosts(*json.loads(text))


class DraftBuilds:
    """Both kernels with their memory, of which each decode slot has its own. Raises CompileError or LaunchError.

    `processors`: with two kernels more, of requests that have processors, too.
    """

    def __init__(self, shape: KernelShape, kernel_name: str, num_slots: int = 1, *, processors: bool = False) -> None:
        import cupy

        from kog_dist.cuda.driver import Kernel
        from kog_dist.workers.cuda.pinned import pinned

        self._shape, self.large_shape = shape, drafting_shape(shape)
        sources = (PLAIN_SOURCE, PROCESSORS_SOURCE) if processors else (PLAIN_SOURCE,)
        made = [[build(one, source) for one in draft_headers(shape)] for source in sources]
        self._pairs = [[Kernel(cubin.path, kernel_name, SHARED_BYTES) for cubin in pair] for pair in made]
        first, end = shape.head.vocab_rows
        self.words = cupy.zeros(self.large_shape.words.num_words, cupy.uint64)
        self.logits = cupy.zeros((self.large_shape.tokens, end - first), cupy.float32)
        num_tokens = 2 * shape.spec.max_context + _ROOM
        self._tokens = [cupy.zeros(num_tokens, cupy.uint32) for _ in range(num_slots)]
        self._staged = [pinned(4 * num_tokens).view(np.uint32) for _ in range(num_slots)]
        self._num_predicted = [0] * num_slots
        self.costs = PassCosts()  # by which the kernels decide; the same on all ranks

    def pair(self, *, processors: bool = False) -> Sequence[Kernel]:
        """Of passes of one token and of several. Of requests with processors only where these have drafts."""
        assert int(processors) < len(self._pairs), "made without builds of requests with processors"
        return self._pairs[int(processors)]

    def is_of(self, kernel: Kernel) -> bool:
        """Whether it is one of these."""
        return any(kernel in pair for pair in self._pairs)

    def is_large(self, kernel: Kernel) -> bool:
        """Whether its passes have several tokens."""
        return any(kernel is large for _, large in self._pairs)

    def prompt_ptr(self, slot: int) -> int:
        """Where the prompt of a decode slot's request stands: between prediction and answer."""
        return int(self._tokens[slot].data.ptr) + 4 * (self._num_predicted[slot] + 1)

    def begin(
        self,
        slot: int,
        prompt: Sequence[int],
        prediction: Sequence[int],
        max_tokens: int,
        first_position: int,
        state: NDArray[np.void],
        stream: DeviceStream,
    ) -> None:
        """Set up the request of a slot, whose passes begin at `first_position`, in `state`; no launch may be under way."""
        from cupy.cuda import runtime

        prediction = prediction[: self._shape.spec.max_context]
        self._num_predicted[slot], num_tokens = len(prediction), len(prediction) + 1 + len(prompt)
        staged, tokens = self._staged[slot], self._tokens[slot]
        staged[: len(prediction)], staged[len(prediction)] = prediction, GAP
        staged[len(prediction) + 1 : num_tokens] = prompt
        runtime.memcpyAsync(tokens.data.ptr, staged.ctypes.data, 4 * num_tokens, runtime.memcpyHostToDevice, stream.ptr)
        drafts = PassDrafts(
            prompt,
            prediction,
            max_tokens,
            self.large_shape.tokens,
            num_left=len(prompt) - first_position,
            extra=in_units(self.costs.extra),
            edge=in_units(self.costs.edge),
        )
        state["pass_tokens"], state["draft_balance"], state["draft_idle"] = drafts.per_pass, drafts.balance, drafts.num_idle
        state["draft_looked"] = len(prompt) - 1
        state["draft_place"] = state["draft_start"] = drafts.start if drafts.start >= 0 else NOWHERE
        state["draft_tokens"] = drafts.num_found

    def resume(
        self, slot: int, first_position: int, token_ids: Sequence[int], position: int, state: np.void, stream: DeviceStream
    ) -> None:
        """Go on at `position`: what was decoded without drafts, from `first_position` on. No launch may be under way."""
        from cupy.cuda import runtime

        at = self._num_predicted[slot] + 1 + first_position
        self._staged[slot][at : at + len(token_ids)] = token_ids
        to, source = self._tokens[slot].data.ptr + 4 * at, self._staged[slot].ctypes.data + 4 * at
        runtime.memcpyAsync(to, source, 4 * len(token_ids), runtime.memcpyHostToDevice, stream.ptr)
        state["pass_tokens"], state["draft_tokens"], state["draft_idle"], state["draft_missed"] = 1, 0, PATIENCE, 0
        state["draft_place"] = state["draft_start"] = NOWHERE
        state["draft_looked"] = position

    def params(self, slot: int) -> bytes:
        """The `DRAFT_PARAMS` of a slot's request."""
        params = np.zeros((), DRAFT_PARAMS.dtype)
        params["tokens_ptr"], params["num_predicted"] = self._tokens[slot].data.ptr, self._num_predicted[slot]
        params["pass_tokens"] = self.large_shape.tokens
        params["extra"], params["edge"] = in_units(self.costs.extra), in_units(self.costs.edge)
        return params.tobytes()

    def measure(self, launch: Callable[[Kernel, int], None], stream: DeviceStream) -> PassCosts:
        """What passes cost. `launch` queues so many of a build, none of which leaves early, at MEASURED_POSITION."""
        import cupy

        def elapsed_ms(kernel: Kernel, *launches: int) -> float:
            events = [cupy.cuda.Event(), cupy.cuda.Event()]
            events[0].record(stream)
            for num_passes in launches:
                launch(kernel, num_passes)
            events[1].record(stream)
            events[1].synchronize()
            return float(cupy.cuda.get_elapsed_time(*events))

        many, (small, large) = _MEASURED_PASSES, self.pair()
        elapsed_ms(small, many), elapsed_ms(large, many)  # the first ones take longer
        # The edge of a launch is in both, so that differences are of passes alone.
        small_ms = elapsed_ms(small, 2 * many) - elapsed_ms(small, many)
        large_ms = elapsed_ms(large, 2 * many) - elapsed_ms(large, many)
        edges_ms = elapsed_ms(small, *itertools.repeat(1, many)) - elapsed_ms(small, many)
        return costs_of(small_ms / many, large_ms / many, edges_ms / (many - 1))


def costs_of(small_ms: float, large_ms: float, edge_ms: float) -> PassCosts:
    """From what passes of one token and of several take, and the edge of a launch; none of them is a gain."""
    if small_ms <= 0:
        return PassCosts()
    return PassCosts(max(large_ms / small_ms - 1, 0.0), max(2 * edge_ms / small_ms, 0.0), min(_MASK_WAIT_MS / small_ms, 1.0))
