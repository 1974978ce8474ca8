"""LiteLLM as a client: it speaks each provider's own API to us."""

import json

import litellm
import pytest

from conversations import COUNT, NUMBERS, QUESTION, RESULT, told
from drivers import WEATHER

NAME, DESCRIPTION, SCHEMA = WEATHER
TOOL = {"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}}
BASES = {
    "openai": lambda up: f"{up.url}/v1",
    "anthropic": lambda up: up.url,
    "gemini": lambda up: f"{up.url}/v1beta",
}


@pytest.fixture(params=list(BASES))
def ask(request, up):
    def complete(messages, **options):
        return litellm.completion(
            model=f"{request.param}/{up.model}",
            api_base=BASES[request.param](up),
            api_key=up.key,
            messages=messages,
            num_retries=0,
            **options,
        )

    return complete


def user(text):
    return [{"role": "user", "content": text}]


def test_whole(ask, up):
    answer = ask(user("Hello"), temperature=0)
    assert answer.choices[0].message.content == up.greeting and answer.usage.total_tokens > 0


def test_stream(ask):
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(user(COUNT), temperature=0, stream=True)]
    assert "".join(pieces).rstrip(".") == NUMBERS


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools(ask, up, stream):
    def said(messages):
        answer = ask(messages, tools=[TOOL], temperature=0, stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        return answer.choices[0].message

    message = said(user(QUESTION))
    (call,) = message.tool_calls
    assert call.function.name == NAME and json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "name": NAME, "content": RESULT}
    assert told(up, said([*user(QUESTION), message.model_dump(), result]).content)


def test_errors_are_litellms_own(ask, up):
    up.model = "no-such-model"
    with pytest.raises(litellm.NotFoundError):
        ask(user("Hello"))
