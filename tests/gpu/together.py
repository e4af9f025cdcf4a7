"""Requests that share the passes of one GPU next to each alone, over HTTP: `python -m tests.gpu.together`.

Engines of random weights answer completions: first one request at a time, then as many at once as `--at-once` says, each with a
scope of kept prefixes of its own. Rates count while all of them decode. Code 1: an answer was another one than alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kog_dist.bench.engine.session import engine_session
from kog_dist.bench.fakes.random_model import random_model
from kog_dist.bench.report import finishing, machine
from kog_dist.errors import KogError
from tests.e2e.http_engine import HttpEngine, http_engine

_READY_S, _LIMIT_S = 240.0, 120.0
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass
class Answer:
    text: str
    prompt_tokens: int
    moments: list[tuple[float, int]]  # seconds, and tokens that had come by then

    def tokens_at(self, moment_s: float) -> int:
        return max((tokens for at_s, tokens in self.moments if at_s <= moment_s), default=0)


def prompt_of(seed: int, num_tokens: int) -> str:
    chance = random.Random(seed)
    text = ""
    while len(text) < num_tokens:
        text += f"{chance.choice(_WORDS)} "
    return text[:num_tokens]


def ask(engine: HttpEngine, prompt: str, scope: str, num_tokens: int) -> Answer:
    """A greedy answer of full length. Raises AssertionError where it failed."""
    body = {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "cache_salt": scope, "stream": True,
        "speculate": "off", "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    found = Answer("", 0, [])
    with engine.http.stream("POST", "/v1/completions", json=body, timeout=_LIMIT_S) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            frame = json.loads(line[6:])
            assert "error" not in frame, frame
            found.text += "".join(choice["text"] for choice in frame["choices"])
            found.prompt_tokens = frame["usage"]["prompt_tokens"]
            found.moments.append((time.monotonic(), frame["usage"]["completion_tokens"]))
    assert found.moments[-1][1] == num_tokens, found.moments[-1]
    return found


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of one of them, the median, while all of them decode."""
    begin_s = max(next(at_s for at_s, tokens in one.moments if tokens) for one in answers)
    end_s = min(one.moments[-1][0] for one in answers)
    return statistics.median((one.tokens_at(end_s) - one.tokens_at(begin_s)) / (end_s - begin_s) for one in answers)


def measured(engine: HttpEngine, num: int, prompt_len: int, num_tokens: int, repeats: int) -> tuple[float, list[str]]:
    """Of `num` requests at a time: tokens per second of each, and what they answered."""
    rates, said = list[float](), list[str]()
    prompts = [prompt_of(prompt_len + seed, prompt_len) for seed in range(num)]
    with ThreadPoolExecutor(num) as threads:
        for _ in range(repeats):
            scopes = [f"{prompt_len} {num} {len(rates)} {index}" for index in range(num)]
            answers = list(threads.map(ask, [engine] * num, prompts, scopes, [num_tokens] * num))
            rates.append(rate(answers))
            said = [one.text for one in answers]
    return statistics.median(rates), said


def run(given: argparse.Namespace) -> bool:
    """Measure and print; the last line is one JSON object. Whether all answers were as alone."""
    before, figures, is_same = machine(), dict[str, Any](), True
    most = max(given.at_once)
    with (
        finishing("together", {"spec": given.spec, "flags": given.flags, "output_len": given.output_len}, before, figures),
        random_model(given.spec, on_gpus="--device=cpu" not in given.flags) as (folder, _),
    ):
        alone, texts = dict[int, float](), dict[int, list[str]]()
        for parallel in (1, most):
            flags = [*given.flags, f"--parallel={parallel}", f"--kv-caches={parallel}"]
            with engine_session() as session, http_engine(session, str(folder), *flags, ready_s=_READY_S) as engine:
                for prompt_len in given.input_len:
                    rows = figures.setdefault(str(prompt_len), {})
                    if parallel == 1:
                        prompts = [prompt_of(prompt_len + seed, prompt_len) for seed in range(most)]
                        prompts += prompts[:1] * (given.repeats - 1)
                        answers = [ask(engine, prompt, f"{i}", given.output_len) for i, prompt in enumerate(prompts)]
                        texts[prompt_len] = [one.text for one in answers[:most]]
                        alone[prompt_len] = rows["alone"] = statistics.median(rate([one]) for one in answers)
                        print(f"{prompt_len} tokens: {alone[prompt_len]:.1f} tokens/s alone", flush=True)
                        continue
                    for num in given.at_once:
                        each, said = measured(engine, num, prompt_len, given.output_len, given.repeats)
                        same = said == texts[prompt_len][:num]
                        is_same &= same
                        rows[str(num)] = each
                        print(
                            f"{prompt_len} tokens, {num} at once: {each:.1f} tokens/s each, {each / alone[prompt_len]:.3f} of "
                            f"alone{'' if same else ', ANSWERS DIFFER'}",
                            flush=True,
                        )
                print(session.output()[-600:] if parallel > 1 else "", flush=True)
    return is_same


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line. Exits with code 2 where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.together", description=__doc__)
    parser.add_argument("--spec", default="llama-3.1-8b@9216", help="shape of kog-bench requests --spec")
    parser.add_argument("--at-once", type=_numbers, default=[1, 2, 4], help="requests at a time")
    parser.add_argument("--input-len", type=_numbers, default=[512, 8000], help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=384, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of kog-launch, behind --; none: --gpus=1")
    found = parser.parse_args(words)
    found.flags = found.flags or ["--gpus=1"]
    return found


def main() -> int:
    given = parsed(sys.argv[1:])
    try:
        return int(not run(given))
    except KogError as error:
        print(f"Error: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
