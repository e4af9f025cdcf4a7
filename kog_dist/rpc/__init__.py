"""How a client talks to the coordinator: messages, transport, client."""
