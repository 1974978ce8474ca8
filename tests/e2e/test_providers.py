"""The mock providers are believed because the official SDKs work on them as on the real services, and because they refuse what
those refuse."""

import httpx
import openai
import pytest

import conversations
from conversations import Upstream
from drivers import BROKEN, OpenAiChat, Wish, status_of
from providers import Anthropic as AnthropicMock
from providers import Gemini, OpenAi

NATIVE = {"chat": OpenAi, "responses": OpenAi, "messages": AnthropicMock, "generate": Gemini}


@pytest.fixture(scope="module")
def mocks():
    running = {kind: kind() for kind in {OpenAi, AnthropicMock, Gemini}}
    yield running
    for mock in running.values():
        mock.close()


def native(mocks, dialect: str) -> Upstream:
    mock = mocks[NATIVE[dialect]]
    mock.reset()
    return Upstream(dialect, mock.url, "mock-model", key=mock.key, names_stop=dialect == "messages")


@pytest.mark.parametrize(("dialect", "ability", "stream"), conversations.cells(tuple(NATIVE)))
def test_the_sdk_works_on_the_mock(mocks, dialect, ability, stream):
    up = native(mocks, dialect)
    conversations.run(up, dialect, ability, stream)


@pytest.mark.parametrize("cut", ["byte", "whole", "odd", "line"])
@pytest.mark.parametrize("dialect", list(NATIVE))
def test_streams_cut_anywhere_are_the_same_streams(mocks, dialect, cut):
    up = native(mocks, dialect)
    with mocks[NATIVE[dialect]].behaving(cut=cut):
        conversations.tools(up, dialect, True)


REFUSED = [
    ({"unknown": 1}, "unknown"),
    ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}, "tool"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(("change", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_openai_refuses_is_refused(mocks, change, word):
    up = native(mocks, "chat")
    body = {"model": "mock-model", "messages": [{"role": "user", "content": "Hello"}]} | change
    headers = {"authorization": f"Bearer {up.key}"}
    reply = httpx.post(f"{up.url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    assert reply.status_code == 400 and word in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("dialect", list(NATIVE))
def test_a_wrong_key_is_refused(mocks, dialect):
    up = native(mocks, dialect)
    up.key = "sk-wrong"
    talk = up.talk(dialect)
    talk.say("Hello")
    # Gemini says 400 for a bad key.
    with pytest.raises(talk.fault("bad_request" if dialect == "generate" else "unauthorized")):
        talk.ask(Wish(), False)


def test_faults_are_faults(mocks):
    up = native(mocks, "chat")
    mock = mocks[OpenAi]
    talk = OpenAiChat(up.url, up.key, up.model)
    talk.say("Hello")
    mock.fail(status=429, headers={"retry-after": "7"})
    with pytest.raises(openai.RateLimitError) as limited:
        talk.ask(Wish(), False)
    assert limited.value.response.headers["retry-after"] == "7" and status_of(limited.value) == 429
    for fault in ({"error_at": 3}, {"cut_at": 3}, {"reset_at": 3}, {"hang_up": True}):
        mock.fail(**fault)
        with pytest.raises((openai.APIError, *BROKEN)):
            talk.ask(Wish(), True)
    mock.fail(body=b"<html>", status=502, content_type="text/html")
    with pytest.raises(openai.InternalServerError):
        talk.ask(Wish(), False)
    assert talk.ask(Wish(), True).text == up.greeting, "a fault is used up"
