"""What of an answer's text reaches the client at its end."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import tokenizers

from kog_dist.decode.request import DecodeRequest
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import FinishReason, Generate, Tokens
from kog_dist.runtime.ring import Finish, TokenEntry
from kog_dist.workers.coordinator.streams import RequestStream

TOKENIZER = Tokenizer.from_folder(Path(str(resources.files("kog_dist"))) / "models" / "demo")
assert TOKENIZER is not None
TEXT = "a🎉é"
BYTES = [next(i for i in range(4096) if TOKENIZER.token_bytes(i) == bytes([byte])) for byte in TEXT.encode()]


def said(
    ids: list[int], finish: Finish, stop: tuple[str, ...] = (), reason: FinishReason | None = None,
    tokenizer: Tokenizer | None = TOKENIZER,
) -> str:  # fmt: skip
    """All text of an answer of these ids, which `finish` ends, or later `reason`."""
    message = Generate("r", prompt_ids=(1,), max_tokens=20, stop=stop)
    assert tokenizer is not None
    stream = RequestStream(b"peer", message, DecodeRequest((1,), 20), tokenizer.stream(), 0)
    text, last = "", len(ids) - 1
    for index, token_id in enumerate(ids):
        event, ended = stream.take([TokenEntry(1, index, token_id, 1, None, finish if index == last else Finish.NONE, None)])
        text += event.text if event is not None else ""
        if ended is not None:
            reason = ended
            break
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


# ---- stop strings that name special tokens ----
LIBRARY = tokenizers.Tokenizer.from_str(
    (Path(str(resources.files("kog_dist"))) / "models" / "demo" / "tokenizer.json").read_text()
)
LIBRARY.add_special_tokens(["<|sep|>", "<|fim_prefix|>", "<|im_start|>"])
LIBRARY.add_tokens(["</tool>"])


@pytest.mark.parametrize(
    ("stop", "answer", "told"),
    [
        (("<|sep|>",), "ab<|sep|>cd", "ab"),
        (("<|sep|>", "c"), "ab<|sep|>cd", "ab"),
        (("b", "<|sep|>"), "ab<|sep|>cd", "a"),
        (("<|fim_prefix|>", "<|sep|>", "/src/"), "a<|sep|>b", "a"),
        (("<|fim_prefix|>", "<|sep|>", "/src/"), "a<|fim_prefix|>b", "a"),
        (("<|fim_prefix|>", "<|sep|>", "/src/"), "a/src/b", "a"),
        (("\n<|im_start|>user",), "a\n<|im_start|>user b", "a"),
        (("\n<|im_start|>user",), "a\n<|im_start|>assistant", "a\nassistant"),
        (("<|sep|><|im_start|>",), "a<|sep|><|im_start|>b", "a"),
        (("<|sep|><|im_start|>",), "a<|sep|>b<|im_start|>", "ab"),
        (("<|endoftext|>",), "a<|endoftext|>b", "a"),
        (("</tool>",), "a</tool>b", "a"),
        (("<|sep|>",), "a<|fim_prefix|>b", "ab"),
        (("<|sep|>",), "plain", "plain"),
        ((), "a<|sep|>b", "ab"),
    ],
)
def test_special_tokens_that_a_stop_string_names(stop: tuple[str, ...], answer: str, told: str) -> None:
    """They have no text in an answer; with `ignore_eos`, ends are such tokens, too."""
    tokenizer = Tokenizer(LIBRARY.to_str())
    assert said(tokenizer.encode(answer), Finish.LENGTH, stop, tokenizer=tokenizer) == told


def test_letters_of_a_special_token_stop_as_text_does() -> None:
    tokenizer = Tokenizer(LIBRARY.to_str())
    letters = [i for piece in ("a<|", "sep|>", "b") for i in tokenizer.encode(piece)]
    assert said(letters, Finish.LENGTH, ("<|sep|>",), tokenizer=tokenizer) == "a"
