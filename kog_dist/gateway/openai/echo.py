"""`echo`: the prompts of a text completion at the beginning of its choices, with log-probabilities of their tokens if wanted."""

from __future__ import annotations

from collections.abc import Sequence

from kog_dist.gateway.openai.errors import invalid
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.records import dataclass


@dataclass(frozen=True, slots=True)
class Echo:
    """Of one prompt: its text, and the id of its first token, which has no log-probability; None: nobody asks for those."""

    text: str
    first_id: int | None

    @classmethod
    def of(cls, given: str | Sequence[int], planned: str | Sequence[int], served: ServedModel, *, scores: bool) -> Echo:
        """Of a prompt as it was given, and as it is sent to the engine. Raises ApiError if its tokens are not known here."""
        if scores and isinstance(planned, str):
            raise invalid(
                "echo", "echo with logprobs needs token ids here: this gateway was started without --model and has no tokenizer"
            )
        return cls(given if isinstance(given, str) else _text_of(given, served), int(planned[0]) if scores else None)


def _text_of(token_ids: Sequence[int], served: ServedModel) -> str:
    return "" if served.tokenizer is None else served.tokenizer.decode(token_ids)
