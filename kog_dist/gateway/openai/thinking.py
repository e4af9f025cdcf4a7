"""Whether and how long a model thinks: what a request asks for, in the words of its template, and where a thought ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final

from kog_dist.errors import CheckpointError
from kog_dist.gateway.openai.errors import ApiError, invalid
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.reading.channels import ANALYSIS, MESSAGE, MESSAGE_END
from kog_dist.records import dataclass

BUDGET: Final = "thinking_budget"
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OF_CHANNELS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_SWITCHES: Final = ("enable_thinking", "thinking")  # variables of templates that turn thoughts on and off
_SMALL_BUDGET: Final = 1024  # tokens, of a low effort
_MAX_BUDGET: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Thinking:
    """`variables`: of the template. `budget`: most tokens of a thought; None: any number. `is_firm`: the request names it.
    `is_off`: no thought is wanted.
    """

    variables: Mapping[str, object] = field(default_factory=dict)
    budget: int | None = None
    is_firm: bool = False
    is_off: bool = False


def thinking_of(effort: object, given: Mapping[str, object] | None, served: ServedModel) -> Thinking:
    """What an effort and the `chat_template_kwargs` of a request come to. Raises ApiError for a budget that is none.

    A template that knows efforts gets the word. Of another one `none` turns thoughts off and other words on, and `minimal` and
    `low` are a budget. What the request says in `chat_template_kwargs` overrules that. Other words are ignored.
    """
    word = effort if isinstance(effort, str) and effort in _EFFORTS else None
    variables, budget = dict(given or {}), _budget(given or {})
    is_firm = budget is not None
    if served.chat_template is None:
        return Thinking(variables, budget, is_firm)
    known = _known(served)
    if BUDGET in variables and BUDGET not in known:
        del variables[BUDGET]
    is_off = word == "none"
    if word is not None and "reasoning_effort" in known:
        variables.setdefault("reasoning_effort", _OF_CHANNELS.get(word, word) if served.has_channels else word)
    elif word is not None:
        variables = {switch: word != "none" for switch in _SWITCHES if switch in known} | variables
        if word in ("minimal", "low") and budget is None:
            budget = _SMALL_BUDGET
    return Thinking(variables, budget, is_firm, is_off=is_off and not any(variables.get(switch) for switch in _SWITCHES))


def _budget(given: Mapping[str, object]) -> int | None:
    budget = given.get(BUDGET)
    if budget is None or budget == -1:
        return None
    if type(budget) is not int or not 0 <= budget <= _MAX_BUDGET:
        where = f"chat_template_kwargs.{BUDGET}"
        raise invalid(where, f"{where} is a number of tokens from 0 to {_MAX_BUDGET}, -1 for any number")
    return budget


def _known(served: ServedModel) -> frozenset[str]:
    """The variables that the template looks at."""
    assert served.chat_template is not None, "the caller knows"
    try:
        return served.chat_template.facts.variables
    except CheckpointError as error:
        raise ApiError(500, "server_error", "chat_template_unusable", None, str(error)) from None


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer that begins within a thought, behind one, or freely (`begins`), and the ids of its prompt. `thought_end`: the id
    that ends the thought; `thought_tokens`: most tokens before it. `thought_letters`: what ends it where no single token does, in
    front of a grammar.
    """

    prompt_ids: Sequence[int]
    begins: str
    thought_end: int | None = None
    thought_tokens: int | None = None
    thought_letters: str | None = None

    def fields(self) -> dict[str, object]:
        """Those of Generate."""
        return {"prompt_ids": self.prompt_ids, "thought_end": self.thought_end, "thought_tokens": self.thought_tokens}


def begin_answer(
    prompt_ids: Sequence[int], thinking: Thinking, served: ServedModel, *, is_enforced: bool, is_new: bool = True
) -> Begun:
    """Where the answer to a prompt begins. `is_enforced`: a grammar follows the thought. `is_new`: the prompt does not end within
    a message.

    Only where a thought is bounded, or a grammar follows, must it be known that there is one: then the prompt begins it, as the
    model would. Raises ApiError for a budget that nothing could keep.
    """
    tokenizer, style = served.tokenizer, served.style
    begins = style.begins(tokenizer, prompt_ids)
    if tokenizer is None or served.chat_template is None or not (is_enforced or thinking.budget is not None):
        return Begun(prompt_ids, begins)
    if style.has_channels:
        opener, end = f"{ANALYSIS}{MESSAGE}", MESSAGE_END
    elif style.thought_tags is not None:
        opener, end = f"{style.thought_tags[0]}\n", style.thought_tags[1]
    else:
        return Begun(prompt_ids, begins)
    end_id = tokenizer.id_of(end)
    is_free = is_new and style.ends(tokenizer, prompt_ids) == "free"
    thinks = begins == "open" or (is_free and style.thinks and not thinking.is_off)
    if not thinks:
        return Begun(prompt_ids, begins)
    if end_id is None and thinking.is_firm:
        raise invalid(f"chat_template_kwargs.{BUDGET}", f"this model has no single token {end}, so no thought can be bounded")
    if end_id is None and (is_free or not is_enforced):
        return Begun(prompt_ids, begins)
    if is_free:
        prompt_ids = (*prompt_ids, *tokenizer.encode(opener, add_special_tokens=False))
    if end_id is None:
        return Begun(prompt_ids, "open", thought_letters=end)
    return Begun(prompt_ids, "open", end_id, thinking.budget)
