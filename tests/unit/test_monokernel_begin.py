"""What the host hands to the monokernel at the beginning of a request; cupy is played, with host memory in the GPU's place."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.collectives.mailbox import place
from kog_dist.decode.pass_drafts import CREDIT
from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.errors import DeviceError
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.runtime.abi import NO_PEER, WaitOp, WaitRecord
from kog_dist.runtime.ring import NO_TOKEN, Drafted, Finish
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.device_slot import DeviceSlot
from kog_dist.workers.cuda.draft_builds import GAP, NOWHERE, PASS_TOKENS, DraftBuilds, PassCosts, costs_of, drafting_shape
from kog_dist.workers.cuda.head_start import HeadStart, LastStreams
from kog_dist.workers.cuda.kernel_abi import DECODE_STATE, DELTA_PARAMS, DRAFT_PARAMS, HOST_PAGE, STREAM_PARAMS, STREAM_THREADS
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import LONGEST_WAIT_US, DeviceToken, Monokernel
from kog_dist.workers.cuda.processors import ProcessedRequest

CONTEXT, STREAM = 16, 7


class Memory:
    """An array of cupy."""

    def __init__(self, count: int, dtype: Any) -> None:
        self.array = np.zeros(count, dtype)
        self.num_reads = 0  # by the host
        self.data = SimpleNamespace(ptr=self.array.ctypes.data)

    def get(self, stream: Any) -> Any:
        self.num_reads += 1
        return self.array.copy()


class Launched:
    """A kernel that is never run."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, int, bytes, int]] = []
        self.steps: list[list[int]] = []  # of the monokernel's launches, and where they stamp

    def launch(self, num_ctas: int, num_threads: int, params: bytes, stream: int) -> None:
        self.steps.append(np.frombuffer(params[:16], int).tolist())

    def launch_grid(self, num_ctas: int, num_threads: int, params: bytes, stream: int) -> None:
        self.grids.append((num_ctas, num_threads, params, stream))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Monokernel:
    def copy(to: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (1, STREAM), "copies must be in order with the launches"
        ctypes.memmove(to, source, num_bytes)

    def copy_now(to: int, source: int, num_bytes: int, kind: int) -> None:
        assert kind == 2
        ctypes.memmove(to, source, num_bytes)

    runtime = SimpleNamespace(memcpyAsync=copy, memcpy=copy_now, memcpyHostToDevice=1, memcpyDeviceToHost=2)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    made = Monokernel.__new__(Monokernel)
    made.stream = SimpleNamespace(ptr=STREAM)
    made._slot = made._ran = DeviceSlot.__new__(DeviceSlot)
    made._slots, made._company, made._together, made._ran_together = [made._slot], [], None, set()
    made._slot.forget()
    made._slot.number, made._slot.processors, made._slot.host = 0, None, np.zeros((), HOST_PAGE.dtype)
    made._forget_epochs()
    spec = SimpleNamespace(num_layers=12)
    made._draft_builds = made.nets = None
    cache = SimpleNamespace(full_layers=(1, 4), num_bytes=160)
    made.shape = SimpleNamespace(num_ctas=5, num_threads=640, spec=spec, cache=cache, tokens=1)  # type: ignore[assignment]
    made.words, made._peers = Memory(4, np.uint64), b"peers"
    made._kernel, start = Launched(), HeadStart.__new__(HeadStart)  # type: ignore[assignment]
    start._peers, start._num_pairs, start._publisher, start.plain = b"peers", 768, Launched(), Launched()  # type: ignore[assignment]
    made._head_start = start
    fields = [("num_steps", int), ("stamps_ptr", int)]
    monkeypatch.setattr(made, "_params", lambda num_steps: np.array([(num_steps, 0)], fields))
    made._slot.prompt, made._slot.state = Memory(CONTEXT, np.uint32), Memory(DECODE_STATE.size_bytes, np.uint8)
    made._slot.staged_prompt, made._slot.staged_state = np.zeros(CONTEXT, np.uint32), np.zeros(1, DECODE_STATE.dtype)
    return made


def test_only_the_tokens_that_the_kernel_will_read_are_copied(kernel: Monokernel) -> None:
    kernel.begin((5, 6, 7), 4, SamplingParams())
    assert kernel._slot.prompt.array.tolist() == [0, 6, 7, *[0] * 13]
    assert int(kernel._slot.state.array.view(DECODE_STATE.dtype)["token"][0]) == 5
    kernel._slot.state.array.view(DECODE_STATE.dtype)["epoch"] = 99
    kernel._slot.state.array.view(DECODE_STATE.dtype)["abort_mirror"] = 1
    kernel.begin([1, 2, 3, 4, 8], 6, SamplingParams(), first_position=3)
    assert kernel._slot.prompt.array.tolist() == [0, 6, 7, 0, 8, *[0] * 11]
    state = kernel.state()
    assert [int(state[name]) for name in ("token", "position", "num_prompt", "max_tokens", "epoch")] == [4, 3, 5, 6, 99]
    assert int(state["abort_mirror"]) == 0, "nothing else of the request before is left"
    assert kernel._slot.tag == 2


def test_another_slot_counts_on_from_where_the_last_one_is(kernel: Monokernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind `begin`, which has chosen an epoch, nothing is taken from the slot before."""
    other = DeviceSlot.__new__(DeviceSlot)
    other.forget()
    other.number, other.processors, other.host = 1, None, np.zeros((), HOST_PAGE.dtype)
    other.prompt, other.state = Memory(CONTEXT, np.uint32), Memory(DECODE_STATE.size_bytes, np.uint8)
    other.staged_prompt, other.staged_state = np.zeros(CONTEXT, np.uint32), np.zeros(1, DECODE_STATE.dtype)
    kernel._slots.append(other)
    states = [slot.state.array.view(DECODE_STATE.dtype) for slot in kernel._slots]
    queued = list[tuple[int, int]]()

    def copy(to: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (1, STREAM) or (kind == 3 and num_bytes in (4, 8))
        if kind == 3:
            queued.append((to - other.state.data.ptr, source - kernel._slots[0].state.data.ptr))
        ctypes.memmove(to, source, num_bytes)

    runtime = SimpleNamespace(memcpyAsync=copy, memcpyHostToDevice=1, memcpyDeviceToDevice=3)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    kernel.begin((5, 6, 7), 4, SamplingParams())
    kernel.launch(3)
    states[0]["epoch"], states[0]["pass_epoch"], states[0]["hash"] = 3, 8, (4, 5)
    kernel.use(1)
    kernel.begin((5, 6, 7), 4, SamplingParams(), cache=1)
    assert int(states[1]["epoch"][0]) == 3
    states[1]["epoch"] = 5  # as if some were left out
    kernel.launch(2)
    assert not queued
    states[1]["epoch"] = 7
    kernel.use(0)
    kernel.launch(1)
    assert states[0]["epoch"][0] == 7
    states[0]["epoch"], states[0]["token"], states[0]["pass_epoch"], states[0]["num_exchanges"] = 8, 66, 9, 2
    kernel.use(1)
    assert int(kernel.state()["epoch"]) == 7
    kernel.launch(1)
    counts = [states[1][name][0].tolist() for name in ("epoch", "num_exchanges", "hash", "pass_epoch")]
    assert counts == [8, 2, [4, 5], 9]
    assert int(states[1]["token"][0]) == 5
    assert int(kernel.state()["epoch"]) == 8, "what was read before is not what is there"


def test_requests_that_share_passes_have_drafts_again_behind_them(kernel: Monokernel, builds: Any) -> None:
    """Which are told what company has decoded."""
    made = SimpleNamespace(shape=SimpleNamespace(tokens=2, num_ctas=5, num_threads=640), kernel=RawLaunches())
    seats = list[Any]()

    def params(of_launch: Any, peers: bytes, given: list[Any], nets: bytes) -> bytes:
        seats.extend(given)
        return b"raw"

    made.params = params
    kernel._company, slot = [made], kernel._slot  # type: ignore[list-item]
    kernel.kv, slot.ring = Memory(400, np.uint8), np.zeros(2 * CONTEXT, np.uint64)
    slot.ring_words = slot.ring.data
    kernel.begin((5, 6, 7), 9, SamplingParams(seed=4), (3,), prediction=(8, 9), cache=2)
    assert slot.prompt.array[1:3].tolist() == [6, 7]
    kernel.launch(4)
    assert [len(build.params) for build in builds.pair()] == [1, 1]
    assert int(kernel.state()["position"]) == 0
    state = slot.state.array.view(DECODE_STATE.dtype)
    state["position"] = 4
    slot.ring[[0, 2]] = 1 << 32 | 21, 1 << 32 | 22
    kernel.launch_together([0], 4)
    assert made.kernel.params == [b"raw"]
    (seat,) = seats
    assert (seat.kv_ptr, seat.tag, seat.stop_ids) == (kernel.kv.data.ptr + 2 * 160, 1, (3,))
    pointers = slot.state.data.ptr, slot.prompt.data.ptr, slot.ring.ctypes.data, slot.host.ctypes.data
    assert (seat.state_ptr, seat.prompt_ptr, seat.ring_ptr, seat.host_ptr) == pointers
    assert int(kernel.state()["position"]) == 4
    kernel.launch(2)
    assert [len(build.params) for build in builds.pair()] == [2, 2]
    assert builds._tokens[0].array[:9].tolist() == [8, 9, GAP, 5, 6, 7, 21, 22, 0]
    names = ("position", "pass_tokens", "draft_place", "draft_tokens", "draft_balance", "draft_looked")
    assert [int(state[name][0]) for name in names] == [4, 1, NOWHERE, 0, CREDIT + 256, 4]
    state["position"] = 5
    kernel.launch(2)
    assert builds._tokens[0].array[8] == 0, "the drafts' builds store tokens themselves"
    kernel.launch_together([0], 4)
    kernel.begin((5, 6, 7), 9, SamplingParams(seed=4), (3,), prediction=(8, 9), cache=2)
    assert kernel._together is None, "its own waits are to be heard of"
    slot.ring[[0, 2, 4]] = [2 << 32 | token for token in (21, 22, 23)]
    state["position"], state["finish"] = 5, Finish.LENGTH
    kernel.launch_together([0], 4)
    kernel.launch(2)
    assert builds._tokens[0].array[8] == 0, "it has ended"


def test_a_step_that_is_a_head_alone_gets_the_streams(kernel: Monokernel) -> None:
    kernel.begin((5, 6, 7), 4, SamplingParams(), first_position=2, streams=LastStreams(0x123400, 0x567800))
    assert int(kernel.state()["token"]) == 7
    assert not kernel._slot.prompt.array.any(), "no copy between prefill and the head"
    head, whole = kernel._head_start, kernel._kernel
    assert head is not None
    (launch,) = head._publisher.grids  # type: ignore[attr-defined]
    assert launch[:2] == (3, STREAM_THREADS), "a thread for each pair of values"
    assert launch[3] == STREAM
    params = np.frombuffer(launch[2], STREAM_PARAMS.dtype, count=1)[0]
    assert [int(params[name]) for name in ("streams_ptr", "invalid_ptr")] == [0x123400, 0x567800]
    assert [int(params[name]) for name in ("words_ptr", "state_ptr")] == [kernel.words.data.ptr, kernel._slot.state.data.ptr]
    assert launch[2][STREAM_PARAMS.size_bytes :] == b"peers"
    for _ in range(2):
        kernel.launch(3, SimpleNamespace(data=SimpleNamespace(ptr=80)))
    assert head.plain.steps == [[1, 80]]  # type: ignore[attr-defined]
    assert whole.steps == [[2, 88], [3, 80]], "the layers come with the second token"  # type: ignore[attr-defined]
    kernel.begin((5, 6, 7), 4, SamplingParams(), first_position=2, streams=LastStreams(1, 2))
    kernel.launch(1)
    assert (len(head.plain.steps), len(whole.steps)) == (2, 2)  # type: ignore[attr-defined]


# ---- drafts ----
class RawLaunches:
    """A build that is never run; keeps the parameters."""

    def __init__(self) -> None:
        self.params: list[bytes] = []

    def launch(self, num_ctas: int, num_threads: int, params: bytes, stream: int) -> None:
        assert (num_ctas, num_threads, stream) == (5, 640, STREAM)
        self.params.append(params)


@pytest.fixture
def builds(kernel: Monokernel, monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = DraftBuilds.__new__(DraftBuilds)
    made._shape = SimpleNamespace(spec=SimpleNamespace(max_context=CONTEXT))
    made.large_shape = SimpleNamespace(tokens=PASS_TOKENS)
    made._pairs = [[RawLaunches(), RawLaunches()] for _ in range(2)]
    made.costs, made._num_predicted = PassCosts(0.25, 0.125, 0.5), [0]
    made.words, made.logits = Memory(8, np.uint64), Memory(4, np.float32)
    made._tokens, made._staged = [Memory(2 * CONTEXT + 8, np.uint32)], [np.zeros(2 * CONTEXT + 8, np.uint32)]
    kernel._draft_builds = made
    monkeypatch.setattr(kernel, "_params", lambda num_steps: np.array((num_steps, 1, 2, 3, 4, 5), DRAFT_FIELDS)[()].copy())
    return made


DRAFT_FIELDS = [(name, np.uint64) for name in ("num_steps", "stamps_ptr", "prompt_ptr", "drafts_ptr", "words_ptr", "logits_ptr")]


def test_a_request_with_drafts_has_its_tokens_where_they_are_looked_up(kernel: Monokernel, builds: Any) -> None:
    kernel.begin((5, 6, 7), 9, SamplingParams(), first_position=2, prediction=(8, 9))
    assert builds._tokens[0].array[:6].tolist() == [8, 9, GAP, 5, 6, 7]
    assert builds.prompt_ptr(0) == builds._tokens[0].data.ptr + 12
    state = kernel.state()
    names = ("token", "position", "pass_tokens", "draft_place", "draft_start", "draft_tokens", "draft_balance", "draft_looked")
    assert [int(state[name]) for name in names] == [7, 2, PASS_TOKENS, 0, 0, 2, CREDIT, 2]
    state_of_others: Any = kernel._slot.state
    state_of_others.array.view(DECODE_STATE.dtype)["pass_epoch"] = 12
    kernel._slot.left = None
    for first_position, pass_tokens in ((2, 1), (1, PASS_TOKENS)):  # what is left of a prompt goes several tokens at a time
        kernel.begin((5, 6, 7), 9, SamplingParams(), first_position=first_position, prediction=())
        state = kernel.state()
        assert [int(state[name]) for name in names[2:6]] == [pass_tokens, NOWHERE, NOWHERE, 0]
        assert int(state["pass_epoch"]) == 12, "words of passes are never taken for later ones"
    assert builds._tokens[0].array[:4].tolist() == [GAP, 5, 6, 7]
    assert not kernel._slot.prompt.array.any()
    kernel.begin((5, 6, 7), 9, SamplingParams())
    assert int(kernel.state()["pass_epoch"]) == 12
    assert kernel._slot.prompt.array[1:3].tolist() == [6, 7]


def test_builds_take_turns_with_words_of_their_own(kernel: Monokernel, builds: Any) -> None:
    kernel.begin((5, 6, 7), 9, SamplingParams(), prediction=(8, 9))
    kernel.launch(30)
    of_drafts = np.frombuffer(builds.params(0), DRAFT_PARAMS.dtype)[0]
    assert of_drafts["tokens_ptr"] == builds._tokens[0].data.ptr
    assert of_drafts.tolist()[1:] == (2, PASS_TOKENS, 256, 128)
    size = np.dtype(DRAFT_FIELDS).itemsize
    places = []
    for build in builds.pair():
        (raw,) = build.params
        assert raw[size:] == b"peers" + builds.params(0)
        places.append(np.frombuffer(raw[:size], DRAFT_FIELDS)[0].tolist())
    small, large = (4, 5), (builds.words.data.ptr, builds.logits.data.ptr)
    assert places == [(30, 0, builds.prompt_ptr(0), 0, *words) for words in (small, large)]
    assert not kernel._kernel.steps, "the plain build has none of it"  # type: ignore[attr-defined]


def test_builds_of_requests_with_processors_take_turns_with_the_same_words(kernel: Monokernel, builds: Any) -> None:
    """They have parameters of both, and of what a grammar forces."""
    made: Any = SimpleNamespace(params=lambda: b"processors", forced_params=lambda wait: f"wait {wait}".encode())
    made.begin = lambda *arguments: None
    kernel._slot.processors = made
    kernel.begin((5, 6, 7), 9, SamplingParams(), prediction=(8, 9), processed=ProcessedRequest())
    kernel.launch(30)
    size, words = np.dtype(DRAFT_FIELDS).itemsize, list[int]()
    for build in builds.pair(processors=True):
        (raw,) = build.params
        assert raw[size:] == b"peersprocessors" + builds.params(0) + b"wait 512"
        words.append(np.frombuffer(raw[:size], DRAFT_FIELDS)[0]["words_ptr"])
    assert words == [4, builds.words.data.ptr]
    assert not any(build.params for build in builds.pair())


def test_delta_nets_have_a_state_with_each_cache(kernel: Monokernel) -> None:
    names = ("taps", "factors", "norm")
    arrays = {f"delta_{name}": SimpleNamespace(data=SimpleNamespace(ptr=place)) for place, name in enumerate(names, start=7)}
    kernel.weights, kernel.shape.delta = SimpleNamespace(**arrays), SimpleNamespace(num_bytes=4096)  # type: ignore[assignment]
    kernel.nets = SimpleNamespace(data=SimpleNamespace(ptr=1 << 20))
    built = kernel._kernel = RawLaunches()  # type: ignore[assignment]
    kernel.begin((5, 6, 7), 9, SamplingParams(), cache=2)
    kernel.launch(30)
    kernel.launch(30, stop_position=20)
    state_ptr, of_launches = (1 << 20) + 2 * 4096, [raw[-DELTA_PARAMS.size_bytes :] for raw in built.params]
    found = [np.frombuffer(raw, DELTA_PARAMS.dtype)[0].tolist() for raw in of_launches]
    assert found == [(7, 8, 9, state_ptr, NOWHERE), (7, 8, 9, state_ptr, 20)]


def test_costs_are_what_passes_took_beyond_the_edges_of_launches() -> None:
    assert costs_of(2.0, 2.5, 0.1) == PassCosts(0.25, 0.1, 0.1)
    assert costs_of(2.0, 1.9, -0.1) == PassCosts(0.0, 0.0, 0.1)
    assert costs_of(0.1, 0.1, 0.0).mask_wait == 1, "a right draft is no loss"
    assert costs_of(0.0, 1.0, 0.1) == PassCosts()


def test_what_the_ring_says_of_drafts(kernel: Monokernel) -> None:
    ring = kernel._slot.ring = np.zeros(2 * CONTEXT, np.uint64)
    kernel._slot.ring_words, kernel._slot.tag = ring.data, 3
    ring[:4] = 3 << 32 | 5, 3 << 32 | Finish.LENGTH | 3 << 8 | 2 << 16 | 1 << 24, 3 << 32 | 5, 3 << 32 | 1 << 8
    assert kernel.token(0) == DeviceToken(5, Finish.LENGTH, Drafted(3, 2, True))
    assert kernel.token(1) == DeviceToken(5, Finish.NONE, Drafted(1, 0, False))


def test_a_launch_says_where_everything_is(kernel: Monokernel) -> None:
    pointers = iter(range(1000, 2000))

    def held() -> Any:
        return SimpleNamespace(data=SimpleNamespace(ptr=next(pointers)), ctypes=SimpleNamespace(data=next(pointers)))

    always, optional = ("tape", "embedding", "norms", "final_norm", "rope"), ("qkv_bias", "head_norms", "out_bias", "sinks")
    of_experts = ("matrices", "router_bias", "gate_up_bias", "down_bias")
    experts = SimpleNamespace(**{name: held() for name in of_experts})
    weights = SimpleNamespace(**{name: held() for name in (*always, *optional)}, experts=experts)
    shape = SimpleNamespace(head=SimpleNamespace(vocab_rows=(48, 96)), cache=SimpleNamespace(num_bytes=160))
    kernel.weights, kernel.shape, kernel._limit_us, kernel._slot.tag = weights, shape, 1234, 9  # type: ignore[assignment]
    kernel._drafts = held()
    kernel.kv, kernel.words, kernel._logits, kernel._slot.prompt, kernel._slot.state, kernel._record = (held() for _ in range(6))
    kernel._slot.host, kernel._slot.ring, kernel.trace, kernel.hashes, kernel._choices = held(), held(), None, None, held()
    kernel._slot.processed, kernel._slot.sampling, kernel._slot.stop_ids = None, SamplingParams(temperature=0.5, seed=77), (4, 5)
    params = Monokernel._params(kernel, 3)
    wanted = {f"{name}_ptr": getattr(weights, name).data.ptr for name in (*always, *optional)}
    wanted |= {f"{name}_ptr": getattr(experts, name).data.ptr for name in of_experts[1:]} | {
        "experts_ptr": experts.matrices.data.ptr
    }
    wanted |= {f"{name}_ptr": getattr(kernel, name).data.ptr for name in ("kv", "words")}
    wanted |= {f"{name}_ptr": getattr(kernel, f"_{name}").data.ptr for name in ("logits", "drafts", "record")}
    wanted |= {f"{name}_ptr": getattr(kernel._slot, name).data.ptr for name in ("prompt", "state")}
    wanted |= {
        "host_ptr": kernel._slot.host.ctypes.data,
        "ring_ptr": kernel._slot.ring.ctypes.data,
        "trace_ptr": kernel._choices.data.ptr,
    }
    wanted |= {
        "inverse_temperature_bits": int(np.float32(2.0).view(np.uint32)),
        "seed": 77,
        "wait_limit_us": 1234,
        "num_stop_ids": 2,
    }
    wanted |= {"vocab_first": 48, "num_steps": 3, "request_tag": 9}
    found = {name: params[name] for name in params.dtype.names or () if name != "stop_ids"}
    assert {name: int(value) for name, value in found.items() if value} == wanted
    assert params["stop_ids"].tolist()[:3] == [4, 5, 0]
    kernel._slot.sampling = SamplingParams()
    for name in (*optional, "experts"):
        setattr(weights, name, None)
    kernel._choices = None
    kernel._slot.processed = SimpleNamespace(mask_epoch=1)  # type: ignore[assignment]
    params = Monokernel._params(kernel, 3)
    assert not any(params[f"{name}_ptr"] for name in (*optional, *of_experts[1:], "experts", "trace", "stamps"))
    assert (int(params["inverse_temperature_bits"]), int(params["wait_limit_us"])) == (0, LONGEST_WAIT_US)


@pytest.mark.parametrize(("finish", "found"), [(None, [10, 11, 12, 13]), (1, [10, 11]), (2, [10, 11])])
def test_a_whole_answer_is_launched_in_chunks(
    kernel: Monokernel, monkeypatch: pytest.MonkeyPatch, finish: int | None, found: list[int]
) -> None:
    """`finish`: the index of an entry that ends the answer, with a token or without."""
    launched = list[int]()
    monkeypatch.setattr(kernel, "launch", launched.append)
    monkeypatch.setattr(kernel, "finish", lambda: None)

    def token(index: int) -> DeviceToken:
        if index == finish:
            return DeviceToken(10 + index, Finish.STOP) if found[-1] == 10 + index else DeviceToken(NO_TOKEN, Finish.CANCELLED)
        return DeviceToken(10 + index, Finish.NONE)

    monkeypatch.setattr(kernel, "token", token)
    assert kernel.generate((5, 6, 7), 4, chunk=3) == found
    assert launched == [3, 3, 3], "seven steps"


@pytest.mark.parametrize(("num_layers", "full_layers"), [(6, (2,)), (12, (1, 5, 9)), (15, (0, 1, 2)), (12, ())])
def test_no_epoch_has_the_tags_of_words_that_were_left_long_ago(
    kernel: Monokernel, num_layers: int, full_layers: tuple[int, ...]
) -> None:
    """Thousands of requests of one token, whose only step is an LM head; then one whose layers read words again."""
    num_tags, last = 1 << 16, num_layers - 1
    spec = SimpleNamespace(num_layers=num_layers)
    kernel.shape = SimpleNamespace(spec=spec, cache=SimpleNamespace(full_layers=full_layers))  # type: ignore[assignment]

    def layer_tag(epoch: int, layer: int) -> int:
        return (epoch * (num_layers + 1) + layer + 1) % num_tags

    left = {layer_tag(99, last), layer_tag(99, last - 1)}  # the second: streams here, where the last ones go to all ranks
    left_out, epoch = [], 100  # 99 ran its layers
    for _ in range(num_tags):
        kernel._choose_epoch(epoch, begins_at_head=True)
        head, whole = kernel._epoch, kernel._epoch + 1  # the second step, if there were one
        left_out += [epoch + 1 - 99] * (head != epoch)
        # Layer 0's are the only words that are waited for where something of another step may be, but for those of a part of
        # attention's positions: the first layer without a window left them (nobody read them), or the last one.
        assert layer_tag(whole, 0) not in left | {layer_tag(head, last)}
        if full_layers:
            assert layer_tag(whole, full_layers[0]) not in {layer_tag(99, full_layers[0]), layer_tag(99, full_layers[-1])}
        assert (head - epoch) % 2 == 0
        epoch = head + 1
    behind = {last - 1, last, num_layers}  # the third: as if nobody had written
    if full_layers:
        behind |= {0, full_layers[-1] - full_layers[0], num_layers - full_layers[0]}
    tags_of_layers = {layer % num_tags for layer in behind}
    assert left_out == [since for since in range(2, num_tags + 1) if since * (num_layers + 1) % num_tags in tags_of_layers]
    kernel._choose_epoch(epoch, begins_at_head=False)
    kernel._choose_epoch(kernel._epoch + 3, begins_at_head=True)
    assert kernel._whole_epoch == kernel._epoch - 1


def test_words_that_nobody_wrote_have_no_tag_that_is_waited_for(kernel: Monokernel) -> None:
    """They are 0, as after `recover` on one rank."""
    kernel._choose_epoch(70_000, begins_at_head=False)
    kernel._forget_epochs()
    epoch, num_bumps = 0, 0
    for _ in range(6000):
        kernel._choose_epoch(epoch, begins_at_head=True)
        assert ((kernel._epoch + 1) * 13 + 1) % (1 << 16), "layer 0 waits for the tag 0"
        num_bumps += kernel._epoch != epoch
        epoch = kernel._epoch + 1
    assert num_bumps > 0


def test_one_rank_recovers_with_epochs_from_the_beginning(kernel: Monokernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel._choose_epoch(70_000, begins_at_head=True)
    device = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device)))
    kernel.stream = SimpleNamespace(synchronize=lambda: None)
    kernel.shape = SimpleNamespace(num_ranks=1)  # type: ignore[assignment]
    host = kernel._slot.host = np.ones(1, [("abort", int), ("cancelled_tag", int)])
    filled = SimpleNamespace(fill=lambda value: None)
    kernel.kv = kernel.words = kernel._slot.state = kernel._record = filled
    kernel.recover()
    assert host.tolist() == [(0, 0)]
    assert (kernel._epoch, kernel._num_heads_alone, kernel._whole_epoch) == (0, 0, -1)


def heap_with_streams(shape: KernelShape, tag: int, has_come: Callable[[int, int], bool]) -> Any:
    """The heap of a rank in which some copies of last streams have a tag, and the others another one. Their floats are data."""
    boxes = place(shape.words.boxes.specs(), shape.num_ranks)
    words = np.random.default_rng(0).integers(1 << 63, size=sum(box.num_words for box in boxes), dtype=np.uint64)
    for box in (box for box in boxes if box.spec.name == "streams"):
        lane_words, copy_words = shape.words.replicas * shape.words.boxes.stream_copy_words, shape.words.boxes.stream_copy_words
        for lane in range(shape.spec.num_lanes):
            for copy in range(shape.words.replicas):
                row = box.row(0, lane // shape.num_lanes) + lane % shape.num_lanes * lane_words + copy * copy_words
                own = words[row : row + shape.spec.hidden_size // 2]
                wanted = tag if has_come(lane, copy) else tag + 0x100
                own &= np.uint64(~0x000000FF000000FF & 0xFFFFFFFFFFFFFFFF)
                own |= np.uint64(wanted & 0xFF | (wanted >> 8) << 32)
    return SimpleNamespace(words=words, peer_ptr=lambda rank, offset: words.ctypes.data + offset if rank == 1 else 0)


@pytest.mark.parametrize(
    ("phase", "lane", "num_missing", "head_type", "num_ranks", "late"),
    [
        (Phase.HEAD, 5, 96, HeadType.REPLICATE, 4, 2),
        (Phase.HEAD, 2, 96, HeadType.LANE, 4, 1),  # its own publisher's
        (Phase.HEAD, 0, 0, HeadType.REPLICATE, 4, 3),  # it was there: the host finds one that was asked for with it
        (Phase.HEAD, 3, 96, HeadType.VOCAB_PARALLEL, 4, 1),
        (Phase.DOWN, 0, 96, HeadType.REPLICATE, 4, 1),
        (NONE, NONE, 8, HeadType.REPLICATE, 4, 3),  # a sum or candidates: the wait knew the peer
        (NONE, NONE, 0, HeadType.REPLICATE, 4, 1),
        (Phase.HEAD, 5, 96, HeadType.REPLICATE, 1, 1),
    ],
)
def test_a_wait_that_ran_out_names_the_rank_that_was_late(
    kernel: Monokernel, phase: int, lane: int, num_missing: int, head_type: HeadType, num_ranks: int, late: int
) -> None:
    num_lanes = 8 // num_ranks
    spec = ModelSpec(
        hidden_size=128, num_layers=1, num_heads=8, num_kv_heads=8, intermediate_size=64, vocab_size=96, max_context=64,
        num_lanes=8, delay=0, head_type=head_type, shared_norm_scale=False,
    )  # fmt: skip
    first = 0 if num_ranks == 1 else num_lanes
    kernel.shape = KernelShape(spec, range(first, first + num_lanes), max_ctas=8, num_ranks=num_ranks)
    kernel.rank = 1
    kernel._heap = heap_with_streams(kernel.shape, 14, lambda lane, copy: lane < 6 or copy != 0)
    kernel._slot.state.array.view(DECODE_STATE.dtype)["abort_mirror"] = 1
    peer = 3 if phase == NONE else 0
    raw = WaitRecord(0, WaitOp.COLLECT, 0, 0, peer, num_missing, 14, 1, 10**9, cta=2, phase=phase, lane=lane).pack()
    kernel._record = SimpleNamespace(get=lambda: np.frombuffer(raw, np.uint8))
    kernel.stream = SimpleNamespace(synchronize=lambda: None)
    with pytest.raises(DeviceError) as caught:
        kernel.finish()
    assert (caught.value.record.rank, caught.value.record.peer) == (1, late)


@pytest.mark.parametrize(
    ("first_missing", "found"),
    [
        (6, (3, 64, 14 + 0x100)),
        (0, (0, 64, 14 + 0x100)),
        (8, (NO_PEER, 0, 14)),  # all have come by the time the host looks
    ],
)
def test_the_message_tells_what_is_missing(kernel: Monokernel, first_missing: int, found: tuple[int, int, int]) -> None:
    spec = ModelSpec(
        hidden_size=128, num_layers=1, num_heads=8, num_kv_heads=8, intermediate_size=64, vocab_size=96, max_context=64,
        num_lanes=8, delay=0, shared_norm_scale=False,
    )  # fmt: skip
    kernel.shape, kernel.rank = KernelShape(spec, range(2, 4), max_ctas=8, num_ranks=4), 1
    kernel._heap = heap_with_streams(kernel.shape, 14, lambda lane, copy: lane < first_missing)
    record = WaitRecord(1, WaitOp.COLLECT, 0, 0, 0, 0, 14, 14, 10**9, cta=3, phase=Phase.HEAD, lane=0)
    named = kernel._with_peer(record)
    assert (named.peer, named.num_missing, named.epoch_seen) == found


def test_a_wait_for_a_sum_names_product_and_layer(kernel: Monokernel) -> None:
    spec = ModelSpec(
        hidden_size=128, num_layers=3, num_heads=8, num_kv_heads=8, intermediate_size=64, vocab_size=96, max_context=64,
        num_lanes=8, delay=0,
    )  # fmt: skip
    kernel.shape, kernel.rank = KernelShape(spec, range(2, 4), max_ctas=8, num_ranks=4), 1
    boxes = [box.name for box in kernel.shape.words.boxes.specs()]
    for name, slot, what in (
        ("mlp", 2, "the sum of DOWN of layer 2"),
        ("attention", 0, "the sum of OUT of layer 0"),
        ("candidates", 1, "SAMPLE"),
    ):
        record = WaitRecord(1, WaitOp.COLLECT, boxes.index(name), slot, 3, 2, 14, 13, 2 * 10**9, cta=12)
        assert str(kernel._with_peer(record)).startswith(f"rank 1, thread block 12: {what} waited 2.0 s for 2 words of rank 3 (")


def test_a_wait_of_the_build_with_several_tokens_names_its_sum(kernel: Monokernel, builds: Any) -> None:
    """On two ranks a phase has a lane there, and a peer in the build of one token."""
    spec = ModelSpec(
        hidden_size=128, num_layers=3, num_heads=8, num_kv_heads=8, intermediate_size=64, vocab_size=96, max_context=64,
        num_lanes=2, delay=0,
    )  # fmt: skip
    kernel.shape, kernel.rank = KernelShape(spec, range(1), max_ctas=8, num_ranks=2), 0
    builds.large_shape = drafting_shape(kernel.shape)
    boxes = [box.name for box in builds.large_shape.words.boxes.specs()]
    for pass_tokens, name in ((1, "candidates"), (PASS_TOKENS, "pass_candidates"), (PASS_TOKENS, "pass_mlp")):
        kernel.begin((5, 6, 7), 9, SamplingParams(), prediction=())
        state: Any = kernel._slot.state
        state.array.view(DECODE_STATE.dtype)["pass_tokens"] = pass_tokens
        record = WaitRecord(0, WaitOp.COLLECT, boxes.index(name), 1, 1, 2, 14, 13, 2 * 10**9, cta=12)
        what = "SAMPLE" if name.endswith("candidates") else "the sum of DOWN of layer 1"
        assert str(kernel._with_peer(record)).startswith(f"rank 0, thread block 12: {what} waited 2.0 s for 2 words of rank 1 (")
        of_a_stream = WaitRecord(0, WaitOp.COLLECT, 0, 0, 0, 8, 14, 1, 10**9, cta=2, phase=Phase.GATE_UP, layer=1, lane=1)
        assert kernel._with_peer(of_a_stream).peer == (1 if pass_tokens == 1 else 0)


def test_a_token_is_there_when_both_words_carry_the_tag_of_the_request(kernel: Monokernel) -> None:
    ring = kernel._slot.ring = np.zeros(2 * CONTEXT, np.uint64)
    kernel._slot.ring_words = ring.data
    kernel._slot.tag = 0xFFFFFFFE
    tag, old = 0xFFFFFFFE << 32, 0xFFFFFFFD << 32
    for words in ((0, 0), (tag | 5, old), (old | 5, tag), (old | 5, old)):
        ring[6:8] = words
        assert kernel.token(3) is None
    ring[6:8] = tag | 5, tag | Finish.STOP
    assert kernel.token(3) == DeviceToken(5, Finish.STOP)
    ring[6:8] = tag | 0xFFFFFFFF, tag | Finish.CANCELLED
    assert kernel.token(3) == DeviceToken(NO_TOKEN, Finish.CANCELLED)
    assert kernel.token(2) is None


def test_what_the_last_request_left_is_read_once(kernel: Monokernel) -> None:
    kernel.begin([1, 2, 3], 4, SamplingParams())
    state: Any = kernel._slot.state
    state.array.view(DECODE_STATE.dtype)["epoch"] = 7  # the kernel
    for _ in range(2):
        assert int(kernel.state()["epoch"]) == 7
    num_reads = state.num_reads
    kernel.begin([4, 5], 4, SamplingParams())
    assert state.num_reads == num_reads, "nothing ran since"
    assert int(kernel.state()["epoch"]) == 7
    assert int(kernel.state()["token"]) == 4, "what was read before the request is not taken for its own"
    assert state.num_reads == num_reads + 1
