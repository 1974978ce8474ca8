"""LangChain's three chat models, unchanged but for their base URL."""

from typing import Literal

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

from conversations import COUNT, NUMBERS, QUESTION, RESULT


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return RESULT


def openai_chat(up):
    return ChatOpenAI(base_url=f"{up.url}/v1", api_key=up.key, model=up.model, temperature=0, max_retries=0)


def openai_responses(up):
    return ChatOpenAI(
        base_url=f"{up.url}/v1", api_key=up.key, model=up.model, temperature=0, max_retries=0, use_responses_api=True
    )


def anthropic(up):
    return ChatAnthropic(
        anthropic_api_url=up.url, anthropic_api_key=up.key, model=up.model, temperature=0, max_tokens=400, max_retries=0
    )


def gemini(up):
    return ChatGoogleGenerativeAI(base_url=up.url, google_api_key=up.key, model=up.model, temperature=0, max_retries=1)


MODELS = [openai_chat, openai_responses, anthropic, gemini]


@pytest.fixture(params=MODELS, ids=[model.__name__ for model in MODELS])
def chat(request, up):
    return request.param(up)


def test_invoke(chat, up):
    answer = chat.invoke("Hello")
    assert answer.text == up.greeting
    assert answer.usage_metadata["input_tokens"] > 0 and answer.usage_metadata["output_tokens"] > 0


def test_stream(chat):
    pieces = [piece.text for piece in chat.stream(COUNT)]
    assert "".join(pieces).rstrip(".") == NUMBERS and len(pieces) > 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools(chat, up, stream):
    bound = chat.bind_tools([get_weather])

    def ask(messages):
        if not stream:
            return bound.invoke(messages)
        first, *rest = bound.stream(messages)
        for piece in rest:
            first += piece
        return first

    question = HumanMessage(QUESTION)
    answer = ask([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"], name="get_weather")
    assert ask([question, answer, result]).text == up.after_tool


class Report(BaseModel):
    """The weather of a city."""

    # Anthropic's SDK leaves out bounds, and what has none may not end at the demo model.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    warm: bool


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("model", MODELS, ids=[model.__name__ for model in MODELS])
def test_structured_output_of_the_pool(everything, model, method):
    typed = model(everything.up("pool")).with_structured_output(Report, method=method)
    report = typed.invoke("The weather in Paris: 12 degrees")
    assert report.city in ("Paris", "Rome")
