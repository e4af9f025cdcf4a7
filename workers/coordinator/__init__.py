"""The coordinator: takes requests, queues them, hands their tokens out, and keeps the books of what the ranks hold."""
