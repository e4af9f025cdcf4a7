"""tokenizer.json: from bytes to text and back."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.model.tokenizer import Tokenizer
from tests.fuzz.json_mutation import fuzzed_json as mutate
from tests.fuzz.refusals import refused

__all__ = ["mutate", "one_input"]

FOLDER = Path(tempfile.mkdtemp())
TEXT = "def area(r):\n    return 3.14 * r  # \u6771\u4eac \U0001f600"


def one_input(data: bytes) -> None:
    """A stream of pieces is the whole text, with any tokenizer that is accepted."""
    (FOLDER / "tokenizer.json").write_bytes(data)
    with refused(CheckpointError, RequestError):
        tokenizer = Tokenizer.from_folder(FOLDER)
        assert tokenizer is not None
        ids = [*range(min(tokenizer.num_ids, 300)), 7]
        decoder = tokenizer.stream()
        assert "".join([*map(decoder.push, ids), decoder.flush()]) == tokenizer.decode(ids)
