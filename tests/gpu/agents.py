"""A first token of agents that take turns, next to one alone: `python -m tests.gpu.agents`, one GPU, over HTTP.

An engine of random weights serves `kog-bench serve`: chats of some 500 tokens, then 16 agents in turns, as many at the same time
as `--at-once` says, whose chats begin with 20,600 shared tokens and the turns that each had before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kog_dist.bench.engine.session import EngineSession, engine_session
from kog_dist.bench.fakes.random_model import random_model
from kog_dist.bench.report import finishing, machine
from kog_dist.errors import KogError
from tests.e2e.http_engine import http_engine

ALONE = ("--num-prompts=6",)
AGENTS = ("--num-prompts=64", "--agents=16", "--shared-len=3550")
_LIMIT_S = 90.0


def serve(session: EngineSession, url: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Ask and print what `kog-bench serve` says; returns its JSON object."""
    words = [
        "serve",
        f"--url={url}",
        "--backend=openai-chat",
        "--ignore-eos",
        "--output-len=32",
        "--each",
        "--input-len=85",
        *arguments,
    ]
    print(f"$ kog-bench {' '.join(words)}", flush=True)
    done = session.run("kog_dist.bench.cli", words, timeout_s=_LIMIT_S)
    *lines, last = done.stdout.splitlines() or [""]
    print(*lines, sep="\n", flush=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, f"{last}\n{done.stderr}")
    found: dict[str, Any] = json.loads(last)
    return found


def run(spec: str, flags: tuple[str, ...], at_once: str) -> None:
    """Measure and print; the last line is one JSON object."""
    before, figures = machine(), dict[str, Any]()
    with finishing("agents_in_turns", {"spec": spec, "flags": flags, "at_once": at_once}, before, figures):
        with (
            random_model(spec, on_gpus="--device=cpu" not in flags) as (folder, _),
            engine_session() as session,
            http_engine(session, str(folder), *flags) as engine,
        ):
            for name, arguments in (("alone", ALONE), ("agents", (*AGENTS, f"--max-concurrency={at_once}"))):
                figures[name] = serve(session, engine.url, arguments)
        alone_ms, agents_ms = (float(figures[name]["median_ttft_ms"]) for name in ("alone", "agents"))
        figures["ratio"] = ratio = agents_ms / alone_ms
        print(f"first token, median: {alone_ms:.1f} ms alone, {agents_ms:.1f} ms of agents in turns, ratio {ratio:.2f}")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line. Exits with code 2 where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.agents", description=__doc__)
    parser.add_argument("--spec", default="qwen3-4b@32768", help="shape of kog-bench requests --spec")
    parser.add_argument("--at-once", default="1", help="agents that ask at the same time")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of kog-launch, behind --; none: --gpus=1")
    return parser.parse_args(words)


def main() -> int:
    given = parsed(sys.argv[1:])
    try:
        run(given.spec, tuple(given.flags) or ("--gpus=1",), given.at_once)
    except subprocess.CalledProcessError as error:
        print(f"Error: {error}: {error.stderr}", flush=True)
        return 1
    except KogError as error:
        print(f"Error: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
