"""Markdown that grows: the same elements however it was cut, nothing of a model's words as markup, and bounded work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page

from tests.e2e.browser.replay_server import ReplayServer
from tests.e2e.browser.test_modules import evaluate

MARKED_SHA256 = "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"  # lib/marked.esm.js of marked 18.2.1

DOCUMENT = """# Sorting & searching

Use `sorted`: it is **stable**, *fast* and ~~slow~~; see [the docs](https://docs.python.org "Python").
A second line\\
and a third &lt;one&gt; &amp; \\*no\\* emphasis.

```python
def sort(values):
    \"\"\"Sort.

    ```
    x = "`"
    ```
    \"\"\"
    return sorted(values)  # why
```

### Steps

1. First
2. Second, with

   a paragraph
   ```sh
   ls -l  # list
   ```
3. Third
   - nested *item*
   - [x] done
   - [ ] open

- loose

- list
-

> A quote
> with **two** lines
> - and a list

Setext
------

| name | value |
|:-----|------:|
| a    | `1`   |
| b    | 2     |

***

~~~~
~~~
tildes
~~~~
    indented code

Text <b>not bold</b> https://example.org/x?y=1 ![picture](https://example.org/p.png) end.
<div>
block
</div>

Last words without an end"""

RENDER = """
    const { Prose } = await load("prose");
    const { Follower } = await load("follow");
    const rendered = (pieces) => {
        const element = document.createElement("div");
        const prose = new Prose(element, new Follower(element));
        for (const piece of pieces) { prose.append(piece); while (!prose.settled) prose.paint(); }
        prose.complete();
        while (!prose.settled) prose.paint();
        return element;
    };
"""


@pytest.fixture(scope="module")
def blank(context: BrowserContext, shared_server: ReplayServer) -> Iterator[Page]:
    page = context.new_page()
    page.goto(shared_server.url)
    yield page
    page.close()


def rendered(page: Page, source: str) -> str:
    """The HTML of a whole text, without what helps to colour code."""
    found: Any = evaluate(page, RENDER + """
        const element = rendered([given]);
        for (const button of element.querySelectorAll("button")) button.remove();
        return element.innerHTML.replace(/<span class="(tail|block|block whole)">/g, "").replace(/<.span>/g, "");
    """, source)  # fmt: skip
    assert isinstance(found, str)
    return found


def test_any_cut_gives_the_same_elements(blank: Page) -> None:
    different = evaluate(blank, RENDER + """
        const whole = rendered([given]).innerHTML;
        const cuts = { characters: [...given], words: given.split(/(?<=\\s)/), lines: given.split(/(?<=\\n)/) };
        for (const size of [2, 3, 5, 7, 11, 50, 90, 130, 170, 300, 410, 530]) {
            cuts[size] = given.match(new RegExp(`[^]{1,${size}}`, "g"));
        }
        return Object.entries(cuts).filter(([, pieces]) => rendered(pieces).innerHTML !== whole).map(([name]) => name);
    """, DOCUMENT)  # fmt: skip
    assert different == []


def test_the_elements_of_a_document(blank: Page) -> None:
    found = evaluate(blank, RENDER + """
        const element = rendered([given]);
        const texts = (selector) => [...element.querySelectorAll(selector)].map((each) => each.textContent);
        return {
            headings: [...element.querySelectorAll("h3, h4, h5")].map((each) => `${each.tagName} ${each.textContent}`),
            inline: texts("p:first-of-type > *"), code: texts("figure pre"), names: texts("figcaption"), cells: texts("th, td"),
            items: texts("ol > li > span:first-child"), tasks: texts("ul ul li, ol ul li"), quote: texts("blockquote li"),
            keywords: texts("pre .keyword"), links: [...element.querySelectorAll("a")].map((each) => [each.href, each.rel]),
        };
    """, DOCUMENT)  # fmt: skip
    assert found["headings"] == ["H3 Sorting & searching", "H4 Steps", "H4 Setext"]
    assert found["inline"][:5] == ["sorted", "stable", "fast", "slow", "the docs"]
    assert found["code"][0].startswith("def sort(values):\n")
    assert found["code"][0].endswith("    return sorted(values)  # why\n")
    assert found["code"][2:] == ["~~~\ntildes\n", "indented code"]
    assert found["names"] == ["pythonCopy", "shCopy", "codeCopy", "codeCopy"]
    assert found["cells"] == ["name", "value", "a", "1", "b", "2"]
    assert found["tasks"] == ["nested item", "☑ done", "☐ open"]
    assert found["quote"] == ["and a list"]
    assert found["keywords"] == ["def", "return"]
    rel = "noopener noreferrer nofollow"
    assert found["links"] == [
        ["https://docs.python.org/", rel], ["https://example.org/x?y=1", rel], ["https://example.org/p.png", rel],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "html"),
    [
        ("<script>alert(1)</script>", '<p class="html">&lt;script&gt;alert(1)&lt;/script&gt;</p>'),
        ("a <img src=x onerror=alert(1)> b", "<p>a &lt;img src=x onerror=alert(1)&gt; b</p>"),
        ("[x](javascript:alert(1)) [y](data:text/html,z)", "<p>x y</p>"),
        ("![p](http://a.b/c.png)", '<p><a href="http://a.b/c.png" title="http://a.b/c.png" target="_blank" rel="noopener '
         'noreferrer nofollow">p</a></p>'),
        ("&lt;i&gt; &#60;b&#x3e; &unknown; &#0;", "<p>&lt;i&gt; &lt;b&gt; &amp;unknown; \ufffd</p>"),
        ("`<b>` &amp;", "<p><code>&lt;b&gt;</code> &amp;</p>"),
        ("a\u202eb\x1b", '<p>a<span class="unseen" data-code="U+202E">\u202eb<span class="unseen" data-code="U+001B">\x1b</p>'),
    ],
    ids=["script", "image", "schemes", "picture", "entities", "code", "unseen"],
)  # fmt: skip
def test_words_never_become_markup(blank: Page, source: str, html: str) -> None:
    assert rendered(blank, source) == html


@pytest.mark.parametrize(
    "end",
    ["```python\nx = 1\n```", "```python\nx = 1\n", "```python\nx = 1", "```python\nx = 1\n``", "~~~python\nx = 1\n~~~~\n"],
    ids=["closed", "line", "cut", "half-closed", "tildes"],
)
def test_code_at_the_end_of_an_answer(blank: Page, end: str) -> None:
    code = end.split("\n", 1)[1].removesuffix("```").removesuffix("~~~~\n")
    assert evaluate(blank, RENDER + """
        return [[given], [...given]].map((pieces) => rendered(pieces).querySelector("pre").textContent);
    """, end) == [code, code]  # fmt: skip


HOSTILE = {
    "dots": "a." * 20_000 + "@", "brackets": "[" * 40_000, "links": "[a](" * 10_000, "quotes": ">" * 20_000,
    "stars": "**a " * 10_000, "tildes": "~a~~" * 10_000, "numbers": "1. " * 10_000,
    "nested": "\n".join(" " * 2 * (idx % 60) + "- a" for idx in range(4000)), "one list": "- an item of a list\n" * 5_000,
    "one table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 4_000, "one line": "word " * 20_000, "fences": "```\n" * 10_000,
    "line of code": "```\n" + "x = 1; " * 20_000, "long words": ("b" * 3_000 + " ") * 10,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_holds_up_the_page(blank: Page, name: str) -> None:
    """Steps stay short, and all characters arrive: what is left out are marks."""
    steps, total, letters = evaluate(blank, RENDER + """
        const element = document.createElement("div");
        const prose = new Prose(element, new Follower(element));
        const steps = [];
        const began = performance.now();
        for (let at = 0; at < given.length || !prose.settled; at += 200) {
            prose.append(given.slice(at, at + 200));
            if (at >= given.length) await new Promise((done) => setTimeout(done, 1));
            const begin = performance.now();
            prose.paint();
            steps.push(performance.now() - begin);
        }
        return [steps.sort((a, b) => a - b), performance.now() - began, element.textContent.replace(/[^a-z]/g, "").length];
    """, HOSTILE[name])  # fmt: skip
    print(f"{name}: longest step {steps[-1]:.0f} ms, p99 {steps[int(len(steps) * 0.99)]:.1f} ms, all {total / 1000:.1f} s")
    # The longest is below 150 when nothing else runs. What grows with the square takes many seconds, or many steps long; a
    # loaded machine holds up one or two.
    assert steps[-1] < 5000
    assert steps[-4] < 1000
    assert letters >= sum(letter.isalpha() for letter in HOSTILE[name])


def test_code_with_long_words_is_code(blank: Page) -> None:
    source = "Words.\n\n```c\nint x = " + "1" * 2_000 + ";\n" + ">" * 40 + "\n```\nEnd."
    assert evaluate(blank, RENDER + """
        const element = rendered([given]);
        return [element.querySelector("pre .keyword").textContent, element.lastChild.textContent];
    """, source) == ["int", "End."]  # fmt: skip


def test_the_library_is_the_published_one() -> None:
    folder = resources.files("kog_dist.gateway").joinpath("static")
    library = folder.joinpath("marked.esm.js").read_bytes()
    assert hashlib.sha256(library).hexdigest() == MARKED_SHA256
    assert b"marked v18.2.1" in library
    assert "Permission is hereby granted" in folder.joinpath("marked.LICENSE").read_text(encoding="utf-8")
