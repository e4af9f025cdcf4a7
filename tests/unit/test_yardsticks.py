"""Trials and planted faults change a copy of the monokernel's sources; the sources have no switches for them."""

from __future__ import annotations

import re

import pytest

from kog_dist.bench.kernel.yardsticks import replaced, without_delayed_sums
from kog_dist.workers.cuda.build import device_sources
from tests.silent import with_silent_cta

BUILDS = {
    "KOG_PROCESSORS",
    "KOG_HEAD_ONLY",
    "KOG_TRACE",
    "KOG_HASHES",
    "KOG_CHOICES",
    "KOG_CODE",
    "KOG_INTEGERS",
    "KOG_EXPERTS",
    "KOG_SHARED_EXPERT",
    "KOG_SLOTS_IN_TURN",
    "KOG_DELTA",
    "KOG_DELTA_PASSES",
    "KOG_DELTA_COMPANY",
    "KOG_UNION",
    "KOG_PLAIN_ATTENTION",
    "KOG_PLAIN_NET_INPUTS",
    "KOG_PLAIN_NET_OUTPUTS",
    "KOG_STREAM",
    "KOG_HEAD_FORMAT",
    "KOG_WHOLE_WINDOWS",
    "KOG_AWAITS_ATTENTION",
    "KOG_COMPANY",
    "KOG_DRAFTS",
}  # what is built of the sources


def test_the_sources_have_no_switch_for_a_trial() -> None:
    text = "\n".join(device_sources().values())
    assert set(re.findall(r"#\s*(?:el)?if(?:n?def)?\b.*?\b(KOG_\w+)", text)) <= BUILDS


def test_a_trial_replaces_one_passage() -> None:
    sources = device_sources()
    for changed in (without_delayed_sums(sources), with_silent_cta(sources, 3)):
        assert [name for name in sources if changed[name] != sources[name]] == ["finalize_residual.cuh"]
    with pytest.raises(AssertionError, match="2 times"):
        replaced({"a.cuh": "x x"}, "a.cuh", "x", "y")
