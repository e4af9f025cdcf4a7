"""`python -m tests.fuzz [TARGET ...] --seconds N --seed S`: fuzz one target after the other; exit code 1 for findings."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.bounds import ROOT
from tests.fuzz.runner import TARGETS, run_target


def main() -> int:
    """Parse the arguments, run, print one line per target and then the findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz what reads hostile bytes.")
    parser.add_argument("targets", metavar="TARGET", nargs="*", help=f"some of {', '.join(TARGETS)}; without one: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target; 0 replays the corpus only (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the generator; another one makes other inputs")
    args = parser.parse_args()
    if unknown := sorted(set(args.targets) - set(TARGETS)):
        parser.error(f"there is no target {', '.join(unknown)}; targets are {', '.join(TARGETS)}")
    outcomes = []
    for name in args.targets or TARGETS:
        outcomes.append(run_target(name, args.seconds, args.seed, ROOT / "build" / "fuzz" / name))
        print(outcomes[-1], flush=True)
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    for finding in findings:
        print(f"\n{finding}")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
