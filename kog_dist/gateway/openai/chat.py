"""`/v1/chat/completions`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from kog_dist.gateway.openai.accounting import predicted_tokens
from kog_dist.gateway.openai.chat_request import AllowedTools, ChatRequest, JsonSchemaFormat, NamedTool
from kog_dist.gateway.openai.chunks import ChunkReply, ReplyForm, quoted
from kog_dist.gateway.openai.errors import invalid
from kog_dist.gateway.openai.logprobs import TokenNames, entries, to_json
from kog_dist.gateway.openai.planning import (
    Stamp,
    answer_limit,
    asked,
    conversation_of,
    object_schema,
    plan_choices,
    predicted_ids,
    sampling_params,
    schema_text,
)
from kog_dist.gateway.openai.prompt import Ending, beginning_of, prompt_of
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.request_model import JsonObjectFormat, TextFormat
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.openai.thinking import begin_answer, thinking_of
from kog_dist.gateway.openai.tools import Function, ToolUse, tool_use
from kog_dist.gateway.reading.deltas import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta, ThoughtBefore
from kog_dist.gateway.reading.reader import PlainText
from kog_dist.gateway.reading.styles import Style
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass
from kog_dist.rpc.messages import Done, Generate, Tokens

__all__ = ["ChatReply", "ChatRequest", "plan_chat"]


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat that has been checked and rendered, whatever form its answer has."""

    stamp: Stamp
    generates: tuple[Generate, ...]
    use: ToolUse
    prompt_ids: Sequence[int]
    unseen: tuple[str, ...]


def plan_chat(body: object, served: ServedModel, key_scope: str = "") -> Planned:
    """The RPC requests and the reply of a chat. May take up to a second in the template's process. Raises ApiError."""
    request = asked(ChatRequest, body, served, key_scope)
    plan = chat_plan(request, served, "chatcmpl-")
    num_choices = len(plan.generates)
    form = ReplyForm.of(plan.stamp, served.name, num_choices, num_choices, request.stream, request.stream_options)
    names = TokenNames(served.tokenizer) if request.logprobs else None
    reply = ChatReply(form, plan.use, names, served.tokenizer, plan.prompt_ids)
    return Planned(plan.generates, form.stream, reply, request.left_out, plan.unseen)


def chat_plan(request: ChatRequest, served: ServedModel, kind: str, *, cuts_limit: bool = False) -> ChatPlan:
    """The RPC requests of a chat, and how its answer is read. `kind`: what ids begin with; `cuts_limit`: see `answer_limit`."""
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    answer_schema = format_schema(request.response_format, "response_format")
    use = _tool_use(request, served, has_format=answer_schema is not None)
    tools = [function.as_chat_tool() for function in use.offered]
    thinking = thinking_of(request.reasoning_effort, request.chat_template_kwargs, served)
    is_enforced = use.is_enforced or answer_schema is not None
    ending = Ending.of(request.add_generation_prompt, request.continue_final_message)
    prompt = prompt_of(
        request.messages,
        tools,
        served,
        variables=thinking.variables,
        scope=request.cache_salt,
        ending=ending,
        is_enforced=is_enforced and served.has_channels,
    )
    begun = begin_answer(prompt.ids, thinking, served, is_enforced=is_enforced, is_new=ending is Ending.ANSWER)
    stamp = Stamp.new(kind)
    conversation = conversation_of(request, beginning_of(request.messages))
    params = sampling_params(request, served, (request.top_logprobs or 0) if request.logprobs else None)
    limits = request.max_tokens, request.max_completion_tokens
    fields = {
        **begun.fields(),
        "max_tokens": answer_limit(limits, len(begun.prompt_ids), served, "messages", cuts=cuts_limit),
        **use.fields(begun, answer_schema, served),
        "prediction_ids": predicted_ids(request.prediction, served),
    }
    generates = plan_choices("messages", request, stamp, [fields], request.n or 1, params, conversation)
    return ChatPlan(stamp, generates, use.after(begun), begun.prompt_ids, prompt.unseen)


def format_schema(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None, param: str) -> str | None:
    """The schema of a response_format; None for text."""
    if isinstance(wanted, JsonSchemaFormat):
        return schema_text(wanted.json_schema.schema_, param)
    return object_schema(wanted, param) if isinstance(wanted, JsonObjectFormat) else None


def _tool_use(request: ChatRequest, served: ServedModel, *, has_format: bool) -> ToolUse:
    functions = [
        Function(tool.function.name, tool.function.description, tool.function.parameters) for tool in request.tools or ()
    ]
    choice = request.tool_choice or ("auto" if functions else "none")
    names: list[str] | None = None
    if isinstance(choice, NamedTool):
        mode, names = "required", [choice.function.name]
    elif isinstance(choice, AllowedTools):
        mode, names = choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]
    else:
        mode = choice
    one_call = request.parallel_tool_calls is False
    return tool_use(functions, mode, names, served, has_format=has_format, has_one_call=one_call)


_CONTENT: Final = b'"delta":{"content":'


class ChatReply(ChunkReply):
    """Chunks of a chat, or its one object."""

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(
        self,
        form: ReplyForm,
        use: ToolUse,
        names: TokenNames | None,
        tokenizer: Tokenizer | None = None,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`names`: of tokens, if the request asked for log-probabilities. `tokenizer`: tags of answers are its tokens."""
        super().__init__(form, has_names=names is not None)
        choices = range(form.num_choices)
        self.use, self._names = use, names
        self._parsers = [use.parser(tokenizer, prompt_ids) for _ in choices]
        self._has_begun = [False] * form.num_choices
        self._deltas: list[list[Delta]] = [[] for _ in choices]
        self._entries: list[list[dict[str, object]]] = [[] for _ in choices]
        self._is_plain = form.stream and names is None and not form.continuous_usage and isinstance(self._parsers[0], PlainText)
        self._plain_before = [before + _CONTENT for before in self._before]
        self._plain_after = b'},"logprobs":null,"finish_reason":null}]' + self._after

    def _on_tokens(self, choice: int, event: Tokens) -> bytes:
        if self._is_plain and self._has_begun[choice]:  # the path of almost every token
            text = event.text
            return self._plain_before[choice] + quoted(text) + self._plain_after if text else b""
        self._num_generated[choice] = event.index + len(event.token_ids)
        begun = self._begin(choice)
        deltas = self._parsers[choice].push(event.token_ids, event.text)
        if self._parsers[choice].is_enough:
            self.satisfied.add(choice)
        told = [] if self._names is None else entries(event, self._names)
        if not self._stream:
            self._deltas[choice] += deltas
            self._entries[choice] += told
            return b""
        return begun + self._frames(choice, deltas, told)

    def _on_done(self, choice: int, done: Done) -> bytes:
        begun = self._begin(choice)
        deltas = self._parsers[choice].finish()
        if not self._stream:
            self._deltas[choice] += deltas
            return b""
        return begun + self._frames(choice, deltas, []) + self._last_frame(choice, b'"delta":{}', done)

    @property
    def num_reasoning_tokens(self) -> int:
        """See Reply."""
        return sum(parser.num_reasoning_tokens for parser in self._parsers)

    @property
    def num_calls(self) -> int:
        """See Reply."""
        return sum(parser.num_calls for parser in self._parsers)

    def _usage(self) -> dict[str, object]:
        details = {"reasoning_tokens": self.num_reasoning_tokens, **predicted_tokens(self._in_order())}
        return super()._usage() | {"completion_tokens_details": details}

    def _finish_reason(self, choice: int, done: Done) -> str:
        reason = super()._finish_reason(choice, done)
        return "tool_calls" if reason == "stop" and self._parsers[choice].num_calls else reason

    def _choice(self, choice: int, finish_reason: str) -> dict[str, object]:
        message = assembled(self._deltas[choice], self.form.stamp.id, choice, self.use.reading.style)
        content = self._entries[choice]
        logprobs = None if self._names is None else {"content": content, "refusal": None}
        return {"index": choice, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def _begin(self, choice: int) -> bytes:
        """The chunk with the role, before a choice's first token and not earlier: clients measure the first token by it."""
        if self._has_begun[choice] or not self._stream:
            return b""
        self._has_begun[choice] = True
        return self._frame(choice, b'"delta":{"role":"assistant","content":""}')

    def _frames(self, choice: int, deltas: Sequence[Delta], told: list[dict[str, object]]) -> bytes:
        logprobs = to_json({"content": told, "refusal": None}) if told else b"null"
        if told and not deltas:
            deltas = (TextDelta(""),)
        frames = b""
        for delta in deltas:
            if isinstance(delta, ThoughtBefore):
                continue  # a stream has said it
            frames += self._frame(choice, self._delta(choice, delta), logprobs)
            logprobs = b"null"
        return frames

    def _delta(self, choice: int, delta: Delta) -> bytes:
        if isinstance(delta, TextDelta):
            return _CONTENT + quoted(delta.text) + b"}"
        if isinstance(delta, ReasoningDelta):
            thought = quoted(delta.text)
            return b'"delta":{"reasoning_content":%b,"reasoning":%b}' % (thought, thought)
        assert isinstance(delta, CallStart | CallArguments), "a stream is not told of thoughts that it has shown"
        call: dict[str, Any] = {"index": delta.idx}
        if isinstance(delta, CallStart):
            call_id = call_name(self.form.stamp.id, choice, delta.idx, self.use.reading.style)
            call |= {"id": call_id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        else:
            call["function"] = {"arguments": delta.text}
        return b'"delta":{"tool_calls":[%b]}' % to_json(call)


def call_name(answer_id: str, choice: int, idx: int, style: Style) -> str:
    """The id of a call; the same whether the answer is streamed or not. Mistral's templates take no others than such of 9."""
    if style.tools == "mistral":
        return hashlib.sha256(f"{answer_id} {choice} {idx}".encode()).hexdigest()[:9]
    return f"call_{answer_id.rpartition('-')[2].rpartition('_')[2][:24]}_{choice}_{idx}"


def assembled(deltas: Sequence[Delta], answer_id: str, choice: int, style: Style) -> dict[str, Any]:
    """The message that the deltas make together."""
    begin = next((idx + 1 for idx, delta in enumerate(deltas) if isinstance(delta, ThoughtBefore)), 0)
    text = "".join(delta.text for delta in deltas[begin:] if isinstance(delta, TextDelta))
    thought = "".join(delta.text for delta in deltas[:begin] if isinstance(delta, TextDelta)).strip()
    thought += "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": call_name(answer_id, choice, delta.idx, style), "type": "function", "function": function})
        elif isinstance(delta, CallArguments):
            calls[delta.idx]["function"]["arguments"] += delta.text
    message: dict[str, object] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thought:
        message["reasoning_content"] = message["reasoning"] = thought
    if calls:
        message["tool_calls"] = calls
    return message
