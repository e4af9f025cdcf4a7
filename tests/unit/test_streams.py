"""What of an answer's text reaches the client at its end."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from kog_dist.decode.request import DecodeRequest
from kog_dist.decode.ring import Finish, TokenEntry
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import FinishReason, Generate, Tokens
from kog_dist.workers.streams import RequestStream

TOKENIZER = Tokenizer.from_folder(Path(str(resources.files("kog_dist"))) / "models" / "demo")
assert TOKENIZER is not None
TEXT = "a🎉é"
BYTES = [next(i for i in range(4096) if TOKENIZER.token_bytes(i) == bytes([byte])) for byte in TEXT.encode()]


def said(ids: list[int], finish: Finish, stop: tuple[str, ...] = (), reason: FinishReason | None = None) -> str:
    """All text of an answer of these ids, which `finish` ends, or later `reason`."""
    message = Generate("r", prompt_ids=(1,), max_tokens=20, stop=stop)
    assert TOKENIZER is not None
    stream = RequestStream(b"peer", message, DecodeRequest((1,), 20), TOKENIZER.stream(), 0)
    text, last = "", len(ids) - 1
    for index, token_id in enumerate(ids):
        event, ended = stream.take([TokenEntry(1, index, token_id, 1, None, finish if index == last else Finish.NONE, None)])
        text += event.text if event is not None else ""
        if ended is not None:
            reason = ended
    assert reason is not None
    return text + "".join(event.text for event in stream.last_events(reason, 1) if isinstance(event, Tokens))


@pytest.mark.parametrize("num_tokens", range(1, len(BYTES) + 1))
@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (Finish.LENGTH, None),
        (Finish.CANCELLED, None),
        (Finish.NONE, FinishReason.CANCELLED),
        (Finish.NONE, FinishReason.DEADLINE),
    ],
)
def test_an_answer_that_is_cut_ends_with_a_whole_character(num_tokens: int, finish: Finish, reason: FinishReason | None) -> None:
    cut = TEXT.encode()[:num_tokens].decode("utf-8", "ignore")
    assert said(BYTES[:num_tokens], finish, reason=reason) == cut
    assert said(BYTES[:num_tokens], finish, ("🎉x", "\ufffd"), reason=reason) == cut, "and what could have become a stop string"


def test_what_the_model_ended_itself_is_shown_as_it_is() -> None:
    assert TOKENIZER is not None
    end = TOKENIZER.eos_ids[0]
    assert said([*BYTES[:3], end], Finish.STOP) == "a\ufffd"
    assert said([*BYTES[:2], BYTES[0]], Finish.LENGTH) == "a\ufffda", "no byte that follows could make it a character"
