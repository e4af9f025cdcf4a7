"""A request between its client and the replicas that are tried for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kog_dist.router.affinity import Affinity, conversation_keys, ids_keys, text_keys
from kog_dist.router.link import ReplicaLink
from kog_dist.router.rules import Waiting
from kog_dist.rpc.messages import Generate

BYTES_PER_ID = 8  # what a waiting token id counts for


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One request of a client, until its terminal event. Times are on the monotonic clock."""

    peer: bytes
    message: Generate
    arrived_s: float
    keys: tuple[bytes, ...] = ()  # of the prompt or the conversation
    homes: tuple[str, ...] = ()  # the replicas that have its beginning
    last_sent_ns: int = 0
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
        if message.conversation is not None:
            keys = conversation_keys(message.conversation)
        else:
            keys = ids_keys(message.prompt_ids) if message.prompt_ids is not None else text_keys(message.prompt or "")
        return cls(peer, message, now_s, keys, affinity.find(keys), round(now_s * 1e9))

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
        return Waiting(self.request_id, self.arrived_s, self.homes, self.avoid)

    def keep(self, text: str, token_ids: list[int]) -> None:
        """Remember a part of the answer, which the next request of the conversation will begin with."""
        self.is_streamed = True
        self.num_tokens += len(token_ids)
        if self.message.conversation is None:
            self.answer_text.append(text)
            self.answer_ids += token_ids

    def all_keys(self) -> tuple[bytes, ...]:
        """Keys of prompt and answer together: what the replica has cached now."""
        if self.message.conversation is not None:
            return self.keys
        if self.message.prompt_ids is not None:
            return ids_keys([*self.message.prompt_ids, *self.answer_ids])
        return text_keys((self.message.prompt or "") + "".join(self.answer_text))


class RequestBook:
    """All requests that are not finished: waiting here, or at a replica under an attempt's id."""

    def __init__(self) -> None:
        self.unfinished: dict[str, RoutedRequest] = {}  # by the client's id, in the order of arrival
        self.attempts: dict[str, RoutedRequest] = {}  # those at a replica, by their name there
        self.waiting: dict[str, RoutedRequest] = {}  # by the client's id, in the order in which they will go

    def arrive(self, request: RoutedRequest) -> None:
        """A new request, at the end of the queue."""
        self.unfinished[request.request_id] = self.waiting[request.request_id] = request

    def start(self, request: RoutedRequest, link: ReplicaLink, attempt_id: str, now_s: float) -> None:
        """A waiting request is at a replica from now on."""
        del self.waiting[request.request_id]
        request.link, request.attempt_id, request.waited_s = link, attempt_id, now_s - request.arrived_s
        self.attempts[attempt_id] = request
        link.attempt_ids.add(attempt_id)

    def wait_again(self, request: RoutedRequest) -> None:
        """Back to the head of the queue; not to the replica where it just was, if there is another."""
        assert request.link is not None, "it was at a replica"
        del self.attempts[request.attempt_id]
        request.avoid = frozenset({request.link.name})
        request.link, request.attempt_id = None, ""
        self.waiting = {request.request_id: request, **self.waiting}

    def find(self, request_id: str) -> RoutedRequest | None:
        """See `OpenRequestBook`."""
        return self.unfinished.get(request_id)

    def remove(self, request: RoutedRequest) -> bool:
        """See `OpenRequestBook`."""
        if self.unfinished.get(request.request_id) is not request:
            return False
        del self.unfinished[request.request_id]
        self.waiting.pop(request.request_id, None)
        self.attempts.pop(request.attempt_id, None)
        return True

    def of_client(self, peer: bytes) -> list[RoutedRequest]:
        """See `OpenRequestBook`."""
        return [request for request in self.unfinished.values() if request.peer == peer]

    def at(self, link: ReplicaLink) -> list[RoutedRequest]:
        """All requests at a replica."""
        return [request for request in self.attempts.values() if request.link is link]

    def waiting_bytes(self) -> int:
        """Memory of the prompts that wait, roughly."""
        return sum(request.num_bytes for request in self.waiting.values())
