"""The openai package: a chat, a stream, a completion with echo, a response, a tool call, an error."""

from __future__ import annotations

import json
import sys

import openai

QUESTION = "What is the capital of France?"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}

with openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120.0) as client:
    body = {"model": "default", "temperature": 0.0, "messages": [{"role": "user", "content": QUESTION}]}
    chat = client.chat.completions.create(**body, max_completion_tokens=24)
    with client.chat.completions.create(**body, max_completion_tokens=24, stream=True) as chunks:
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    called = client.chat.completions.create(**body, tools=tools, tool_choice="required", max_tokens=32)
    (call,) = called.choices[0].message.tool_calls
    response = client.responses.create(model="default", input=QUESTION, temperature=0.0, max_output_tokens=24)
    scored = client.completions.create(model="default", prompt=QUESTION, echo=True, logprobs=1, max_tokens=0)
    try:
        client.chat.completions.create(**body | {"model": "gpt-5"})
        refused = None
    except openai.NotFoundError as error:
        refused = error.code
    print(
        json.dumps(
            {
                "text": chat.choices[0].message.content,
                "streamed": streamed,
                "arguments": json.loads(call.function.arguments),
                "response": response.output_text,
                "num_scored": len(scored.choices[0].logprobs.token_logprobs),
                "refused": refused,
            }
        )
    )
