"""Log-probabilities of a prompt: its first token is decoded, and each next one with a mask that allows no other.

So ranks need nothing for it: CPU ranks and GPUs report what they report of any token, the model's own logits before masks. The
prompt goes token by token, at the speed of decoding. What it leaves in the KV cache the answer goes on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from kog_dist.decode.request import DecodeRequest
from kog_dist.late_numpy import np
from kog_dist.rpc.messages import PromptLogprobs
from kog_dist.runtime.masks import NUM_SLOTS, MaskSlots, MaskWords, num_words
from kog_dist.runtime.ring import Finish, TokenEntry
from kog_dist.sampling_params import SamplingParams


class PromptScoring:
    """Of one prompt of at least two tokens. Ranks decode `request`; write masks before that, and tell `take` what they gave."""

    def __init__(self, prompt: Sequence[int], num_top: int, masks: MaskSlots, mask_epoch: int) -> None:
        """`num_top`: alternatives of each token. `mask_epoch`: of the first of one mask for each token but the first."""
        self.request = DecodeRequest(prompt[:1], len(prompt) - 1, SamplingParams(logprobs=num_top), mask_epoch=mask_epoch)
        self.is_done = False
        self._wanted, self._masks = prompt[1:], masks
        self.num_taken = 0

    def write_masks(self) -> None:
        """Those of the next tokens, if they are not there: both at the beginning, then one with each token that was taken.

        Call it again when time has passed: a grammar process that was stopped during an earlier request may write over a mask,
        once.
        """
        for idx in range(self.num_taken, min(self.num_taken + NUM_SLOTS, len(self._wanted))):
            epoch = self.request.mask_epoch + idx
            if self._masks.get(epoch) is None:
                self._masks.put(epoch, self._only(self._wanted[idx]))

    def _only(self, token_id: int) -> MaskWords:
        mask = np.zeros(num_words(self._masks.vocab_size), np.uint32)
        mask[token_id // 32] = 1 << token_id % 32
        return mask

    def take(self, request_id: str, entries: Sequence[TokenEntry]) -> tuple[PromptLogprobs | None, Finish]:
        """The event for entries that follow those taken before, and whether they end the prompt: LENGTH if it is whole."""
        scored = [(entry.token_id, entry.logprobs) for entry in entries if entry.logprobs is not None]
        first, finish = 1 + self.num_taken, entries[-1].finish
        self.num_taken += len(scored)
        self.is_done = finish is not Finish.NONE
        if not scored:
            return None, finish
        event = PromptLogprobs(
            request_id,
            first,
            tuple(token_id for token_id, _ in scored),
            tuple(logprobs.chosen for _, logprobs in scored),
            top_ids=tuple(chain.from_iterable(logprobs.top_ids for _, logprobs in scored)),
            top_logprobs=tuple(chain.from_iterable(logprobs.top_logprobs for _, logprobs in scored)),
        )
        return event, finish
