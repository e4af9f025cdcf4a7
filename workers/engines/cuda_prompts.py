"""Which prompts prefill reads on a GPU rank, and how: in company part by part."""

from __future__ import annotations

from collections.abc import Generator

from kog_dist.runtime.notes import note
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.engines.cuda_caches import CudaCaches
from kog_dist.workers.engines.cuda_launcher import CudaLauncher
from kog_dist.workers.engines.cuda_rank import CudaRank
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.launches import Launches
from kog_dist.workers.engines.prompt_run import PromptRun
from kog_dist.workers.prefill.tape.tape_abi import is_multiplied_on_tape

MIN_PREFILL_TOKENS = 3  # fewer are faster one by one: a chunk takes as long as reading the weights
MIN_TAPE_TOKENS, MIN_EXPANDED_TOKENS = 4, 6  # the same of quantised ones (docs/formats.md#prefill)


def min_prefill_tokens(shape: KernelShape) -> int:
    """How many tokens of a prompt, but for its last, prefill is not used for less than."""
    if shape.coding is None:
        return MIN_PREFILL_TOKENS
    return MIN_TAPE_TOKENS if is_multiplied_on_tape(shape) else MIN_EXPANDED_TOKENS


class PromptReader:
    """Of one rank. `min_tokens`: see `min_prefill_tokens`."""

    def __init__(self, gpu: CudaRank, caches: CudaCaches, launcher: CudaLauncher) -> None:
        self._gpu, self._caches, self._launcher = gpu, caches, launcher
        self.min_tokens = MIN_PREFILL_TOKENS
        self._has_overflown = False  # in any request so far

    def takes(self, one: CudaRequest) -> bool:
        """Whether prefill reads the prompt of a request that is about to begin; if not, the kernel writes its cache."""
        prefill = self._gpu.prefill
        if prefill is None:
            return False
        # Of a model with a state whoever reads a token decides about bits: that does not hang on what is kept.
        num_kept = one.held if self._caches.states is None else 0
        if len(one.request.prompt) - 1 - num_kept >= self.min_tokens:
            return True
        prefill.forget(one.held, one.cache)
        return False

    def read(self, one: CudaRequest) -> Generator[None, None, None]:
        """Have prefill read the prompt, or in company a chunk of it, part by part. Once it holds all, the kernel begins with the
        LM head, in launches that are queued right behind prefill if they can be.

        It holds fewer when the request is to end, or when prefill cannot run it (also fewer than there were): the kernel goes on
        from there, and sees why.
        """
        gpu, prefill, request, start = self._gpu, self._gpu.prefill, one.request, one.held
        assert prefill is not None
        num_prompt = len(request.prompt)

        def begin() -> Launches:
            return self._launcher.begin(one, num_prompt)

        prompt = PromptRun(gpu.control, gpu.rank, gpu.peers, one.seq, request, gpu.heartbeat, begin, takes_turns=gpu.takes_turns)
        end = prefill.next_end(start, num_prompt) if gpu.takes_turns else None
        if one.saves:
            end = min(one.saves[0].place, num_prompt if end is None else end)
        self._caches.goes(one.cache)
        one.held = yield from prompt.steps(prefill, start, end, lambda: one.others_decode)
        if gpu.control.aborted():
            gpu.leave(f"left request {one.seq}")
        if self._caches.states is not None and start < one.held < num_prompt:
            self._caches.save_state(one, one.held)
        if one.held <= start and not prompt.is_stopped and not self._has_overflown:
            self._has_overflown = True  # said once
            note(f"a value of request {one.seq} left the range of prefill's binary16; such prompts go token by token")
        one.reads = end is not None and start < one.held == end < num_prompt
        one.launches = prompt.launches if one.held == num_prompt else None
