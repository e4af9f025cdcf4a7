"""How the tokens of an answer come from the kernel of a GPU rank to the token ring, and how an answer ends."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.reported import TokenLogprobs
from kog_dist.errors import RequestFailed
from kog_dist.runtime.pace import Pace
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.workers.engines.cuda_caches import CudaCaches
from kog_dist.workers.engines.cuda_rank import POLL_S, CudaRank
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.launches import Launches, Token

FIRST_TOKEN_SPIN_S = 0.004  # behind prefill it comes within about a millisecond, and whoever asked waits for it
REFILL_TOKENS = 16


class CudaAnswers:
    """Of one rank's requests. Rank 0 alone writes the token ring, and reports log-probabilities."""

    def __init__(self, gpu: CudaRank, caches: CudaCaches) -> None:
        self._gpu, self._caches = gpu, caches

    def decode(self, one: CudaRequest, holds: Callable[[], bool]) -> None:
        """Hand out tokens, many of which the kernel decodes in a launch and chooses itself, until the answer ends; once it
        `holds`, until all launches that are queued have ended.
        """
        assert one.launches is not None
        if one.pace is None and one.request.mask_epoch and self._gpu.rank == 0:
            one.pace = Pace()
        first = one.index
        while one.index < self._gpu.max_tokens(one.request):
            token = self._next_token(one, one.launches, holds)
            if token is None:
                if one.index == first:
                    self._gpu.kernel.finish()  # says whether a wait ran out of time
                return
            self.take(one, token)
            if one.finish is not Finish.NONE:
                return
        raise RequestFailed("rank_failed", f"the kernel gave {one.index} tokens of request {one.seq} and did not end it")

    def take(self, one: CudaRequest, token: Token, *, is_whole: bool = False) -> None:
        """Hand the next token out. `is_whole`: of one that ends with it the kernel need not be waited for."""
        gpu, seq, request, index = self._gpu, one.seq, one.request, one.index
        if gpu.choices is not None:
            gpu.await_launches(f"left request {seq}")
            gpu.compare_choices()
        if index == 0:
            gpu.control.stamp(gpu.rank, RankStage.CHOSEN, one.slot)
        logits = self._logits(seq) if request.logit_digests else None
        wants_logprobs = gpu.rank == 0 and request.sampling.logprobs is not None and token.token_id != NO_TOKEN
        logprobs = self._logprobs(seq, index) if wants_logprobs else None
        if gpu.control.aborted():
            gpu.leave(f"left request {seq}")
        num_held = len(request.prompt) + index
        if token.finish is Finish.NONE:
            gpu.control.set_progress(gpu.rank, seq, num_held, one.slot)
        elif is_whole:
            self._holds(one, num_held)
        else:
            self._settle(one, token.finish)
        if gpu.takes_turns and token.finish is Finish.NONE:
            one.answer.append(token.token_id)
            if one.gain is not None and one.is_followed:
                one.gain.took(token.token_id)
        self._put(one, token, logits, logprobs)
        one.index, one.finish = index + 1, token.finish

    def heed_cancel(self, one: CudaRequest) -> None:
        """End it if somebody asked for that; it travels with rank 0's candidate, so after the same token everywhere."""
        if self._gpu.rank == 0 and not one.asked_to_cancel and self._gpu.control.cancelled(one.seq, one.slot):
            self._gpu.kernel.cancel()
            one.asked_to_cancel = True

    def tell_progress(self, one: CudaRequest, held: int) -> None:
        """Say how many positions the cache of one holds whose prompt goes token by token."""
        one.told = held
        self._gpu.control.set_progress(self._gpu.rank, one.seq, held, one.slot)

    def _next_token(self, one: CudaRequest, launches: Launches, holds: Callable[[], bool]) -> Token | None:
        """Wait for a token. The kernel bounds every wait of its own, so launches end; if they end without it, they say why.

        None: it holds, and all launches have ended.
        """
        gpu, kernel, seq, index, pace = self._gpu, self._gpu.kernel, one.seq, one.index, one.pace
        num_held = min(one.held, len(one.request.prompt) - 1)  # before the launches, while they are prefilling
        spin_until_s = time.monotonic() + FIRST_TOKEN_SPIN_S if index == 0 else 0.0
        if index % REFILL_TOKENS == REFILL_TOKENS - 1:
            # Also if this host lags behind and finds each token there: the kernel is not to wait for it.
            launches.refill(index, holds=holds())
        while (token := kernel.token(index)) is None:
            if gpu.control.aborted():
                gpu.leave(f"left request {seq}")
            self.heed_cancel(one)
            is_held = holds()
            if index > 0 and gpu.num_new > 0:
                launches.leave_early()
            if launches.refill(index, holds=is_held):
                gpu.heartbeat.progress()
                if index == 0:
                    held = num_held + launches.num_prompt_steps_ended
                    self.tell_progress(one, max(one.told, held))  # launches know nothing of passes that it shared
            elif kernel.is_idle() and launches.all_ended and kernel.token(index) is None:
                kernel.finish()
                raise RequestFailed("rank_failed", f"the kernel ended without token {index} of request {seq}")
            elif is_held and launches.none_under_way and kernel.token(index) is None:
                return None
            if time.monotonic() < spin_until_s or (pace is not None and pace.until_near_s() <= 0):
                os.sched_yield()
            else:
                time.sleep(POLL_S)
        if pace is not None:
            pace.token()
        gpu.heartbeat.progress()
        return token

    def _logprobs(self, seq: int, index: int) -> TokenLogprobs:
        """Those of a token that is known; the kernel makes them while it decodes the next one."""
        kernel = self._gpu.kernel
        while (found := kernel.logprobs(index)) is None:
            if self._gpu.control.aborted():
                self._gpu.leave(f"left request {seq}")
            if kernel.is_idle() and kernel.logprobs(index) is None:
                kernel.finish()
                raise RequestFailed("rank_failed", f"the kernel ended without logprobs of token {index} of request {seq}")
            time.sleep(POLL_S)
        return found

    def _logits(self, seq: int) -> NDArray[np.float32] | None:
        """The float32 logits (vocab_size,) of the token that was just decoded; None on ranks above 0. Collective."""
        gpu = self._gpu
        gpu.await_launches(f"left request {seq}")
        own: NDArray[np.float32] = gpu.kernel.logits.get(stream=gpu.kernel.stream)
        return own if gpu.peers is None else gpu.peers.gather_logits(own)

    def _put(self, one: CudaRequest, token: Token, digested: NDArray[np.float32] | None, logprobs: TokenLogprobs | None) -> None:
        """Rank 0 hands a token out, with a digest of the logits `digested`."""
        if self._gpu.rank != 0:
            return
        digest = None if digested is None else _sha256(digested)
        ring, now_ns = self._gpu.control.rings[one.slot], time.monotonic_ns()
        ring.put(one.seq, one.index, token.token_id, now_ns, digest, token.finish, logprobs, token.drafted)

    def _settle(self, one: CudaRequest, finish: Finish) -> None:
        """Wait until the kernel has left the request."""
        gpu, kernel = self._gpu, self._gpu.kernel
        gpu.await_launches(f"left request {one.seq}")
        kernel.finish()
        if finish is Finish.NUMERICAL_FAULT:
            kernel.recover()
        self._holds(one, 0 if finish is Finish.NUMERICAL_FAULT else int(kernel.state()["position"]))

    def _holds(self, one: CudaRequest, held: int) -> None:
        """Say how many positions the KV cache of a request holds that has ended, behind what is queued; its state is there."""
        gpu = self._gpu
        self._caches.end(one, held)
        gpu.control.set_progress(gpu.rank, one.seq, held, one.slot)
        if not held:
            self._caches.clear(one.cache)


def _sha256(logits: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(logits.astype("<f4").tobytes()).digest()
