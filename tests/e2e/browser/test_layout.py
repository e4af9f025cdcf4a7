"""Where things stand: one column to read, the message below it, and only one thing that scrolls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.e2e.browser.replay_server import ReplayServer, Script
from tests.e2e.browser.test_playground import ended, run, run_until_compared

LAPTOP: ViewportSize = {"width": 1280, "height": 800}
DESK: ViewportSize = {"width": 1920, "height": 1080}
PHONE: ViewportSize = {"width": 360, "height": 740}
SIZES = (LAPTOP, DESK, PHONE)
NAMES = [f"{size['width']}x{size['height']}" for size in SIZES]
LONG = [f"line {idx}\n\n" for idx in range(400)]
SCROLL = """() => [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility()
    && element.scrollHeight > element.clientHeight + 1 && ["auto", "scroll"].includes(getComputedStyle(element).overflowY))
    .map((element) => element.id)"""


@pytest.fixture
def sized(browser: Browser, server: ReplayServer, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page in a window of the size that the test names."""
    page = browser.new_page(viewport=request.param)
    page.goto(server.url)
    page.get_by_role("radio", name="Chat").check()
    yield page
    page.close()


def box(page: Page, selector: str) -> tuple[float, float, float, float]:
    """Left, top, right and bottom in the window."""
    found = page.locator(selector).first.bounding_box()
    assert found is not None, f"{selector} is not shown"
    return found["x"], found["y"], found["x"] + found["width"], found["y"] + found["height"]


def assert_in_sight(page: Page, *selectors: str) -> None:
    size = page.viewport_size
    assert size is not None
    for selector in selectors:
        left, top, right, bottom = box(page, selector)
        assert (left >= 0, top >= 0, right <= size["width"], bottom <= size["height"]) == (True,) * 4, selector


@pytest.mark.parametrize("sized", SIZES, indirect=True, ids=NAMES)
def test_answers_stand_above_the_message_in_one_column(sized: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=LONG, tokens_per_s=4000.0)
    run(sized, "How?")
    ended(sized)
    sized.wait_for_function(
        "() => scroll.scrollTop + scroll.clientHeight > scroll.scrollHeight - 40".replace(
            "scroll.", "document.getElementById('scroll')."
        )
    )
    assert_in_sight(sized, "#engine", "#tab-speed", "#settings-button", ".exchange footer", "#prompt", "#run", "#context")
    answer, message = box(sized, ".exchange .prose"), box(sized, ".box")
    assert box(sized, ".exchange footer")[3] <= message[1]
    assert answer[2] - answer[0] <= 720.5
    assert abs((answer[0] + answer[2]) - (message[0] + message[2])) < 3, "one column"
    assert sized.evaluate(SCROLL) == ["scroll"], "no frame that scrolls in a frame"
    assert sized.evaluate("[document.documentElement.scrollHeight > innerHeight, scrollY]") == [False, 0]


@pytest.mark.parametrize("sized", [LAPTOP], indirect=True, ids=["1280x800"])
def test_settings_leave_message_and_answer_in_sight(sized: Page, server: ReplayServer) -> None:
    sized.click("#settings-button")
    server.script = Script(pieces=LONG, tokens_per_s=4000.0)
    run(sized, "How?")
    ended(sized)
    for selector in (".box", ".exchange .prose"):
        assert box(sized, selector)[2] <= box(sized, "#sampling")[0], selector
    sized.keyboard.press("Escape")


@pytest.mark.parametrize("sized", [LAPTOP], indirect=True, ids=["1280x800"])
def test_the_list_of_chats_stays_closed(sized: Page) -> None:
    expect(sized.locator("#side")).to_be_visible()
    sized.click("#side-button")
    expect(sized.locator("#side")).to_be_hidden()
    sized.reload()
    expect(sized.locator("#side")).to_be_hidden()
    sized.click("#side-button")
    expect(sized.locator("#side")).to_be_visible()


@pytest.mark.parametrize("sized", [PHONE], indirect=True, ids=["360x740"])
def test_on_a_phone_the_list_opens_over_the_chat(sized: Page, server: ReplayServer) -> None:
    expect(sized.locator("#side")).to_be_hidden()
    server.script = Script(pieces=["yes"])
    run(sized, "How?")
    ended(sized)
    sized.click("#side-button")
    sized.click("#new")
    expect(sized.locator("#side")).to_be_hidden()
    expect(sized.locator("#welcome")).to_be_visible()
    sized.click("#side-button")
    sized.locator(".turn-open").click()
    expect(sized.locator("#side")).to_be_hidden()
    expect(sized.locator(".exchange")).to_have_count(1)


@pytest.mark.parametrize("sized", SIZES, indirect=True, ids=NAMES)
def test_all_figures_are_in_sight(sized: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=LONG, tokens_per_s=400.0)
    run_until_compared(sized, "How?")
    sized.click("#tab-speed")
    assert_in_sight(sized, "#rate", "#ttft", "#itl-p99", "#num-tokens", "#verdict", "#track-live", "#track-replay")
    assert set(sized.evaluate(SCROLL)) <= {"speed-panel"}, "no frame that scrolls in a frame"
