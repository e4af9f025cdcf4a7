"""`kog-chat`, and the client side of HTTP that it shares with `kog-bench serve`. Imports nothing of the engine but its names."""
