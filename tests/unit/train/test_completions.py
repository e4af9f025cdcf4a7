"""Completions of held-out functions: where they end, whether they parse, and whether they do what the originals do."""

from __future__ import annotations

import pytest
import torch

from kog_dist.model.laneformer import KvCache
from kog_dist.train.completions import chosen_functions, complete_functions, summary
from kog_dist.train.generate import draw_tokens
from kog_dist.train.held_out import HeldOutFunction
from kog_dist.train.unit_tests import UnitTests

TESTS = {  # by name of the function
    "a": UnitTests("", ("((1,), {})", "(('x',), {})"), ("1 | tuple(1) | dict()", "'x' | tuple('x') | dict()")),
    "b": UnitTests("", ("(([],), {})", "(([2],), {})"), ("list() | tuple(list()) | dict()", "list(2) | tuple(list(2)) | dict()")),
}


class Scripted:
    """A tokenizer whose tokens are characters, for judging known continuations."""

    def encode(self, text: str) -> Scripted:
        self.ids = [ord(character) for character in text]
        return self

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def token_to_id(self, token: str) -> int:
        return 0


class Continuation(torch.nn.Module):
    """Writes a fixed text behind each prompt."""

    def __init__(self, texts: dict[str, str]) -> None:
        super().__init__()
        self.texts = texts
        self.cos = torch.zeros(1)
        self.rows: list[str] = []

    def forward(self, ids: torch.Tensor, cache: object) -> torch.Tensor:
        assert isinstance(cache, RowCache)
        cache.rows = [
            row + "".join(map(chr, piece)) for row, piece in zip(cache.rows or [""] * len(ids), ids.tolist(), strict=True)
        ]
        logits = torch.zeros(len(ids), 1, 128)
        for slot, row in enumerate(cache.rows):
            whole = next(prompt + text for prompt, text in self.texts.items() if (prompt + text).startswith(row)) + "\0" * 99
            logits[slot, 0, ord(whole[len(row)])] = 1.0
        return logits


class RowCache(KvCache):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []

    def keep_rows(self, rows: torch.Tensor) -> None:
        self.rows = [self.rows[int(row)] for row in rows]


def test_completions_end_at_the_margin_and_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "def a(x):\n    y = x\n": "    return y\n\n\ndef other(:\n",
        "def b(xs):\n    y = [\n": "        1,\n]\n    return y\n",  # ended by the end of the text
        "def c(x):\n    z = x\n": "    return (z\nnext\n",
        "def d(x):\n    q = x\n": "next = 1\n",
        "def e(x):\n    w = x\n": "    x = 1\n" * 40,
        "    def f(self, x):\n        v = x\n": "        return v\n\n    def g(self\n",
        "def g(x):\n    u = x\n": "    y = 1\n    if y:\n        for z in range(100000000000000000000000000000):\n" + " " * 60,
    }
    monkeypatch.setattr("kog_dist.train.generate.KvCache", RowCache)
    functions = []
    for prompt in texts:
        own = prompt.replace("    def", "def").replace("        v", "    v")
        source = own + ("    1]\n" if "[" in own else "    return 1\n")
        functions.append(HeldOutFunction("p", own, source, TESTS.get(own[4])))
    module = Continuation(texts)
    found = complete_functions(module, Scripted(), functions, temperature=0.0, max_new_tokens=60)  # type: ignore[arg-type]
    assert [(completion.ended, completion.parses) for completion in found] == [
        (True, True),
        (True, True),
        (True, False),
        (True, False),  # nothing of its own
        (False, True),  # cut at the limit, unfinished line dropped
        (True, True),
        (False, True),  # what is cut off leaves no head of a block behind
    ]
    assert found[0].text == "def a(x):\n    y = x\n    return y\n"
    assert found[4].text.endswith("    x = 1\n")
    assert found[5].text == "    def f(self, x):\n        v = x\n        return v\n"
    assert [completion.passes for completion in found] == [True, False, None, None, None, None, None]
    assert found[6].text == "def g(x):\n    u = x\n    y = 1\n"
    outcome = summary(found)
    assert (outcome["num_parsed"], outcome["num_ended_parsed"], outcome["num_cut_at_limit"]) == (5, 3, 2)
    assert outcome["parse_share"] == 0.7143
    assert (outcome["num_tested"], outcome["num_passed"], outcome["pass_share"]) == (2, 1, 0.5)


def test_a_random_sample_and_all_that_have_tests() -> None:
    functions = [HeldOutFunction("p", "", str(n), TESTS["a"] if n % 3 == 0 else None) for n in range(10)]
    sample, tested = chosen_functions(functions, 4)
    assert [function.source for function in sample] == ["0", "1", "2", "3"]
    assert [function.source for function in tested] == ["6", "9"]


def test_tokens_are_drawn_by_their_probability() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(1000, 1)
    numbers = (torch.arange(1000) + 0.5) / 1000
    counts = torch.bincount(draw_tokens(logits, 0.5, numbers), minlength=3) / 1000
    torch.testing.assert_close(counts, torch.softmax(logits[0] / 0.5, -1), atol=2e-3, rtol=0)
    assert set(draw_tokens(logits, 0.0, numbers).tolist()) == {2}
    assert draw_tokens(logits[:2], 1.0, torch.tensor([0.0, 1.0])).tolist() == [0, 2]
