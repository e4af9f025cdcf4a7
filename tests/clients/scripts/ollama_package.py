"""The ollama package: models, a prompt, a chat in pieces with its figures, an error."""

from __future__ import annotations

import json
import sys

import ollama

client = ollama.Client(sys.argv[1])
question = [{"role": "user", "content": "How is the weather in Rome?"}]
shown = client.show("default")
pieces = list(client.chat("default", question, stream=True, options={"num_predict": 20, "num_ctx": 4096}, keep_alive="5m"))
try:
    client.chat("no-such-model", question)
    missing = None
except ollama.ResponseError as error:
    missing = [error.status_code, error.error]
print(
    json.dumps(
        {
            "models": [entry.model for entry in client.list().models],
            "running": [entry.model for entry in client.ps().models],
            "capabilities": shown.capabilities,
            "prompt": client.generate("default:latest", "How is the weather in Rome?").response,
            "pieces": [piece.message.content for piece in pieces],
            "done": [piece.done for piece in pieces],
            "num_tokens": pieces[-1].eval_count,
            "reason": pieces[-1].done_reason,
            "missing": missing,
        }
    )
)
