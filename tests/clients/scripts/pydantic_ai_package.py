"""pydantic-ai: an answer, and one of a given type."""

from __future__ import annotations

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """Where it is."""

    city: Literal["Paris", "Oslo"]


model = OpenAIChatModel("default", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none"))
settings = {"temperature": 0.0, "max_tokens": 48}
text = Agent(model, model_settings=settings).run_sync(QUESTION)
typed = Agent(model, output_type=City, model_settings=settings).run_sync(QUESTION)
print(json.dumps({"text": text.output, "city": typed.output.city, "num_tokens": text.usage.output_tokens}))
