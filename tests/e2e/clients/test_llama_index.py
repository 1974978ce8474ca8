"""LlamaIndex's OpenAILike."""

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from conversations import COUNT, NUMBERS, QUESTION, RESULT


@pytest.fixture
def llm(up):
    return OpenAILike(
        api_base=f"{up.url}/v1",
        api_key=up.key,
        model=up.model,
        temperature=0,
        max_retries=0,
        is_chat_model=True,
        is_function_calling_model=True,
    )


def test_chat(llm, up):
    assert llm.chat([ChatMessage(role="user", content="Hello")]).message.content == up.greeting


def test_stream(llm):
    pieces = [piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content=COUNT)])]
    assert "".join(piece or "" for piece in pieces).rstrip(".") == NUMBERS and len(pieces) > 3


def test_tools(llm, up):
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        return RESULT

    tool = FunctionTool.from_defaults(get_weather, name="get_weather", description="Get the weather in a city")
    # LlamaIndex asks for one call at a time by itself; where a provider's API cannot say that, it is refused, not forgotten.
    options = {}
    if "one_call" in up.refuses:
        with pytest.raises(openai.BadRequestError, match="parallel_tool_calls"):
            llm.chat_with_tools([tool], user_msg=QUESTION)
        options = {"allow_parallel_tool_calls": True}
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, **options)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"})
    result = ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id})
    history = [ChatMessage(role="user", content=QUESTION), answer.message, result]
    assert llm.chat_with_tools([tool], chat_history=history, **options).message.content == up.after_tool
