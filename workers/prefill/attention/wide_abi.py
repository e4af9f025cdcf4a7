"""What wide_attention.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

WIDE_HEAD_DIM = 256  # at most: values of a head whose sums a thread has registers for
