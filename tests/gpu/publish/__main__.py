"""`python -m tests.gpu.publish [RAW_DIR]`: write the figures of README and docs out of the raw results in docs/results/runs.

RAW_DIR is one of these folders: it says which rows it lacks. With --check nothing is written; code 1 if a page would change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kog_dist.errors import ConfigError
from tests.gpu.publish.pages import PAGES, written
from tests.gpu.publish.publication import Publication
from tests.gpu.publish.rows import rows_left
from tests.gpu.publish.runs import ROOT, RUNS, MeasuredRun, read_run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.publish", description=__doc__)
    parser.add_argument("raw_dir", nargs="?", type=Path, metavar="RAW_DIR", help="a run in docs/results/runs")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(arguments)
    try:
        if given.raw_dir is not None:
            print(*report(read_run(given.raw_dir)), sep="\n")
            if given.raw_dir.resolve().parent != RUNS:
                raise ConfigError(f"{given.raw_dir} is not published from where it is: move it into {RUNS.relative_to(ROOT)}")
        publication = Publication.read()
    except ConfigError as error:
        parser.error(str(error))
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (now := written(page, text, publication)) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not given.check:
                page.write_text(now, encoding="utf-8")
    print(f"{'not what they would be' if given.check else 'written'}: {', '.join(stale) or 'no page'}")
    return int(given.check and bool(stale))


def report(run: MeasuredRun) -> list[str]:
    """What a run has and lacks."""
    done = {(row.name, row.gpus) for row in run.rows}
    most = max((row.gpus for row in run.rows), default=1)
    lines = [f"{run.name}: commit {run.commit}, {run.card or 'no card yet'}, {len(done)} rows, up to {most} GPUs"]
    lines += [f"  measured again, the first counts: {where}" for where in run.again]
    return lines + [f"  missing: {row.name} on {row.gpus} GPUs" for row in rows_left(most, done)]


if __name__ == "__main__":
    sys.exit(main())
