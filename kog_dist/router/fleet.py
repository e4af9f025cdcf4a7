"""All replicas that the launcher has named, each with its link."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

import zmq

from kog_dist.router.link import ReplicaLink, Served
from kog_dist.router.orders import FleetOrder
from kog_dist.router.rules import Seat
from kog_dist.rpc.messages import Welcome


class Fleet:
    """Links by replica name. `own_prefix` is how request ids of this router begin at the replicas."""

    def __init__(self, own_prefix: str) -> None:
        self.own_prefix = own_prefix
        self.served: Served | None = None  # what all of them serve, as the first one said
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[str, ReplicaLink] = {}

    def links(self) -> list[ReplicaLink]:
        """All of them, in the launcher's order."""
        return list(self._links.values())

    def link(self, name: str) -> ReplicaLink:
        """The link of a replica that exists."""
        return self._links[name]

    def seats(self, now_s: float) -> list[Seat]:
        """What the rules need to know of the replicas."""
        return [
            Seat(link.name, link.is_usable(), link.num_free(now_s), link.idle_since_s, link.busy_until_s, len(link.attempt_ids))
            for link in self._links.values()
        ]

    def num_usable(self) -> int:
        """Replicas that take requests, now or later."""
        return sum(link.is_usable() for link in self._links.values())

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What a poller should watch; changes whenever a link opens or closes."""
        return [socket for link in self._links.values() for socket in link.sockets()]

    def obey(self, order: FleetOrder, now_s: float) -> list[ReplicaLink]:
        """Make the links what the launcher says. Returns those that are closed by that; their requests are lost."""
        wanted = {replica.name: replica for replica in order.replicas}
        closed = []
        for name, link in list(self._links.items()):
            replica = wanted.get(name)
            if replica is not None and replica.generation == link.order.generation:
                link.order = replica
                continue
            link.close()
            del self._links[name]
            closed.append(link)
        for name, replica in wanted.items():
            if name not in self._links:
                self._links[name] = ReplicaLink(self._context, replica, self.own_prefix, now_s)
        return closed

    def greeted(self, link: ReplicaLink, welcome: Welcome) -> None:
        """A replica says who it is; the first that may be used says what all must serve."""
        link.greeted(welcome, self.served)
        if self.served is None and not link.is_refused():
            self.served = Served.of(welcome)

    def look(self, now_s: float, ready: Set[zmq.Socket[bytes] | int]) -> Iterator[tuple[ReplicaLink, str]]:
        """Look after the links that are in `ready` or due; yields those that have just been lost, and why."""
        for link in self.links():
            is_due = now_s >= link.next_look_s() or not ready.isdisjoint(link.sockets())
            if is_due and (reason := link.look(now_s)) is not None:
                yield link, reason

    def next_look_s(self) -> float:
        """When `look` should be called again, though no socket is readable."""
        return min((link.next_look_s() for link in self._links.values()), default=math.inf)

    def close(self) -> None:
        """Close every link."""
        for link in self._links.values():
            link.close()
        self._context.term()
