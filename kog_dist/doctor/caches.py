"""What engines keep on disk for their next start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kog_dist.doctor.report import Finding, ok, warning
from kog_dist.system.files import is_ours_alone

_GIB = 2**30


def rounded_weights() -> Iterator[Finding]:
    """Of which models there are weights that `--quantize` has rounded, and what they take."""
    from kog_dist.model.formats.rounded_cache import kept_models, rounded_folder

    try:
        root = rounded_folder()
    except OSError as error:
        yield warning(f"weights that --quantize rounds cannot be kept: {error.strerror}")
        return
    existing = next((parent for parent in (root, *root.parents) if parent.exists()), Path("/"))
    models = kept_models(root)
    details = {
        "folder": str(root),
        "models": [{"model": kept.model, "format": kept.form, "bytes": kept.num_bytes} for kept in models],
    }
    if not os.access(existing, os.W_OK | os.X_OK) or not is_ours_alone(existing):
        yield warning(
            f"weights that --quantize rounds cannot be kept in {root}: {existing} cannot be written, or others can write to it; "
            "set XDG_CACHE_HOME",
            **details,
        )
    elif models:
        total = sum(kept.num_bytes for kept in models)
        count = f"{len(models)} model{'s' if len(models) > 1 else ''}"
        yield ok(
            f"weights of {count} that --quantize has rounded take {total / _GIB:.1f} GiB in {root}; remove it to be rid of them",
            **details,
        )
    else:
        yield ok(f"weights that --quantize rounds will be kept in {root}", **details)
