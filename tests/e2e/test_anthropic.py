"""The official Anthropic SDK, unchanged, against the demo model: messages, streams, tools, thinking, counting, errors."""

import hashlib
import json

import anthropic
import httpx
import pytest

from harness import free_port, serving, user

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
}
TIMER = {
    "name": "set_timer",
    "description": "Set a timer",
    "input_schema": {
        "type": "object",
        "properties": {"minutes": {"type": "integer", "description": "Minutes to wait"}},
        "required": ["minutes"],
    },
}
QUESTION = user("What is the weather in Paris?")
GREEDY = {"temperature": 0}


def sdk(gateway, **options) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, **{"api_key": "none", "max_retries": 0, "timeout": 120, **options})


@pytest.fixture(scope="module")
def claude(gateway):
    return sdk(gateway)


def ask(claude, model, messages, **options):
    return claude.messages.create(
        **{"model": model, "max_tokens": 100, "messages": messages, "extra_body": GREEDY, **options}
    )


def final(claude, model, messages, **options):
    """The names of a stream's events, and the message that the SDK makes of them."""
    wanted = {"model": model, "max_tokens": 100, "messages": messages, "extra_body": GREEDY, **options}
    with claude.messages.stream(**wanted) as stream:
        names = [event.type for event in stream]
        return names, stream.get_final_message()


def test_a_message_whole_and_streamed(claude, model):
    answer = ask(claude, model, user("Hello"))
    assert answer.id.startswith("msg_") and answer.type == "message" and answer.role == "assistant"
    assert answer.model == model and answer._request_id.startswith("req_")
    assert [block.text for block in answer.content] == ["Hello! How can I help you today?"]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    names, streamed = final(claude, model, user("Hello"))
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert streamed.content[0].text == answer.content[0].text and streamed.stop_reason == "end_turn"
    usage, said = streamed.usage, answer.usage
    # A prefix may have been cached in between; together the counts are the same.
    assert usage.input_tokens + usage.cache_read_input_tokens == said.input_tokens + said.cache_read_input_tokens
    assert usage.output_tokens == said.output_tokens > 0


def test_frames_are_as_published(gateway, model):
    """What SDKs forgive and other clients do not: names of events, one ping, contiguous indexes, no `[DONE]`."""
    body = {"model": model, "max_tokens": 9, "messages": user("Hello"), "stream": True}
    text = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60).raise_for_status().text
    frames = [frame.split("\n") for frame in text.strip().split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert [name for name, _ in events].count("ping") == 1
    start, delta = events[0][1]["message"], events[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 9 and delta["usage"]["input_tokens"] >= 0


def test_instructions_blocks_and_a_stop_sequence(claude, model):
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = ask(claude, model, messages, system=system, stop_sequences=["Paris"], metadata={"user_id": "u"})
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in answer.content[0].text
    short = ask(claude, model, messages, max_tokens=1)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)


def test_a_last_assistant_turn_is_continued(claude, model):
    turns = [*user("What is the capital of France?"), {"role": "assistant", "content": "The capital of France is"}]
    assert ask(claude, model, turns).content[0].text.strip() == "Paris."


def test_a_round_trip_with_tools(claude, model):
    tools = [WEATHER, TIMER]
    first = ask(claude, model, QUESTION, tools=tools)
    names, streamed = final(claude, model, QUESTION, tools=tools)
    for answer in (first, streamed):
        assert answer.stop_reason == "tool_use"
        (call,) = answer.content
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"}) and call.id
    assert "input_json" in names
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[0].id,
        "content": [{"type": "text", "text": '{"temperature": 12, "condition": "rainy"}'}],
    }
    turns = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(claude, model, turns, tools=tools)
    assert second.content[0].text == "It is rainy in Paris, 12 degrees." and second.stop_reason == "end_turn"
    hidden = ask(claude, model, QUESTION, tools=tools, tool_choice={"type": "none"})
    assert all(block.type == "text" for block in hidden.content)


def test_thinking_is_a_block_of_its_own(claude, model):
    options = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = ask(claude, model, user("What is 27 + 48?"), **options)
    thought, text = answer.content
    assert (thought.type, text.type) == ("thinking", "text") and thought.thinking and "75" in text.text
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens
    _, streamed = final(claude, model, user("What is 27 + 48?"), **options)
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert streamed.content[0].thinking == thought.thinking
    # Sent back as it came, as agents do.
    turns = [*user("What is 27 + 48?"), {"role": "assistant", "content": answer.content}, *user("Hello")]
    off = ask(claude, model, turns, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]


def test_counting_agrees_with_usage(gateway, claude, model):
    tools = [WEATHER, TIMER]
    counted = claude.messages.count_tokens(model=model, messages=QUESTION, tools=tools, system="Be brief.")
    usage = ask(claude, model, QUESTION, tools=tools, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    reply = claude.messages.with_raw_response.count_tokens(model=model, messages=QUESTION)
    assert "x-penstock-estimate" not in reply.headers


def test_usage_tells_what_the_cache_held(claude, model):
    """Marks of where to cache are taken everywhere and change nothing: every prefix is cached."""
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "You are a lighthouse keeper. " * 40, **mark}]
    tools = [{**WEATHER, **mark}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello", **mark}]}]
    first = ask(claude, model, messages, system=system, tools=tools, max_tokens=4).usage
    again = ask(claude, model, messages, system=system, tools=tools, max_tokens=4).usage
    plain = ask(claude, model, user("Hello"), system=system[0]["text"], tools=[WEATHER], max_tokens=4).usage
    assert again.cache_read_input_tokens > 200 and again.cache_creation_input_tokens == 0
    whole = {usage.input_tokens + usage.cache_read_input_tokens for usage in (first, again, plain)}
    assert len(whole) == 1 and plain.cache_read_input_tokens > 200


def test_models_in_both_shapes(claude, client, model):
    page = claude.models.list()
    assert [card.id for card in page] == [model] and page.data[0].type == "model" and not page.has_more
    assert claude.models.retrieve(model).id == model
    assert client.models.list().data[0].object == "model"


def test_errors_are_typed(gateway, claude, model):
    def refused(kind, **options) -> anthropic.APIStatusError:
        with pytest.raises(kind) as caught:
            ask(claude, **{"model": model, "messages": user("Hello"), **options})
        error = caught.value
        assert error.body["type"] == "error" and error.body["request_id"] == error.request_id
        assert set(error.body["error"]) == {"type", "message"}
        return error

    assert refused(anthropic.NotFoundError, model="nope").body["error"]["type"] == "not_found_error"
    bad = anthropic.BadRequestError
    assert refused(bad, max_tokens=0).body["error"]["message"].startswith("max_tokens: ")
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    error = refused(bad, messages=[{"role": "user", "content": [document]}])
    assert error.body["error"]["message"].startswith("messages[0].content[0].type: ")
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    assert "tools[0].type" in refused(bad, tools=[server_tool]).body["error"]["message"]
    # What makes agents compact their conversation.
    assert refused(bad, messages=user("word " * 20_000)).body["error"]["message"].startswith("prompt is too long")
    reply = httpx.post(
        f"{gateway.url}/v1/messages", content=b"{", headers={"content-type": "application/json"}, timeout=30
    )
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    reply = httpx.get(f"{gateway.url}/v1/messages", timeout=30)
    assert (reply.status_code, reply.json()["type"], reply.headers["request-id"]) == (
        405,
        "error",
        reply.headers["x-request-id"],
    )


def test_keys_both_ways_names_and_guesses(tmp_path):
    secret = "sk-" + "k" * 40
    config = f"""
[[keys]]
id = "team-a"
digest = "{hashlib.sha256(secret.encode()).hexdigest()}"
[[pools]]
id = "demo"
[[providers]]
id = "elsewhere"
base_url = "http://127.0.0.1:{free_port()}/v1"
models = ["foreign"]
[[models]]
name = "claude"
aliases = ["claude-sonnet-5"]
to = [{{ pool = "demo" }}]
"""
    with serving(tmp_path, config=config) as gateway:
        model = "demo"
        body = {"model": model, "max_tokens": 5, "messages": user("Hello")}
        for headers in ({"x-api-key": secret}, {"authorization": f"Bearer {secret}"}):
            assert httpx.post(f"{gateway.url}/v1/messages", json=body, headers=headers, timeout=60).status_code == 200
        assert ask(sdk(gateway, api_key=secret), model, user("Hello"), max_tokens=5).content
        token = sdk(gateway, api_key=None, auth_token=secret)
        # Agents ask for the models that they know.
        alias = "claude-sonnet-5"
        answer = ask(token, alias, user("Hello"), max_tokens=5)
        assert answer.content and answer.model == alias
        reply = token.messages.with_raw_response.count_tokens(model=alias, messages=user("Hello"))
        assert "x-penstock-estimate" not in reply.headers
        usage = answer.usage
        assert reply.parse().input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        with pytest.raises(anthropic.AuthenticationError):
            ask(sdk(gateway, api_key="wrong"), model, user("Hello"))
        # Nobody there can count, and nobody is asked.
        reply = token.messages.with_raw_response.count_tokens(model="foreign", messages=user("word " * 400))
        assert (reply.headers["x-penstock-estimate"], reply.parse().input_tokens) == ("true", 504)
