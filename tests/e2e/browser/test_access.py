"""How the playground looks and who can use it: themes, contrast, small screens, keyboard, screen readers, less motion."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.e2e.browser.replay_server import ReplayServer, Script
from tests.e2e.browser.test_playground import ANSWER, ANSWER_JS, ended, foot, run


def test_light_and_dark(browser: Browser, page: Page, server: ReplayServer) -> None:
    paper = "() => getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(248, 249, 249)"
    page.click("#theme")
    assert page.evaluate(paper) == "rgb(18, 20, 22)"
    page.reload()
    assert page.evaluate(paper) == "rgb(18, 20, 22)", "the choice is remembered"
    dark = browser.new_page(color_scheme="dark")
    dark.goto(server.url)
    assert dark.evaluate(paper) == "rgb(18, 20, 22)", "without a choice the system decides"
    dark.close()


CONTRASTS = """() => {
    const luminance = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (; element; element = element.parentElement) {
            const colour = getComputedStyle(element).backgroundColor;
            if (!colour.endsWith(", 0)")) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const poor = [];
    for (const element of document.querySelectorAll("body *")) {
        const ownText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!ownText || !element.checkVisibility() || element.matches(":disabled, :disabled *, noscript")) continue;
        const [a, b] = [luminance(getComputedStyle(element).color), luminance(ground(element))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) poor.push(`${element.className || element.id || element.tagName}: ${ratio.toFixed(2)}`);
    }
    return poor;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_at_least_4_5(page: Page, server: ReplayServer, theme: str) -> None:
    page.evaluate("(theme) => { document.documentElement.dataset.theme = theme; }", theme)
    server.script = Script(
        pieces=("@cached\ndef f(x=1, y=None):\n", '    """Text."""\n', "    return g(x)  # why\n\x1b"), end="error"
    )
    run(page)
    ended(page)
    assert page.evaluate(CONTRASTS) == []


def test_360_pixels_are_enough(browser: Browser, server: ReplayServer) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto(server.url)
    server.script = Script(pieces=[*ANSWER, "x" * 300, "\n"])
    run(page, "# " + "long " * 40)
    ended(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    outside = """() => [...document.querySelectorAll("main *")].filter((element) => element.checkVisibility()
        && element.getBoundingClientRect().right > 360.5)
        .map((element) => element.id || element.className)"""
    assert page.evaluate(outside) == []
    page.close()


SMALL = """() => [...document.querySelectorAll("button, summary, input, select, textarea, .modes label")].filter((element) => {
    const box = (element.closest("label.check, .modes label") ?? element).getBoundingClientRect();
    return element.checkVisibility() && (box.height < 40 || box.width < 40);
}).map((element) => element.id || element.textContent || element.name)"""
FINE = """() => [...document.querySelectorAll("input:not([type=radio], [type=checkbox]), select, textarea")]
    .filter((element) => parseFloat(getComputedStyle(element).fontSize) < 16).map((element) => element.id)"""


@pytest.mark.parametrize("width", [1280, 360])
def test_fingers_hit_and_telephones_do_not_magnify(browser: Browser, server: ReplayServer, width: int) -> None:
    """Targets have 40 pixels, and fields text of 16, for which no telephone magnifies the page."""
    page = browser.new_page(viewport={"width": width, "height": 740})
    page.goto(server.url)
    server.script = Script(pieces=["```python\n", "x = 1\n", "```\n"])
    page.click("#settings-button")
    page.select_option("#num-logprobs", "3")
    page.select_option("#format", "json_schema")
    if width == 360:
        assert page.evaluate(SMALL) == []
        page.click("#settings-close")
    for mode in ("Complete text", "Chat"):
        page.get_by_role("radio", name=mode).check()
        run(page, "x")
        ended(page)
    page.click("#side-button") if width == 360 else None
    for details in page.locator("details:visible").all():
        details.evaluate("(each) => { each.open = true; }")
    assert page.evaluate(SMALL) == []
    page.keyboard.press("Escape")
    for opener in ("#copy-request", "#key-button") if width == 1280 else ("#key-button",):
        page.click(opener)
        assert page.evaluate(SMALL) == []
        page.keyboard.press("Escape")
    server.script = Script(status=401)
    run(page, "x")
    expect(page.locator("#problem")).to_be_visible()
    assert page.evaluate(SMALL) == []
    assert page.evaluate(FINE) == []
    page.close()


def test_the_keyboard_is_enough(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=ANSWER)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab") if page.evaluate("document.activeElement.id") != "prompt" else None
    page.locator("#prompt").focus()
    page.keyboard.type("x")
    page.keyboard.press("Control+Enter")
    expect(foot(page)).to_contain_text("Finished")
    order: list[str] = []
    page.locator("#new").focus()
    while not order or order[-1] != "run":
        page.keyboard.press("Tab")
        assert len(order) < 40, "the message cannot be sent by keyboard"
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert shown != "none", f"{order[-1]} does not show that it has the focus"
    wanted = ["search", "clear", "side-button", "tab-chat", "settings-button", "scroll", "prompt", "copy-request", "run"]
    assert [each for each in order if each in wanted] == wanted
    page.locator("#tab-chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-speed")).to_be_focused()
    expect(page.locator("#speed-panel")).to_be_visible()


def test_a_screen_reader_hears_sentences_not_tokens(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["word "] * 200, tokens_per_s=1000.0)
    page.evaluate("""() => {
        window.heard = [];
        new MutationObserver(() => heard.push(announcement.textContent)).observe(announcement, { childList: true });
    }""")
    run(page)
    ended(page)
    heard = page.evaluate("window.heard")
    assert heard[0] == "Started."
    assert heard[-1].startswith("Finished: 200 tokens")
    assert len(heard) == 2
    live = page.evaluate("[...document.querySelectorAll('[aria-live], [role=status], [role=alert]')].map((each) => each.id)")
    assert sorted(live) == ["announcement", "copied", "problem"]
    unnamed = """() => [...document.querySelectorAll("button, input, textarea, [role=region]")].filter((element) =>
        !element.textContent.trim() && !element.labels?.length && !element.getAttribute("aria-label")
        && !element.getAttribute("aria-labelledby")).map((element) => element.id)"""
    assert page.evaluate(unnamed) == []


def test_less_motion_when_asked(browser: Browser, server: ReplayServer) -> None:
    context: BrowserContext = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.goto(server.url)
    server.script = Script(pieces=["word "] * 800, tokens_per_s=1000.0)
    page.evaluate("""() => {
        window.paints = 0;
        window.began = performance.now();
        new MutationObserver(() => { window.paints++; }).observe(live, { childList: true, subtree: true, characterData: true });
    }""")
    run(page)
    page.wait_for_function(f"() => {ANSWER_JS.format('live')}.length === 4000")
    paints, seconds = page.evaluate("[window.paints, (performance.now() - window.began) / 1000]")
    assert paints <= 4 * seconds + 4, "four times a second, not with every frame"
    context.close()


def test_the_focus_is_never_lost(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["word "] * 100_000, tokens_per_s=500.0)
    page.fill("#prompt", "x")
    page.locator("#run").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.locator("#stop").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#run")).to_be_focused()
