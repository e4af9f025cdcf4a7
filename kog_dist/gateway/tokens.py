"""`/tokenize`, `/detokenize` and `/tokenizer_info`, with vLLM's field names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from kog_dist.errors import RequestError
from kog_dist.gateway.openai.body import parse
from kog_dist.gateway.openai.errors import invalid
from kog_dist.gateway.openai.planning import check_model
from kog_dist.gateway.openai.request_model import RequestModel, ignored
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import MAX_PROMPT_IDS

MAX_TEXT_BYTES: Final = 1 << 20

ModelName = Annotated[str, Field(max_length=1024)]


class TokenizeRequest(RequestModel):
    """Text, or the messages of a chat as its template writes them."""

    model: ModelName | None = None
    prompt: Annotated[str, Field(max_length=MAX_TEXT_BYTES)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(max_length=4096)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    add_generation_prompt: bool = Field(default=True, description="With messages: end where the answer begins.")
    add_special_tokens: bool | None = Field(default=None, description="Default: yes for a prompt, no for messages.")
    return_token_strs: bool | None = Field(default=None, description="Also the text of each token.")
    user: Any = ignored("it makes no difference here")


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: ModelName | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]


def tokenize(body: object, served: ServedModel) -> dict[str, Any]:
    """vLLM's answer: count, max_model_len, tokens, token_strs. Raises ApiError."""
    asked = parse(TokenizeRequest, body)
    tokenizer = _tokenizer(served, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "give either prompt or messages", "missing_required_parameter")
    special = asked.add_special_tokens
    foreign: Sequence[tuple[int, int]] = ()
    try:
        if asked.prompt is not None:
            text, special = asked.prompt, special if special is not None else True
        elif served.chat_template is None:
            raise invalid("messages", "this model has no chat template; give its text as prompt", "no_chat_template")
        else:
            rendered = served.chat_template.render(
                asked.messages or [], tools=asked.tools, add_generation_prompt=asked.add_generation_prompt
            )
            text, foreign = str(rendered), () if served.obeys_special_tokens else rendered.request_runs
        if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
            raise invalid("prompt", f"the text has more than {MAX_TEXT_BYTES} bytes")
        ids = tokenizer.encode(text) if special else tokenizer.encode_chat(text, foreign=foreign)
    except RequestError as error:
        raise invalid("messages" if asked.prompt is None else "prompt", str(error), error.code) from None
    texts = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids] if asked.return_token_strs else None
    return {"count": len(ids), "max_model_len": served.max_context, "tokens": ids, "token_strs": texts}


def detokenize(body: object, served: ServedModel) -> dict[str, Any]:
    """vLLM's answer: prompt. Raises ApiError."""
    asked = parse(DetokenizeRequest, body)
    tokenizer = _tokenizer(served, asked.model)
    for place, token_id in enumerate(asked.tokens):
        if token_id >= served.vocab_size:
            raise invalid(f"tokens[{place}]", f"token id {token_id} is not below the vocabulary's {served.vocab_size}")
    return {"prompt": tokenizer.decode(asked.tokens)}


def tokenizer_info(served: ServedModel) -> dict[str, Any]:
    """bos_token, eos_token, ... and chat_template, as clients need them that have no tokenizer themselves. Raises ApiError."""
    template = served.chat_template
    return {**_tokenizer(served, None).special_tokens, "chat_template": None if template is None else template.source}


def _tokenizer(served: ServedModel, name: str | None) -> Tokenizer:
    check_model(name, served)
    if served.tokenizer is None:
        raise invalid(
            None, "this gateway has no tokenizer: the model folder has none, or it was started without --model", "no_tokenizer"
        )
    return served.tokenizer
