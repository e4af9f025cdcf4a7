"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kog_dist.gateway.openai.body import parse
from kog_dist.gateway.openai.chat import format_schema
from kog_dist.gateway.openai.chunks import ChunkReply, ReplyForm, merged, quoted
from kog_dist.gateway.openai.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from kog_dist.gateway.openai.errors import invalid
from kog_dist.gateway.openai.logprobs import LegacyLogprobs, TokenNames, to_json
from kog_dist.gateway.openai.planning import (
    Stamp,
    answer_limit,
    check_model,
    conversation_of,
    encode_prompt,
    plan_choices,
    sampling_params,
)
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.request_model import MAX_CHOICES, MOST_TOKENS
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.rpc.messages import Done, ErrorCode, Tokens

__all__ = ["CompletionReply", "CompletionRequest", "plan_completion"]


def plan_completion(body: object, served: ServedModel) -> Planned:
    """The RPC requests and the reply of a text completion: for each prompt its n choices. Raises ApiError."""
    request = parse(CompletionRequest, body, leaves_out=served.leaves_out_unknown)
    check_model(request.model, served)
    prompts = _prompts(request, served)
    per_prompt = request.n or 1
    num_choices = per_prompt * len(prompts)
    if num_choices > MAX_CHOICES:
        raise invalid(
            "n", f"{len(prompts)} prompts with n {per_prompt} make {num_choices} choices; at most {MAX_CHOICES} are decoded"
        )
    stamp = Stamp.new("cmpl-")
    limits = (request.max_tokens, request.max_completion_tokens)
    if limits == (None, None):
        limits = (DEFAULT_MAX_TOKENS, None)
    schema = {"json_schema": format_schema(request.response_format, "response_format")}
    params = sampling_params(request, served, request.logprobs)
    generates = plan_choices(
        "prompt", request, stamp, [{**_prompt_fields(one, limits, served), **schema} for one in prompts], per_prompt, params,
        conversation_of(request, ()),
    )  # fmt: skip
    form = ReplyForm.of(stamp, served.name, num_choices, per_prompt, request.stream, request.stream_options)
    names = TokenNames(served.tokenizer) if request.logprobs is not None else None
    return Planned(generates, form.stream, CompletionReply(form, names), request.left_out)


def _prompt_fields(prompt: str | tuple[int, ...], limits: Sequence[int | None], served: ServedModel) -> dict[str, Any]:
    """The prompt and the length of its answer. Of a text that the engine cuts into tokens, it says itself whether that fits."""
    if isinstance(prompt, str):
        limit = min(limit for limit in limits if limit is not None)
        if limit == MOST_TOKENS:  # what fits would be known with the number of its tokens
            raise invalid("max_tokens", "-1 is no limit where the engine alone has the tokenizer; give a number")
        return {"prompt": prompt, "max_tokens": limit}
    return {"prompt_ids": prompt, "max_tokens": answer_limit(limits, len(prompt), served, "prompt")}


def _prompts(request: CompletionRequest, served: ServedModel) -> list[str | tuple[int, ...]]:
    """Every prompt: its token ids, or its text if only the engine has a tokenizer."""
    prompt = request.prompt
    several: list[Any] = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [_checked_ids(one, served) if isinstance(one, list) else _text_prompt(one, served) for one in several]


def _text_prompt(text: str, served: ServedModel) -> str | tuple[int, ...]:
    if served.tokenizer is None and served.engine_takes_text:
        return text
    return encode_prompt(text, served, "prompt", add_special_tokens=True)


def _checked_ids(ids: list[int], served: ServedModel) -> tuple[int, ...]:
    if max(ids) >= served.vocab_size:
        raise invalid(
            "prompt",
            f"prompt: {max(ids)} is no token id; they are from 0 to {served.vocab_size - 1}",
            ErrorCode.TOKEN_ID_OUT_OF_RANGE.value,
        )
    if len(ids) >= served.max_context:
        raise invalid(
            "prompt",
            f"the prompt has {len(ids)} tokens, at most {served.max_context - 1} leave room for an answer",
            ErrorCode.CONTEXT_LENGTH_EXCEEDED.value,
        )
    return tuple(ids)


_TEXT: Final = b'"text":'


class CompletionReply(ChunkReply):
    """Chunks of a text completion, or its one object."""

    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(self, form: ReplyForm, names: TokenNames | None) -> None:
        """`names`: of tokens, if the request asked for log-probabilities."""
        super().__init__(form, has_names=names is not None)
        choices = range(form.num_choices)
        self._texts: list[list[str]] = [[] for _ in choices]
        self._legacy = None if names is None else [LegacyLogprobs(names) for _ in choices]
        self._told: list[list[dict[str, list[Any]]]] = [[] for _ in choices]
        self._is_plain = form.stream and names is None and not form.continuous_usage
        self._plain_before = [before + _TEXT for before in self._before]
        self._plain_after = b',"logprobs":null,"finish_reason":null}]' + self._after

    def _on_tokens(self, choice: int, event: Tokens) -> bytes:
        text = event.text
        if self._is_plain:  # the path of almost every token
            return self._plain_before[choice] + quoted(text) + self._plain_after if text else b""
        self._num_generated[choice] = event.index + len(event.token_ids)
        told = None if self._legacy is None or not event.logprobs else self._legacy[choice].of(event)
        if not self._stream:
            self._texts[choice].append(text)
            if told is not None:
                self._told[choice].append(told)
            return b""
        if not text and told is None:
            return b""
        return self._frame(choice, _TEXT + quoted(text), b"null" if told is None else to_json(told))

    def _on_done(self, choice: int, done: Done) -> bytes:
        return self._last_frame(choice, b'"text":""', done) if self._stream else b""

    def _choice(self, choice: int, finish_reason: str) -> dict[str, Any]:
        logprobs = None if self._legacy is None else merged(self._told[choice])
        return {"index": choice, "text": "".join(self._texts[choice]), "logprobs": logprobs, "finish_reason": finish_reason}
