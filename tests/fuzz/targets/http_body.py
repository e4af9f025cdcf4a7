"""Bodies of HTTP requests, through all endpoints that read one, and back from the process that reads large ones."""

from __future__ import annotations

from pathlib import Path

from kog_dist.gateway import body_work
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.packing import packed, packed_error, unpacked, unpacked_error
from kog_dist.model.tokenizer import Tokenizer
from tests.fuzz.json_mutation import fuzzed_json as mutate

__all__ = ["mutate", "one_input"]

_TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[3] / "kog_dist" / "models" / "demo")
_SERVED = ServedModel("demo", (), 4096, 2048, _TOKENIZER, None, 0)


def one_input(data: bytes) -> None:
    """A plan that survives packing, an answer, or an error of the client with a sentence."""
    for path in (*body_work.PLANS, *body_work.TOKENS):
        try:
            found = body_work.read(path, data, _SERVED)
            if isinstance(found, Planned):
                parts = packed(found)
                again = unpacked(**parts, tokenizer=_TOKENIZER)
                assert packed(again) == parts
        except ApiError as error:
            _look_at(error)


def _look_at(error: ApiError) -> None:
    assert 400 <= error.status < 500, error
    assert 0 < len(error.message) <= 1500
    assert unpacked_error(packed_error(error)).body() == error.body()
