"""What tests look at in processes that an engine consists of."""

from __future__ import annotations

import re
from pathlib import Path

# Of the standard library and of packages, what some process imports; and the project itself.
HOSTILE = """
    asyncio ctypes functools importlib inspect json kog_dist logging msgpack mpi4py numpy platform psutil pydantic pynvml random
    resource rich safetensors select shutil signal site socket ssl starlette struct subprocess tokenizers typer typing uuid
    uvicorn zmq cupy_backends jinja2 llguidance torch
""".split()


def plant(folder: Path) -> Path:
    """Modules that say in a file that they were imported."""
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'marker')!r}, 'a').write(__name__ + chr(10))\n")
    return folder / "marker"


def is_hardened(pid: int) -> bool:
    """Whether a process leaves no core dump and cannot gain rights."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
    return "NoNewPrivs:\t1\n" in status and re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE) is not None
