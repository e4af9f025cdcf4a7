"""A GPU played with host memory and a thread: cupy as far as the monokernel's host side uses it, and what its kernels do.

A played kernel reads its parameters from the bytes that the host packed. What it decodes is a chain through its request's KV
cache: the row of a position is made of the row before, one further back, and the token, and chooses the next token. So a wrong
cache, row, prompt, ring, state or epoch shows in an answer, or fails. Where the model has delta nets the row is also made of a
chain through the state that belongs to the cache, which says behind how many tokens it stands.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.collectives.cuda_abi import PEERS
from kog_dist.cuda import driver
from kog_dist.cuda.build import Cubin
from kog_dist.runtime.abi import Struct
from kog_dist.runtime.masks import NUM_SLOTS, num_words, tag_of
from kog_dist.runtime.ring import Finish
from kog_dist.workers.cuda import company_build, draft_builds, head_start, kv_blocks, monokernel, processors
from kog_dist.workers.cuda.build import PLAIN_SOURCE, PROCESSORS_SOURCE
from kog_dist.workers.cuda.company_build import company_headers
from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.cuda.kernel_abi import (
    COMPANY_PARAMS,
    COMPANY_STATES_PARAMS,
    DECODE_PARAMS,
    DECODE_STATE,
    DELTA_PARAMS,
    DRAFT_PARAMS,
    FORCED_PARAMS,
    HOST_PAGE,
    PROCESSOR_PARAMS,
    STREAM_PARAMS,
    ProcessorFlag,
)
from kog_dist.workers.cuda.kernel_boxes import COMPANY_SIZES
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.engines import cuda_programs
from kog_dist.workers.prefill.base.chunks import Chunk

_NOT_READY, _PATIENCE_S, _NONE = 600, 30.0, 0xFFFFFFFF
_PASS_S = 0.0005  # as long as a pass takes, so that requests that come meanwhile find others running
_MASK = (1 << 64) - 1
_OF_SOURCE = {PLAIN_SOURCE: "", PROCESSORS_SOURCE: "_processors"}


def at(address: int, dtype: Any, count: int = 1) -> NDArray[Any]:
    """An array on memory at an address."""
    num_bytes = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype)


def mixed(state: int, token: int) -> int:
    """What a token makes of what a state holds."""
    return (state * 3202034522624059733 + (token + 7) * 3935559000370003845) & _MASK


class PlayedArray:
    """An array of cupy."""

    def __init__(self, array: NDArray[Any], device: PlayedGpu) -> None:
        self.array, self._device = array, device
        self.data = SimpleNamespace(ptr=array.ctypes.data)
        self.nbytes, self.size, self.dtype = array.nbytes, array.size, array.dtype

    def __getitem__(self, key: Any) -> PlayedArray:
        return PlayedArray(self.array[key], self._device)

    def fill(self, value: int) -> None:
        """On another stream than the kernel's: it must have been waited for."""
        assert self._device.stream.is_idle
        self.array.fill(value)

    def get(self, stream: Any) -> NDArray[Any]:
        stream.synchronize()
        return self.array.copy()


class PlayedStream:
    """A thread that does what is queued, in order."""

    def __init__(self) -> None:
        self.ptr, self.error = 77, list[BaseException]()
        self._queue = queue.SimpleQueue[Callable[[], object] | None]()
        self._num_queued = self._num_done = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException as error:
                self.error.append(error)
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()

    def queue(self, call: Callable[[], object]) -> None:
        self._num_queued += 1
        self._queue.put(call)

    @property
    def is_idle(self) -> bool:
        return self._num_done == self._num_queued

    def synchronize(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.is_idle, _PATIENCE_S)
        assert not self.error, self.error

    def record(self) -> Any:
        """An event."""
        return _Event(self, self._num_queued)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive()
        assert not self.error, self.error


class _Event:
    def __init__(self, stream: PlayedStream, number: int) -> None:
        self._stream, self._number = stream, number

    @property
    def done(self) -> bool:
        return not self._stream.error and self._stream._num_done >= self._number


class PlayedGpu:
    """Put in the place of cupy, the compiler and the driver by `install`. `shape`: of the monokernel that runs on it."""

    def __init__(self, shape: KernelShape) -> None:
        self.shape, self.stream = shape, PlayedStream()
        # Of the next pass: of words of one token, of several, and of builds with company.
        self.epochs = {"epoch": 0, "pass_epoch": 0, "company2": 0, "company4": 0}
        self.num_shared = 0  # passes that several requests had
        self.num_drafting = 0  # passes of requests with processors and drafts
        self.published: tuple[int, int] | None = None  # what the next LM head alone begins with: its epoch, a row
        # What a launch begins with, and what rank 0 tells its peers in it: with one rank nobody is told.
        self.meet: Callable[[tuple[Any, ...]], None] = lambda what: None
        self.told: Callable[[Callable[[], Any]], Any] = lambda decide: decide()
        self.num_under_way = self.num_passes = 0  # launches that have not ended; passes so far
        self.fault_at = -1  # position behind which a value is not finite, the next time that a token is chosen there

    def install(self, monkeypatch: pytest.MonkeyPatch, current: Callable[[], PlayedGpu] | None = None) -> None:
        """`current`: the GPU of the thread that calls, where there are several."""
        own = current or (lambda: self)
        runtime = SimpleNamespace(
            memcpyAsync=lambda *args: own()._copy(*args), memcpy2DAsync=lambda *args: own()._copy_rows(*args),
            memsetAsync=lambda *args: own()._set(*args), streamQuery=lambda stream: own()._query(stream),
            memcpyHostToDevice=1, memcpyDeviceToHost=2, memcpyDeviceToDevice=3,
        )  # fmt: skip
        cuda = SimpleNamespace(
            runtime=runtime, Stream=lambda non_blocking: own().stream, alloc_pinned_memory=lambda size: bytearray(size),
            Device=lambda: SimpleNamespace(synchronize=own().stream.synchronize, use=lambda: None),
            Memory=lambda size: _Held(np.zeros(size, np.uint8)),
        )  # fmt: skip
        types = {name: getattr(np, name) for name in ("uint8", "uint32", "uint64", "float32")}
        played = SimpleNamespace(cuda=cuda, zeros=lambda *args: own()._zeros(*args), **types)
        for name, module in (("cupy", played), ("cupy.cuda", cuda)):
            monkeypatch.setitem(__import__("sys").modules, name, module)
        for user in (driver, monokernel, processors, head_start):
            monkeypatch.setattr(user, "Kernel", lambda path, name, shared: _PlayedKernel(own(), path.stem))
        monkeypatch.setattr(monokernel, "build", lambda headers: _cubin("plain"))
        for ahead in (monokernel, cuda_programs):
            monkeypatch.setattr(ahead, "prebuild", list)
        monkeypatch.setattr(
            draft_builds,
            "build",
            lambda headers, source: _cubin(
                ("small" if headers == draft_builds.draft_headers(own().shape)[0] else "large") + _OF_SOURCE[source]
            ),
        )

        def company(headers: Any) -> Cubin:
            return _cubin(next(f"company{n}" for n in COMPANY_SIZES if company_headers(own().shape, n) == headers))

        monkeypatch.setattr(company_build, "build", company)
        monkeypatch.setattr(processors, "build", lambda headers, source: _cubin("processors"))
        monkeypatch.setattr(head_start, "build", lambda headers, source: _cubin(Path(source).stem))
        mapping = lambda address, num_bytes: SimpleNamespace(device_ptr=address, close=lambda: None)  # noqa: E731
        monkeypatch.setattr(processors, "HostMapping", mapping)
        monkeypatch.setattr(kv_blocks, "HostMapping", mapping)

    # ---- memory ----
    def _zeros(self, shape: Any, dtype: Any = np.float32) -> PlayedArray:
        return PlayedArray(np.zeros(shape, dtype), self)

    def _copy(self, to: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        assert stream == self.stream.ptr
        self.stream.queue(lambda: ctypes.memmove(to, source, num_bytes))

    def _copy_rows(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        for row in range(height):
            self._copy(to + row * to_pitch, source + row * pitch, width, kind, stream)

    def _set(self, to: int, value: int, num_bytes: int, stream: int) -> None:
        self.stream.queue(lambda: ctypes.memset(to, value, num_bytes))

    def _query(self, stream: int) -> int:
        assert not self.stream.error, self.stream.error
        return 0 if self.stream.is_idle else _NOT_READY

    # ---- the KV cache ----
    def row(self, kv_ptr: int, position: int) -> NDArray[np.uint64]:
        """The row of a position in the KV cache there: in the last layer, its last KV head."""
        cache, spec = self.shape.cache, self.shape.spec
        layer = cache.layers[-1]
        batches = cache.full_batches if spec.window(layer) is None else cache.kept_window_batches
        slot = position // cache.splits % (16 * batches)
        first_from_behind = (cache.splits - position % cache.splits) * batches - slot // 16
        return at(kv_ptr + cache.num_bytes - first_from_behind * cache.batch_bytes + slot % 16 * 8, np.uint64)

    def next_row(self, kv_ptr: int, position: int, token: int) -> int:
        """What the row of a position is made of."""
        before = int(self.row(kv_ptr, position - 1)[0]) if position else 1
        far = int(self.row(kv_ptr, position // 2)[0]) if position and not self.shape.cache.ring_positions else 2
        return (before * 6364136223846793005 + far * 2862933555777941757 + (token + 1) * 1442695040888963407) & _MASK | 1

    # ---- the state ----
    def state(self, nets_ptr: int) -> list[NDArray[np.uint64]]:
        """Of the KV cache whose state is there: behind how many tokens it stands, and what they have made of it, at both ends."""
        assert self.shape.delta is not None
        return [at(nets_ptr, np.uint64, 2), at(nets_ptr + self.shape.delta.num_bytes - 16, np.uint64, 2)]

    def next_state(self, nets_ptr: int, position: int, token: int) -> int:
        """Put a token into a state, and give what comes of it. What stands there before the first token does not count."""
        ends, before = self.state(nets_ptr), 3
        if position:
            assert ends[0].tolist() == ends[1].tolist(), "half of a state"
            assert ends[0][0] == position, f"position {position} cannot follow a state of {ends[0][0]} positions"
            before = int(ends[0][1])
        value = mixed(before, token)
        for end in ends:
            end[:] = position + 1, value
        return value

    # ---- kernels ----
    def launch(self, name: str, raw: bytes) -> None:
        """Queue a kernel."""
        self.num_under_way += 1

        def run() -> None:
            self.run(name, raw)
            self.num_under_way -= 1

        self.stream.queue(run)

    def run(self, name: str, raw: bytes) -> None:
        """What a launch does."""
        if name == "last_streams":
            params = np.frombuffer(raw, STREAM_PARAMS.dtype, 1)[0]
            state = at(int(params["state_ptr"]), DECODE_STATE.dtype)[0]
            value = int(at(int(params["streams_ptr"]), np.uint64)[0])
            self.published = int(state["epoch"]), value
            if at(int(params["invalid_ptr"]), np.int32)[0]:
                at(int(params["state_ptr"]), DECODE_STATE.dtype)["finish"] = Finish.CANCELLED
            return
        of_seats = np.zeros(0, np.uint64)
        if self.shape.delta is not None:
            if name.startswith("company"):
                raw, states = _without(raw, COMPANY_STATES_PARAMS)
                of_seats = states["state_ptr"]
            nets = np.frombuffer(raw[-DELTA_PARAMS.size_bytes :], DELTA_PARAMS.dtype)[0]
            self._nets_ptr, stop_position = int(nets["state_ptr"]), int(nets["stop_position"])
            raw = raw[: -DELTA_PARAMS.size_bytes]
        params = np.frombuffer(raw, DECODE_PARAMS.dtype, 1)[0]
        state = at(int(params["state_ptr"]), DECODE_STATE.dtype)
        if name.startswith("company"):
            company = _without(raw, COMPANY_PARAMS)[1]
            self._run_together(name, params, company, of_seats, state)
            return
        has_drafts = name.startswith(("small", "large"))
        if has_drafts and (int(state["pass_tokens"][0]) > 1) != name.startswith("large"):
            return
        if state["finish"][0] or at(int(params["host_ptr"]), HOST_PAGE.dtype)["abort"][0]:
            return  # so it needs no peer
        self.meet((name, int(params["num_steps"]), int(state["position"][0]), int(state["num_prompt"][0])))
        drafts, forced = None, None
        if has_drafts and "processors" in name:
            raw, forced = _without(raw, FORCED_PARAMS)
        if has_drafts:
            raw, drafts = _without(raw, DRAFT_PARAMS)
        for _ in range(int(params["num_steps"])):
            if drafts is not None and self.shape.delta is not None and state["position"][0] >= stop_position:
                return
            if state["finish"][0] or at(int(params["host_ptr"]), HOST_PAGE.dtype)["abort"][0]:
                return
            time.sleep(_PASS_S)
            if drafts is not None:
                self._look_up(drafts, state[0], int(params["ring_ptr"]))
            self._pass(name, params, raw[-PROCESSOR_PARAMS.size_bytes :] if "processors" in name else b"", state, forced)
            if drafts is not None and forced is None and self.told(lambda: _do_others_wait(params)):
                return

    def _look_up(self, drafts: Any, state: Any, ring_ptr: int) -> None:
        """What a build with drafts does with the tokens of a request: stores the newest one, and looks all of them up."""
        position, num_prompt = int(state["position"]), int(state["num_prompt"])
        stored = at(int(drafts["tokens_ptr"]) + 4 * (int(drafts["num_predicted"]) + 1), np.uint32, position + 1)
        if position >= num_prompt and state["draft_looked"] < position:  # its own, or that of an LM head alone
            assert position in (num_prompt, state["draft_looked"] + 1), "nobody has told the drafts of what was decoded"
            stored[position] = state["token"]
        ring = at(ring_ptr, np.uint64, 2 * (position + 1))[::2]
        assert stored[num_prompt:].tolist() == (ring & np.uint64(_NONE))[: max(position + 1 - num_prompt, 0)].tolist()
        state["draft_looked"] = position

    def _run_together(self, name: str, params: Any, company: Any, nets_ptrs: NDArray[np.uint64], own: Any) -> None:
        """A launch with a token of each seat in a pass. `nets_ptrs`: states of the seats' requests, of models with delta nets."""
        seats = [seat for seat in range(int(name.removeprefix("company"))) if int(company["taken"]) >> seat & 1]
        names = ("kv_ptr", "prompt_ptr", "ring_ptr", "host_ptr", "seed", "inverse_temperature_bits", "request_tag")
        count = len(company["stop_ids"]) // len(company["seed"])
        requests = {
            seat: {field: company[field][seat] for field in (*names, "num_stop_ids")}
            | {"logits_ptr": params["logits_ptr"], "stop_ids": company["stop_ids"][seat * count : (seat + 1) * count]}
            for seat in seats
        }
        states = {seat: at(int(company["state_ptr"][seat]), DECODE_STATE.dtype) for seat in seats}
        assert self.published is None, "a pass has taken the place of streams that nobody has used"
        has_ended = all(state["finish"][0] for state in states.values())
        if has_ended or at(int(params["host_ptr"]), HOST_PAGE.dtype)["abort"][0]:
            return
        positions = tuple((seat, int(state["position"][0]), int(state["num_prompt"][0])) for seat, state in states.items())
        self.meet((name, int(params["num_steps"]), positions))
        for _ in range(int(params["num_steps"])):
            live = [seat for seat in seats if not states[seat]["finish"][0]]
            if not live or at(int(params["host_ptr"]), HOST_PAGE.dtype)["abort"][0]:
                return
            assert int(own["epoch"][0]) == self.epochs[name]
            own["epoch"] = self.epochs[name] = self.epochs[name] + 1
            self.num_shared += len(live) > 1
            time.sleep(_PASS_S)
            for seat in live:
                self._nets_ptr = int(nets_ptrs[seat]) if len(nets_ptrs) else 0
                self._pass("company", requests[seat], b"", states[seat])
            if self.told(lambda: any(map(_do_others_wait, requests.values()))):
                return

    def _pass(self, name: str, params: Any, of_processors: bytes, state: Any, forced: Any = None) -> None:
        self.num_passes += 1
        self.num_drafting += forced is not None
        counter = "pass_epoch" if name.startswith("large") else "epoch"
        is_own = name != "company"
        assert not is_own or int(state[counter][0]) >= self.epochs[counter], "words of this pass have been there before"
        position, token, kv_ptr = int(state["position"][0]), int(state["token"][0]), int(params["kv_ptr"])
        if "head" in name:
            assert self.published is not None
            epoch, row = self.published
            assert epoch == int(state["epoch"][0]), "another pass came between the streams and the LM head"
            self.published = None
        else:
            assert self.published is None, "a pass has taken the place of streams that nobody has used"
            row = self.next_row(kv_ptr, position, token)
            if self.shape.delta is not None:
                row ^= self.next_state(self._nets_ptr, position, token) << 1 & _MASK
            self.row(kv_ptr, position)[0] = row
        if is_own:
            state[counter] = self.epochs[counter] = int(state[counter][0]) + 1
        index = position + 1 - int(state["num_prompt"][0])
        host = at(int(params["host_ptr"]), HOST_PAGE.dtype)
        is_cancelled = self.told(lambda: int(host["cancelled_tag"][0]) == int(params["request_tag"]))
        finish = Finish.CANCELLED if is_cancelled else Finish.NONE
        if index < 0:
            token = int(at(int(params["prompt_ptr"]) + 4 * (position + 1), np.uint32)[0])
        else:
            vocab = self.shape.spec.vocab_size
            first, end = self.shape.head.vocab_rows
            at(int(params["logits_ptr"]), np.float32, end - first)[:] = (row >> 20) % 1000 + np.arange(first, end)
            token = (row >> 7 ^ int(params["seed"]) * int(params["inverse_temperature_bits"])) % vocab
            if of_processors:
                tag = int(params["request_tag"])
                given = np.frombuffer(of_processors, PROCESSOR_PARAMS.dtype, 1)[0]
                found = self.told(lambda: self._allowed(given, index, token, host, tag, forced))
                if found is None:
                    is_ours = self.told(lambda: int(host["cancelled_tag"][0]) == tag)
                    finish = Finish.CANCELLED if is_ours else Finish.NO_MASK
                token = token if found is None else found
            stops = token in params["stop_ids"][: int(params["num_stop_ids"])]
            is_full = index + 1 >= int(state["max_tokens"][0]) or position + 2 >= self.shape.spec.max_context
            if position == self.fault_at:
                self.fault_at, finish = -1, Finish.NUMERICAL_FAULT
            if finish is Finish.NONE:
                finish = Finish.STOP if stops else Finish.LENGTH if is_full else Finish.NONE
        if index >= 0 or finish is not Finish.NONE:
            has_token = finish not in (Finish.CANCELLED, Finish.NO_MASK, Finish.NUMERICAL_FAULT)
            tag = int(params["request_tag"]) << 32
            entry = at(int(params["ring_ptr"]) + 16 * max(index, 0), np.uint64, 2)
            entry[:] = tag | (token if has_token else _NONE), tag | finish
        state["token"], state["position"], state["finish"] = token, position + 1, finish

    def _allowed(self, params: Any, index: int, token: int, host: Any, tag: int, forced: Any) -> int | None:
        """The next token of the vocabulary that the mask has, which may come late; None if it has none, or none comes. `forced`:
        of builds with drafts, for which what is forced comes in front of it.
        """
        if not params["flags"] & ProcessorFlag.MASKED:
            return token
        vocab, epoch = self.shape.spec.vocab_size, int(params["mask_epoch"]) + index
        count = num_words(vocab)
        slot, until_s = at(int(params["mask_ptr"]) + epoch % NUM_SLOTS * 8 * count, np.uint64, count), time.monotonic() + 2.0
        while (slot >> np.uint64(32) != tag_of(epoch)).any():
            if host["abort"][0] or host["cancelled_tag"][0] == tag or time.monotonic() > until_s:
                return None
            time.sleep(0.0002)
        if forced is not None:
            assert at(int(forced["forced_ptr"]), np.uint64)[0] >> np.uint64(32) == tag_of(epoch), "nobody said what is forced"
        bits = np.unpackbits((slot & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.uint8), bitorder="little")[:vocab]
        return next((one % vocab for one in range(token, token + vocab) if bits[one % vocab]), None)


def _without(raw: bytes, struct: Struct) -> tuple[bytes, Any]:
    """What stands before a launch's last parameters, and these."""
    return raw[: -struct.size_bytes], np.frombuffer(raw[-struct.size_bytes :], struct.dtype)[0]


def _do_others_wait(params: Any) -> bool:
    return bool(at(int(params["host_ptr"]), HOST_PAGE.dtype)["cancelled_tag"][0] == 0xFFFFFFFF)


class _Held:
    """Memory that is not of a pool."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array, self.ptr = array, array.ctypes.data


def _cubin(name: str) -> Cubin:
    return Cubin(Path(f"{name}.cubin"), "")


class _PlayedKernel:
    def __init__(self, gpu: PlayedGpu, name: str) -> None:
        self._gpu, self._name = gpu, name

    def launch(self, num_ctas: int, num_threads: int, params: bytes, stream: int) -> None:
        sizes = {"plain": 0, "head": 0, "small": DRAFT_PARAMS.size_bytes, "large": DRAFT_PARAMS.size_bytes}
        of_both = PROCESSOR_PARAMS.size_bytes + DRAFT_PARAMS.size_bytes + FORCED_PARAMS.size_bytes
        sizes |= {f"{size}{_OF_SOURCE[PROCESSORS_SOURCE]}": of_both for size in ("small", "large")}
        of_company = COMPANY_PARAMS.size_bytes + (COMPANY_STATES_PARAMS.size_bytes if self._gpu.shape.delta is not None else 0)
        sizes |= {f"company{size}": of_company for size in COMPANY_SIZES}
        of_build = sizes.get(self._name, PROCESSOR_PARAMS.size_bytes)
        of_build += 0 if self._gpu.shape.delta is None else DELTA_PARAMS.size_bytes
        peers = len(params) - DECODE_PARAMS.size_bytes - of_build
        assert peers == PEERS.size_bytes
        self._gpu.launch(self._name, params)

    def launch_grid(self, num_ctas: int, num_threads: int, params: bytes, stream: int) -> None:
        self._gpu.launch(self._name, params)


class PlayedRunner:
    """A runner of prefill: plain rows, which it takes from KV caches and gives them, and so the state that belongs to a cache.

    `rounds_by`: 0, or tokens that change a state together, from where a chunk begins: so what comes of it is neither what the
    kernel makes of them, nor what others make that are divided otherwise.
    """

    is_all_or_nothing = True

    def __init__(self, gpu: PlayedGpu, kv_ptr: int, nets_ptr: int = 0, *, rounds_by: int = 0) -> None:
        self._gpu, self._kv_ptr, self._nets_ptr, self._rounds_by = gpu, kv_ptr, nets_ptr, rounds_by
        self._states = dict[int, int]()  # by the number of tokens before
        self._plain, self._token_ids, self._cache = dict[int, int](), Sequence[int], 0
        self._streams, self._invalid = np.zeros(1, np.uint64), np.zeros(1, np.int32)
        self._next_part = self.num_decoded_between = 0  # of the chunk; parts in front of which others have decoded
        self._num_passes = 0

    def begin(self, token_ids: Sequence[int], start: int, held: int, cache: int = 0) -> None:
        assert not self._gpu.num_under_way, "a launch is under way"
        assert not self._next_part, "a chunk of another prompt is under way"
        self._gpu.stream.synchronize()  # copies of what is kept
        self._ids, self._cache = list(token_ids), cache
        for position in range(held, start):
            self._plain[position] = int(self._gpu.row(self._at, position)[0])
        if self._nets_ptr:
            self._states = {0: 3}
            if start:
                ends = self._ends
                assert ends[0].tolist() == ends[1].tolist(), "half of a state"
                assert ends[0][0] == start, f"position {start} cannot follow a state of {ends[0][0]} positions"
                self._states[start] = int(ends[0][1])

    @property
    def _ends(self) -> list[NDArray[np.uint64]]:
        assert self._gpu.shape.delta is not None
        return self._gpu.state(self._nets_ptr + self._cache * self._gpu.shape.delta.num_bytes)

    @property
    def _at(self) -> int:
        return self._kv_ptr + self._cache * self._gpu.shape.cache.num_bytes

    def queue(self, chunk: Chunk, part: int = 0) -> Callable[[], bool]:
        assert not self._gpu.num_under_way, "a launch is under way"
        assert part == self._next_part
        self.num_decoded_between += bool(part) and self._gpu.num_passes > self._num_passes
        self._next_part, self._num_passes = (part + 1) % chunk.num_parts, self._gpu.num_passes
        if self._next_part:
            return lambda: True
        for position in range(chunk.start, chunk.end):
            before = self._plain[position - 1] if position else 1
            far = self._plain[position // 2] if position and not self._gpu.shape.cache.ring_positions else 2
            self._plain[position] = (
                before * 6364136223846793005 + far * 2862933555777941757 + (self._ids[position] + 1) * 1442695040888963407
            ) & _MASK | 1
            if self._nets_ptr:
                value = self._states[position]
                if self._rounds_by and (position - chunk.start) % self._rounds_by == 0:
                    value = mixed(value, -1)
                value = mixed(value, self._ids[position])
                self._states[position + 1] = value
                self._plain[position] ^= value << 1 & _MASK
        return lambda: True

    @property
    def streams(self) -> LastStreams:
        return LastStreams(self._streams.ctypes.data, self._invalid.ctypes.data)

    def queue_end(self, chunk: Chunk) -> None:
        self._streams[0] = self._plain[chunk.end - 1]

    def store(self, first: int, last: int) -> None:
        self._next_part = 0  # of one that was stopped the rest is never run
        for position in range(first, last):
            self._gpu.row(self._at, position)[0] = self._plain[position]
        for end in self._ends if self._nets_ptr and last > first else ():
            end[:] = last, self._states[last]

    def has_ended(self) -> bool:
        return True

    def finish(self) -> bool:
        return True

    def stop(self) -> None:
        pass
