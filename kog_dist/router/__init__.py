"""One RPC endpoint in front of several engines: which of them gets a request, and what happens when one is lost."""
