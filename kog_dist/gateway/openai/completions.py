"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from kog_dist.gateway.openai.chat import format_schema
from kog_dist.gateway.openai.chunks import ChunkReply, ReplyForm, merged, quoted
from kog_dist.gateway.openai.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from kog_dist.gateway.openai.echo import Echo
from kog_dist.gateway.openai.errors import invalid, unsupported
from kog_dist.gateway.openai.logprobs import LegacyLogprobs, TokenNames, to_json
from kog_dist.gateway.openai.planning import (
    Stamp,
    answer_limit,
    asked,
    conversation_of,
    encode_prompt,
    plan_choices,
    sampling_params,
)
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.request_model import MAX_CHOICES, MOST_TOKENS
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.model.fill_in_middle import FillInMiddle
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import Done, ErrorCode, PromptLogprobs, Tokens

__all__ = ["CompletionReply", "CompletionRequest", "plan_completion"]


def plan_completion(body: object, served: ServedModel, key_scope: str = "") -> Planned:
    """The RPC requests and the reply of a text completion: for each prompt its n choices. Raises ApiError."""
    request = asked(CompletionRequest, body, served, key_scope)
    limits = _limits(request)
    scores = bool(request.echo) and (request.logprobs is not None or 0 in limits)
    _check_combination(request, limits, scores=scores)
    given = _given_prompts(request)
    prompts = [_prompt(one, request.suffix or "", served) for one in given]
    per_prompt = request.n or 1
    num_choices = per_prompt * len(prompts)
    if num_choices > MAX_CHOICES:
        raise invalid(
            "n", f"{len(prompts)} prompts with n {per_prompt} make {num_choices} choices; at most {MAX_CHOICES} are decoded"
        )
    stamp = Stamp.new("cmpl-")
    common = {"prompt_logprobs": scores, "json_schema": format_schema(request.response_format, "response_format")}
    params = sampling_params(request, served, 0 if scores and request.logprobs is None else request.logprobs)
    generates = plan_choices(
        "prompt",
        request,
        stamp,
        [{**_prompt_fields(one, limits, served), **common} for one in prompts],
        per_prompt,
        params,
        conversation_of(request, ()),
    )
    echoes: Sequence[Echo] = ()
    if request.echo:
        has_names = scores and request.logprobs is not None
        echoes = [Echo.of(one, sent, served, scores=has_names) for one, sent in zip(given, prompts, strict=True)]
    form = ReplyForm.of(stamp, served.name, num_choices, per_prompt, request.stream, request.stream_options)
    names = TokenNames(served.tokenizer) if request.logprobs is not None else None
    return Planned(generates, form.stream, CompletionReply(form, names, echoes), request.left_out)


def _limits(request: CompletionRequest) -> tuple[int | None, int | None]:
    """Of the answer, as they were given."""
    limits = (request.max_tokens, request.max_completion_tokens)
    return (DEFAULT_MAX_TOKENS, None) if limits == (None, None) else limits


def _check_combination(request: CompletionRequest, limits: Sequence[int | None], *, scores: bool) -> None:
    """Raises ApiError for fields that exclude each other. `scores`: the prompt's tokens get log-probabilities."""
    if 0 in limits and not request.echo:
        name = "max_tokens" if limits[0] == 0 else "max_completion_tokens"
        raise invalid(name, f"{name} 0 asks for nothing, but with echo; give at least 1")
    if scores and request.response_format is not None and request.response_format.type != "text":
        raise invalid("echo", "echo with log-probabilities and response_format exclude each other")
    if request.suffix and request.echo:
        raise invalid("echo", "echo and suffix exclude each other: the prompt is not what the answer comes behind")


def _prompt_fields(prompt: str | tuple[int, ...], limits: Sequence[int | None], served: ServedModel) -> dict[str, object]:
    """The prompt and the length of its answer. Of a text that the engine cuts into tokens, it says itself whether that fits."""
    if isinstance(prompt, str):
        limit = min(limit for limit in limits if limit is not None)
        if limit == MOST_TOKENS:  # what fits would be known with the number of its tokens
            raise invalid("max_tokens", "-1 is no limit where the engine alone has the tokenizer; give a number")
        return {"prompt": prompt, "max_tokens": limit}
    return {"prompt_ids": prompt, "max_tokens": answer_limit(limits, len(prompt), served, "prompt")}


def _given_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Every prompt: a text, or token ids."""
    prompt: Any = request.prompt
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def _prompt(given: str | list[int], suffix: str, served: ServedModel) -> str | tuple[int, ...]:
    """A prompt's token ids, or its text if only the engine has a tokenizer."""
    if suffix:
        return _around_the_middle(given, suffix, served)
    if isinstance(given, list):
        return _checked_ids(given, served)
    if served.tokenizer is None and served.engine_takes_text:
        return given
    return encode_prompt(given, served, "prompt")


def _around_the_middle(before: str | list[int], after: str, served: ServedModel) -> tuple[int, ...]:
    tokenizer = served.tokenizer
    marks = FillInMiddle.of(tokenizer) if tokenizer is not None else None
    if tokenizer is None or marks is None:
        raise unsupported("suffix", f"{served.name} has no tokens for filling in the middle; omit suffix")
    if not isinstance(before, str):
        raise invalid("suffix", "suffix needs the prompt as text, not as token ids")
    bare = partial(Tokenizer.encode, add_special_tokens=False)
    before_ids = marks.bare(before, lambda text: encode_prompt(text, served, "prompt", bare))
    after_ids = marks.bare(after, lambda text: encode_prompt(text, served, "suffix", bare))
    return _checked_ids([*tokenizer.encode(""), *marks.around(before_ids, after_ids)], served)


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

    def __init__(self, form: ReplyForm, names: TokenNames | None, echoes: Sequence[Echo] = ()) -> None:
        """`names`: of tokens, if the request asked for log-probabilities. `echoes`: of all prompts, if it asked for them."""
        super().__init__(form, has_names=names is not None)
        choices = range(form.num_choices)
        self._texts: list[list[str]] = [[] for _ in choices]
        self._legacy = None if names is None else [LegacyLogprobs(names, has_prompt=bool(echoes)) for _ in choices]
        self._logprobs: list[list[dict[str, list[object]]]] = [[] for _ in choices]
        self.echoes = echoes
        self._unsaid = {choice: echoes[choice // form.choices_per_prompt] for choice in choices} if echoes else {}
        self._is_plain = form.stream and names is None and not form.continuous_usage and not echoes
        self._plain_before = [before + _TEXT for before in self._before]
        self._plain_after = b',"logprobs":null,"finish_reason":null}]' + self._after

    def _on_tokens(self, choice: int, event: Tokens) -> bytes:
        text = event.text
        if self._is_plain:  # the path of almost every token
            return self._plain_before[choice] + quoted(text) + self._plain_after if text else b""
        self._num_generated[choice] = event.index + len(event.token_ids)
        return self._piece(choice, text, event)

    def _on_prompt(self, choice: int, event: PromptLogprobs) -> bytes:
        return self._piece(choice, "", event)

    def _piece(self, choice: int, text: str, event: Tokens | PromptLogprobs | None) -> bytes:
        """Text and log-probabilities that have come; the first ones come behind the echo."""
        legacy = None if self._legacy is None else self._legacy[choice]
        begin, logprobs = b"", None
        if (echo := self._unsaid.pop(choice, None)) is not None:
            first = None if legacy is None or echo.first_id is None else legacy.first(echo.first_id)
            begin = self._told(choice, echo.text, first)
        if legacy is not None and event is not None and event.logprobs:
            logprobs = legacy.of(event)
        return begin + self._told(choice, text, logprobs)

    def _told(self, choice: int, text: str, logprobs: dict[str, list[Any]] | None) -> bytes:
        if not self._stream:
            self._texts[choice].append(text)
            if logprobs is not None:
                self._logprobs[choice].append(logprobs)
            return b""
        if not text and logprobs is None:
            return b""
        return self._frame(choice, _TEXT + quoted(text), b"null" if logprobs is None else to_json(logprobs))

    def _on_done(self, choice: int, done: Done) -> bytes:
        first = self._piece(choice, "", None)
        return first + self._last_frame(choice, b'"text":""', done) if self._stream else b""

    def _choice(self, choice: int, finish_reason: str) -> dict[str, object]:
        logprobs = None if self._legacy is None else merged(self._logprobs[choice])
        return {"index": choice, "text": "".join(self._texts[choice]), "logprobs": logprobs, "finish_reason": finish_reason}
