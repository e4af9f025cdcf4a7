"""Attention of a chunk of tokens."""
