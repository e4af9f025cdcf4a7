"""One request on a GPU rank, from when it was taken over to its last entry in the token ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import field

from kog_dist.decode.request import DecodeRequest, KvCopy
from kog_dist.records import dataclass
from kog_dist.runtime.pace import Pace
from kog_dist.runtime.ring import Finish
from kog_dist.workers.engines.draft_gain import DraftGain
from kog_dist.workers.engines.launches import Launches


@dataclass(slots=True)
class CudaRequest:
    """`held`: positions that its KV cache holds when its launches begin; while its prompt is read, so far.

    `launches`: None while its prompt is read, or its grammar is waited for. `finish`: why it has ended; NONE until then.
    """

    seq: int
    request: DecodeRequest
    held: int
    saves: deque[KvCopy] = field(default_factory=deque)  # copies of its state that are still to be made, by their places
    reads: bool = False  # its prompt, by prefill
    reading: Generator[None, None, None] | None = None  # a chunk of it, of which some parts were read
    company_steps: int = 0  # of a launch, since others run; 0: it is alone
    others_decode: bool = False  # others run, some of which are not being read
    launches: Launches | None = None
    index: int = 0  # of the next token of the answer
    told: int = 0  # positions that the cache of one whose prompt goes token by token is said to hold
    pace: Pace | None = None  # of one whose next mask can only be made when the token is handed out
    waits_since_s: float | None = None  # for its first mask
    asked_to_cancel: bool = False
    answer: list[int] = field(default_factory=list)  # so far, where requests take turns
    gain: DraftGain | None = None  # of one that might have drafts and has had company
    is_followed: bool = False  # the gain knows of all tokens, since it has company
    is_ending: bool = False  # its last token is there
    finish: Finish = field(default=Finish.NONE)

    @property
    def has_streams(self) -> bool:
        """Whether the last token's streams are where prefill has left them, since its grammar is waited for."""
        return self.waits_since_s is not None and self.held == len(self.request.prompt)

    @property
    def shares(self) -> bool:
        """Whether its next tokens may come from passes that it shares: the kernel chooses them without looking at all logits."""
        return self.launches is not None and not self.request.needs_all_logits and not self.request.logit_digests

    @property
    def slot(self) -> int:
        """The decode slot."""
        return self.request.decode_slot

    @property
    def cache(self) -> int:
        """The KV cache."""
        return self.request.kv.cache
