"""Stop strings: the cut does not depend on how the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.workers.coordinator.stop_strings import StopFilter


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    stop_filter = StopFilter(stops)
    passed = "".join(stop_filter.push(piece) for piece in pieces)
    return passed + stop_filter.flush(), stop_filter.stopped


def reference(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """The obvious twin: the shortest beginning of the text that ends in a stop string, less the longest one it ends in."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("END",), ["a", "E", "N", "D", "b"], ("a", True)),
        (("END",), ["aE", "NE", "NDx"], ("aEN", True)),
        (("\n\n",), ["x\n", "y\n", "\n"], ("x\ny", True)),
        (("abc", "b"), ["ab"], ("a", True)),
        (("aab",), ["a", "a", "a", "b"], ("a", True)),
        (("cd", "b"), ["abcd"], ("a", True)),
        (("bc", "abc"), ["xabc"], ("x", True)),
        (("def",), ["x de"], ("x de", False)),
        ((), ["x", "y"], ("xy", False)),
        (("é😀",), ["caf", "é", "😀!"], ("caf", True)),
    ],
)
def test_examples(stops: tuple[str, ...], pieces: list[str], expected: tuple[str, bool]) -> None:
    assert run(stops, pieces) == expected


def test_it_says_which_text_has_ended_the_answer() -> None:
    stop_filter = StopFilter(("\n\n", "<|sep|>", "end"))
    assert (stop_filter.push("the e"), stop_filter.stopped_by) == ("the ", None)
    assert (stop_filter.push("nd\n\n"), stop_filter.stopped_by) == ("", "end")
    named = StopFilter(("<|sep|>",))
    assert (named.push("a", "<|sep|>"), named.stopped_by) == ("a", "<|sep|>")


def test_possible_stop_text_is_withheld_until_it_is_decided() -> None:
    stop_filter = StopFilter(("</s>",))
    assert stop_filter.push("hi</") == "hi"
    assert stop_filter.push("b>") == "</b>"
    assert stop_filter.push("</s") == ""
    assert stop_filter.push(">more") == ""
    assert stop_filter.stopped
    assert stop_filter.push("even more") == ""


pieces_of_text = st.lists(st.text(alphabet="ab\n", max_size=5), max_size=12)
stop_strings = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4).map(tuple)


@given(stop_strings, pieces_of_text)
def test_the_result_does_not_depend_on_the_pieces(stops: tuple[str, ...], pieces: list[str]) -> None:
    assert run(stops, pieces) == reference(stops, "".join(pieces))


@given(stop_strings, pieces_of_text)
def test_what_has_left_is_always_a_prefix_of_the_answer(stops: tuple[str, ...], pieces: list[str]) -> None:
    answer, _ = reference(stops, "".join(pieces))
    stop_filter = StopFilter(stops)
    passed = ""
    for piece in pieces:
        passed += stop_filter.push(piece)
        assert answer.startswith(passed)
