"""Structured output: grammars are compiled and followed in processes of their own; masks go through shared memory to rank 0."""
