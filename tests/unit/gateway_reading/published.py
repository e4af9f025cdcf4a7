"""Ten published chat templates in their essentials, with the tokens that their vocabularies have for tags, and an answer of
each: a thought, and two calls in the model's own form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kog_dist.model.tokenizer import CHANNEL_TAGS

ADDED_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
WEATHER: dict[str, Any] = {
    "name": "weather", "description": "Of a town.",
    "parameters": {
        "type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}, "required": ["town"],
    },
}  # fmt: skip
CLOCK: dict[str, Any] = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
TOWN = {"town": "Köln", "days": 2}

CHATML = """\
{%- macro shown(tool) %}{{ tool | tojson }}{% endmacro %}
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Functions: <tools>{% for tool in tools %}
{{ shown(tool) }}{% endfor %}
</tools> HOW<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
THOUGHT{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
OPENING{% endif %}"""
HERMES_CALL = """
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""
XML_CALL = """
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>"""
THOUGHT = """{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}"""
NO_THOUGHT = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
OPEN_THOUGHT = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"


def chatml(how: str, thought: str, call: str, opening: str) -> str:
    return CHATML.replace("HOW", how).replace("THOUGHT", thought).replace("CALL", call).replace("OPENING", opening)


# How Qwen3.5 and later do it: parts of a message, the last question, thoughts before it left out, and refusals of their own.
QWEN35 = """\
{%- macro shown(content, is_system=false) %}
{%- if content is string %}{{ content }}
{%- elif content is iterable and content is not mapping %}
{%- for item in content %}
{%- if item.type == 'image' or 'image' in item or 'image_url' in item %}
{%- if is_system %}{{ raise_exception('A system message has no images.') }}{% endif %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in item %}{{ item.text }}
{%- else %}{{ raise_exception('Of an unknown type.') }}{% endif %}
{%- endfor %}
{%- elif content is not none and content is not undefined %}{{ raise_exception('Of an unknown type.') }}{% endif %}
{%- endmacro %}
{%- if not messages %}{{ raise_exception('There are no messages.') }}{% endif %}
{%- if tools and tools is iterable and tools is not mapping %}<|im_start|>system
# Functions

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

HOW
{%- if messages[0].role == 'system' and shown(messages[0].content, true) | trim %}

{{ shown(messages[0].content, true) | trim }}{% endif %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ shown(messages[0].content, true) | trim }}<|im_end|>
{% endif %}
{%- set ns = namespace(seeks=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
{%- if ns.seeks and message.role == 'user' %}
{%- set asked = shown(message.content) | trim %}
{%- if not (asked.startswith('<tool_response>') and asked.endswith('</tool_response>')) %}
{%- set ns.seeks = false %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}
{%- endif %}
{%- endfor %}
{%- if ns.seeks %}{{ raise_exception('Nobody asks anything.') }}{% endif %}
{%- for message in messages %}
{%- set content = shown(message.content) | trim %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('A system message is the first.') }}{% endif %}
{%- elif message.role == 'user' %}<|im_start|>user
{{ content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- set thought = '' %}
{%- if message.reasoning_content is string %}{% set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\n' ~ (thought | trim) ~ '\n</think>\n\n' ~ (content | trim) }}
{%- else %}{{ content | trim }}{% endif %}
{%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
{%- for call in message.tool_calls %}
{%- set call = call.function if call.function is defined else call %}
{{- ('\n\n' if loop.first and content | trim else '' if loop.first else '\n') ~ '<tool_call>\n<function=' ~ call.name ~ '>\n' }}
{%- if call.arguments is defined %}
{%- for key, value in call.arguments | items %}
{{- '<parameter=' ~ key ~ '>\n' }}
{%- set text = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}
{{- text ~ '\n</parameter>\n' }}
{%- endfor %}
{%- endif %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{%- endif %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}{{ raise_exception('Of an unknown role.') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '<think>\n' }}
{%- endif %}"""

LLAMA = """\
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>' }}
{%- if tools %}Environment: ipython{% endif %}<|eot_id|>
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}<|start_header_id|>{{ role }}<|end_header_id|>

{% if tools and loop.first %}Answer with {"name": function, "parameters": its arguments}. {{ tools | tojson }}
{% endif %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}
{%- else %}{{ message.content }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST] ' ~ message.content }}[/INST]
{%- elif message.role == 'assistant' and message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}{{ ', ' if not loop.last }}
{%- endfor %}]</s>
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}}[/TOOL_RESULTS]
{%- else %} {{ message.content }}</s>{% endif %}
{%- endfor %}"""

DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}<｜User｜>{{ message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>
{%- for call in message.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif message.role == 'tool' %}<｜tool▁outputs▁begin｜>{{ message.content }}<｜tool▁outputs▁end｜>
{%- else %}<｜Assistant｜>{{ message.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""  # noqa: RUF001

GPT_OSS = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if tools %}<|start|>developer<|message|>namespace functions {{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- for call in message.tool_calls %}<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>
{{- call.function.arguments | tojson }}<|call|>{% endfor %}
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

SMOLLM2 = """\
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}<|im_start|>system
You are SmolLM.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _json_calls(key: str, before: str, between: str, behind: str) -> str:
    calls = [{"name": "weather", key: TOWN}, {"name": "clock", key: {}}]
    return before + between.join(json.dumps(call, ensure_ascii=False) for call in calls) + behind


HERMES_CALLS = _json_calls("arguments", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
XML_CALLS = (
    "<tool_call>\n<function=weather>\n<parameter=town>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>"
)
DEEPSEEK_CALLS = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"town": "Köln", "days": 2}\n```'  # noqa: RUF001
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
)
CHANNEL_CALLS = (
    '<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"town": "Köln", "days": 2}'
    "<|call|><|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
)
CHAT_MARKS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Published:
    """`specials`: tokens without text; `tags`: added tokens with text. `begin`: of the thought; `shown`: of the first call in the
    next prompt, "" where the template shows none.
    """

    template: str
    specials: Sequence[str]
    tags: Sequence[str]
    calls: str
    shown: str
    begin: str = "<think>\n"
    end: str = "\n</think>\n\n"


QWEN_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
HERMES_HOW = 'Call: <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
XML_HOW = "Call: <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
ARGUMENTS = '{"town": "Köln", "days": 2}'
FAMILIES = {
    "Qwen3": Published(
        chatml(HERMES_HOW, THOUGHT, HERMES_CALL, NO_THOUGHT), CHAT_MARKS, QWEN_TAGS, HERMES_CALLS,
        '<tool_call>\n{"name": "weather", "arguments": ' + ARGUMENTS,
    ),
    "Qwen3-Coder": Published(
        chatml(XML_HOW, "", XML_CALL, ""), CHAT_MARKS, QWEN_TAGS, XML_CALLS,
        "<function=weather>\n<parameter=town>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>",
    ),
    "Qwen3.6": Published(
        chatml(XML_HOW, THOUGHT, XML_CALL, OPEN_THOUGHT), CHAT_MARKS, QWEN_TAGS, XML_CALLS,
        "<function=weather>\n<parameter=town>\nKöln\n</parameter>", begin="",
    ),
    "Qwen3.5": Published(
        QWEN35.replace("HOW", XML_HOW), (*CHAT_MARKS, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"), QWEN_TAGS,
        XML_CALLS,
        "<function=weather>\n<parameter=town>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>", begin="",
    ),
    "Llama 3.1": Published(
        LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"), (),
        _json_calls("parameters", "<|python_tag|>", "; ", ""), '{"name": "weather", "parameters": ' + ARGUMENTS,
    ),
    "Mistral": Published(
        MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"), (),
        _json_calls("arguments", "[TOOL_CALLS] [", ", ", "]"), '"name": "weather"',
    ),
    "DeepSeek-R1 distilled": Published(
        DEEPSEEK, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),  # noqa: RUF001
        DEEPSEEK_CALLS, "<｜tool▁sep｜>weather\n```json", begin="",  # noqa: RUF001
    ),
    "Hermes": Published(
        chatml(HERMES_HOW, "", HERMES_CALL, ""), CHAT_MARKS, ("<tool_call>", "</tool_call>"), HERMES_CALLS,
        '<tool_call>\n{"name": "weather"',
    ),
    "gpt-oss": Published(
        GPT_OSS, CHANNEL_TAGS, (), CHANNEL_CALLS, "assistant to=functions.weather<|channel|>commentary json<|message|>",
        begin="<|channel|>analysis<|message|>", end="",
    ),
    "SmolLM2": Published(
        SMOLLM2, CHAT_MARKS, (), _json_calls("arguments", "<tool_call>[", ", ", "]</tool_call>"), "",
    ),
}  # fmt: skip


def write_folder(folder: Path, family: Published) -> int:
    """A model folder with this template and these tokens, without weights; the number of ids."""
    raw = json.loads((Path(str(resources.files("kog_dist"))) / "models" / "demo" / "tokenizer.json").read_text())
    first = 1 + int(max(raw["model"]["vocab"].values()))
    added = [(content, True) for content in family.specials] + [(content, False) for content in family.tags]
    raw["added_tokens"] += [
        {"id": first + idx, "content": content, "special": special, **ADDED_FLAGS} for idx, (content, special) in enumerate(added)
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": family.specials[0]}))
    (folder / "chat_template.jinja").write_text(family.template)
    (folder / "config.json").write_text("{}")
    return first + len(added)
