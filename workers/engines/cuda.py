"""The engine of a GPU rank: the monokernel decodes in chunks of many tokens; the host hands out what it writes."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from kog_dist.control import ControlPage, DecodeRequest, KvLayout, RankState
from kog_dist.decode.plan import make_plan
from kog_dist.decode.ring import NO_TOKEN, Finish
from kog_dist.decode.sampling import Candidate, Sampling
from kog_dist.decode.validate import check
from kog_dist.errors import AbortedError, ConfigError, LaunchError, RequestFailed
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines.heartbeat import Heartbeat
from kog_dist.workers.engines.root_choice import RootChoice

CHUNK_STEPS = 64
CHUNKS_QUEUED = 2  # the next one starts without the host
HEARTBEAT_MARGIN_S = 2.0  # a wait that runs out of time says more than silence, so it comes first
POLL_S = 20e-6
USE_PREFILL = False  # until tests/gpu/test_prefill.py has passed on a GPU
MIN_PREFILL_TOKENS = 3  # fewer are faster one by one: a block takes as long as reading the weights


class Token(Protocol):
    """One entry that the kernel wrote."""

    @property
    def token_id(self) -> int:
        """The token, or NO_TOKEN."""

    @property
    def finish(self) -> Finish:
        """Not NONE: the last entry."""


class Kernel(Protocol):
    """What this engine needs of `monokernel.Monokernel`."""

    stream: Any
    logits: Any

    def begin(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        stop_ids: tuple[int, ...] = (),
        *,
        first_position: int = 0,
    ) -> None:
        """Set up a request whose first tokens are in the KV cache already."""

    def launch(self, num_steps: int) -> None:
        """Queue steps; they do nothing once the request has ended."""

    def token(self, index: int) -> Token | None:
        """A token of the answer, None if it is not there yet."""

    def cancel(self) -> None:
        """End the request after the current token."""

    def abort(self) -> None:
        """Leave all waits."""

    def finish(self) -> None:
        """Wait for all launches; DeviceError if a wait ran out of time."""

    def state(self) -> Any:
        """What the last launch left; its `position` counts those in the KV cache."""

    def recover(self) -> None:
        """Forget caches and words, in which values that are not finite may stand."""


class Prefiller(Protocol):
    """What this engine needs of `prefill.Prefill`."""

    def run(
        self,
        token_ids: Sequence[int],
        start: int,
        *,
        should_stop: Callable[[], bool],
        on_progress: Callable[[int], None],
    ) -> int:
        """Fill the kernel's KV cache behind the first `start` tokens; returns how many it holds then."""


class CudaEngine:
    """See `Engine`. Hosts all lanes of the model on one GPU."""

    def __init__(self, args: WorkerArgs, control: ControlPage) -> None:
        self._args, self._control, self._rank = args, control, args.info.rank
        self._kernel: Kernel | None = None
        self._prefill: Prefiller | None = None  # None: the kernel takes prompts token by token
        self._max_context = 0

    # ---- startup ----
    def startup(self) -> None:
        """See `Engine.startup`."""
        if self._args.info.world_size != 1:
            raise ConfigError(f"the CUDA engine runs on one GPU, not {self._args.info.world_size}; use --gpus 1")
        self._control.set_state(self._rank, RankState.LOADING)
        checkpoint = open_checkpoint(Path(self._args.model), verify=self._args.verify)
        spec = checkpoint.spec
        check(make_plan(spec, 1, staggered=True))  # the kernel's order
        with translated_errors(self._args.device):
            self._kernel = self._load(checkpoint)
            self._max_context = spec.max_context
            self._kernel.begin((0,), 1, Sampling())
            self._kernel.launch(1)  # a trial token: maps everything, and shows that the kernel runs
            self._kernel.finish()

    def _load(self, checkpoint: Any) -> Kernel:
        import cupy

        from kog_dist.workers.cuda.kernel_shape import KernelShape
        from kog_dist.workers.cuda.load import load_weights
        from kog_dist.workers.cuda.monokernel import Monokernel
        from kog_dist.workers.prefill.buffers import misfit
        from kog_dist.workers.prefill.gpu import matrices_for, prefill_for

        cupy.cuda.Device(device_index(self._args.device)).use()
        spec = checkpoint.spec
        shape = KernelShape(spec, spec.lanes_of_rank(0, 1), weight_dtype=checkpoint.dtype, kv_dtype=self._args.kv_dtype)
        ring_positions = 16 * shape.splits * shape.window_batches if spec.window_layers else 0
        self._control.set_kv_layout(self._rank, KvLayout(1, ring_positions))
        kernel: Kernel
        if not USE_PREFILL or misfit(spec):
            kernel = Monokernel(shape, load_weights(shape, checkpoint), rank=self._rank)
            return kernel
        matrices, observe = matrices_for(shape)
        kernel = made = Monokernel(shape, load_weights(shape, checkpoint, observe), rank=self._rank)
        self._prefill = prefill_for(made, matrices.layers())
        return kernel

    # ---- requests ----
    def run(self, seq: int, request: DecodeRequest) -> Finish:
        """See `Engine.run`."""
        assert self._kernel is not None
        self._control.set_progress(self._rank, seq, request.kv.num_cached)
        limit_s = self._args.step_timeout_s + HEARTBEAT_MARGIN_S
        with translated_errors(self._args.device), Heartbeat(self._control, self._rank, limit_s) as heartbeat:
            num_cached = self._prefilled(seq, request, heartbeat)
            if request.is_shaped:
                return self._run_shaped(seq, request, heartbeat, num_cached)
            return self._run_plain(seq, request, heartbeat, num_cached)

    def _prefilled(self, seq: int, request: DecodeRequest, heartbeat: Heartbeat) -> int:
        """Positions that the KV cache holds once the prompt without its last token has gone through prefill.

        Fewer when the request is to end, or when prefill cannot run it: the kernel goes on from there, and sees why.
        """
        start, num_wanted = request.kv.num_cached, len(request.prompt) - 1
        if self._prefill is None or num_wanted - start < MIN_PREFILL_TOKENS:
            return start

        def progress(position: int) -> None:
            heartbeat.progress()
            self._control.set_progress(self._rank, seq, position)

        def should_stop() -> bool:
            return self._control.aborted() or self._control.cancelled(seq)

        held = self._prefill.run(request.prompt[:num_wanted], start, should_stop=should_stop, on_progress=progress)
        progress(held)
        return held

    def _run_plain(self, seq: int, request: DecodeRequest, heartbeat: Heartbeat, num_cached: int) -> Finish:
        """The kernel decodes many tokens in a launch and chooses them itself."""
        kernel, num_prompt = self._kernel, len(request.prompt)
        assert kernel is not None
        max_tokens = min(request.max_tokens, self._max_context - num_prompt)
        sampling = Sampling(request.temperature, request.seed)
        kernel.begin(request.prompt, max_tokens, sampling, request.end_ids, first_position=num_cached)
        launches = Launches(kernel, num_prompt - 1 - num_cached, max_tokens, one_by_one=request.logit_digests)
        for index in range(max_tokens):
            token = self._next_token(seq, index, launches, heartbeat, num_cached if index == 0 else None)
            digest = self._digest(launches) if request.logit_digests else None
            if self._control.aborted():
                self._leave(seq)
            if token.finish is Finish.NONE:
                self._control.set_progress(self._rank, seq, num_prompt + index)
            else:
                self._settle(seq, token.finish)
            self._control.ring.put(seq, index, token.token_id, time.monotonic_ns(), digest, token.finish)
            if token.finish is not Finish.NONE:
                return token.finish
        raise RequestFailed("rank_failed", f"the kernel gave {max_tokens} tokens of request {seq} and did not end it")

    def _run_shaped(self, seq: int, request: DecodeRequest, heartbeat: Heartbeat, held: int) -> Finish:
        """The kernel decodes one token at a time, and the host chooses from its logits, as rank 0 of CPU ranks does."""
        kernel = self._kernel
        assert kernel is not None
        root = RootChoice(seq, request, self._control, len(kernel.logits), step_timeout_s=self._args.step_timeout_s)
        tokens, index = list(request.prompt), 0
        while True:
            position = len(tokens) - 1
            kernel.begin(tokens, 1, Sampling(request.temperature, request.seed), first_position=held)
            launches = Launches(kernel, position - held, 1, one_by_one=False)
            entry = self._next_token(seq, 0, launches, heartbeat, held)
            launches.wait()
            if self._control.aborted():
                self._leave(seq)
            if entry.finish in (Finish.CANCELLED, Finish.NUMERICAL_FAULT):
                self._settle(seq, entry.finish)
                self._control.ring.put(seq, index, NO_TOKEN, time.monotonic_ns(), None, entry.finish)
                return entry.finish
            logits = kernel.logits.get(stream=kernel.stream)
            choose = root.choose_at(position)
            chosen = Candidate(0.0, entry.token_id) if choose is None else choose(logits)
            if chosen is None or math.isnan(chosen.value):
                finish = root.failure if chosen is None else Finish.NUMERICAL_FAULT
                self._settle(seq, finish)
                self._control.ring.put(seq, index, NO_TOKEN, time.monotonic_ns(), None, finish)
                return finish
            token_id, finish = chosen.token_id, Finish.NONE
            if token_id in request.end_ids:
                finish = Finish.STOP
            elif index + 1 >= request.max_tokens or position + 2 >= self._max_context:
                finish = Finish.LENGTH
            held = position + 1
            self._control.set_progress(self._rank, seq, held)
            digest = _sha256(logits) if request.logit_digests else None
            self._control.ring.put(seq, index, token_id, time.monotonic_ns(), digest, finish, root.took(token_id, logits))
            if finish is not Finish.NONE:
                return finish
            tokens.append(token_id)
            index += 1

    def _next_token(self, seq: int, index: int, launches: Launches, heartbeat: Heartbeat, num_cached: int | None) -> Token:
        """Wait for a token. The kernel bounds every wait of its own, so launches end; if they end without it, they say why.

        `num_cached`: positions that the KV cache held before the launches, while they are prefilling; None afterwards.
        """
        kernel = self._kernel
        assert kernel is not None
        asked_to_cancel = False
        while (token := kernel.token(index)) is None:
            if self._control.aborted():
                self._leave(seq)
            if not asked_to_cancel and self._control.cancelled(seq):
                kernel.cancel()
                asked_to_cancel = True
            if launches.refill(index):
                heartbeat.progress()
                if num_cached is not None:
                    self._control.set_progress(self._rank, seq, num_cached + launches.num_prompt_steps_ended)
            elif launches.all_ended and kernel.token(index) is None:
                kernel.finish()
                raise RequestFailed("rank_failed", f"the kernel ended without token {index} of request {seq}")
            time.sleep(POLL_S)
        heartbeat.progress()
        return token

    def _settle(self, seq: int, finish: Finish) -> None:
        """Wait until the kernel has left the request; say how many positions the KV cache holds."""
        kernel = self._kernel
        assert kernel is not None
        kernel.finish()
        if finish is Finish.NUMERICAL_FAULT:
            kernel.recover()
        self._control.set_progress(self._rank, seq, 0 if finish is Finish.NUMERICAL_FAULT else int(kernel.state()["position"]))

    def _digest(self, launches: Launches) -> bytes:
        """SHA-256 of the float32 logits of the token that was just decoded; the launch must have ended."""
        assert self._kernel is not None
        launches.wait()
        return _sha256(self._kernel.logits.get(stream=self._kernel.stream))

    def _leave(self, seq: int) -> None:
        assert self._kernel is not None
        self._kernel.abort()
        self._kernel.stream.synchronize()  # bounded: the kernel leaves its waits within microseconds of the abort
        raise AbortedError(f"rank {self._rank} left request {seq} because the engine is being stopped")

    def close(self) -> None:
        """See `Engine.close`."""
        self._kernel = self._prefill = None


class Launches:
    """The launches of one request: a few queued at a time, so that the kernel never waits for the host.

    With `one_by_one` every answer token is a launch of its own, queued when the one before was taken: its logits can be read.
    """

    def __init__(self, kernel: Kernel, num_prompt_steps: int, max_tokens: int, *, one_by_one: bool) -> None:
        self._kernel = kernel
        self._num_prompt_steps, self._num_steps_ended = num_prompt_steps, 0
        self._queued: deque[tuple[Any, int]] = deque()  # event and steps of each launch under way
        plan = [(steps, 0) for steps in _chunks(num_prompt_steps + (0 if one_by_one else max_tokens))]
        plan += [(1, index) for index in range(max_tokens if one_by_one else 0)]
        self._waiting = deque(plan)  # steps of a launch, and tokens that must have been taken before it
        self.refill(0)

    @property
    def all_ended(self) -> bool:
        """Whether nothing is queued and nothing is left to queue."""
        return not self._queued and not self._waiting

    @property
    def num_prompt_steps_ended(self) -> int:
        """Steps of the prompt whose launches have ended."""
        return min(self._num_steps_ended, self._num_prompt_steps)

    def refill(self, num_taken: int) -> bool:
        """Forget launches that have ended and queue the next ones; whether any had ended."""
        ended = False
        while self._queued and self._queued[0][0].done:
            self._num_steps_ended += self._queued.popleft()[1]
            ended = True
        while self._waiting and len(self._queued) < CHUNKS_QUEUED and self._waiting[0][1] <= num_taken:
            steps = self._waiting.popleft()[0]
            self._kernel.launch(steps)
            self._queued.append((self._kernel.stream.record(), steps))
        return ended

    def wait(self) -> None:
        """Wait for everything that is queued."""
        self._kernel.stream.synchronize()


def _chunks(num_steps: int) -> list[int]:
    return [min(CHUNK_STEPS, num_steps - start) for start in range(0, num_steps, CHUNK_STEPS)]


def _sha256(logits: Any) -> bytes:
    return hashlib.sha256(logits.astype("<f4").tobytes()).digest()


def device_index(device: str) -> int:
    """GPU of a device name: `cuda` or `cuda:INDEX`."""
    return int(device.partition(":")[2] or 0)


@contextmanager
def translated_errors(device: str) -> Iterator[None]:
    """Errors of cupy and torch as one sentence of ours; neither is imported here, so that tests run the engine without them."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("cupy", "torch")):
            raise
        name = type(error).__name__
        if name == "OutOfMemoryError":
            raise LaunchError(f"{device} has too little free memory for the model: {error}; stop what else uses it") from error
        if "insufficient" in str(error) or "NoDevice" in str(error):
            raise LaunchError(f"{device} cannot be used: no NVIDIA driver or no GPU ({error}); use --device cpu") from error
        raise LaunchError(f"{device} failed: {name}: {error}; start the engine again") from error
