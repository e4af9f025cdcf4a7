"""Modules of the playground by themselves, in the browser that runs them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page

from tests.e2e.browser.replay_server import NOTHING, ReplayServer

LIBRARY = "marked.esm.js"  # tests/e2e/browser/test_markdown.py compares it with what was published


@pytest.fixture(scope="module")
def blank(context: BrowserContext, shared_server: ReplayServer) -> Iterator[Page]:
    """A page of the server's origin with nothing on it."""
    page = context.new_page()
    page.goto(f"{shared_server.url}/static/icon.svg")
    yield page
    page.close()


def evaluate(page: Page, body: str, argument: Any = None) -> Any:
    """What an async function with `body` returns; `load(name)` gives a module."""
    return page.evaluate(f"async (given) => {{ const load = (name) => import(`/static/${{name}}.js`); {body} }}", argument)


def test_events_survive_every_cut(blank: Page) -> None:
    stream = ': ping\n\ndata: {"a": 1}\n\r\ndata:two\r\ndata: lines\r\n\r\nevent: x\nid: 3\n\ndata: ü😀\n\ndata: [DONE]\n\n'
    pieces = """
        const { EventReader } = await load("stream");
        const found = [];
        for (let cut = 0; cut <= given.length; cut++) {
            const reader = new EventReader();
            found.push(JSON.stringify([...reader.push(given.slice(0, cut)), ...reader.push(given.slice(cut))]));
        }
        const reader = new EventReader();
        found.push(JSON.stringify([...given].flatMap((character) => reader.push(character))));
        return [...new Set(found)].map((each) => JSON.parse(each));
    """
    assert evaluate(blank, pieces, stream) == [['{"a": 1}', "two\nlines", "ü😀", "[DONE]"]]


def test_tokens_are_counted_by_usage_or_by_chunks(blank: Page) -> None:
    count = """
        const { ChunkReader } = await load("stream");
        const receipt = new ChunkReader().receipt(given.map((chunk) => JSON.stringify(chunk)), 5);
        return [receipt.pieces, receipt.finishReason, receipt.usage?.completion_tokens ?? null];
    """
    plain = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}, {"choices": [{"delta": {"content": "ab"}}]}]
    last = {"choices": [], "usage": {"completion_tokens": 9}}
    assert evaluate(blank, count, [*plain, last]) == [[{"text": "ab", "numTokens": 1}], None, 9]
    counted = [
        {"choices": [{"text": text, "finish_reason": None}], "usage": {"completion_tokens": n}}
        for text, n in (("a", 1), ("", 2), ("bc", 5))
    ]
    ended = {"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 5}}
    pieces = [{"text": "a", "numTokens": 1}, {"text": "", "numTokens": 1}, {"text": "bc", "numTokens": 3}]
    assert evaluate(blank, count, [*counted, ended, last]) == [pieces, "length", 9]


@pytest.mark.parametrize("event", ["nonsense", "null", "[1", '{"choices": [{"text": 5}]}'])
def test_what_is_no_chunk_is_refused(blank: Page, event: str) -> None:
    read = """
        const { ChunkReader } = await load("stream");
        const before = JSON.stringify({ choices: [{ text: "kept" }] });
        const { pieces, failure } = new ChunkReader().receipt([before, given, before], 0);
        return [pieces.map((piece) => piece.text), failure.title];
    """
    assert evaluate(blank, read, event) == [["kept"], "The answer cannot be read"]


def test_figures_are_those_of_their_definitions(blank: Page) -> None:
    measure = """
        const { Pace } = await load("pace");
        const pace = new Pace(1000);
        const before = pace.figures();
        for (const [at, numTokens] of given) pace.receive(at, numTokens);
        return [before, pace.figures()];
    """
    reads = [(1050, 2), *((1052 + 2 * idx, 1) for idx in range(98)), (1050 + 2 * 98 + 100, 2), (5000, 0)]
    before, after = evaluate(blank, measure, reads)
    assert before == {"numTokens": 0, "ttftMs": None, "tokensPerS": None, "itlP50Ms": None, "itlP99Ms": None, "decodeMs": None}
    assert (after["numTokens"], after["ttftMs"], after["decodeMs"]) == (102, 50, 296)
    assert after["tokensPerS"] == pytest.approx(100 / 0.296)
    assert after["itlP50Ms"] == pytest.approx(2, rel=0.011)
    assert after["itlP99Ms"] == pytest.approx(50, rel=0.011)  # 100 ms, shared by the two tokens that came then


def test_the_replay_keeps_its_pace_and_never_runs_ahead(blank: Page) -> None:
    play = """
        const { Replay } = await load("race");
        const replay = new Replay(100);
        const shown = [replay.due(0)];
        replay.receive(1000, [{ text: "a", numTokens: 1 }, { text: "bcd", numTokens: 3 }, { text: "e", numTokens: 1 }]);
        for (const now of [999, 1000, 1029, 1030, 1039]) shown.push(replay.due(now));
        shown.push(replay.due(1040), replay.due(1090), replay.over);
        replay.receive(1100, [{ text: "f", numTokens: 1 }]);
        replay.complete();
        shown.push(replay.due(1100), replay.over, replay.finishedMs);
        return shown;
    """
    assert evaluate(blank, play) == ["", "a", "", "", "bcd", "", "e", "", False, "f", True, 50]


COLOUR = """
    const { beginning, colourLine } = await load("highlight");
    let state = beginning(given.language);
    return given.text.split("\\n").map((line) => {
        const coloured = colourLine(state, line);
        state = coloured.state;
        return coloured.runs;
    });
"""


@pytest.mark.parametrize("language", ["python", "c-like", "shell", "config", "sql", "markup", "plain"])
def test_colours_change_no_character(blank: Page, language: str) -> None:
    folder = resources.files("kog_dist.gateway").joinpath("static")
    text = inspect.getsource(textwrap) + folder.joinpath("highlight.js").read_text() + "```py\n'''x\n```\n\\"
    lines = evaluate(blank, COLOUR, {"language": language, "text": text})
    assert "\n".join("".join(run[1] for run in runs) for runs in lines) == text


def test_colours_of_python(blank: Page) -> None:
    text = 'class A:\n    """Doc\n    if "x" else"""\n    x = 0x1F + f(\'it\\\'s\')  # why\n    def go(self): return None'
    lines = evaluate(blank, COLOUR, {"language": "python", "text": text})
    found = [[tuple(run) for run in runs if run[0]] for runs in lines]
    assert found == [
        [("keyword", "class"), ("name", "A")],
        [("string", '"""Doc')],
        [("string", '    if "x" else"""')],
        [("number", "0x1F"), ("call", "f"), ("string", "'it\\'s'"), ("comment", "# why")],
        [("keyword", "def"), ("name", "go"), ("constant", "self"), ("keyword", "return"), ("constant", "None")],
    ]


def test_colours_of_c(blank: Page) -> None:
    text = "/* if\n int */ int f(void) { return 'a'; } // x\nif not"
    lines = evaluate(blank, COLOUR, {"language": "c-like", "text": text})
    found = [[tuple(run) for run in runs if run[0]] for runs in lines]
    assert found == [
        [("comment", "/* if")],
        [
            ("comment", " int */"),
            ("keyword", "int"),
            ("call", "f"),
            ("keyword", "void"),
            ("keyword", "return"),
            ("string", "'a'"),
            ("comment", "// x"),
        ],
        [("keyword", "if")],
    ]


@pytest.mark.parametrize(
    ("name", "text", "colours"),
    [
        ("Bash", "cd $HOME  # x\nurl=http://a#b", ["keyword cd", "decorator $HOME", "comment # x"]),
        ("yaml", "name: 'x' # c\n- port: 80", ["name name", "string 'x'", "comment # c", "name - port", "number 80"]),
        ("sql", "SELECT a FROM t -- x", ["keyword SELECT", "keyword FROM", "comment -- x"]),
        ("html", '<a href="x">&lt;</a><!-- <b>\n-->', [
            "keyword <a", "name href", 'string "x"', "keyword >", "decorator &lt;", "keyword </a", "keyword >",
            "comment <!-- <b>", "comment -->",
        ]),
        ("rust", "fn f() -> u8 { 1 }", ["keyword fn", "name f", "number 1"]),
        ("text", "if x", []),
        ("", "if x", []),
    ],
)  # fmt: skip
def test_the_name_behind_a_fence_chooses_the_colours(blank: Page, name: str, text: str, colours: list[str]) -> None:
    language = evaluate(blank, 'return (await load("languages")).languageNamed(given);', name)
    lines = evaluate(blank, COLOUR, {"language": language, "text": text})
    assert [" ".join(run) for runs in lines for run in runs if run[0]] == colours


def test_a_long_line_without_an_end_is_not_coloured_again_and_again(blank: Page) -> None:
    paint = """
        const { Listing } = await load("listing");
        const listing = new Listing(document.createElementNS("http://www.w3.org/1999/xhtml", "div"));
        const began = performance.now();
        for (let idx = 0; idx < 20_000; idx++) { listing.append("'abc\\\\ "); listing.paint(); }
        return performance.now() - began;
    """
    assert evaluate(blank, paint) < 5000  # 0.5 s when nothing else runs; painted anew each time it would take minutes


def test_numbers_as_people_write_them(blank: Page) -> None:
    write = """
        const { count, rate, duration, bandwidth } = await load("numbers");
        return [count(4012), rate(4012.4), rate(99.94), rate(null), duration(0.25), duration(1.234), duration(34.56),
            duration(250), duration(12345), duration(undefined), bandwidth(4.8e12), bandwidth(2.94e9), bandwidth(5e6)];
    """
    assert evaluate(blank, write) == [
        "4,012", "4,012", "99.9", NOTHING, "250 µs", "1.23 ms", "34.6 ms",
        "250 ms", "12.35 s", NOTHING, "4.80 TB/s", "2.9 GB/s", "5 MB/s",
    ]  # fmt: skip


def test_the_page_names_every_module_and_nothing_from_elsewhere() -> None:
    folder = resources.files("kog_dist.gateway").joinpath("static")
    files = {entry.name: entry.read_text() for entry in folder.iterdir() if not entry.name.endswith(".LICENSE")}
    page = files["index.html"]
    assert set(re.findall(r'(?:href|src)="/static/([^"]+)"', page)) == set(files) - {"index.html"}
    for name, text in files.items():
        if name == LIBRARY:
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.|\beval\(|\bFunction\(|\bfetch\(|\bimport\b", text)
            continue
        assert not re.search(
            r"""(?:src|href)=["']https?:|@import|\burl\(|innerHTML|insertAdjacentHTML|document\.write|\beval\(""", text
        ), name
        imported = set(re.findall(r'from "\./([^"]+)"', text))
        assert imported <= set(files), name
        assert len(text.splitlines()) <= 300, name
    assert not re.search(r"<script>|\sstyle=|\son\w+=|<style", page)
