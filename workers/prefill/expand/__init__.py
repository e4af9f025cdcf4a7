"""Quantised matrices from the monokernel's tape, in the type of prefill's products."""
