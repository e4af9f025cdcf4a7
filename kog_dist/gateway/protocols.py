"""Whose protocol a path speaks: its clients read errors of one form alone."""

from __future__ import annotations

from enum import StrEnum


class Protocol(StrEnum):
    """What is not Anthropic's or Ollama's has the form of OpenAI's errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


def protocol_of(path: str) -> Protocol:
    """The protocol of a path, whether there is something at it or not."""
    if path.startswith("/v1/messages"):
        return Protocol.ANTHROPIC
    is_ollama = path.startswith("/api/") and not path.startswith("/api/v1/")
    return Protocol.OLLAMA if is_ollama else Protocol.OPENAI
