"""What `kog-bench prefill --stops` says a stop within a prompt waits for, by a clock that only work moves."""

from __future__ import annotations

from collections.abc import Callable

from kog_dist.bench.kernel.prefill_stops import stops

CHUNK_S, CHUNK, CHUNKS = 0.03125, 1024, 4


class Chunks:
    """Prefill of CHUNKS chunks, which asks once before each."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def run(self, should_stop: Callable[[], bool]) -> int:
        for number in range(CHUNKS):
            if should_stop():
                return number * CHUNK
            self.now_s += CHUNK_S
        return CHUNKS * CHUNK


def test_a_stop_waits_for_the_rest_of_its_chunk() -> None:
    """Eight stops: a quarter and three quarters into each chunk."""
    chunks = Chunks()
    figure = stops(chunks.run, 8, lambda: chunks.now_s)
    assert (figure["whole_ms"], figure["stops"], figure["most_ms"]) == (125.0, 8, 23.4)
    assert figure["reached"] == [1024, 1024, 2048, 2048, 3072, 3072, 4096, 4096]


def test_a_stop_after_the_end_waits_for_nothing() -> None:
    chunks = Chunks()
    runs = iter([False, False, True])

    def run(should_stop: Callable[[], bool]) -> int:
        chunks.now_s += 0.001 if next(runs) else 0.1
        return 7

    assert stops(run, 1, lambda: chunks.now_s)["most_ms"] == 0.0
