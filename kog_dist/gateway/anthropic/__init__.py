"""Anthropic's Messages API: bodies to chats, answers to events. What they mean is `kog_dist/gateway/openai`'s."""
