"""Writes which functions a process calls that a test has started, each once, for tests/mutants/reached.py: see there."""

import os
import sys
import threading

if path := os.environ.get("TESTS_REACHED_CHILDREN"):
    written = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    folder = os.path.join(os.environ["TESTS_REACHED_ROOT"], "")
    seen: dict[int, object] = {}

    def trace(frame, event, argument):  # type: ignore[no-untyped-def]
        code = frame.f_code
        if id(code) not in seen:
            seen[id(code)] = code  # kept, or another would get its address
            if code.co_filename.startswith(folder):
                os.write(written, f"{code.co_filename}\t{code.co_qualname}\n".encode())

    sys.settrace(trace)
    threading.settrace(trace)
