"""The event that tells all about an engine, or about a router and the engines behind it."""

from __future__ import annotations

from kog_dist.records import dataclass
from kog_dist.rpc.fields import array, checked, choice, flag, optional
from kog_dist.rpc.messages.checks import COUNT, ID, NAME, SECONDS, Checked
from kog_dist.rpc.messages.codes import EngineState


@dataclass(frozen=True, slots=True)
class StatusReport(Checked):
    """The engine's state and counters since its start. Waiting requests are listed in the order in which they will run.

    `running`: of the requests that are decoded the one that began first; `also_running`: the others; at most `parallel` in all.
    `running_position`: tokens of the first that are in the KV cache; below `running_prompt_tokens` it is prefilling.
    A router's `parallel` is the sum of its replicas'.
    `used_positions`: tokens of all of them in KV caches.
    `prefill`: whether prompts go through prefill, in blocks of many tokens, on all ranks (of all replicas).
    `own_sampling`: the model's own sampling for people, which HTTP uses where a request says nothing; empty for a router.
    `kept_...`: blocks of `kept_block_tokens` tokens of earlier requests, used and as many as there is room for, in the memory of
    the devices and behind it in the hosts'; 0: there are none, or not before the first request. `kept_ring`: positions that
    windowed layers keep, where these are not all, so that requests go on behind the last sequence alone. `kept_states`: copies of
    a state that every token changes.
    `epochs_waited`, `waited_s`: how often and how long each rank has waited for peers; None for ranks that do not count it.
    """

    state: EngineState = checked(choice(EngineState))
    instance: str = checked(NAME)
    model: str = checked(NAME)
    build: str = checked(NAME)
    pid: int = checked(COUNT)
    world_size: int = checked(COUNT)
    rank_states: tuple[str, ...] = checked(array(NAME, 4096))
    beat_ages_s: tuple[float, ...] = checked(array(SECONDS, 4096))
    uptime_s: float = checked(SECONDS)
    running: str | None = checked(optional(ID))
    waiting: tuple[str, ...] = checked(array(ID, 4096))
    queue_limit: int = checked(COUNT)
    num_completed: int = checked(COUNT)
    num_cancelled: int = checked(COUNT)
    num_failed: int = checked(COUNT)
    num_refused: int = checked(COUNT)
    num_dropped_clients: int = checked(COUNT)
    num_bad_messages: int = checked(COUNT)
    num_tokens: int = checked(COUNT)
    replica_names: tuple[str, ...] = checked(array(NAME, 4096), default=())  # of a router; the next four are in this order
    replica_states: tuple[str, ...] = checked(array(NAME, 4096), default=())  # with the reason, where it is not in use
    replica_addresses: tuple[str, ...] = checked(array(NAME, 4096), default=())
    replica_running: tuple[str, ...] = checked(array(NAME, 4096), default=())  # ids with blanks between, empty when idle
    replica_ranks: tuple[int, ...] = checked(array(COUNT, 4096), default=())  # 0: it has not said yet
    client_queue_limit: int = checked(COUNT, default=0)  # of the waiting requests of one connection
    num_expired: int = checked(COUNT, default=0)  # requests that their own deadline ended; not counted elsewhere
    running_position: int = checked(COUNT, default=0)
    running_prompt_tokens: int = checked(COUNT, default=0)
    rank_places: tuple[str, ...] = checked(array(NAME, 4096), default=())  # device and CPUs of each rank
    epochs_waited: tuple[int | None, ...] = checked(array(optional(COUNT), 4096), default=())
    waited_s: tuple[float | None, ...] = checked(array(optional(SECONDS), 4096), default=())
    prefill: bool = checked(flag, default=False)
    own_sampling: str = checked(NAME, default="")
    kept_block_tokens: int = checked(COUNT, default=0)
    kept_used: int = checked(COUNT, default=0)
    kept_slots: int = checked(COUNT, default=0)
    kept_host_used: int = checked(COUNT, default=0)
    kept_host_slots: int = checked(COUNT, default=0)
    kept_ring: int = checked(COUNT, default=0)
    kept_states_used: int = checked(COUNT, default=0)
    kept_states: int = checked(COUNT, default=0)
    also_running: tuple[str, ...] = checked(array(ID, 4096), default=())
    parallel: int = checked(COUNT, default=1)
    used_positions: int = checked(COUNT, default=0)

    @property
    def all_running(self) -> tuple[str, ...]:
        """Ids of the requests that are decoded."""
        return () if self.running is None else (self.running, *self.also_running)

    @property
    def num_running(self) -> int:
        """How many there are."""
        return len(self.all_running)
