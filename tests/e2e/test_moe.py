"""Engines on CPU ranks with experts: the same tokens and logits on any number of ranks, which compare what they choose."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.engine.session import EngineSession, running, until
from kog_dist.bench.made_models.chain import TextChain
from kog_dist.bench.made_models.published import write_published
from kog_dist.errors import RequestFailed
from kog_dist.rpc.messages import ErrorCode, Tokens
from tests.e2e.conftest import without_progress
from tests.e2e.test_quantised import NUM_TOKENS, PROMPT_IDS, ask
from tests.unit import moe_models
from tests.unit.made_models.test_published import CODE, NOT_OF_THE_ORACLE, SHAPES


@pytest.mark.timeout(300)
def test_qwen3_moe(tmp_path: Path) -> None:
    model = moe_models.made("qwen3_moe", tmp_path)
    answers = []
    for ranks, flags in ((1, ()), (4, ("--check-experts",))):
        with running(str(tmp_path), "--device=cpu", f"--ranks={ranks}", *flags) as (_, client):
            answers.append(ask(client))
    assert answers[0] == answers[1]
    tokens, digests = answers[0]
    assert len(set(digests)) == NUM_TOKENS
    logits = moe_models.reference(model, [*PROMPT_IDS, *tokens[:-1]]).logits[len(PROMPT_IDS) - 1 :]
    best = logits.max(axis=1)
    assert (best - logits[np.arange(NUM_TOKENS), tokens] < 1e-4 * np.abs(logits).max()).all(), "transformers chooses the same"


@pytest.mark.timeout(300)
def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    config, stored, _ = moe_models.in_mxfp4()
    moe_models.write_mxfp4(tmp_path, config, stored)
    answers = []
    for ranks, flags in ((1, ()), (2, ("--check-experts",)), (4, ())):
        with running(str(tmp_path), "--device=cpu", f"--ranks={ranks}", *flags) as (_, client):
            answers.append(ask(client))
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0][1])) == NUM_TOKENS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", sorted(NOT_OF_THE_ORACLE))
def test_a_made_model_writes_its_text(family: str, tmp_path: Path) -> None:
    write_published(tmp_path, SHAPES[family], chain=TextChain.of([CODE]))
    with running(str(tmp_path), "--device=cpu", "--ranks=2") as (_, client):
        told = [event.text for event in client.generate(prompt="What is it?", max_tokens=100) if isinstance(event, Tokens)]
    assert "".join(told) == CODE


# Started by the Python of every process; in that of rank 1 choices are wrong ones as soon as there is the file FLAG.
WRONG_CHOICE = """
import sys
if '"rank": 1,' in " ".join(sys.orig_argv):
    import numpy as np
    from pathlib import Path
    from kog_dist.decode.cpu import lane_math

    select, flag = lane_math.select, Path(FLAG)

    def wrong(logits, scores, is_normalised, choice):
        select(logits, scores, is_normalised, choice)
        if flag.exists():
            choice[0] = np.sort((choice[0] + 1) % len(logits))

    lane_math.select = wrong
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_wrong_choice_of_one_rank(session: EngineSession, tmp_path: Path, is_checked: bool) -> None:
    """`--check-experts` reaches the ranks and ends the engine with a sentence that says where; without it nobody notices."""
    model = tmp_path / "model"
    moe_models.made("qwen3_moe", model)
    (session.folder / "sitecustomize.py").write_text(f"FLAG = {str(tmp_path / 'flag')!r}\n{WRONG_CHOICE}", encoding="utf-8")
    session.variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(session.folder), os.environ.get("PYTHONPATH"))))
    launcher = session.launch(str(model), "--device=cpu", "--ranks=2", *(("--check-experts",) if is_checked else ()))
    with session.connect() as client:
        until(lambda: "ready after" in session.output(stream="out"), 30.0, session.output)
        (tmp_path / "flag").touch()
        if not is_checked:
            assert len(ask(client)[0]) == NUM_TOKENS
            return
        with pytest.raises(RequestFailed) as caught:
            ask(client)
    assert caught.value.code is ErrorCode.RANK_FAILED
    assert launcher.wait(30.0) == 4
    [sentence] = without_progress(session.output()).splitlines()
    found = r"rank 1 chose experts \d+, \d+, \d+ in layer 0 at position 0, but rank 0 \d+, \d+, \d+: the ranks do not compute"
    assert re.search(found, sentence), sentence
