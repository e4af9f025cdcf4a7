"""Messages as some templates want them: contents in parts, arguments of calls as text."""

from __future__ import annotations

from kog_dist.model.template_trials import as_parts, with_text_arguments


def test_a_text_becomes_one_part() -> None:
    parts = [{"type": "text", "text": "a"}]
    assert as_parts("a") == parts
    assert as_parts("") == [{"type": "text", "text": ""}]
    assert as_parts(parts) is parts
    assert as_parts(None) is None


def test_arguments_become_text() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "Orléans"}}}
    said = {"id": "c2", "function": {"name": "g", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, said]}
    found = with_text_arguments(message)
    assert found["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Orléans"}'}}, said,
    ]  # fmt: skip
    assert call["function"] == {"name": "f", "arguments": {"city": "Orléans"}}, "the message stays as it is"


def test_a_message_without_calls_gets_none() -> None:
    assert with_text_arguments({"role": "user", "content": "a"}) == {"role": "user", "content": "a"}
    assert with_text_arguments({"role": "assistant", "tool_calls": []}) == {"role": "assistant", "tool_calls": []}
