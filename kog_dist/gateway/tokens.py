"""`/tokenize`, `/detokenize` and `/tokenizer_info`, with vLLM's field names."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import Field

from kog_dist.errors import RequestError
from kog_dist.gateway.openai.body import parse
from kog_dist.gateway.openai.chat_request import ChatMessage, TemplateValues, Tool
from kog_dist.gateway.openai.errors import invalid, unsupported
from kog_dist.gateway.openai.planning import check_model
from kog_dist.gateway.openai.prompt import Ending, prompt_of
from kog_dist.gateway.openai.request_model import MAX_MESSAGES, MAX_TOOLS, RequestModel, ignored
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.openai.tools import Function
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import MAX_PROMPT_IDS

MAX_TEXT_BYTES: Final = 1 << 20

ModelName = Annotated[str, Field(max_length=1024)]


class TokenizeRequest(RequestModel):
    """Text, or the messages of a chat as its template writes them."""

    model: ModelName | None = None
    prompt: Annotated[str, Field(max_length=MAX_TEXT_BYTES)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: TemplateValues | None = Field(default=None, description="With messages: as in a chat.")
    add_generation_prompt: bool | None = Field(default=None, description="With messages: false ends behind the last one.")
    continue_final_message: bool | None = Field(default=None, description="With messages: end within the last one.")
    add_special_tokens: bool | None = Field(default=None, description="Of a prompt. Default: yes.")
    return_token_strs: bool | None = Field(default=None, description="Also the text of each token.")
    user: object = ignored("it makes no difference here")


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: ModelName | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]


def tokenize(body: object, served: ServedModel) -> dict[str, Any]:
    """vLLM's answer: count, max_model_len, tokens, token_strs. Raises ApiError."""
    asked = parse(TokenizeRequest, body, leaves_out=served.leaves_out_unknown)
    tokenizer = _tokenizer(served, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "give either prompt or messages", "missing_required_parameter")
    ids = _ids_of_text(asked.prompt, tokenizer, asked) if asked.prompt is not None else _ids_of_chat(asked, served)
    texts = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids] if asked.return_token_strs else None
    return {"count": len(ids), "max_model_len": served.max_context, "tokens": ids, "token_strs": texts}


def _ids_of_text(text: str, tokenizer: Tokenizer, asked: TokenizeRequest) -> list[int]:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise invalid("prompt", f"the text has more than {MAX_TEXT_BYTES} bytes")
    try:
        return tokenizer.encode(text, add_special_tokens=asked.add_special_tokens is not False)
    except RequestError as error:
        raise invalid("prompt", str(error), error.code) from None


def _ids_of_chat(asked: TokenizeRequest, served: ServedModel) -> list[int]:
    """The prompt that `/v1/chat/completions` makes of the same."""
    if served.chat_template is None:
        raise invalid("messages", "this model has no chat template; give its text as prompt", "no_chat_template")
    if asked.add_special_tokens:
        raise unsupported("add_special_tokens", "add_special_tokens: a chat template writes special tokens itself")
    tools = [
        Function(tool.function.name, tool.function.description, tool.function.parameters).as_chat_tool()
        for tool in asked.tools or ()
    ]
    longest = replace(served, max_context=MAX_TEXT_BYTES)  # who counts may want to know how much too long a chat is
    prompt = prompt_of(
        asked.messages or [],
        tools,
        longest,
        variables=asked.chat_template_kwargs,
        ending=Ending.of(asked.add_generation_prompt, asked.continue_final_message),
    )
    return list(prompt.ids)


def detokenize(body: object, served: ServedModel) -> dict[str, object]:
    """vLLM's answer: prompt. Raises ApiError."""
    asked = parse(DetokenizeRequest, body)
    tokenizer = _tokenizer(served, asked.model)
    for place, token_id in enumerate(asked.tokens):
        if token_id >= served.vocab_size:
            raise invalid(f"tokens[{place}]", f"token id {token_id} is not below the vocabulary's {served.vocab_size}")
    return {"prompt": tokenizer.decode(asked.tokens)}


def tokenizer_info(served: ServedModel) -> dict[str, object]:
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
