"""The OpenAI API as pure functions: requests to RPC messages, RPC events to replies and SSE frames."""
