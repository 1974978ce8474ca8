"""pydantic-ai: an agent with a tool, through each of its models."""

from typing import Literal

import pytest
from anthropic import AsyncAnthropic
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from conversations import COUNT, NUMBERS, QUESTION, RESULT, told

# The demo model is small: at a temperature of 1 it calls what nobody offered, now and then.
GREEDY = ModelSettings(temperature=0)
MODELS = {
    "chat": lambda up: OpenAIChatModel(up.model, provider=OpenAIProvider(base_url=f"{up.url}/v1", api_key=up.key)),
    "responses": lambda up: OpenAIResponsesModel(
        up.model, provider=OpenAIProvider(base_url=f"{up.url}/v1", api_key=up.key)
    ),
    "anthropic": lambda up: AnthropicModel(
        up.model, provider=AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=up.url, api_key=up.key))
    ),
    "gemini": lambda up: GoogleModel(up.model, provider=GoogleProvider(base_url=up.url, api_key=up.key)),
}


@pytest.fixture(params=list(MODELS))
def model(request, up):
    return MODELS[request.param](up)


def test_run(model, up):
    assert Agent(model, model_settings=GREEDY).run_sync("Hello").output == up.greeting


def test_a_tool(model, up):
    agent = Agent(model, model_settings=GREEDY)
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        asked.append(city)
        return RESULT

    assert told(up, agent.run_sync(QUESTION).output)
    assert asked == ["Paris"]


def test_stream(model):
    answer = Agent(model, model_settings=GREEDY).run_stream_sync(COUNT)
    pieces = list(answer.stream_text(delta=True, debounce_by=None))
    assert "".join(pieces).rstrip(".") == NUMBERS and len(pieces) > 3


class Report(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    degrees: Literal[12, 30]


@pytest.mark.parametrize("form", [NativeOutput, ToolOutput])
def test_typed_output_of_the_pool(everything, form):
    # It asks models of Anthropic and Google by their names whether they know schemas.
    for name in MODELS if form is ToolOutput else ["chat", "responses"]:
        agent = Agent(MODELS[name](everything.up("pool")), output_type=form(Report), retries=0)
        report = agent.run_sync("The weather in Paris: 12 degrees").output
        assert report.city in ("Paris", "Rome"), name
