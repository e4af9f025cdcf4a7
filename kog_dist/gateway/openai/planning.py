"""What the three APIs have in common on the way to RPC messages: names, limits against the model, ids, seeds, stickiness."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from kog_dist.errors import RequestError
from kog_dist.gateway.openai.body import parse
from kog_dist.gateway.openai.chat_request import Prediction
from kog_dist.gateway.openai.errors import ApiError, invalid
from kog_dist.gateway.openai.request_model import MOST_TOKENS, JsonObjectFormat, SamplingFields
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass
from kog_dist.rpc.messages import MAX_PROMPT_IDS, MAX_SCHEMA_BYTES, BadMessage, ErrorCode, Generate
from kog_dist.sampling_params import LIMITS, MAX_SEED, SamplingParams

Asked = TypeVar("Asked", bound=SamplingFields)

_SAME_NAMES: Final = tuple(name for name in LIMITS if name not in ("seed", "logit_bias", "logprobs"))  # in a request and here
_TOKEN_ID: Final = re.compile("0|[1-9][0-9]{0,9}")
_MAX_BYTES_PER_TOKEN: Final = 64  # a text with more of them per token of context cannot fit, and is not tokenized
_HEAD_BYTES_PER_TOKEN: Final = 8
_CUT_TOKENS: Final = 1024  # as many more may a part of a text have than it has in the whole


@dataclass(frozen=True, slots=True)
class Stamp:
    """Name and date of one answer. `created_s`: Unix time."""

    id: str
    created_s: int

    @classmethod
    def new(cls, kind: str) -> Stamp:
        """A name that nobody else has: `kind`, then 128 random bits."""
        return cls(f"{kind}{secrets.token_hex(16)}", int(time.time()))

    def choice_id(self, choice: int, num_choices: int) -> str:
        """The RPC request's name; a single choice has the answer's, so that an operator can cancel what a client reports."""
        return self.id if num_choices == 1 else f"{self.id}-{choice}"


def asked(kind: type[Asked], body: object, served: ServedModel, key_scope: str) -> Asked:
    """The body as a checked request for the served model. Raises ApiError.

    `key_scope` says whose caches it may use, "" those of all. It becomes part of the `cache_salt`, here and nowhere later: what
    is kept of texts, the router and the ranks see that salt alone.
    """
    request = parse(kind, body, leaves_out=served.leaves_out_unknown)
    check_model(request.model, served)
    if key_scope:
        request.cache_salt = _salt_within(key_scope, request.cache_salt)
    return request


def _salt_within(key_scope: str, salt: str | None) -> str:
    """Another salt for each scope and each salt of a client; nobody who does not know the scope can send it."""
    return hmac.new(key_scope.encode(), b"" if salt is None else b"cache_salt " + salt.encode(), hashlib.sha256).hexdigest()


def check_model(name: str | None, served: ServedModel) -> None:
    """Raise ApiError 404 unless the request is for the served model."""
    if not served.answers_to(name):
        names = ", ".join([served.name, *served.card()["aliases"]])
        raise ApiError(
            404,
            "invalid_request_error",
            "model_not_found",
            "model",
            f"there is no model {ascii(name)[:80]} here; there is {names}",
        )


def sampling_params(request: SamplingFields, served: ServedModel, logprobs: int | None) -> SamplingParams:
    """How tokens are chosen; of a request with several choices the first one's seed. Raises ApiError for an id that is none."""
    given = {name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None}
    if "top_p" in given:
        given["top_p"] = max(given["top_p"], LIMITS["top_p"][0])  # 0 leaves the best token only
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)  # -1 is vLLM's word for all
    bias = tuple(_logit_bias(request.logit_bias or {}, served.vocab_size).items())
    seed = secrets.randbits(63) if request.seed is None else request.seed % (MAX_SEED + 1)
    try:
        return replace(served.defaults, **given, seed=seed, logit_bias=bias, logprobs=logprobs)
    except ValueError as error:
        raise invalid(str(error).partition(" ")[0], str(error)) from None


def _ending_fields(request: SamplingFields) -> dict[str, object]:
    """The fields of Generate that say where an answer ends."""
    stop = request.stop
    texts = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    return {"stop": texts, "ignore_eos": bool(request.ignore_eos)}


def _logit_bias(raw: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in raw.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise invalid("logit_bias", f"logit_bias: {ascii(key)[:40]} is no token id; they are from 0 to {vocab_size - 1}")
        bias[int(key)] = value
    return bias


def plan_choices(
    param: str,
    request: SamplingFields,
    stamp: Stamp,
    prompts: Sequence[Mapping[str, object]],
    per_prompt: int,
    params: SamplingParams,
    conversation: str | None,
) -> tuple[Generate, ...]:
    """The messages of a request: `per_prompt` choices of each prompt, one prompt after the other. Raises ApiError."""
    num_choices = per_prompt * len(prompts)
    return tuple(
        _generate(
            param,
            {
                **_ending_fields(request),
                **prompts[choice // per_prompt],
                "request_id": stamp.choice_id(choice, num_choices),
                "sampling": _of_choice(params, choice % per_prompt),
                "conversation": _choice_conversation(conversation, choice),
                "cache_salt": request.cache_salt,
                "speculate": request.speculate,
            },
        )
        for choice in range(num_choices)
    )


def _of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Those of one choice of a prompt: the request's own for the first one, so that n does not change it, then the next seeds."""
    return params if choice == 0 else replace(params, seed=(params.seed + choice) % (MAX_SEED + 1))


def _generate(param: str, fields: Mapping[str, Any]) -> Generate:
    """The checked message. Raises ApiError with the message's own complaint; `param` is what prompts are called."""
    least, most = fields["sampling"].min_tokens, fields["max_tokens"]
    if least > most:
        raise invalid("min_tokens", f"min_tokens is {least}, and the answer has at most {most} tokens; ask for no more than that")
    try:
        return Generate(**fields)
    except BadMessage as error:
        sentence = str(error).removeprefix("generate: ")
        name = sentence.partition(" ")[0]
        name = param if name in ("prompt", "prompt_ids") else name
        raise invalid(name if name in fields or name == param else None, sentence) from None


def conversation_of(request: SamplingFields, beginning: Sequence[str]) -> str | None:
    """The RPC `conversation` that leads a router to the replica with the cached beginning; None leaves that to the prompt.

    `prompt_cache_key` where it is given; else what stays the same while a chat grows: the messages up to the first one of the
    user (`beginning`), together with `user`, which tells apart those who begin alike.
    """
    if request.prompt_cache_key is not None:
        parts = ["key", request.prompt_cache_key]
    elif beginning:
        parts = ["chat", request.user or "", *beginning]
    else:
        return None
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _choice_conversation(conversation: str | None, choice: int) -> str | None:
    """That of the first choice goes on; the others have their own, so that replicas share them."""
    return conversation if conversation is None or choice == 0 else f"{conversation}.{choice}"


def encode_prompt(
    text: str, served: ServedModel, param: str, encode: Callable[[Tokenizer, str], Sequence[int]] = Tokenizer.encode
) -> tuple[int, ...]:
    """Token ids of a prompt that leaves room for an answer. Raises ApiError 400."""
    if served.tokenizer is None:
        raise invalid(
            param,
            f"{served.name} has no tokenizer; send token ids as the prompt of /v1/completions"
            if not served.engine_takes_text
            else "this gateway was started without --model, so it has no chat template; use /v1/completions, or give it --model",
            ErrorCode.NO_TOKENIZER.value,
        )
    num_bytes, most = len(text.encode("utf-8", "surrogatepass")), _MAX_BYTES_PER_TOKEN * served.max_context
    if num_bytes > most:
        raise _too_long(param, f"the prompt has {num_bytes} bytes, at most {most} can fit {served.max_context} tokens of context")
    room = min(served.max_context - 1, MAX_PROMPT_IDS)
    why = "leave room for an answer" if room < MAX_PROMPT_IDS else "are taken in one prompt"
    try:
        if num_bytes > 2 * _HEAD_BYTES_PER_TOKEN * room:  # hardly any such text fits: a part of it shows that in less time
            head = served.tokenizer.encode(text[: _HEAD_BYTES_PER_TOKEN * room], add_special_tokens=False)
            if len(head) > room + _CUT_TOKENS:
                raise _too_long(param, f"the prompt has over {len(head) - _CUT_TOKENS} tokens, at most {room} {why}")
        ids = tuple(encode(served.tokenizer, text))
    except ApiError:
        raise
    except RequestError as error:
        raise invalid(param, str(error), error.code) from None
    except BaseException as error:  # the library's panics derive from BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise invalid(param, f"the tokenizer cannot read the prompt: {error!s:.200}") from None
    if not ids:
        raise invalid(param, "the prompt has no tokens; give at least one")
    if len(ids) > room:
        raise _too_long(param, f"the prompt has {len(ids)} tokens, at most {room} {why}")
    return ids


def predicted_ids(prediction: Prediction | None, served: ServedModel) -> tuple[int, ...] | None:
    """The tokens of a prediction, as many as an answer may have. What cannot be read is none: it changes no answer."""
    if prediction is None or served.tokenizer is None:
        return None
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    try:
        ids = served.tokenizer.encode(text[: _HEAD_BYTES_PER_TOKEN * served.max_context], add_special_tokens=False)
    except BaseException as error:  # the library's panics derive from BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        return None
    return tuple(ids[: min(served.max_context, MAX_PROMPT_IDS)]) or None


def answer_limit(
    wanted: Sequence[int | None], num_prompt_tokens: int, served: ServedModel, param: str, *, cuts: bool = False
) -> int:
    """The smallest of the limits that the client gave, else what fits the context. Raises ApiError 400 if it does not fit.

    MOST_TOKENS is no limit. `cuts`: a limit that does not fit becomes what does, for clients that must name one.
    """
    room = served.max_context - num_prompt_tokens
    limit = min((given for given in wanted if given is not None and given < MOST_TOKENS), default=room)
    if limit > room and not cuts:
        raise _too_long(
            param,
            f"{num_prompt_tokens} prompt tokens and an answer of {limit} exceed the context of {served.max_context} tokens; "
            f"ask for at most {room}",
        )
    return min(limit, room)


def schema_text(schema: Mapping[str, Any], param: str) -> str:
    """The JSON of a schema as RPC takes it. Raises ApiError 400 above the limit."""
    return bounded(json.dumps(schema, separators=(",", ":")), param)


def bounded(text: str, param: str) -> str:
    """The text of a schema or a grammar. Raises ApiError 400 above the limit."""
    if len(text) > MAX_SCHEMA_BYTES:
        raise invalid(param, f"{param}: the JSON schema has {len(text)} bytes, at most {MAX_SCHEMA_BYTES} are accepted")
    return text


def object_schema(wanted: JsonObjectFormat, param: str) -> str:
    """The JSON of what a `json_object` must satisfy: its own schema if it has one. Raises as `schema_text`."""
    return schema_text(wanted.schema_ or {"type": "object"}, param)


def _too_long(param: str, message: str) -> ApiError:
    return invalid(param, message, ErrorCode.CONTEXT_LENGTH_EXCEEDED.value)
