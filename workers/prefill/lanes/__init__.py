"""Prefill of Laneformers: the layers, and what a GPU and NumPy do for them."""
