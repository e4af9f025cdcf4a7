"""Formats of quantised weights: what their codes mean, how published files hold them, and how a matrix is rounded to one.

One definition for all: a weight is the exact value of its code, less the zero point if there is one, times its scale, rounded
once to float32. `weight_format.py` has it; a module for each format says what its codes are and where files have them.
"""
