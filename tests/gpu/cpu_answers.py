"""Greedy answers of the interpreter, which is what CPU ranks run: `python cpu_answers.py < REQUEST` prints them as JSON.

REQUEST: {"model": folder, "kv_dtype": name, "prompts": [[ids]], "num_tokens": n, "quantize": as the setting}, the last one may
be left out. An answer is its token ids, and for each one how much larger its logit was than the next one's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.sampling_params import SamplingParams


def answer(model: Interpreter, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    model.use_cache(0, 0, 0)
    for position, token_id in enumerate(prompt[:-1]):
        model.step(token_id, position, None)
    ids, gaps = [], []
    token_id = prompt[-1]
    for position in range(len(prompt) - 1, len(prompt) - 1 + num_tokens):
        output = model.step(token_id, position, SamplingParams(), gather_logits=True)
        token_id = output.token_id
        assert output.logits is not None
        second, first = np.partition(output.logits, -2)[-2:]
        ids.append(token_id)
        gaps.append(float(first - second))
    return {"token_ids": ids, "gaps": gaps}


def main() -> None:
    request = json.load(sys.stdin)
    checkpoint = open_checkpoint(Path(request["model"]), verify=False, quantize=request.get("quantize", "none"))
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes))
    model = Interpreter(make_plan(checkpoint.spec, 1), 0, weights, None, kv_dtype=request["kv_dtype"])
    json.dump([answer(model, prompt, request["num_tokens"]) for prompt in request["prompts"]], sys.stdout)


if __name__ == "__main__":
    main()
