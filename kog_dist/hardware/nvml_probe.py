"""`python -m kog_dist.hardware.nvml_probe`: asks the NVIDIA driver about every GPU, in a process that may hang for ever.

Says with an empty line that the driver has answered, and keeps it awake until its standard input is closed.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Ask, answer, wait."""
    import pynvml

    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:
        pass
    print(flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
