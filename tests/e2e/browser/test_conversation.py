"""Conversations: questions and answers together, changed, asked again, kept in the browser and taken out of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.browser.replay_server import INFO, NOTHING, ReplayServer, Script
from tests.e2e.browser.test_playground import ANSWER, HOSTILE, ended, foot, run

SAID = "Use `sorted`:\n```python\ndef f(): pass\n```\n"
PIECES = ("Use ", "`sorted`:\n", "```python\n", "def f(): pass\n", "```\n")
RECORDS = """() => Object.entries(localStorage).filter(([key]) => key.startsWith("kog-history/"))
    .map(([, value]) => JSON.parse(value)).sort((one, other) => other.at - one.at)"""


@pytest.fixture
def chat(page: Page) -> Page:
    page.get_by_role("radio", name="Chat").check()
    return page


def ask(page: Page, *questions: str) -> None:
    for question in questions:
        run(page, question)
        ended(page)


def choose(page: Page, idx: int, name: str) -> None:
    """Something out of the menu of a chat in the list."""
    page.locator(".turn .menu summary").nth(idx).click()
    page.locator(".turn").nth(idx).get_by_role("button", name=name).click()


def messages(server: ReplayServer, idx: int = -1) -> list[str]:
    """What the request with this index says, in turns."""
    return [message["content"] for message in server.served[idx].body["messages"]]


def test_a_conversation_goes_on_and_is_cleared(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=PIECES)
    for question in ("How?", "And then?"):
        run(chat, question)
        ended(chat)
        expect(foot(chat)).to_contain_text("Finished")
    expect(chat.locator("#transcript .keyword", has_text="def").first).to_be_visible()
    assert [served.path for served in server.served] == ["/v1/chat/completions"] * 2
    assert server.served[1].body["messages"] == [
        {"role": "user", "content": "How?"}, {"role": "assistant", "content": SAID}, {"role": "user", "content": "And then?"},
    ]  # fmt: skip
    expect(chat.locator(".turn")).to_have_count(1)
    expect(chat.locator(".turn .turn-figures")).to_contain_text("2 turns")
    chat.click("#clear")
    expect(chat.locator(".turn")).to_have_count(0)
    expect(chat.locator("#no-turns")).to_be_visible()
    expect(chat.locator(".exchange")).to_have_count(0)
    run(chat, "Again")
    ended(chat)
    assert server.served[2].body["messages"] == [{"role": "user", "content": "Again"}]


@pytest.mark.parametrize("counts", [True, False])
def test_a_thought_is_folded_and_counted_and_not_sent_again(chat: Page, server: ReplayServer, counts: bool) -> None:
    server.script = Script(pieces=("Hm", "..."), num_reasoning=2, end="hold", counts=counts)
    run(chat, "How?")
    expect(chat.locator("#outcome")).to_have_text("Thinking")
    expect(chat.locator(".thought summary")).to_have_text("Thinking…")
    chat.locator("#stop").click()
    ended(chat)
    expect(foot(chat)).to_contain_text("Stopped")
    chat.click("#new")
    server.script = Script(pieces=("Hm", "...", *PIECES), num_reasoning=2, counts=counts)
    run(chat, "How?")
    ended(chat)
    expect(foot(chat)).to_contain_text("Finished")
    expect(chat.locator("#transcript")).to_contain_text("sorted")
    thought = chat.locator(".thought")
    expect(thought.locator("div").first).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator("div").first).to_have_text("Hm...")
    expect(chat.locator(".exchange .prose")).not_to_contain_text("Hm")
    expect(chat.locator("#num-tokens")).to_have_text(str(2 + len(PIECES)))
    run(chat, "And then?")
    ended(chat)
    assert messages(server)[-3:] == ["How?", SAID, "And then?"]
    chat.reload()
    chat.locator(".thought summary").first.click()
    expect(chat.locator(".thought div").first).to_have_text("Hm...")


CALLS = (
    {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"city": "<b>'}},
    {"index": 0, "function": {"arguments": 'Oslo"}'}},
    {"index": 1, "id": "call_2", "function": {"name": "time", "arguments": "{}"}},
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_calls_are_cards_that_take_results(chat: Page, server: ReplayServer) -> None:
    chat.click("#settings-button")
    chat.fill("#tools", "[1]")
    run(chat, "Weather?")
    expect(chat.locator("#tools")).to_be_focused()
    chat.fill("#tools", json.dumps(TOOLS))
    server.script = Script(pieces=("I look.",), calls=CALLS, finish_reason="tool_calls")
    ask(chat, "Weather?")
    assert server.served[0].body["tools"] == TOOLS
    cards = chat.locator(".tool-call")
    expect(cards).to_have_count(2)
    assert cards.locator("p").all_text_contents() == ["weather()", "time()"]
    assert cards.locator("pre").all_text_contents() == ['{\n  "city": "<b>Oslo"\n}', "{}"]
    expect(foot(chat)).to_contain_text("Called a tool")
    chat.reload()
    expect(cards).to_have_count(2)
    chat.get_by_label("Result of weather").fill("rain")
    chat.get_by_label("Result of time").fill("noon")
    server.script = Script(pieces=("It rains at noon.",))
    chat.get_by_role("button", name="Give the results").click()
    ended(chat)
    sent = server.served[1].body["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert [call["function"]["name"] for call in sent[1]["tool_calls"]] == ["weather", "time"]
    assert [(message["tool_call_id"], message["content"]) for message in sent[2:]] == [("call_1", "rain"), ("call_2", "noon")]
    expect(chat.locator(".exchange .prose").last).to_have_text("It rains at noon.")


@pytest.mark.parametrize("cut", ["stop", "length"])
def test_an_answer_that_was_cut_goes_on(chat: Page, server: ReplayServer, cut: str) -> None:
    server.script = Script(pieces=("One, ",), **({"end": "hold"} if cut == "stop" else {"finish_reason": "length"}))  # type: ignore[arg-type]
    run(chat, "Count.")
    expect(chat.locator(".exchange .prose")).to_have_text("One,")
    if cut == "stop":
        chat.click("#stop")
    ended(chat)
    server.script = Script(pieces=("two.",))
    foot(chat).get_by_role("button", name="Continue").click()
    ended(chat)
    body = server.served[1].body
    assert [(message["role"], message["content"]) for message in body["messages"]] == [("user", "Count."), ("assistant", "One, ")]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    expect(chat.locator(".exchange")).to_have_count(1)
    expect(chat.locator(".exchange .prose")).to_have_text("One, two.")
    expect(foot(chat)).to_contain_text("Finished")
    expect(foot(chat).get_by_role("button", name="Continue")).to_have_count(0)
    ask(chat, "Again.")
    assert messages(server) == ["Count.", "One, two.", "Again."]


def test_drafts_and_the_queue_are_said(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=PIECES, drafted=(12, 9), queue_ms=1500.0)
    ask(chat, "How?")
    expect(foot(chat)).to_contain_text("9 of 12 drafted accepted · 1.50 s in the queue")


def test_a_model_without_a_template_gets_no_markdown(chat: Page, server: ReplayServer) -> None:
    server.info = {**INFO, "model": {**INFO["model"], "chat": "plain"}}
    chat.reload()
    expect(chat.locator("#chat-note")).to_be_hidden()
    chat.get_by_role("radio", name="Chat").check()
    expect(chat.locator("#chat-note")).to_be_visible()
    server.script = Script(pieces=("*a* ", "`b`\n", "# c"))
    ask(chat, "How?")
    expect(chat.locator(".exchange .plain").last).to_have_text("*a* `b`\n# c")
    assert chat.locator(".exchange :is(em, code, h3)").count() == 0


def test_what_was_typed_outlives_a_reload(chat: Page, server: ReplayServer) -> None:
    chat.fill("#prompt", "half a question")
    chat.get_by_role("radio", name="Complete text").check()
    assert chat.input_value("#prompt") == ""
    chat.fill("#prompt", "def f(")
    chat.reload()
    assert chat.input_value("#prompt") == "def f("
    chat.get_by_role("radio", name="Chat").check()
    assert chat.input_value("#prompt") == "half a question"
    ask(chat, "whole")
    chat.reload()
    assert chat.input_value("#prompt") == ""


def test_enter_sends_and_shift_enter_is_a_new_line(chat: Page, server: ReplayServer) -> None:
    chat.fill("#prompt", "one")
    chat.locator("#prompt").press("Shift+Enter")
    chat.locator("#prompt").type("two")
    chat.locator("#prompt").press("Enter")
    ended(chat)
    assert messages(server) == ["one\ntwo"]
    chat.get_by_role("radio", name="Complete text").check()
    chat.fill("#prompt", "def f():")
    chat.locator("#prompt").press("Enter")
    assert chat.input_value("#prompt") == "def f():\n"
    chat.locator("#prompt").press("Control+Enter")
    ended(chat)
    assert server.served[1].body["prompt"] == "def f():\n"


def test_chats_are_found_and_renamed(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=PIECES)
    for question in ("About cats", "About dogs"):
        ask(chat, question)
        chat.click("#new")
    chat.fill("#search", "CATS")
    expect(chat.locator(".turn-prompt")).to_have_text(["About cats"])
    chat.fill("#search", "sorted")
    expect(chat.locator(".turn")).to_have_count(2)  # answers are searched, too
    chat.fill("#search", "birds")
    expect(chat.locator("#no-turns")).to_have_text("No chat has these words.")
    chat.fill("#search", "")
    choose(chat, 1, "Rename")
    chat.get_by_label("Title").fill("Felines")
    chat.keyboard.press("Enter")
    expect(chat.locator(".turn-prompt")).to_have_text(["About dogs", "Felines"])
    choose(chat, 0, "Rename")
    chat.get_by_label("Title").fill("Nothing")
    chat.keyboard.press("Escape")
    expect(chat.locator(".turn-prompt")).to_have_text(["About dogs", "Felines"])
    chat.locator(".turn-open").nth(1).click()
    ask(chat, "More?")
    chat.reload()
    expect(chat.locator(".turn-prompt")).to_have_text(["Felines", "About dogs"])


def test_a_new_chat_shows_nothing_of_the_last(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["word "] * 400, tokens_per_s=4000.0)
    ask(chat, "How?")
    chat.click("#new")
    expect(chat.locator("#welcome")).to_be_visible()
    expect(chat.locator("#outcome")).to_be_empty()
    chat.click("#tab-speed")
    expect(chat.locator("#rate")).to_have_text("0")
    expect(chat.locator("#num-tokens")).to_have_text(NOTHING)
    expect(chat.locator("#race")).to_be_hidden()
    expect(chat.locator("#replay")).to_be_empty()


def test_who_only_waited_when_the_engine_died_hears_that_nothing_had_begun(chat: Page, server: ReplayServer) -> None:
    server.script = Script(place=2, pieces=(), end="error")
    run(chat, "How?")
    expect(chat.locator("#problem")).to_contain_text("Nothing of the answer had begun")
    expect(chat.locator("#problem")).not_to_contain_text("exact beginning")
    assert chat.input_value("#prompt") == "How?"


def test_question_and_answer_stand_together_in_markdown(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["# Two ways\n\n", "1. **sort**\n", "2. *sorted*\n\n", "```python\n", "x = sorted(y)\n", "```"])
    ask(chat, "How do I\n  sort?")
    exchange = chat.locator(".exchange")
    expect(exchange.locator(".question")).to_have_text("How do I\n  sort?")
    assert exchange.locator("h3").all_text_contents() == ["Two ways"]
    assert exchange.locator("ol > li").all_text_contents() == ["sort", "sorted"]
    expect(exchange.locator("figcaption")).to_contain_text("python")
    expect(exchange.locator("pre")).to_have_text("x = sorted(y)\n")
    expect(exchange.locator("footer")).to_contain_text(" · 6 tokens")
    expect(chat.locator("#replay h3")).to_have_text("Two ways")
    expect(chat.locator("#replay pre")).to_have_text("x = sorted(y)\n")
    question, answer = exchange.locator(".question").bounding_box(), exchange.locator("h3").bounding_box()
    assert question is not None
    assert answer is not None
    assert question["y"] < answer["y"]
    assert chat.input_value("#prompt") == ""


def test_what_a_model_writes_stays_text_in_markdown(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=[*HOSTILE, "\n\n[x](javascript:window.pwned=1) ![y](http://192.0.2.1/z.png)\n"])
    ask(chat, "<script>window.pwned = 1</script>\u202e")
    chat.reload()
    expect(chat.locator(".exchange")).to_have_count(1)
    for link in chat.locator("#transcript a").all():
        assert str(link.get_attribute("href")).startswith("http")
    assert chat.evaluate("window.pwned") is None
    assert chat.locator("main script, main img, main b:not(.rank b), main i:not(.rank i)").count() == 0
    assert chat.locator("#transcript [data-code='U+202E']").count() == 2


def test_the_last_answer_is_regenerated(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["one"])
    ask(chat, "First?", "Second?")
    server.script = Script(pieces=["two"])
    chat.fill("#prompt", "a draft")
    expect(chat.get_by_role("button", name="Regenerate")).to_have_count(1)
    chat.get_by_role("button", name="Regenerate").click()
    ended(chat)
    assert messages(server) == ["First?", "one", "Second?"]
    expect(chat.locator(".exchange")).to_have_count(2)
    expect(chat.locator(".exchange .prose").last).to_have_text("two")
    assert chat.input_value("#prompt") == "a draft"
    server.script = Script(status=503)
    chat.get_by_role("button", name="Regenerate").click()
    expect(chat.locator("#problem")).to_be_visible()
    expect(chat.locator(".exchange .prose").last).to_have_text("two")
    assert len(chat.evaluate(RECORDS)[0]["turns"]) == 2
    server.script = Script(pieces=["three"])
    chat.click("#problem-retry")
    ended(chat)
    assert messages(server) == ["First?", "one", "Second?"]
    assert chat.locator(".exchange .prose").all_text_contents() == ["one", "three"]
    assert chat.input_value("#prompt") == "a draft"


def test_an_earlier_question_is_edited(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["one"])
    ask(chat, "First?", "Second?", "Third?")
    chat.locator(".exchange").nth(1).get_by_role("button", name="Edit").click()
    assert chat.input_value("#prompt") == "Second?"
    expect(chat.locator("#edit-note")).to_contain_text("replaces turn 2 and those after it")
    chat.click("#edit-cancel")
    expect(chat.locator("#edit-note")).to_be_hidden()
    chat.locator(".exchange").nth(1).get_by_role("button", name="Edit").click()
    server.script = Script(pieces=["two"])
    ask(chat, "Instead?")
    assert messages(server) == ["First?", "one", "Instead?"]
    assert chat.locator(".exchange .question").all_text_contents() == ["First?", "Instead?"]
    assert [turn["prompt"] for turn in chat.evaluate(RECORDS)[0]["turns"]] == ["First?", "Instead?"]
    expect(chat.locator("#edit-note")).to_be_hidden()
    chat.locator(".exchange").first.get_by_role("button", name="Edit").click()
    server.script = Script(status=503)
    run(chat, "Anew?")
    expect(chat.locator("#problem")).to_be_visible()
    assert chat.locator(".exchange .question").all_text_contents() == ["First?", "Instead?"]
    assert chat.input_value("#prompt") == "Anew?"
    server.script = Script(pieces=["three"])
    chat.click("#problem-retry")
    ended(chat)
    assert messages(server) == ["Anew?"]
    assert chat.locator(".exchange .question").all_text_contents() == ["Anew?"]
    assert chat.input_value("#prompt") == ""


def test_a_question_that_failed_is_back_in_its_box(chat: Page, server: ReplayServer) -> None:
    server.script = Script(status=503)
    run(chat, "Why?")
    expect(chat.locator("#problem")).to_be_visible()
    assert chat.input_value("#prompt") == "Why?"
    expect(chat.locator(".exchange")).to_have_count(0)
    server.script = Script(pieces=ANSWER, end="error")
    chat.click("#problem-retry")
    ended(chat)
    expect(chat.locator(".exchange footer")).to_contain_text("The answer was cut off")
    assert chat.input_value("#prompt") == ""
    server.script = Script(pieces=ANSWER)
    chat.click("#problem-retry")
    ended(chat)
    assert messages(server) == ["Why?"], "what was cut off is asked for again"
    expect(chat.locator(".exchange")).to_have_count(1)
    expect(chat.locator(".exchange footer")).to_contain_text("Finished")


def test_history_survives_a_reload(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=PIECES)
    ask(chat, "How?", "And then?")
    chat.get_by_role("radio", name="Complete text").check()
    run(chat, "def f():\n")
    ended(chat)
    chat.reload()
    expect(chat.locator(".turn")).to_have_count(2)
    expect(chat.locator(".turn-prompt").first).to_have_text("def f():")
    chat.locator(".turn-open").nth(1).click()
    assert chat.get_by_role("radio", name="Chat").is_checked()
    expect(chat.locator(".exchange")).to_have_count(2)
    expect(chat.locator(".exchange .keyword").first).to_have_text("def")
    ask(chat, "More?")
    assert messages(server) == ["How?", SAID, "And then?", SAID, "More?"]
    expect(chat.locator(".turn")).to_have_count(2)
    chat.reload()
    expect(chat.locator(".exchange")).to_have_count(3)
    assert chat.get_by_role("radio", name="Chat").is_checked(), "the page opens with what was last used"
    chat.click("#new")
    expect(chat.locator(".exchange")).to_have_count(0)
    ask(chat, "Else?")
    assert messages(server) == ["Else?"]
    expect(chat.locator(".turn")).to_have_count(3)
    choose(chat, 0, "Delete")
    expect(chat.locator(".turn")).to_have_count(2)
    expect(chat.locator(".exchange")).to_have_count(0)
    chat.click("#clear")
    assert chat.evaluate(RECORDS) == []


def test_another_tab_shows_the_same_history(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=PIECES)
    other = chat.context.new_page()
    other.goto(server.url)
    ask(chat, "How?")
    expect(other.locator(".turn")).to_have_count(1)
    other.click("#clear")
    expect(chat.locator(".turn")).to_have_count(0)
    other.close()


def test_storage_that_is_full_forgets_the_oldest(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["a" * 300_000] * 2, tokens_per_s=10_000)
    ask(chat, "0?")
    for idx in range(1, 5):
        chat.click("#new")
        ask(chat, f"{idx}?")
    prompts = [record["turns"][0]["prompt"] for record in chat.evaluate(RECORDS)]
    assert prompts == ["4?", "3?", "2?"]
    chat.evaluate("""() => {
        Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); };
    }""")
    chat.click("#new")
    ask(chat, "5?")
    expect(chat.locator(".turn")).to_have_count(1)
    expect(chat.locator(".exchange")).to_have_count(1)
    chat.reload()


@pytest.mark.parametrize(
    "value", ["nonsense", "null", "{}", '{"id": "x", "mode": "conversation", "at": 1, "turns": [{"prompt": 1}]}']
)
def test_foreign_records_are_left_out(page: Page, value: str) -> None:
    page.evaluate("(value) => localStorage.setItem('kog-history/x', value)", value)
    page.reload()
    expect(page.locator("#engine")).to_have_attribute("data-state", "ready")
    expect(page.locator(".turn")).to_have_count(0)


def test_without_storage_the_page_works(browser: Browser, server: ReplayServer) -> None:
    page = browser.new_page()
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } })"
    )
    page.goto(server.url)
    page.get_by_role("radio", name="Chat").check()
    server.script = Script(pieces=PIECES)
    ask(page, "How?", "And then?")
    assert messages(server) == ["How?", SAID, "And then?"]
    expect(page.locator(".turn")).to_have_count(1)
    page.close()


def saved(page: Page, click: Callable[[], None]) -> tuple[str, str]:
    """Name and text of the file that a click gives."""
    with page.expect_download() as download:
        click()
    return download.value.suggested_filename, Path(download.value.path()).read_text(encoding="utf-8")


def test_conversations_and_completions_are_exported(chat: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=PIECES)
    ask(chat, "How do I sort?", "And then?")
    name, text = saved(chat, lambda: choose(chat, 0, "Export as Markdown"))
    expect(chat.locator(".turn .menu[open]")).to_have_count(0)
    assert name == "how-do-i-sort.md"
    assert text.startswith("# How do I sort?\n\ndemo, 20")
    assert f"## Question\n\nAnd then?\n\n## Answer\n\n{SAID}" in text
    name, text = saved(chat, lambda: choose(chat, 0, "Export as JSON"))
    found: dict[str, Any] = json.loads(text)
    assert (name, found["model"]) == ("how-do-i-sort.json", "demo")
    assert [message["content"] for message in found["messages"]] == ["How do I sort?", SAID, "And then?", SAID]
    assert [figures["numTokens"] for figures in found["figures"]] == [5, 5]
    chat.get_by_role("radio", name="Complete text").check()
    server.script = Script(pieces=ANSWER)
    run(chat, "def fib(n):\n")
    ended(chat)
    name, text = saved(chat, lambda: choose(chat, 0, "Export as text"))
    assert (name, text) == ("def-fib-n.txt", "def fib(n):\n" + "".join(ANSWER))


def test_code_is_copied_without_its_fence(browser: Browser, server: ReplayServer) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(server.url)
    page.get_by_role("radio", name="Chat").check()
    server.script = Script(pieces=PIECES)
    ask(page, "How?")
    page.locator(".code button").first.click()
    expect(page.locator(".code button").first).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f(): pass\n"
    page.locator(".exchange footer").get_by_role("button", name="Copy").click()
    page.wait_for_function("async () => (await navigator.clipboard.readText()).startsWith('Use')")
    assert page.evaluate("navigator.clipboard.readText()") == SAID
    context.close()
