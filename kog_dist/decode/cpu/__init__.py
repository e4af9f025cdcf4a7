"""Decoding on CPU ranks: the interpreter of a plan, its arrays, and its arithmetic in C and NumPy."""
