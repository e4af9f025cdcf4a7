"""Answers of a chain model with drafts and without, over HTTP: `python -m tests.gpu.chains`, one GPU.

A model of a real shape that writes known texts reads all its bytes (`kog-bench make-model --chain`), and what the prompt quotes
says how many drafts are right. Each text is asked for in turn with drafts and without, and then again, with what was answered
before as a draft (`auto`). Code 1: an answer was another one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kog_dist.bench.engine.session import engine_session
from kog_dist.bench.made_models.chain import TextChain, mark_of
from kog_dist.bench.made_models.published import write_published
from kog_dist.bench.report import finishing, machine
from kog_dist.bench.shapes import SHAPES, model_folder, named_spec
from kog_dist.errors import KogError
from kog_dist.foreign_file import read_text
from tests.e2e.http_engine import HttpEngine, http_engine

CONTEXT = 8192
_READY_S = 240.0  # of a start that rounds all weights, and compiles what nobody has built beforehand
# Of an edit each so many-th line is another one, which changes 3 and 15 % of a text's tokens; renames of the workload of
# `kog-bench drafts` change 2 to 3 %.
CHANGED_LINES = {"edit": 28, "rewrite": 6}
# Lines of modules of Python's library.
LINES = {"quote": ("textwrap", 200), "edit": ("shlex", 200), "rewrite": ("queue", 200), "prose": ("tempfile", 250)}


def texts() -> dict[str, tuple[str, str]]:
    """By kind: what the prompt quotes, and what the model writes."""
    found = {}
    for kind, (module, most) in LINES.items():
        path = sys.modules[module].__file__ if module in sys.modules else __import__(module).__file__
        assert path is not None
        lines = [line for line in read_text(Path(path)).splitlines()[:most] if line.isascii()]
        every = CHANGED_LINES.get(kind)
        edited = [f"{line}  # line {i}" if every and i % every == 4 else line for i, line in enumerate(lines)]
        found[kind] = "" if kind == "prose" else "\n".join(lines), "\n".join(edited)
    return found


def ask(engine: HttpEngine, prompt: str, speculate: str) -> dict[str, Any]:
    """A greedy answer to its end."""
    body = {
        "messages": [{"role": "user", "content": prompt}], "max_tokens": CONTEXT // 2, "temperature": 0, "speculate": speculate,
    }  # fmt: skip
    reply = engine.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def measured(engine: HttpEngine, prompt: str, wanted: str, repeats: int) -> dict[str, Any]:
    """Tokens per second, in turn without drafts and with; and of an answer that was given before."""
    answers: Mapping[str, list[dict[str, Any]]] = {"off": [], "lookup": [], "auto": []}
    ask(engine, prompt, "off")  # the prompt is kept then
    for together in (("off", "lookup"), ("auto",)):
        for _ in range(repeats):
            for speculate in together:
                answers[speculate].append(ask(engine, prompt, speculate))
    said = [answer["choices"][0]["message"]["content"] for found in answers.values() for answer in found]
    rates = {
        speculate: statistics.median(answer["timings"]["predicted_per_second"] for answer in found)
        for speculate, found in answers.items()
    }
    last = answers["lookup"][-1]
    return {
        "tokens": last["usage"]["completion_tokens"], "tokens_per_s_off": rates["off"], "tokens_per_s_lookup": rates["lookup"],
        "drafted_tokens": last["timings"].get("draft_n", 0), "accepted_tokens": last["timings"].get("draft_n_accepted", 0),
        "tokens_per_s_again": rates["auto"], "is_same": set(said) == {wanted},
    }  # fmt: skip


def run(shape: str, flags: Sequence[str], repeats: int) -> bool:
    """Measure and print; the last line is one JSON object. Whether all answers were as they should be."""
    before, figures = machine(), dict[str, Any]()
    all_texts = texts()
    with (
        finishing("chains", {"spec": shape, "flags": [*flags], "repeats": repeats}, before, figures),
        model_folder(named_spec(shape)) as folder,
    ):
        write_published(folder, SHAPES[shape], chain=TextChain.of([answer for _, answer in all_texts.values()]))
        arguments = (str(folder), f"--context={CONTEXT}", *flags)
        with engine_session() as session, http_engine(session, *arguments, ready_s=_READY_S) as engine:
            for index, (kind, (quoted, wanted)) in enumerate(all_texts.items()):
                row = figures[kind] = measured(engine, f"{quoted}\n{mark_of(index)}", wanted, repeats)
                off, lookup = row["tokens_per_s_off"], row["tokens_per_s_lookup"]
                print(
                    f"{kind:<6} {row['tokens']} tokens: {off:7.1f} tokens/s without, {lookup:7.1f} with drafts "
                    f"({lookup / off:.3f} times, {row['accepted_tokens']} of {row['drafted_tokens']} right), "
                    f"{row['tokens_per_s_again']:7.1f} again"
                    f"{'' if row['is_same'] else ', ANSWERS DIFFER'}",
                    flush=True,
                )
    return all(row["is_same"] for row in figures.values())


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line. Exits with code 2 where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.chains", description=__doc__)
    parser.add_argument("--spec", default="llama-3.1-8b", choices=sorted(SHAPES), help="shape of the model")
    parser.add_argument("--repeats", type=int, default=5, help="answers of each kind with drafts and without; the medians count")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of kog-launch, behind --; none: --gpus=1")
    return parser.parse_args(words)


def main() -> int:
    given = parsed(sys.argv[1:])
    try:
        return int(not run(given.spec, given.flags or ["--gpus=1"], given.repeats))
    except KogError as error:
        print(f"Error: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
