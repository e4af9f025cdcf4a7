"""What the OpenAI layer knows of the model that an engine serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol

from kog_dist.gateway.reading.styles import Style, style_of
from kog_dist.model.chat_template import RenderedChat
from kog_dist.model.generation_config import OPENAI_DEFAULTS
from kog_dist.model.template_trials import TemplateFacts
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass
from kog_dist.sampling_params import SamplingParams

DEFAULT_ALIAS: Final = "default"  # names the served model whatever it is called


class ChatRenderer(Protocol):
    """Messages to prompt text; `kog_dist.model.chat_template.ChatTemplate`."""

    source: str
    tool_source: str  # of chats with tools

    @property
    def facts(self) -> TemplateFacts:
        """What it does with what it is given. Raises CheckpointError."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> RenderedChat:
        """The prompt. Raises RequestError if the template refuses the messages, breaks on them or exceeds its limits."""


def shown_name(names: Sequence[str], own: str) -> str:
    """What a model is called that requests may call by `names`: the first that is no pattern, else its own."""
    return next((name for name in names if "*" not in name), own)


@dataclass(frozen=True)
class ServedModel:
    """The model behind the gateway. `aliases`: other names, and patterns with `*`. `max_context`: tokens of prompt and answer
    together. `created`: Unix time in seconds.

    Without a tokenizer only `/v1/completions` works, with token ids, and with text where the engine has a tokenizer itself
    (`engine_takes_text`); without a chat template chats become plain text, as docs/openai.md says. `leaves_out_unknown`: see
    `body.parse`. `obeys_special_tokens`: special tokens count in the strings of messages and tools, too. `reasoning_parser`,
    `tool_parser`: how answers are read, `auto` as the template says.
    """

    name: str
    aliases: tuple[str, ...]
    max_context: int
    vocab_size: int
    tokenizer: Tokenizer | None
    chat_template: ChatRenderer | None
    created: int
    defaults: SamplingParams = OPENAI_DEFAULTS
    engine_takes_text: bool = False
    leaves_out_unknown: bool = True
    obeys_special_tokens: bool = False
    reasoning_parser: str = "auto"
    tool_parser: str = "auto"

    def answers_to(self, name: str | None) -> bool:
        """Whether a request for the model `name` is ours; one that names none is."""
        return name is None or name in self.names or any(fnmatchcase(name, alias) for alias in self.aliases if "*" in alias)

    @property
    def names(self) -> list[str]:
        """All that it is called, patterns left out; its own first."""
        return list(dict.fromkeys([self.name, *(alias for alias in self.aliases if "*" not in alias), DEFAULT_ALIAS]))

    def card(self, name: str | None = None) -> dict[str, Any]:
        """The entry of `/v1/models`, by one of its names."""
        return {
            "id": name or self.name,
            "object": "model",
            "type": "model",  # this and the next two are Anthropic's
            "display_name": name or self.name,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(),
            "created": self.created,
            "owned_by": "kog_dist",
            "max_model_len": self.max_context,
            "aliases": sorted({DEFAULT_ALIAS, *self.aliases} - {name or self.name}),
            "chat": self.chat_style,
        }

    @property
    def style(self) -> Style:
        """How it writes thoughts and calls; see docs/answers.md."""
        template = self.chat_template
        source = None if template is None else f"{template.source}\n{template.tool_source}"
        return style_of(source, has_channels=self.has_channels, reasoning=self.reasoning_parser, tools=self.tool_parser)

    @property
    def has_channels(self) -> bool:
        """Whether the model writes messages in channels, as gpt-oss."""
        told = self.chat_template is not None and "<|channel|>" in self.chat_template.source
        return told and self.tokenizer is not None and self.tokenizer.has_channels

    @property
    def chat_style(self) -> str:
        """How messages become a prompt: `template`, `plain` (joined text, for base models) or `none` (no tokenizer)."""
        if self.tokenizer is None:
            return "none"
        return "plain" if self.chat_template is None else "template"
