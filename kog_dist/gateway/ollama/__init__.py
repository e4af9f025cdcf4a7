"""Ollama's API: bodies to chats and completions, answers to lines of JSON. What they mean is `kog_dist/gateway/openai`'s."""
