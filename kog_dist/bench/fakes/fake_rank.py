"""A fake rank 0, for `kog-bench first-token`, behind a real coordinator: what the host of a GPU does, which is waited for.

`python -m kog_dist.bench.fakes.fake_rank CONTROL_FD PLAY`; it ends when its standard input closes.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Mapping

from kog_dist.records import dataclass
from kog_dist.runtime.control import ControlPage, RankState
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.wait import Deadline

_TOKEN_ID = 7
_LAUNCHED_MS = 0.4  # from the prompt's copy on: what queueing takes a host, while the GPU works
_TOKEN_MS = 1.0
_IDLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Play:
    """How long the GPU works, in milliseconds."""

    chunks_ms: Mapping[int, float]  # of all chunks of a prompt, by its tokens; other prompts take those of the next longer one
    rest_ms: float  # of prefill behind the last chunk: the last token's last layer, and the copy to the cache
    head_ms: float  # from there to the first token

    def to_json(self) -> str:
        """One line for the command line."""
        return json.dumps([list(self.chunks_ms.items()), self.rest_ms, self.head_ms])

    @classmethod
    def from_json(cls, text: str) -> Play:
        """The inverse of `to_json`."""
        chunks_ms, rest_ms, head_ms = json.loads(text)
        return cls(dict(chunks_ms), rest_ms, head_ms)

    def chunks_of(self, num_tokens: int) -> float:
        """Milliseconds of a prompt's chunks."""
        return self.chunks_ms[min((length for length in self.chunks_ms if length >= num_tokens), default=max(self.chunks_ms))]


class FakeRank:
    """As the CUDA engine's host: `CudaRank`, `PromptRun` and `Prefill` say which stage is told when."""

    def __init__(self, control: ControlPage, play: Play) -> None:
        self._control, self._play, self._seen = control, play, 0

    def run(self) -> None:
        """Serve until standard input closes or the engine is aborted."""
        self._control.heed_rousing(0)
        self._control.set_state(0, RankState.READY)
        while not select.select([sys.stdin], [], [], 0)[0] and not self._control.aborted():
            self._control.wait_doorbell(0, self._seen, Deadline.after(_IDLE_S), when_roused=lambda: None)
            if self._control.doorbell() > self._seen:
                self._seen = self._control.doorbell()
                self._serve(self._seen)
                self._control.set_read(0, self._seen)

    def _serve(self, seq: int) -> None:
        control, play = self._control, self._play
        control.stamp(0, RankStage.SEEN)
        request = control.read_request(seq)
        control.stamp(0, RankStage.READ)
        if request.only_copies:
            return
        num_prompt = len(request.prompt)
        control.set_progress(0, seq, request.kv.num_cached)
        control.stamp(0, RankStage.UPLOADED)
        begin_ns, chunks_ms = time.monotonic_ns(), play.chunks_of(num_prompt)
        _work(begin_ns, min(_LAUNCHED_MS, chunks_ms))
        self._tell(RankStage.LAUNCHED)
        _work(begin_ns, chunks_ms)
        control.set_progress(0, seq, num_prompt - 1)
        _work(begin_ns, chunks_ms + play.rest_ms)
        self._tell(RankStage.PREFILLED)
        _work(begin_ns, chunks_ms + play.rest_ms + play.head_ms)
        control.stamp(0, RankStage.CHOSEN)
        last = request.max_tokens - 1
        for index in range(last):
            control.ring.put(seq, index, _TOKEN_ID, time.monotonic_ns(), None, Finish.NONE)
            _work(time.monotonic_ns(), _TOKEN_MS)
        control.ring.put(seq, last, _TOKEN_ID, time.monotonic_ns(), None, Finish.LENGTH)

    def _tell(self, stage: RankStage) -> None:
        self._control.stamp(0, stage)
        self._control.ring.announce()


def _work(begin_ns: int, ms: float) -> None:
    """Return so long after `begin_ns`; the host of a GPU does not sleep either."""
    end_ns = begin_ns + round(1e6 * ms)
    while time.monotonic_ns() < end_ns:
        os.sched_yield()


if __name__ == "__main__":
    FakeRank(ControlPage.from_fd(int(sys.argv[1])), Play.from_json(sys.argv[2])).run()
