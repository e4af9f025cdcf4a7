"""Gated delta nets of a chunk of tokens: the rule in blocks, where the monokernel keeps states, device code."""
