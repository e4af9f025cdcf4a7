"""The moments between a request's reception and its first token in the client: what the time to the first token is made of.

All are moments of CLOCK_MONOTONIC, which the processes of a machine share. Those of ranks are rank 0's; each is None where there
was no such moment, as of prefill in an engine without it.

| stage | what has just happened |
|---|---|
| `admitted` | checked, tokenized and in the queue (one with a grammar: the grammar was checked, too) |
| `started` | its turn has come; `queue_s` ends here |
| `submitted` | kept caches were searched for its beginning and its block is written; the doorbell comes next |
| `seen` | rank 0 has left its wait for the doorbell |
| `read` | rank 0 has read the block |
| `uploaded` | the prompt is on its way to the GPU, and cached keys and values are where prefill reads them |
| `launched` | the request is set up in the kernel, and its first launches are queued: on a GPU behind prefill |
| `prefilled` | what prefill does of the prompt is in the KV cache, and rank 0 knows it |
| `chosen` | rank 0 has the first token |
| `put` | it goes into the token ring; `ttft_s` ends here |
| `taken` | the coordinator has read it |
| `sent` | the client's socket has it |
"""

from __future__ import annotations

import enum
from typing import Final


class RankStage(enum.IntEnum):
    """Stages that a rank stamps in its part of the control page."""

    SEEN = 0
    READ = 1
    UPLOADED = 2
    LAUNCHED = 3
    PREFILLED = 4
    CHOSEN = 5


RANK_STAGES: Final = tuple(stage.name.lower() for stage in RankStage)
STAGES: Final = ("admitted", "started", "submitted", *RANK_STAGES, "put", "taken", "sent")
