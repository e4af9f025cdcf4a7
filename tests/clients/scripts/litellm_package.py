"""litellm: a chat, a stream, a text completion, a model that nobody serves."""

from __future__ import annotations

import json
import sys

import litellm

litellm.telemetry = False
QUESTION = "What is the capital of France?"
WHERE = {"api_base": sys.argv[1], "api_key": "none", "num_retries": 0, "timeout": 120}
MESSAGES = [{"role": "user", "content": QUESTION}]
body = {"model": "openai/default", "messages": MESSAGES, "temperature": 0.0, "max_tokens": 24, **WHERE}
chat = litellm.completion(**body)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**body, stream=True))
text = litellm.text_completion(
    model="text-completion-openai/default", prompt="The capital of France is", temperature=0.0, max_tokens=8, **WHERE
)
try:
    litellm.completion(**body | {"model": "openai/no-such-model"})
    refused = None
except litellm.NotFoundError as error:
    refused = error.message
print(
    json.dumps(
        {
            "text": chat.choices[0].message.content,
            "streamed": streamed,
            "completion": text.choices[0].text,
            "refused": refused,
            "num_tokens": chat.usage.completion_tokens,
        }
    )
)
