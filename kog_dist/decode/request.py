"""What ranks know of a request."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kog_dist.errors import RequestError
from kog_dist.records import dataclass
from kog_dist.sampling_params import GREEDY, SamplingParams


class KvCopyKind(enum.IntEnum):
    """What a `KvCopy` copies. The numbers are those of request blocks."""

    LOAD = 0  # from a slot of the block pool to a block of the KV cache
    SAVE = 1  # from a block of the KV cache to a slot
    MOVE = 2  # from a slot to another one
    LOAD_STATE = 3  # from a slot for states to that of the KV cache: its state behind the first `place` positions
    SAVE_STATE = 4  # the other way round, once the request has come so far
    MOVE_STATE = 5  # from a slot for states to another one


class KvCopy(NamedTuple):
    """A copy of the keys and values of `KvLayout.block_tokens` neighbouring positions, in all layers.

    `place`: number of the block in the request's KV cache, which begins at position `place * block_tokens`; of moves the slot
    that gets them. See workers/coordinator/kept_blocks.py. Of a model with a state that every token changes: a copy of that, in
    slots of its own (workers/coordinator/kept_states.py).
    """

    kind: KvCopyKind
    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class KvUse:
    """Where a request keeps its keys and values, and what it need not prefill.

    It runs in KV cache `cache`. Cache `source`, often the same one, holds the first `num_cached` tokens of the prompt at the
    positions from 0 on, once `copies` are made in their order: an engine copies them if the two differ, and goes on behind them.
    At least one token of the prompt is always decoded, for its logits. The coordinator decides, so that all ranks do the same
    (see workers/coordinator/kept_caches.py).
    """

    cache: int = 0
    source: int = 0
    num_cached: int = 0
    copies: tuple[KvCopy, ...] = ()


@dataclass(slots=True)  # not frozen: to make it would take twice as long, which is time to the first token
class DecodeRequest:
    """What ranks know of a request; nobody changes it. At most 16 `stop_ids` (the model's end tokens).

    `only_copies`: there is no answer: the ranks make the copies of `kv` and write nothing to the ring.

    `mask_epoch`: 0, or a grammar constrains the answer, and its token i is chosen with the mask of epoch `mask_epoch` + i (see
    runtime/masks.py).

    `decode_slot`: which of the rings, masks and words of the control page are this request's while it runs.

    `drafts`: ranks may draft tokens and verify several in a pass. `prediction`: what the client expects the answer to be.

    `prompt` is kept as `array("I")`, which is copied and searched in a hundredth of a tuple's time: at 4,000 tokens that is part
    of the time to the first one. RequestError for an id that does not fit.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_digests: bool = False
    kv: KvUse = KvUse()
    mask_epoch: int = 0
    only_copies: bool = False
    drafts: bool = False
    prediction: Sequence[int] = ()
    decode_slot: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, array):
            try:
                self.prompt = array("I", self.prompt)
            except OverflowError:
                raise RequestError("invalid_request", "a token id of the prompt does not fit into 32 bits") from None
        if not isinstance(self.prediction, array):
            self.prediction = array("I", self.prediction)

    def at(self, kv: KvUse, decode_slot: int = 0) -> DecodeRequest:
        """The same request in this KV cache and decode slot."""
        return DecodeRequest(
            self.prompt, self.max_tokens, self.sampling, self.stop_ids, self.ignore_eos, self.logit_digests, kv, self.mask_epoch,
            drafts=self.drafts, prediction=self.prediction, decode_slot=decode_slot,
        )  # fmt: skip

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end this answer."""
        return () if self.ignore_eos else self.stop_ids

    @property
    def needs_all_logits(self) -> bool:
        """Whether rank 0 needs all logits: for anything but greedy and temperature sampling without log-probabilities."""
        return self.mask_epoch != 0 or self.sampling.needs_all_logits

    @property
    def has_processors(self) -> bool:
        """Whether rank 0 chooses from them."""
        return self.mask_epoch != 0 or self.sampling.has_processors
