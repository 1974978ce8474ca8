"""pydantic-ai: an agent with a tool, through each of its models."""

import pytest
from anthropic import AsyncAnthropic
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider

from conversations import COUNT, NUMBERS, QUESTION, RESULT, told

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
    assert Agent(model).run_sync("Hello").output == up.greeting


def test_a_tool(model, up):
    agent = Agent(model)
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        asked.append(city)
        return RESULT

    assert told(up, agent.run_sync(QUESTION).output)
    assert asked == ["Paris"]


def test_stream(model):
    answer = Agent(model).run_stream_sync(COUNT)
    pieces = list(answer.stream_text(delta=True, debounce_by=None))
    assert "".join(pieces).rstrip(".") == NUMBERS and len(pieces) > 3
