"""An agent framework from PyPI, unchanged but for its base URL: pydantic-ai, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.messages import ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

Result = TypeVar("Result")
KINDS = pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
TIMEOUT_S = 60.0


class Forecast(BaseModel):
    """What the agent answers."""

    sky: Literal["clear", "cloudy"]
    degrees: Literal[10, 20]


def with_model(kind: Any, base_url: str, use: Callable[[Model], Awaitable[Result]]) -> Result:
    """Run `use` with a model whose connections are closed afterwards."""

    async def run() -> Result:
        async with asyncio.timeout(TIMEOUT_S), AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            return await use(kind("default", provider=OpenAIProvider(openai_client=client)))

    return asyncio.run(run())


def first_the_weather(context: RunContext[None]) -> ModelSettings:
    """The demo model cannot tell when it has asked enough: the first step is the tool's, the second one the answer's."""
    return ModelSettings(temperature=0.0, max_tokens=120, tool_choice=["weather"] if context.run_step == 1 else ["final_result"])


@KINDS
def test_an_agent_calls_a_tool_and_answers_in_structure(kind: Any, base_url: str) -> None:
    asked: list[str] = []

    async def weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "clear, 20 degrees"

    async def use(model: Model) -> Any:
        agent = Agent(
            model, output_type=Forecast, instructions="You forecast.", tools=[weather], model_settings=first_the_weather
        )
        return await agent.run("What will it be like in Paris?")

    result = with_model(kind, base_url, use)
    assert isinstance(result.output, Forecast)
    assert len(asked) == 1
    parts = [part for message in result.all_messages() for part in message.parts]
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    returns = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert [call.tool_name for call in calls] == ["weather", "final_result"]
    assert returns[0].tool_call_id == calls[0].tool_call_id
    assert result.usage.requests == 2
    assert result.usage.output_tokens > 0


@KINDS
def test_an_agent_answers_in_a_native_schema(kind: Any, base_url: str) -> None:
    async def use(model: Model) -> Any:
        agent = Agent(model, output_type=NativeOutput(Forecast), model_settings=ModelSettings(temperature=0.0, max_tokens=120))
        return await agent.run("The weather in Oslo:")

    result = with_model(kind, base_url, use)
    assert isinstance(result.output, Forecast)
    response = result.all_messages()[-1]
    assert isinstance(response, ModelResponse)
    assert response.finish_reason == "stop"


@KINDS
def test_an_agent_streams_text(kind: Any, base_url: str) -> None:
    async def use(model: Model) -> tuple[str, str]:
        agent = Agent(model, model_settings=ModelSettings(temperature=0.0, max_tokens=24, seed=1))
        async with agent.run_stream("def add(a, b):") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
            return "".join(pieces), await stream.get_output()

    pieces, whole = with_model(kind, base_url, use)
    assert pieces == whole
    assert len(whole) > 10
