"""Sums over the lanes of all ranks."""
