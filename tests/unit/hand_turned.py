"""A coordinator whose loop, ranks, clients and clock are moved by hand: each test is one interleaving."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import RequestError
from kog_dist.model.spec import ModelSpec
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.listener import Delivery, RpcListener
from kog_dist.rpc.messages import Event, Generate, Request
from kog_dist.runtime.control import ControlPage, KvLayout, RankState
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.workers.coordinator.arguments import CoordinatorArgs
from kog_dist.workers.coordinator.loop import Coordinator
from kog_dist.workers.coordinator.model_folder import ModelFolder

CONTEXT = 24
ALPHABET = 2  # token ids 1 and 2 are the letters a and b; 0 ends an answer
WORLD_SIZE = 2
NUM_KV_CACHES = 2
MS = 1_000_000
PEERS = [b"p0", b"p1", b"p2"]


def answer_of(prompt: Sequence[int]) -> list[int]:
    """What the model says: any fixed function of the prompt will do."""
    state = sum((i + 1) * token_id for i, token_id in enumerate(prompt)) + 1
    answer = []
    for _ in range(CONTEXT):
        state = state * 75 % 65_537
        answer.append(0 if state % 11 == 0 else 1 + state % ALPHABET)
    return answer


class Letters:
    """A tokenizer of two letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 1 for letter in text]

    def stream(self, after: Sequence[int]) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return chr(token_id - 1 + ord("a")) if token_id else ""

    def flush(self) -> str:
        return ""

    def special_name(self, token_id: int) -> str:
        return ""


class Wire:
    """Stands in for RpcListener: what clients sent, and what reached each of them."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.num_bad_messages = 0
        self.inbox: list[tuple[bytes, Request]] = []
        self.delivered: dict[bytes, list[Event]] = defaultdict(list)
        self.room = dict.fromkeys(PEERS, 10**9)
        self.gone: set[bytes] = set()

    def receive(self, max_messages: int, on_generate: Callable[[], None]) -> list[tuple[bytes, Request]]:
        taken, self.inbox = self.inbox[:max_messages], self.inbox[max_messages:]
        for _, message in taken:
            if isinstance(message, Generate):
                on_generate()
        return taken

    def send(self, peer: bytes, event: Event) -> Delivery:
        if peer in self.gone:
            return Delivery.GONE
        if self.room[peer] <= 0:
            return Delivery.FULL
        self.room[peer] -= 1
        self.delivered[peer].append(event)
        return Delivery.TAKEN

    def drop(self, peer: bytes, last: Sequence[Event]) -> None:
        self.delivered[peer] += last
        self.room[peer] = -(10**9)

    def is_behind(self, peer: bytes) -> bool:
        return self.room[peer] < 10**6

    def flush(self) -> list[bytes]:
        return []

    def has_input(self) -> bool:
        return bool(self.inbox)

    has_backlog = False

    def close(self, linger_s: float = 0.0) -> None:
        """Nothing to close."""


class Texts:
    """Stands in for TextReader: texts above a length are read when a test says so."""

    fds: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.longest_at_once = CONTEXT
        self._readings: list[tuple[Any, Callable[[], DecodeRequest]]] = []
        self._read: list[tuple[Any, DecodeRequest | BaseException]] = []

    @property
    def askers(self) -> list[Any]:
        return [asker for asker, _ in (*self._read, *self._readings)]

    def start(self) -> None:
        """There is no thread."""

    def is_for(self, message: Generate) -> bool:
        return message.prompt is not None and len(message.prompt) > self.longest_at_once

    def ask(self, asker: Any, client: bytes, read: Callable[[], DecodeRequest]) -> None:
        self._readings.append((asker, read))

    def forget(self, asker: Any) -> None:
        self._read = [one for one in self._read if one[0] is not asker]
        self._readings = [one for one in self._readings if one[0] is not asker]

    def read(self) -> None:
        """The first one that waits."""
        for asker, read in self._readings[:1]:
            try:
                self._read.append((asker, read()))
            except RequestError as error:
                self._read.append((asker, error))
        del self._readings[:1]

    def has_answer(self) -> bool:
        return bool(self._read)

    def answer(self) -> tuple[Any, DecodeRequest | BaseException] | None:
        return self._read.pop(0) if self._read else None

    def close(self) -> None:
        """Nothing to close."""


class Ranks:
    """Rank 0 decoding one token at a time, and the words of the others."""

    def __init__(self, control: ControlPage, num_kv_caches: int) -> None:
        self.control = control
        self.seq, self.index = 0, 0
        self.request: DecodeRequest | None = None
        self.uses: list[DecodeRequest] = []
        self.forced: list[int] = []  # by the masks of the current request
        self.now_ns = 0
        self._caches: list[list[int]] = [[] for _ in range(num_kv_caches)]

    def become_ready(self) -> None:
        for rank in range(WORLD_SIZE):
            self.control.set_kv_layout(rank, KvLayout(len(self._caches)))
            self.control.set_state(rank, RankState.READY)

    def decode(self, num_tokens: int, *, is_faulty: bool = False) -> None:
        """Prefill at once, then decode; does nothing while there is nothing to do."""
        for _ in range(num_tokens):
            if self.request is None and not self.begin():
                return
            self._decode_one(is_faulty=is_faulty)

    def begin(self) -> bool:
        """Take the next request, if there is one; its prefill stands where its cached prefix ends."""
        if self.control.doorbell() == self.seq or self.control.aborted():
            return False
        self.seq, self.index, self.forced = self.seq + 1, 0, []
        request = self.request = self.control.read_request(self.seq)
        self.uses.append(request)
        use = request.kv
        kept = self._caches[use.source][: use.num_cached]
        assert kept == list(request.prompt[: use.num_cached]), "the cache holds what the coordinator says"
        assert use.num_cached < len(request.prompt), "the last prompt token is decoded"
        self._caches[use.cache] = kept
        self.control.set_progress(0, self.seq, use.num_cached)
        return True

    def prefill(self, position: int) -> None:
        """The prompt is read up to `position`."""
        assert self.request is not None
        self._caches[self.request.kv.cache] = list(self.request.prompt[:position])
        self.control.set_progress(0, self.seq, position)

    def _decode_one(self, *, is_faulty: bool) -> None:
        request = self.request
        assert request is not None
        token_id, finish, logprobs = answer_of(request.prompt)[self.index], Finish.NONE, None
        if request.mask_epoch:
            mask = self.control.masks.get(request.mask_epoch + self.index)
            token_id, finish = (NO_TOKEN, Finish.NO_MASK) if mask is None else (int(mask[0]).bit_length() - 1, Finish.NONE)
            self.forced.append(token_id)
        if request.sampling.logprobs is not None and token_id != NO_TOKEN:
            num_top = request.sampling.logprobs
            logprobs = TokenLogprobs(-0.5 * token_id, tuple(range(num_top)), tuple(-0.25 * i for i in range(num_top)))
        if self.control.cancelled(self.seq):
            token_id, finish, logprobs = NO_TOKEN, Finish.CANCELLED, None
        elif is_faulty:
            token_id, finish, logprobs = NO_TOKEN, Finish.NUMERICAL_FAULT, None
        elif token_id in request.stop_ids and not request.ignore_eos:
            finish = Finish.STOP
        elif self.index == request.max_tokens - 1 and finish is Finish.NONE:
            finish = Finish.LENGTH
        if finish is not Finish.CANCELLED or self.index:
            answer = self.forced if request.mask_epoch else answer_of(request.prompt)
            self._caches[request.kv.cache] = [*request.prompt, *answer[: self.index]]
        self.control.set_progress(0, self.seq, len(self._caches[request.kv.cache]))
        self.control.ring.put(self.seq, self.index, token_id, self.now_ns, None, finish, logprobs)
        self.index += 1
        if finish is not Finish.NONE:
            self.request = None
            if is_faulty:
                self._caches = [[] for _ in self._caches]
            for rank in range(WORLD_SIZE):
                self.control.set_read(rank, self.seq)


class HandTurned:
    """One engine and its clients. Nothing moves by itself, not even the clock."""

    def __init__(self, *, queue_limit: int = 64, client_queue_limit: int = 16) -> None:
        spec = ModelSpec(
            hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=8, vocab_size=ALPHABET + 1,
            max_context=CONTEXT,
        )  # fmt: skip
        self.control = ControlPage.create(WORLD_SIZE, CONTEXT, vocab_size=ALPHABET + 1)
        self.wire = Wire()
        self.ranks = Ranks(self.control, NUM_KV_CACHES)
        self.now_ns = 10**12
        model = ModelFolder("letters", Path("letters"), spec, cast(Tokenizer, Letters()), (0,))
        args = CoordinatorArgs(
            "unit",
            "unit",
            -1,
            -1,
            "unit",
            "unit",
            -1,
            drain_s=1e6,
            queue_limit=queue_limit,
            client_queue_limit=client_queue_limit,
        )
        self.coordinator = Coordinator(args, self.control, model, cast(RpcListener, self.wire), clock=lambda: self.now_ns)
        self.texts = Texts()
        for user in (self.coordinator, self.coordinator.requests, self.coordinator._admission):
            user._texts = cast(Any, self.texts)

    def pass_ms(self, milliseconds: float) -> None:
        self.now_ns += round(milliseconds * MS)

    def ask(self, peer: bytes, request_id: str, prompt: str | None = "ab", **fields: Any) -> None:
        """A client sends a request; the coordinator reads it."""
        self.wire.inbox.append((peer, Generate(request_id, prompt, **fields)))
        self.coordinator.turn()

    def decode(self, num_tokens: int = CONTEXT) -> None:
        """Rank 0 decodes; the coordinator hands each token out."""
        for _ in range(num_tokens):
            self.ranks.now_ns = self.now_ns
            self.ranks.decode(1)
            self.coordinator.turn()

    def events(self, request_id: str) -> list[Any]:
        """What the client of a request was told about it."""
        everything = [event for events in self.wire.delivered.values() for event in events]
        return [event for event in everything if getattr(event, "request_id", None) == request_id]

    def close(self) -> None:
        self.control.close()
