"""Chat templates: rendered as transformers does, from the right file, and harmless whatever the template or the messages are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.model.chat_template import ChatTemplate, RenderLimits, render
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.system import stopped_child
from kog_dist.system.stopped_child import is_stopped

CHAT = [{"role": "user", "content": "add <1> & 'é'"}, {"role": "assistant", "content": "2"}]
CHATML = """\
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA2 = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def quick() -> RenderLimits:
    """Limits that make a bomb go off early; still plenty for any honest template."""
    return RenderLimits(seconds=0.25, max_characters=100_000)


def refused(template: ChatTemplate, messages: list[dict[str, Any]] | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        template.render(CHAT if messages is None else messages)
    return caught.value


# ---- rendering ----
def test_published_kinds_of_templates() -> None:
    with ChatTemplate(CHATML) as template:
        turns = "<|im_start|>user\nadd <1> & 'é'<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        assert template.render(CHAT) == turns + "<|im_start|>assistant\n"
        assert template.render(CHAT, add_generation_prompt=False) == turns
        assert template.render([]) == "<|im_start|>assistant\n"
    assert render(LLAMA2, CHAT, SPECIAL) == "<s>[INST] add <1> & 'é' [/INST] 2 </s>"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),  # trim_blocks and lstrip_blocks
        ("{{ messages[0]['content'] }}", "add <1> & 'é'"),  # nothing is escaped
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "add <1> & \'é\'"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "0134",
        ),
        ("a{% generation %}b{{ messages | length }}{% endgeneration %}c", "ab2c"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }} {{ bos_token }} {{ missing }}", "True <s> "),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)
def test_the_environment_is_the_one_templates_are_written_for(source: str, expected: str) -> None:
    assert render(source, CHAT, SPECIAL) == expected


def test_variables_reach_the_template_and_replace_nothing() -> None:
    with ChatTemplate("{{ thinks }}{{ messages | length }}{{ bos_token }}", {"bos_token": "<s>"}) as template:
        assert template.render(CHAT, variables={"thinks": False, "messages": [], "bos_token": "x"}) == f"False{len(CHAT)}<s>"


def test_tools_reach_the_template() -> None:
    assert render("{{ tools[0].name }}", CHAT, tools=[{"name": "search"}]) == "search"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(contents=st.lists(st.text(max_size=30) | st.text("{}%#'\"\\\n\ud800é🎉", max_size=30), max_size=4))
def test_contents_pass_through_untouched(chatml: ChatTemplate, contents: list[str]) -> None:
    text = chatml.render([{"role": "user", "content": content} for content in contents], add_generation_prompt=False)
    assert text == "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)


@pytest.fixture(scope="module")
def chatml() -> Iterator[ChatTemplate]:
    with ChatTemplate(CHATML) as template:
        yield template


def test_one_child_serves_all_threads(chatml: ChatTemplate) -> None:
    rendered: dict[int, str] = {}

    def work(number: int) -> None:
        rendered[number] = chatml.render([{"role": "user", "content": str(number)}])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {number for number, text in rendered.items() if f"user\n{number}<" in text} == set(range(8))


# ---- refusals ----
def test_what_a_template_refuses_is_the_client_s_error(chatml: ChatTemplate) -> None:
    error = refused(chatml, [{"role": "hacker", "content": ""}])
    assert error.code == "chat_rejected"
    assert str(error) == "the chat template refuses the conversation: unknown role hacker"
    assert refused(chatml, [{"role": "user"}]).code == "chat_template_failed"
    assert refused(chatml, [{"role": "user", "content": 3}]).code == "chat_template_failed"
    assert chatml.render([]) == "<|im_start|>assistant\n"


@pytest.mark.parametrize("content", [b"bytes", float("nan"), {1, 2}, object()])
def test_messages_that_are_no_json_are_refused(chatml: ChatTemplate, content: object) -> None:
    assert refused(chatml, [{"role": "user", "content": content}]).code == "invalid_messages"


@pytest.mark.parametrize("source", ["{% if", "{{ 1 +", "{% for x in y %}", "{{ x | nosuchfilter }}", "{{" + "(" * 5000])
def test_a_template_with_a_syntax_error_is_a_checkpoint_error(source: str) -> None:
    with ChatTemplate(source) as template:
        with pytest.raises(CheckpointError, match="the model's chat template cannot be used"):
            template.check()
        with pytest.raises(CheckpointError, match="the model's chat template cannot be used"):
            template.render(CHAT)


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{{ ''['__cla' ~ 'ss__'] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': messages}) }}",
    "{% set f = '{0.__class__.__init__}'.format %}{{ f(messages) }}",
    "{{ ['{0.__class__}'] | map('format', messages) | list }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ (messages | list)[0].__getattribute__('keys') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ url_for.__globals__ }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ config.__class__ }}",
    "{{ loop.__class__ }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ (1).__class__.__base__ }}",
    "{{ ().__reduce_ex__(2) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ messages.pop() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages.clear() }}",
    "{% set messages[0] = 1 %}",
    "{{ open('/etc/passwd').read() }}",
    "{{ __import__('os') }}",
    "{{ exec('1') }}",
    "{{ eval('1') }}",
    "{{ messages | pprint | attr('__class__') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_get_out_of_its_sandbox(source: str) -> None:
    try:
        text = render(source, CHAT, SPECIAL)
    except (RequestError, CheckpointError):
        return
    # What renders at all must be the empty text of something undefined, or nothing but plain data of ours.
    assert not any(word in text for word in ("class", "root:", "uid=", "<module", "builtin", "0x", "function")), text


@pytest.mark.parametrize("change", ["append(1)", "pop()", "clear()", "extend([1])", "sort()", "__setitem__(0, 1)"])
def test_a_template_cannot_change_what_it_was_given(change: str) -> None:
    with ChatTemplate("{{ messages." + change + " }}") as template:
        error = refused(template)
    assert error.code == "chat_template_failed"
    assert "SecurityError" in str(error)


def test_the_child_sees_no_environment_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOG_API_KEY", "secret")
    with ChatTemplate("x") as template:
        template.check()
        child = template._child
        assert child is not None
        environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        assert b"secret" not in environment
        assert b"PYTHONPATH" in environment
        links = [os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")]
        assert all(link.startswith("pipe:") or link == "/dev/null" for link in links)


BOMBS = {
    "endless loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "huge power": "{{ 9 ** (9 ** (messages | length * 5)) }}",
    "long text": "{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}",
    "much memory at once": "{{ 'x' * (1000000000 * (messages | length)) }}",
    "much memory in a list": "{{ ([1] * (100000000 * (messages | length))) | length }}",
    "doubling": "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "wide format": "{{ '%1000000000d' % (messages | length) }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(messages) }}",
    "padding": "{{ 'x' | center(1000000000 * (messages | length)) }}",
    "replacing": "{{ ('a' * 90000).replace('a', 'b' * 90000 * (messages | length)) }}",
    "slow sort": "{% for i in range(99999) %}{{ (range(99999) | sort | list)[:0] }}{% endfor %}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_ends_in_a_refusal_and_the_next_request_is_served(source: str, quick: RenderLimits) -> None:
    guarded = "{% if messages %}" + source + "{% else %}fine{% endif %}"
    with ChatTemplate(guarded, limits=quick) as template:
        error = refused(template)
        assert error.code == "chat_template_limit"
        assert template.render([]) == "fine"


def test_constants_that_explode_while_compiling_are_a_checkpoint_error(quick: RenderLimits) -> None:
    memory, seconds = ChatTemplate("{{ 'x' * 1000000000 }}", limits=quick), ChatTemplate("{{ 9 ** (9 ** 10) }}", limits=quick)
    with memory, pytest.raises((CheckpointError, RequestError), match="bytes of memory"):
        memory.render(CHAT)
    with seconds, pytest.raises(CheckpointError, match=r"more than 0\.25 s"):
        seconds.check()


def test_output_is_bounded_to_the_character() -> None:
    with ChatTemplate("{{ messages[0].content }}", limits=RenderLimits(max_characters=1000)) as template:
        assert len(template.render([{"content": "é" * 1000}])) == 1000
        assert "the output exceeds 1000 characters" in str(refused(template, [{"content": "é" * 1001}]))


def test_large_conversations_pass(chatml: ChatTemplate) -> None:
    content = "🎉é" * 200_000  # far more than a pipe holds, in both directions
    assert (
        chatml.render([{"role": "user", "content": content}], add_generation_prompt=False)
        == f"<|im_start|>user\n{content}<|im_end|>\n"
    )


def test_a_child_that_was_killed_is_replaced(chatml: ChatTemplate) -> None:
    chatml.check()
    first = chatml._child
    assert first is not None
    first.kill()
    first.wait(10)
    assert chatml.render([]) == "<|im_start|>assistant\n"
    assert chatml._child is not None
    assert chatml._child.pid != first.pid


def stop(template: ChatTemplate) -> subprocess.Popen[bytes]:
    child = template._child
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    while not is_stopped(child.pid):
        pass
    return child


def test_a_child_that_is_stopped_is_replaced_and_asked_the_same(
    quick: RenderLimits, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(stopped_child, "STOPPED_S", 0.2)
    with ChatTemplate("fine", limits=quick) as template:
        template.check()
        child = stop(template)
        assert template.render([]) == "fine"
        assert child.wait(20) == -signal.SIGKILL


@pytest.mark.parametrize("strike", [signal.SIGSTOP, signal.SIGKILL])
def test_children_that_are_lost_as_soon_as_they_are_asked_are_an_error_of_ours(
    quick: RenderLimits, monkeypatch: pytest.MonkeyPatch, strike: signal.Signals
) -> None:  # fmt: skip
    monkeypatch.setattr(stopped_child, "STOPPED_S", 0.1)
    with ChatTemplate("fine", limits=quick) as template:
        start = template._start

        def start_and_strike() -> None:
            start()
            assert template._child is not None
            template._child.send_signal(strike)

        monkeypatch.setattr(template, "_start", start_and_strike)
        with pytest.raises(CheckpointError, match=r"was (stopped for 1 s|ended by somebody else), 2 times"):
            template.render([])
        monkeypatch.setattr(template, "_start", start)
        assert template.render([]) == "fine"


def test_a_child_that_is_stopped_while_it_starts_is_replaced(
    quick: RenderLimits, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(stopped_child, "STOPPED_S", 0.1)
    children: list[int] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if not children:
                self.send_signal(signal.SIGSTOP)
            children.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Started)
    with ChatTemplate("fine", limits=quick) as template:
        template.check()
        assert template.render([]) == "fine"
    assert len(children) == 2


def test_closing_leaves_no_process(quick: RenderLimits) -> None:
    template = ChatTemplate("fine", limits=quick)
    assert template.render([]) == "fine"
    child = template._child
    assert child is not None
    template.close()
    template.close()
    assert child.wait(20) == -signal.SIGKILL


def test_a_child_whose_parent_is_gone_ends() -> None:
    template = ChatTemplate("fine")
    template.check()
    child = template._child
    assert child is not None
    assert child.stdin is not None
    child.stdin.close()  # what the death of the parent does
    assert child.wait(10) == 0
    template.close()


# ---- where the template comes from ----
def folder_with(folder: Path, template: str | None, config: object) -> Path:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
    return folder


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from the list"}]


@pytest.mark.parametrize(
    ("template", "config", "tool_use", "expected"),
    [
        ("from the file", "from the config", None, ("from the file", "from the file")),
        (None, "from the config", None, ("from the config", "from the config")),
        (None, NAMED, None, ("from the list", "tools")),
        ("from the file", NAMED, None, ("from the file", "from the file")),
        ("from the file", None, "tools", ("from the file", "tools")),
        ("from the file", NAMED, "other tools", ("from the file", "other tools")),
    ],
)
def test_which_template_wins(
    tmp_path: Path, template: str | None, config: object, tool_use: str | None, expected: tuple[str, str]
) -> None:  # fmt: skip
    """As transformers has it, with and without tools."""
    folder = folder_with(tmp_path, template, config)
    if tool_use is not None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    found = ChatTemplate.from_folder(folder)
    assert found is not None
    assert (found.source, found.tool_source) == expected
    with found:
        assert (found.render(CHAT), found.render(CHAT, tools=[{}])) == expected
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(folder / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    assert (theirs.get_chat_template(), theirs.get_chat_template(tools=[{}])) == expected


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    assert ChatTemplate.from_folder(folder_with(tmp_path, None, None)) is None


def test_special_tokens_are_the_folder_s(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.add_special_tokens(["<s>"])
    library.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(library.to_str(), special_tokens={"bos_token": "<s>"})
    template = ChatTemplate.from_folder(folder_with(tmp_path, "{{ bos_token }}", None), tokenizer)
    assert template is not None
    with template:
        assert template.render(CHAT) == "<s>"


@pytest.mark.parametrize(
    "config", [3, {}, [3], [{"name": "default"}], [{"name": "default", "template": 3}], [{"name": "a", "template": ""}], []]
)
def test_a_chat_template_of_another_kind_is_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        ChatTemplate.from_folder(folder_with(tmp_path, None, config))


def test_template_files_that_are_no_text_or_huge_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(CheckpointError, match=r"has 1048577 characters"):
        ChatTemplate.from_folder(tmp_path)


def test_one_trial_of_a_template_that_never_ends_is_enough(quick: RenderLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            children.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Started)
    with ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", limits=quick) as template:
        assert template.facts.takes_parts == frozenset()
    assert len(children) == 1
