"""The end of a child that is of no use any more. Whoever ends it does not wait for that: it needs a core to end on, which it may
not get for seconds on a busy machine, and least of all if it has a low priority.
"""

from __future__ import annotations

import subprocess
import threading
from typing import Any


def kill(child: subprocess.Popen[Any]) -> None:
    """Kill it at once. A thread waits for its end, so that nothing is left of it. Never blocks."""
    child.kill()
    threading.Thread(target=child.wait, name=f"end of {child.pid}", daemon=True).start()
