"""docs/clients.md shows the versions that `make clients` tries, and blocks that run; the scripted model writes its texts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kog_dist.model.tokenizer import Tokenizer
from tests.clients.page import ADDRESS, PAGE, block
from tests.clients.pinned import NODE, PYTHON
from tests.clients.scripted_model import END, LOST, Cue, call, mark_of, pieces_of, write_scripted_model

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_has_every_client_and_the_version_that_was_tried() -> None:
    shown = re.findall(r"^\| (\S+) \| ([0-9.]+) \|", TEXT, re.M)
    assert dict(shown) == {name.partition("[")[0]: version for name, version in PYTHON.items()} | NODE


@pytest.mark.parametrize("heading", re.findall(r"^## (.*)$", TEXT, re.M))
def test_every_client_has_a_block_with_the_address(heading: str) -> None:
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    languages = re.findall(r"^```(\w+)$", section, re.M)
    texts = {language: block(heading, language, "http://else:1") for language in languages}
    assert "http://else:1" in "".join(texts.values())
    assert ADDRESS not in "".join(texts.values())
    compile(texts.get("python", ""), heading, "exec")
    json.loads(texts.get("json", "{}"))


CUES = (
    Cue(("one",), "a a a a b b a a"),
    Cue(("two", "more"), "I ask.\n" + call("f", x="a a", y=[1, {}])),
    Cue(("three",), "a a a"),
)


def test_a_scripted_model_writes_given_texts(tmp_path: Path) -> None:
    write_scripted_model(tmp_path / "m", CUES)
    weights = load_file(tmp_path / "m" / "model.safetensors")
    embedding, head = (weights[name].astype(np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    tokenizer = Tokenizer.from_folder(tmp_path / "m")
    assert tokenizer is not None
    for idx, text in enumerate((*(cue.text for cue in CUES), LOST)):
        token, said = tokenizer.id_of(mark_of(idx)), list[int]()
        while token != tokenizer.id_of(END):
            logits = head @ (embedding[token] / np.sqrt(np.mean(embedding[token] ** 2)))
            token = int(logits.argmax())
            assert np.sort(logits)[-2] < logits[token] / 2, "no temperature changes it"
            said.append(token)
        assert tokenizer.decode(said[:-1]) == text


def test_pieces_are_texts_that_no_other_token_has() -> None:
    taken = {"a", "\u0120a"}
    first, second = pieces_of("a a a a b a", taken), pieces_of("a a a a b c", taken)
    assert (first, second) == (["a\u0120a", "\u0120a\u0120a", "\u0120b\u0120a"], ["a\u0120a\u0120a", "\u0120a\u0120b", "\u0120c"])
