"""What `kog-bench peers` asks engines on GPUs: `python -m tests.gpu.peer_model --spec llama-3.1-8b --out DIR`.

DIR/model is a chain model of a real shape, which every engine reads whole, and which writes the texts of chains.py: where a
prompt quotes them drafts are right. DIR/quote.jsonl, edit.jsonl, rewrite.jsonl and prose.jsonl ask for them, as loads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kog_dist.bench.made_models.chain import TextChain, mark_of
from kog_dist.bench.made_models.published import write_published
from kog_dist.bench.shapes import SHAPES
from kog_dist.errors import KogError
from tests.gpu.chains import texts

_MOST_TOKENS = 1024  # of an answer, which ends before


def prompts(index: int, quoted: str, count: int) -> list[str]:
    """That begin differently, so that no engine is helped by what it has kept."""
    return [f"# {number}\n{quoted}\n{mark_of(index)}" for number in range(count)]


def write(spec: str, out: Path, count: int) -> None:
    """Raises OSError where they cannot be written, KogError where the shape has no room for the texts."""
    all_texts = texts()
    (out / "model").mkdir(parents=True)
    write_published(out / "model", SHAPES[spec], chain=TextChain.of([answer for _, answer in all_texts.values()]))
    for index, (kind, (quoted, _)) in enumerate(all_texts.items()):
        lines = [json.dumps({"prompt": prompt, "max_tokens": _MOST_TOKENS}) for prompt in prompts(index, quoted, count)]
        (out / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line. Exits with code 2 where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.peer_model", description=__doc__)
    parser.add_argument("--spec", default="llama-3.1-8b", choices=sorted(SHAPES), help="shape of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--requests", type=int, default=3, help="of each load")
    return parser.parse_args(words)


def main() -> int:
    given = parsed(sys.argv[1:])
    try:
        write(given.spec, given.out, given.requests)
    except (KogError, OSError) as error:
        print(f"Error: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
