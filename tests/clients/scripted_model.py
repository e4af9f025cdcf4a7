"""A Llama of one layer that writes given texts, whatever its prompt is: clients with tools and long prompts talk to it.

Its chat template looks at what was said since the last answer, and ends the prompt with the token of a cue. From there each
token has one successor: its embedding is the row of the head that belongs to the next one. Attention and MLP add nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

CONTEXT: Final = 65_536
DEMO: Final = Path(str(resources.files("kog_dist"))) / "models" / "demo"
HIDDEN, WIDTH = 128, 16
HEAD_SCALE: Final = 8.0  # the logit of the next token is 90, of all others below 45: no temperature changes the answer
BEGIN, END = "<|im_start|>", "<|im_end|>"
TAGS: Final = ("<tool_call>", "</tool_call>")  # no tokens, so that a grammar of calls takes their letters
LOST: Final = "Nobody said what to write here."
_SHOWN_BYTES: Final = str.maketrans({" ": "Ġ", "\n": "Ċ", "\t": "ĉ"})  # of GPT-2's alphabet, for ASCII

TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each function call, return a JSON object with its name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- set now = namespace(said='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{% set now.said = '' %}
{%- elif message.role != 'system' %}{% set now.said = now.said ~ message.content ~ '\\n' %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
CHOICE{% endif %}"""


@dataclass(frozen=True)
class Cue:
    """What is written where all `words` were said since the last answer; the first cue that fits counts."""

    words: tuple[str, ...]
    text: str


def call(name: str, **arguments: Any) -> str:
    """The text of a call, as the template shows it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def write_scripted_model(folder: Path, cues: Iterable[Cue]) -> None:
    """A model folder."""
    played = [*cues, Cue((), LOST)]
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    taken = {*vocabulary, *TAGS}
    texts = [pieces_of(cue.text, taken) for cue in played]
    for name in (BEGIN, END, *(mark_of(idx) for idx in range(len(played)))):
        tokenizer["added_tokens"].append(_special(len(vocabulary), name))
        vocabulary[name] = len(vocabulary)
    following: dict[int, int] = {}
    for idx, pieces in enumerate(texts):
        chain = [vocabulary[mark_of(idx)], *range(len(vocabulary), len(vocabulary) + len(pieces)), vocabulary[END]]
        vocabulary |= dict(zip(pieces, chain[1:], strict=False))
        following |= dict(pairwise(chain))
    folder.mkdir()
    _write_weights(folder, following, len(vocabulary), vocabulary[END])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template_of(played)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def template_of(cues: Sequence[Cue]) -> str:
    """The template that chooses the first that fits."""
    choices = "".join(
        "{% elif " + " and ".join(f"{word!r} in now.said" for word in cue.words or ("",)) + " %}" + mark_of(idx)
        for idx, cue in enumerate(cues)
    )
    return TEMPLATE.replace("CHOICE", "{% if false %}" + choices + "{% endif %}")


def mark_of(cue_idx: int) -> str:
    """The token with which the text of a cue begins."""
    return f"<|cue_{cue_idx}|>"


def pieces_of(text: str, taken: set[str]) -> list[str]:
    """A text in words that no other token has; they are added to those that are `taken`."""
    assert text.isascii()
    pieces: list[str] = []
    piece = ""
    for word in re.findall(r"\s*\S+|\s+$", text.translate(_SHOWN_BYTES).replace("Ġ", " Ġ")):
        piece += word.strip(" ")
        if piece not in taken:
            pieces.append(piece)
            taken.add(piece)
            piece = ""
    while piece:
        piece = pieces.pop() + piece
        if piece not in taken:
            pieces.append(piece)
            taken.add(piece)
            piece = ""
    assert "".join(pieces) == text.translate(_SHOWN_BYTES)
    return pieces


def _special(token_id: int, text: str) -> dict[str, Any]:
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": text, **options}


def _write_weights(folder: Path, following: dict[int, int], vocab_size: int, end: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16", "num_hidden_layers": 1,
        "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": WIDTH,
        "vocab_size": vocab_size, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "eos_token_id": end,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    codes = np.sign(np.random.default_rng(1).standard_normal((vocab_size, HIDDEN))) / HIDDEN**0.5
    layer = {
        "self_attn.q_proj": (WIDTH, HIDDEN), "self_attn.k_proj": (WIDTH, HIDDEN), "self_attn.v_proj": (WIDTH, HIDDEN),
        "self_attn.o_proj": (HIDDEN, WIDTH), "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    weights = {f"model.layers.0.{name}.weight": np.zeros(shape, np.float16) for name, shape in layer.items()}
    weights["model.embed_tokens.weight"] = codes[[following.get(token, end) for token in range(vocab_size)]].astype(np.float16)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float16)
    weights["lm_head.weight"] = (codes * HEAD_SCALE).astype(np.float16)
    save_file(weights, folder / "model.safetensors")
