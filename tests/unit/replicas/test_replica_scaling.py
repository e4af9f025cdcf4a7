"""How many replicas there are, as requests come and go."""

from __future__ import annotations

from kog_dist.launch.replicas.scaling import UP_AFTER_S, Scaler

DOWN_AFTER_S = 60.0


class Fleet:
    """A scaler whose decisions are carried out at once; every step takes a tenth of a second."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.now_s = 0.0
        self.num_replicas = num_replicas
        self.is_settled = True
        self.scaler = Scaler(1, 4, DOWN_AFTER_S, 0.0)
        self.changes: list[tuple[float, int]] = []

    def run(self, seconds: float, *, waiting: int, running: int) -> None:
        for _ in range(round(seconds * 10)):
            self.now_s = round(self.now_s + 0.1, 1)
            change = self.scaler.decide(
                self.now_s, num_replicas=self.num_replicas, num_waiting=waiting, num_running=running, is_settled=self.is_settled
            )  # fmt: skip
            self.num_replicas += change
            if change:
                self.changes.append((self.now_s, change))


def test_one_more_for_every_second_of_waiting_up_to_the_bound() -> None:
    fleet = Fleet()
    fleet.run(10, waiting=5, running=1)
    assert [change for _, change in fleet.changes] == [1, 1, 1]
    assert fleet.changes[0][0] == UP_AFTER_S + 0.1
    assert fleet.num_replicas == 4


def test_short_bursts_change_nothing() -> None:
    fleet = Fleet()
    for _ in range(20):
        fleet.run(UP_AFTER_S - 0.2, waiting=3, running=1)
        fleet.run(0.1, waiting=0, running=1)
    assert fleet.changes == []


def test_nothing_is_decided_while_a_replica_starts() -> None:
    fleet = Fleet()
    fleet.is_settled = False
    fleet.run(30, waiting=5, running=1)
    assert fleet.changes == []
    fleet.is_settled = True
    fleet.run(0.1, waiting=5, running=1)
    assert fleet.num_replicas == 2, "they have been waiting long enough"


def test_one_fewer_after_a_minute_in_which_it_was_not_needed() -> None:
    fleet = Fleet(3)
    fleet.run(0.1, waiting=0, running=3)
    fleet.run(DOWN_AFTER_S - 1, waiting=0, running=2)
    assert fleet.num_replicas == 3
    fleet.run(1, waiting=0, running=2)
    assert fleet.num_replicas == 2
    fleet.run(10 * DOWN_AFTER_S, waiting=0, running=2)
    assert fleet.num_replicas == 2
    fleet.run(10 * DOWN_AFTER_S, waiting=0, running=0)
    assert fleet.num_replicas == 1


def test_being_needed_once_a_minute_is_enough() -> None:
    fleet = Fleet(2)
    for _ in range(10):
        fleet.run(DOWN_AFTER_S - 5, waiting=0, running=1)
        fleet.run(0.1, waiting=0, running=2)
    assert fleet.changes == []


def test_below_the_lower_bound_it_grows_without_requests() -> None:
    fleet = Fleet(0)
    fleet.run(1, waiting=0, running=0)
    assert fleet.num_replicas == 1
