"""How wrong logits are after prefill, by the type of the products: `PYTHONPATH=. python tests/unit/prefill/accuracy.py`.

Prints the figures of docs/prefill.md in some minutes: 15 layers and eight lanes, as the 2B shape has them, but a quarter as wide.
"Rounding alone" is what rounding keys and values does to the logits of the float64 oracle.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.sampling_params import SamplingParams
from tests.unit.prefill.models import Rank, relative_error, token_ids

SPEC = ModelSpec(
    hidden_size=768, num_layers=15, num_heads=16, num_kv_heads=8, intermediate_size=3072, vocab_size=2000, max_context=512,
    num_lanes=8, delay=2, sliding_window=128, window_layers=tuple(range(10)),
)  # fmt: skip
LENGTHS = (2, 4, 9, 17, 65, 130, 400)


def main() -> None:
    """Print a line for each type of the products and of the cache."""
    ids = token_ids(SPEC, max(LENGTHS))
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), SPEC, random_tensors(SPEC, 7), manifest=False)
        checkpoint = open_checkpoint(Path(name))
        oracle = Laneformer.from_checkpoint(Path(name), torch.float64).eval()
        with torch.no_grad():
            plain = oracle(torch.tensor([ids]))[0]
        for kv_dtype in ("bfloat16", "float16"):
            oracle.round_keys_and_values(getattr(torch, kv_dtype))
            with torch.no_grad():
                wanted = oracle(torch.tensor([ids]))[0]
            _show(f"rounding alone, cache {kv_dtype}", [relative_error(plain[n - 1], wanted[n - 1]) for n in LENGTHS])
            for dtype in ("float32", "float16"):
                rank, errors = Rank(checkpoint, dtype=dtype, kv_dtype=kv_dtype, sizes=(128,), exact_size=64), list[float]()
                for length in LENGTHS:
                    rank.run(ids[: length - 1])
                    engine = rank.interpreter(length - 1)
                    logits = engine.step(ids[length - 1], length - 1, SamplingParams(), gather_logits=True).logits
                    assert logits is not None
                    errors.append(relative_error(logits, wanted[length - 1]))
                _show(f"products {dtype}, cache {kv_dtype}", errors)


def _show(what: str, errors: list[float]) -> None:
    by_length = ", ".join(f"{length}: {error:.2e}" for length, error in zip(LENGTHS, errors, strict=True))
    print(f"{what}: {by_length}", flush=True)


if __name__ == "__main__":
    main()
