"""What all ranks must have in common before they exchange anything, and the check of it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kog_dist.errors import ConfigError
from kog_dist.runtime.abi import abi_digest
from kog_dist.runtime.topology import Rendezvous
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint


def common_terms(args: WorkerArgs, checkpoint: Checkpoint, plan_digest: str) -> dict[str, str]:
    """The terms of every kind of rank, by the name to show when ranks differ; an engine adds its own."""
    headers = "".join(file.header_sha256 for file in checkpoint.files)
    return {
        "world size": str(args.info.world_size),
        "model": checkpoint.spec.digest(),
        "checkpoint files": hashlib.sha256(headers.encode()).hexdigest(),
        "plan": plan_digest,
        "rounding of weights": f"{args.quantize}, head {args.quantize_head}",
        "KV cache type": args.kv_dtype,
        "number of KV caches": str(args.num_kv_caches),
        "requests that decode together": str(args.parallel),
        "memory for kept prefixes": f"{args.kept_bytes}, {args.kept_host_bytes}",
        "positions that windowed layers keep": str(args.whole_windows),
        "use of prefill": str(args.prefill),
        "use of drafts": str(args.drafts),
        "memory layout": f"{abi_digest():016x}",
    }


def agree(rendezvous: Rendezvous, terms: dict[str, str], deadline: Deadline) -> None:
    """Return when all ranks have equal `terms`. Collective. Raises ConfigError naming the ranks that differ and in what."""
    everyone = [json.loads(raw) for raw in rendezvous.all_gather_bytes(json.dumps(terms).encode(), deadline)]
    for name, value in terms.items():
        differing = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != everyone[0].get(name)]
        if differing:
            names = f"{', '.join(map(str, differing))} {'differs' if len(differing) == 1 else 'differ'}"
            mine = f"rank {rendezvous.rank} has {value:.16}, rank 0 has {everyone[0].get(name, 'none'):.16}"
            raise ConfigError(f"the ranks do not agree on the {name}: {names} from rank 0 ({mine}); start all from one version")
