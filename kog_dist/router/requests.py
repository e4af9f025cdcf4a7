"""A request between its client and the replicas that are tried for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field

from kog_dist.records import dataclass
from kog_dist.router.affinity import Affinity, conversation_key, ids_keys, text_keys
from kog_dist.router.link import ReplicaLink
from kog_dist.router.rules import Waiting
from kog_dist.rpc.messages import Done, Generate
from kog_dist.runtime.rounds import Rounds

BYTES_PER_ID = 8  # what a waiting token id counts for
_BLOCKS_TO_TELL = 4


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One request of a client, until its terminal event. Times are on the monotonic clock."""

    peer: bytes
    message: Generate
    arrived_s: float
    keys: tuple[bytes, ...] = ()  # of the prompt, a block each
    known: Mapping[str, int] = field(default_factory=dict)  # blocks of it that replicas have cached, see `Affinity.find`
    last_sent_ns: int = 0
    passed_s: float | None = None  # when a free replica was first left to others for its sake
    link: ReplicaLink | None = None  # None while it waits here
    attempt_id: str = ""  # its name at the replica; another one for every attempt
    waited_s: float = 0.0  # from arrival to the attempt that counts
    is_accepted: bool = False
    is_streamed: bool = False  # the client has been sent a part of the answer
    num_tokens: int = 0
    lost: list[str] = field(default_factory=list)  # names of replicas that were lost with it
    avoid: frozenset[str] = frozenset()
    answer_text: list[str] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)

    @classmethod
    def arrived(cls, peer: bytes, message: Generate, affinity: Affinity, now_s: float) -> RoutedRequest:
        """A request that has just come."""
        if message.prompt_ids is not None:
            keys = ids_keys(message.prompt_ids, message.cache_salt)
        else:
            keys = text_keys(message.prompt or "", message.cache_salt)
        known = affinity.find(keys)
        if message.conversation is not None:  # who has served it has all of it, or had
            homes = affinity.find([conversation_key(message.conversation, message.cache_salt)])
            known = {**dict.fromkeys(homes, max(1, len(keys))), **{name: known[name] for name in known if name not in homes}}
        return cls(peer, message, now_s, keys, known, last_sent_ns=round(now_s * 1e9))

    @property
    def request_id(self) -> str:
        """The client's name for it."""
        return self.message.request_id

    @property
    def num_bytes(self) -> int:
        """Memory of its prompt, roughly."""
        return len(self.message.prompt or "") + BYTES_PER_ID * len(self.message.prompt_ids or ())

    @property
    def deadline_s(self) -> float:
        """When its client does not want it any more; `math.inf` for never."""
        return math.inf if self.message.deadline_s is None else self.arrived_s + self.message.deadline_s

    def waiting(self) -> Waiting:
        """What the rules need to know of it."""
        return Waiting(self.request_id, self.passed_s, self.known, max(1, len(self.keys)), self.avoid)

    def block_s(self, done: Done) -> float | None:
        """Seconds that its replica took to compute a block of the prompt; None if there were too few to tell."""
        num_blocks = len(self.keys) * (1 - done.num_cached_tokens / max(1, done.num_prompt_tokens))
        return None if num_blocks < _BLOCKS_TO_TELL or done.prefill_s is None else done.prefill_s / num_blocks

    def keep(self, text: str, token_ids: list[int]) -> None:
        """Remember a part of the answer, which the next request of the conversation will begin with."""
        self.is_streamed = True
        self.num_tokens += len(token_ids)
        self.answer_text.append(text)
        self.answer_ids += token_ids

    def seen_by(self, name: str, affinity: Affinity) -> None:
        """A replica has, or will have, what has come of prompt and answer until now in its cache."""
        message = self.message
        if message.prompt_ids is not None:
            keys = ids_keys([*message.prompt_ids, *self.answer_ids], message.cache_salt) if self.answer_ids else self.keys
        else:
            whole = (message.prompt or "") + "".join(self.answer_text)
            keys = text_keys(whole, message.cache_salt) if self.answer_text else self.keys
        affinity.remember(keys, name)
        if message.conversation is not None:
            affinity.remember([conversation_key(message.conversation, message.cache_salt)], name)


class RequestBook:
    """All requests that are not finished: waiting here, or at a replica under an attempt's id."""

    def __init__(self) -> None:
        self.unfinished: dict[str, RoutedRequest] = {}  # by the client's id, in the order of arrival
        self.attempts: dict[str, RoutedRequest] = {}  # those at a replica, by their name there
        self.waiting: dict[str, RoutedRequest] = {}  # by the client's id
        self._turns = Rounds[RoutedRequest]()  # of these

    def arrive(self, request: RoutedRequest) -> None:
        """A new request, at the end of its client's line."""
        self.unfinished[request.request_id] = self.waiting[request.request_id] = request
        self._turns.add(request.peer, request)

    def in_turns(self) -> Iterator[RoutedRequest]:
        """Those that wait, in the order in which they will go if nothing else comes."""
        return iter(self._turns)

    def start(self, request: RoutedRequest, link: ReplicaLink, attempt_id: str, now_s: float) -> None:
        """A waiting request is at a replica from now on."""
        del self.waiting[request.request_id]
        self._turns.take(request.peer, request)
        request.link, request.attempt_id, request.waited_s = link, attempt_id, now_s - request.arrived_s
        self.attempts[attempt_id] = request
        link.attempt_ids.add(attempt_id)

    def wait_again(self, request: RoutedRequest) -> None:
        """Back to the head of the queue; not to the replica where it just was, if there is another."""
        assert request.link is not None, "it was at a replica"
        del self.attempts[request.attempt_id]
        request.avoid = frozenset({request.link.name})
        request.link, request.attempt_id = None, ""
        self.waiting[request.request_id] = request
        self._turns.add_first(request.peer, request)

    def find(self, request_id: str) -> RoutedRequest | None:
        """See `OpenRequestBook`."""
        return self.unfinished.get(request_id)

    def remove(self, request: RoutedRequest) -> bool:
        """See `OpenRequestBook`."""
        if self.unfinished.get(request.request_id) is not request:
            return False
        del self.unfinished[request.request_id]
        if self.waiting.pop(request.request_id, None) is not None:
            self._turns.remove(request.peer, request)
        self.attempts.pop(request.attempt_id, None)
        return True

    def of_client(self, peer: bytes) -> list[RoutedRequest]:
        """See `OpenRequestBook`."""
        return [request for request in self.unfinished.values() if request.peer == peer]

    def at(self, link: ReplicaLink) -> list[RoutedRequest]:
        """All requests at a replica."""
        return [request for request in self.attempts.values() if request.link is link]

    def num_waiting_of(self, peer: bytes) -> int:
        """Requests of one connection that wait."""
        return self._turns.num_of(peer)

    def waiting_bytes(self, peer: bytes | None = None) -> int:
        """Memory of the prompts that wait, roughly; of those of one connection."""
        return sum(request.num_bytes for request in self.waiting.values() if peer in (None, request.peer))
