"""The GPU programs by themselves: the monokernel, prefill, and what they are compared with."""
