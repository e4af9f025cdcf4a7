"""The demo model on the GPU says what CPU ranks and the training code say: 512 greedy tokens after each of 20 prompts.

They add in another order, so keys and values that lie between two of the cache's values are rounded up here and down there;
where two logits are almost equal, either may be the larger one. Rounding all keys and values to bfloat16 instead of float16
changes the difference of the two best logits by 0.006 in the median, 0.036 at most in 99 of 100 places (one answer, on a CPU).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

DEMO = Path(str(resources.files("kog_dist"))) / "models" / "demo"
NUM_TOKENS = 512
TIE = {"bfloat16": 0.02, "float16": 0.003}  # two best logits closer than that may change places, by the cache's type
PROMPTS = (
    "def add(a, b):\n    return",
    "for i in range(10):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "try:\n    import json\nexcept ImportError:\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "from collections import defaultdict\n\ncounts = defaultdict(int)\nfor word in words:\n",
    "if __name__ == \"__main__\":\n",
    "lambda x: x",
    "parser = argparse.ArgumentParser(description=",
    "def subtract(a, b):\n    return",
    "class Queue:\n    def __init__(self):\n",
    "def is_prime(n):\n",
    "def gcd(a, b):\n    while b:\n",
    "import unittest\n\n\nclass TestCase(unittest.TestCase):\n    def test_one(self):\n",
    "def parse(text):\n    tokens = text.split()\n",
    "def factorial(n):\n",
    "logger = logging.getLogger(__name__)\n\n\ndef run(config):\n",
    "@dataclass\nclass Item:\n    name: str\n",
    "if not isinstance(value, str):\n",
    "def connect(host, port):\n",
)  # fmt: skip


@contextmanager
def cpu_answers(kv_dtype: str, prompts: list[list[int]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that compute the prompts' answers, one for each core: process i has prompts i, i + n, ..."""
    num = min(len(prompts), len(os.sched_getaffinity(0)))
    command = [sys.executable, str(Path(__file__).with_name("cpu_answers.py"))]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = []
    try:
        for first in range(num):
            request = {"model": str(DEMO), "kv_dtype": kv_dtype, "prompts": prompts[first::num], "num_tokens": NUM_TOKENS}
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdin is not None
            json.dump(request, process.stdin)
            process.stdin.close()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def collect(processes: list[subprocess.Popen[str]], num_prompts: int) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = [{}] * num_prompts
    for first, process in enumerate(processes):
        assert process.stdout is not None
        answers[first :: len(processes)] = json.load(process.stdout)
    return answers


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_greedy_tokens_are_those_of_cpu_ranks_and_of_the_training_code(kv_dtype: str) -> None:
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    with cpu_answers(kv_dtype, prompts) as processes:
        checkpoint = open_checkpoint(DEMO)
        shape = KernelShape(checkpoint.spec, range(checkpoint.spec.num_lanes), kv_dtype=kv_dtype)
        kernel = Monokernel(shape, load_weights(shape, checkpoint))
        found = [kernel.generate(prompt, NUM_TOKENS) for prompt in prompts]
        trained = [trained_choices(prompt, ids) for prompt, ids in zip(prompts, found, strict=True)]
        wanted = collect(processes, len(prompts))
    differing, num_trained_others = [], 0
    for number, (ids, answer, (choices, gaps)) in enumerate(zip(found, wanted, trained, strict=True)):
        pairs = enumerate(zip(ids, answer["token_ids"], strict=True))
        num_same = next((at for at, (a, b) in pairs if a != b), NUM_TOKENS)
        if num_same < NUM_TOKENS:
            differing.append((f"prompt {number}, token {num_same} of CPU ranks", answer["gaps"][num_same]))
        others = [at for at in range(NUM_TOKENS) if ids[at] != choices[at]]
        num_trained_others += len(others)
        # What CPU ranks choose, too, is what the cache's rounding makes of the model: with a bfloat16 cache they choose a token
        # that training has 0.028 below its own choice, with a float16 one they do not.
        gpu_alone = [(f"prompt {number}, token {at} of training", gaps[at]) for at in others if at >= num_same]
        assert all(gap < TIE[kv_dtype] for _, gap in gpu_alone), gpu_alone
    print(f"{kv_dtype} cache: {len(prompts) - len(differing)} of {len(prompts)} answers are those of CPU ranks; training code "
          f"would choose another token in {num_trained_others} of {len(prompts) * NUM_TOKENS} places; {differing}")  # fmt: skip
    assert all(gap < TIE[kv_dtype] for _, gap in differing), differing
    assert len(differing) <= {"bfloat16": 5, "float16": 1}[kv_dtype]


@torch.no_grad()
def trained_choices(prompt: list[int], answer: list[int]) -> tuple[list[int], list[float]]:
    """The training code's best token in each place of an answer, in float32, and how much better than the next one it is."""
    module = Laneformer.from_checkpoint(DEMO).cuda()
    logits = module(torch.tensor([prompt + answer[:-1]], device="cuda"))[0, len(prompt) - 1 :]
    best, tokens = logits.topk(2, dim=-1)
    return tokens[:, 0].tolist(), (best[:, 0] - best[:, 1]).tolist()
