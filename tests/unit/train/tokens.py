"""A data folder as `prepare` writes it, made of counted-up token ids: what a nano model learns within ten steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def write_tokens(folder: Path, *, vocab_size: int = 320, num_tokens: int = 4000) -> Path:
    """Write `train-000.npy`, `held_out.npy` and the counts of `sources.json`; 3 bytes of source per token."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.arange(num_tokens) * 7 % vocab_size
    np.save(folder / "train-000.npy", ids.astype(np.uint16), allow_pickle=False)
    np.save(folder / "held_out.npy", ids[: num_tokens // 4].astype(np.uint16), allow_pickle=False)
    counts = {"num_held_out_tokens": num_tokens // 4, "num_held_out_bytes": num_tokens // 4 * 3, "digest": "00ff"}
    (folder / "sources.json").write_text(json.dumps(counts), encoding="utf-8")
    return folder
