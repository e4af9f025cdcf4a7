"""The body of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from pydantic import Discriminator, Field, Tag

from kog_dist.gateway.openai.chat_request import JsonSchemaFormat
from kog_dist.gateway.openai.peer_fields import REFUSED_EVERYWHERE
from kog_dist.gateway.openai.request_model import (
    MAX_CHOICES,
    JsonObjectFormat,
    NoTokens,
    Refusal,
    SamplingFields,
    StreamOptions,
    TextFormat,
    TopLogprobs,
    Whole,
)
from kog_dist.rpc.messages import MAX_PROMPT_IDS

DEFAULT_MAX_TOKENS = 16  # OpenAI's

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)]


def _prompt_kind(prompt: object) -> str | None:
    """Which of the forms a prompt has, by its first element, so that a complaint is about that form."""
    if isinstance(prompt, list):
        first = prompt[0] if prompt else None
        return "texts" if isinstance(first, str) else "lists of ids" if isinstance(first, list) else "ids"
    return "text" if isinstance(prompt, str) else None


_COMPLETIONS_ONLY: Final[Mapping[str, Refusal]] = {
    **dict.fromkeys(("messages", "input", "inputs"), Refusal("here it is called prompt")),
    **dict.fromkeys(("instructions", "system", "system_prompt"), Refusal("write it into the prompt", (None, ""))),
    **dict.fromkeys(("tools", "functions", "documents"), Refusal("use /v1/chat/completions", (None, []))),
    **dict.fromkeys(("chat_template", "chat_template_kwargs"), Refusal("use /v1/chat/completions", (None, {}))),
    "max_output_tokens": Refusal("here it is called max_tokens"),
    "top_logprobs": Refusal("logprobs is their number here"),
    "add_special_tokens": Refusal("send token ids", (None, True)),
    "input_extra": Refusal("write it into the prompt", (None, [])),
    "input_prefix": Refusal("use prompt and suffix", (None, "")),
    "input_suffix": Refusal("use prompt and suffix", (None, "")),
}


class CompletionRequest(SamplingFields):
    """One or several prompts to be continued."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **{name: why for name, why in REFUSED_EVERYWHERE.items() if name != "suffix"},
        **_COMPLETIONS_ONLY,
    }

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES), Tag("texts")]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_CHOICES), Tag("lists of ids")],
        Discriminator(
            _prompt_kind, custom_error_type="prompt_kind", custom_error_message="must be a text, token ids, or a list of them"
        ),
    ] = Field(description=f"A text, token ids, or a list of them. Prompts times n: at most {MAX_CHOICES}.")
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: NoTokens = Field(
        default=None, description=f"Default: {DEFAULT_MAX_TOKENS}. -1: what fits the context. 0: none, with echo."
    )
    max_completion_tokens: NoTokens = Field(default=None, description="The same; with both, the smaller one counts.")
    logprobs: TopLogprobs | None = Field(default=None, description="How many alternatives of each token.")
    echo: bool | None = Field(
        default=None, description="The answer begins with the prompt; with logprobs its tokens have them, too, but for the first."
    )
    suffix: str | None = Field(
        default=None, description="What comes after the answer, of models that fill in the middle; then prompts are texts."
    )
    stream_options: StreamOptions | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(
        default=None, discriminator="type", description="As in vLLM: the same as that of a chat."
    )
