"""Where things stand: prompt, figures, answer and comparison in sight, on a laptop and on a phone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.e2e.browser.replay_server import ReplayServer, Script
from tests.e2e.browser.test_playground import ended, run

LAPTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 360, "height": 740}
LONG = [f"line {idx}\n" for idx in range(400)]


@pytest.fixture
def sized(browser: Browser, server: ReplayServer, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page in a window of the size that the test names."""
    page = browser.new_page(viewport=request.param)
    page.goto(server.url)
    yield page
    page.close()


def box(page: Page, selector: str) -> tuple[float, float, float, float]:
    """Left, top, right and bottom in the window."""
    found = page.locator(selector).first.bounding_box()
    assert found is not None, f"{selector} is not shown"
    return found["x"], found["y"], found["x"] + found["width"], found["y"] + found["height"]


@pytest.mark.parametrize("sized", [LAPTOP], indirect=True, ids=["1280x800"])
def test_all_is_in_sight_on_a_laptop(sized: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=LONG)
    run(sized)
    ended(sized)
    for selector in ("#engine", "#rate", "#ttft", "#itl-p99", "#num-tokens", "#prompt", "#run", ".sampling summary", "#ranks",
                     "#live", "#track-live", "#replay", "#track-replay", "#verdict"):  # fmt: skip
        left, top, right, bottom = box(sized, selector)
        assert (left >= 0, top >= 0, right <= 1280, bottom <= 800) == (True,) * 4, selector
    prompt, live, replay = box(sized, "#prompt"), box(sized, "#live"), box(sized, "#replay")
    assert prompt[2] < live[0], "the answer is beside the prompt"
    assert min(prompt[3], live[3]) - max(prompt[1], live[1]) > 200
    assert live[3] - live[1] > 300, "most of the height is the answer's"
    assert live[3] < replay[1]
    assert box(sized, "#speed")[3] - box(sized, "#speed")[1] < 80, "the figures are a strip"
    assert sized.evaluate("scrollY") == 0


@pytest.mark.parametrize("sized", [LAPTOP], indirect=True, ids=["1280x800"])
def test_open_settings_leave_the_answer_in_sight(sized: Page) -> None:
    sized.evaluate("document.getElementById('prompt').style.height = '1200px'")
    sized.mouse.wheel(0, 600)
    sized.wait_for_function("() => scrollY > 300")
    top, bottom = box(sized, "#live")[1], box(sized, "#replay")[3]
    assert top > 0
    assert bottom < 800


@pytest.mark.parametrize("sized", [LAPTOP, {"width": 900, "height": 700}], indirect=True, ids=["1280x800", "900x700"])
def test_the_answer_never_covers_the_history(sized: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=LONG)
    sized.click(".sampling summary")
    run(sized)
    ended(sized)
    sized.locator(".turn summary").click()
    # Again and again: the page grows while the turn opens.
    sized.wait_for_function(
        "() => { scrollTo(0, 1e9); return scrollY + innerHeight >= document.documentElement.scrollHeight - 1; }"
    )
    assert box(sized, ".answer")[3] <= box(sized, "#turns")[1]


@pytest.mark.parametrize("sized", [PHONE], indirect=True, ids=["360x740"])
def test_a_phone_shows_the_answer(sized: Page, server: ReplayServer) -> None:
    prompt, live = box(sized, "#prompt"), box(sized, "#live")
    assert prompt[1] > 0
    assert live[1] < 740 - 200, "200 pixels of the answer are above the fold before anything is scrolled"
    server.script = Script(pieces=["word "] * 100_000, tokens_per_s=500.0)
    run(sized)
    sized.wait_for_function("() => document.querySelector('#live .block').textContent.includes('word word')")
    for selector in ("#rate", "#ttft", "#num-tokens", "#track-live", "#live", "#stop-here"):
        left, top, right, bottom = box(sized, selector)
        assert (left >= 0, top >= 0, right <= 360, bottom <= 740) == (True,) * 4, selector
    sized.click("#stop-here")
    expect(sized.locator("#outcome")).to_have_text("Stopped")
    expect(sized.locator("#stop-here")).to_be_hidden()
