"""openai-agents: an agent over chats and over responses, and one that must call a tool."""

from __future__ import annotations

import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

QUESTION = "What is the capital of France?"
asked: list[str] = []


@function_tool  # type: ignore[untyped-decorator]
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    asked.append(city)
    return "sunny"


set_tracing_disabled(True)
client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120.0)
chats = OpenAIChatCompletionsModel("default", client)
settings = ModelSettings(temperature=0.0, max_tokens=32)
required = ModelSettings(temperature=0.0, max_tokens=32, tool_choice="required")
text = Runner.run_sync(Agent(name="a", model=chats, model_settings=settings), QUESTION)
response = Runner.run_sync(Agent(name="b", model=OpenAIResponsesModel("default", client), model_settings=settings), QUESTION)
tool = Runner.run_sync(Agent(name="c", model=chats, model_settings=required, tools=[weather]), "How is the weather in Paris?")
print(json.dumps({"text": text.final_output, "response": response.final_output, "asked": asked, "after_tool": tool.final_output}))
