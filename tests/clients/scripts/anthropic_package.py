"""The anthropic package: events and their order, a result that comes back, tokens counted and cached, errors."""

from __future__ import annotations

import json
import sys

import anthropic

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Of a city.", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}]
messages = [{"role": "user", "content": [{"type": "text", "text": "How is the weather in Paris?"}]}]

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120.0)
body = {"model": "claude-sonnet-4-5", "max_tokens": 64, "tools": TOOLS}
counted = client.messages.count_tokens(model="claude-sonnet-4-5", tools=TOOLS, messages=messages).input_tokens
with client.messages.stream(messages=messages, **body) as stream:
    events = [event.type for event in stream]
    first = stream.get_final_message()
(call,) = (part for part in first.content if part.type == "tool_use")
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny, 21 degrees"}]}
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
last = client.messages.create(messages=messages, **body)
try:
    client.messages.create(messages=messages, **body | {"model": "gpt-5"})
    missing = None
except anthropic.NotFoundError as error:
    missing = error.body["error"]["type"]
try:
    client.messages.create(messages=[{"role": "user", "content": "word " * 70_000}], **body)
    too_long = None
except anthropic.BadRequestError as error:
    too_long = error.body["error"]["message"]
print(
    json.dumps(
        {
            "events": events,
            "counted": counted,
            "prompt": first.usage.input_tokens + first.usage.cache_read_input_tokens,
            "call": [call.name, call.input],
            "reasons": [first.stop_reason, last.stop_reason],
            "text": last.content[0].text,
            "cached": last.usage.cache_read_input_tokens,
            "missing": missing,
            "too_long": too_long,
        }
    )
)
