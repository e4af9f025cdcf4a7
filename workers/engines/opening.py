"""How an engine opens its model, on whatever device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kog_dist.errors import ConfigError
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.formats.rounded_cache import RoundedCache
from kog_dist.runtime.notes import note
from kog_dist.workers.arguments import WorkerArgs


def opened(args: WorkerArgs, max_context: int) -> Checkpoint:
    """A rank's checkpoint. Raises CheckpointError; ConfigError for a context of more than `max_context`, the control page's."""
    checkpoint = open_checkpoint(
        Path(args.model), verify=args.verify, context=args.context, quantize=args.quantize, quantize_head=args.quantize_head
    )
    if checkpoint.spec.max_context > max_context:
        raise ConfigError(
            f"rank {args.info.rank}: the model's context is {checkpoint.spec.max_context} tokens, but the control page was made "
            f"for {max_context}; the checkpoint was changed during start-up"
        )
    return replace(checkpoint, cache=RoundedCache.of(checkpoint, args.rounded_cache_bytes, note))
