"""How byte-level BPE cuts texts, by the name that a GGUF file gives (`tokenizer.ggml.pre`).

Names and rules are those of llama.cpp (`src/llama-vocab.cpp`); expressions are as the models' own tokenizer.json have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Cut(NamedTuple):
    """What is done before merges. `ignores_merges`: a piece that is a token is not merged. `begins`: texts begin with BOS, unless
    the file says otherwise. `is_composed`: texts are brought to NFC.
    """

    pre_tokenizers: list[dict[str, object]]
    ignores_merges: bool = False
    begins: bool = False
    is_composed: bool = False


def byte_level(*, use_regex: bool) -> dict[str, object]:
    """Bytes as characters; with `use_regex` cut as GPT-2 does."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(*patterns: str) -> list[dict[str, object]]:
    found = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in patterns]
    return [*found, byte_level(use_regex=False)]


_ENGLISH: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_HAN: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}"
)
_GPT2: Final = Cut([byte_level(use_regex=True)])
_DIGITS: Final = Cut([{"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)])
_LLAMA3: Final = Cut(_split(_WORDS % "{1,3}"), ignores_merges=True, begins=True)
_QWEN2: Final = Cut(_split(_WORDS % ""), is_composed=True)
_QWEN35: Final = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"

CUTS: Final[Mapping[str, Cut]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2),
    "qwen35": Cut(_split(_QWEN35), is_composed=True),
    **dict.fromkeys(("stablelm2", "hunyuan"), Cut(_split(_WORDS % ""))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), Cut(_split(_WORDS % "{1,3}"))),
    "glm4": Cut(_split(_WORDS % "{1,3}"), ignores_merges=True),
    "tekken": Cut(_split(_CASES % ("", "", "")), ignores_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Cut(_split(_CASES % (f"{_ENGLISH}?", f"{_ENGLISH}?", "{1,3}")))),
    "deepseek-coder": Cut(_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3": Cut(_split(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
    "seed-coder": Cut(_split(rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}")),
}
