"""Which algorithms of products were the fastest when an engine last tried them, in the user's cache folder.

A file belongs to all that may make others the fastest, or unknown: its name is a hash of that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from kog_dist.cuda.build import cache_folder
from kog_dist.foreign_file import read_text
from kog_dist.runtime.notes import note
from kog_dist.system.files import write_at_once

_ALGORITHMS, _MADE_FOR = "algorithms", "made for"


class AlgorithmCache:
    """Algorithms by the product that they are for; both are texts to this class.

    `made_for`: what a choice depends on besides the product. What cannot be read counts as absent.
    """

    def __init__(self, made_for: Mapping[str, str], *, folder: Path | None = None) -> None:
        self._made_for = dict(made_for)
        digest = hashlib.sha256(json.dumps(self._made_for, sort_keys=True).encode()).hexdigest()
        self.path = (folder or cache_folder().parent / "algorithms") / f"{digest[:32]}.json"
        self._known = self._read()
        self._new: dict[str, str] = {}

    def get(self, product: str) -> str | None:
        """The algorithm that was chosen for it; None if there is none."""
        return self._known.get(product)

    def put(self, product: str, algorithm: str) -> None:
        """Have an algorithm kept by `save`."""
        self._new[product] = self._known[product] = algorithm

    def save(self) -> None:
        """Write what was put, beside what is in the file by now: other ranks choose at the same time."""
        if not self._new:
            return
        kept = {_MADE_FOR: self._made_for, _ALGORITHMS: self._read() | self._new}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_at_once(self.path, json.dumps(kept, indent=1, sort_keys=True).encode())
        except OSError as error:
            note(f"the fastest algorithms of products are not kept, and will be looked for at every start: {error}")
        self._new.clear()

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(read_text(self.path))
        except (OSError, ValueError, RecursionError):
            return {}
        kept = found.get(_ALGORITHMS) if isinstance(found, dict) else None
        if not isinstance(kept, dict) or not all(isinstance(algorithm, str) for algorithm in kept.values()):
            return {}
        return kept
