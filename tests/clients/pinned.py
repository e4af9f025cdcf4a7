"""The versions of other people's clients that `make clients` installs; docs/clients.md shows the same."""

from __future__ import annotations

from typing import Final

# What a user installs, and the version. From the Python package index:
PYTHON: Final = {
    "openai": "3.57.0", "litellm": "1.110.2", "pydantic-ai-slim[openai]": "2.68.0", "openai-agents": "0.24.0", "llm": "0.36",
    "aider-chat": "0.86.2", "lm_eval[api]": "0.4.13", "anthropic": "2.14.0", "ollama": "0.6.3", "langchain-openai": "1.7.4",
    "smolagents[openai]": "1.26.0", "aiperf": "0.13.0",
}  # fmt: skip
# From npm:
NODE: Final = {
    "opencode-ai": "1.18.33", "@continuedev/cli": "1.5.47", "@anthropic-ai/claude-code": "2.1.332", "ai": "7.0.173",
    "@ai-sdk/openai-compatible": "3.0.92",
}  # fmt: skip
