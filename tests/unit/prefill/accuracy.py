"""How wrong logits are after prefill, by the type of the products: `PYTHONPATH=. python tests/unit/prefill/accuracy.py`.

Prints the figures of docs/prefill.md in some minutes: 15 layers and eight lanes, as the 2B shape has them, but a quarter as wide.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from kog_dist.decode.sampling import Sampling
from kog_dist.model.checkpoint import open_checkpoint, random_tensors, write_checkpoint
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.spec import ModelSpec
from tests.unit.prefill.models import Rank, relative_error, token_ids

SPEC = ModelSpec(
    hidden_size=768, num_layers=15, num_heads=16, num_kv_heads=8, intermediate_size=3072, vocab_size=2000, max_context=512,
    num_lanes=8, delay=2, sliding_window=128, window_layers=tuple(range(10)),
)  # fmt: skip
NUM_TOKENS = 400


def main() -> None:
    ids = token_ids(SPEC, NUM_TOKENS)
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), SPEC, random_tensors(SPEC, 7), manifest=False)
        checkpoint = open_checkpoint(Path(name))
        oracle = Laneformer.from_checkpoint(Path(name), torch.float64).eval()
        for kv_dtype in (torch.bfloat16, torch.float16):
            oracle.round_keys_and_values(kv_dtype)
            with torch.no_grad():
                wanted = oracle(torch.tensor([ids]))[0, -1]
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                rank = Rank(checkpoint, dtype=dtype, kv_dtype=kv_dtype, sizes=(64,))
                rank.run(ids[:-1])
                engine = rank.interpreter(NUM_TOKENS - 1)
                logits = engine.step(ids[-1], NUM_TOKENS - 1, Sampling(), gather_logits=True).logits
                assert logits is not None
                print(f"products {dtype}, cache {kv_dtype}: {relative_error(logits, wanted):.2e}", flush=True)


if __name__ == "__main__":
    main()
