"""Prefill of a prompt on one GPU rank: see docs/prefill.md."""
