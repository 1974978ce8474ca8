"""Tools and reasoning: a round trip as an application makes it, whole and streamed."""

import json

from harness import user

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
TIMER = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Set a timer",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"type": "integer", "description": "Minutes to wait"}},
            "required": ["minutes"],
        },
    },
}
QUESTION = user("What is the weather in Paris?")


def ask(client, model, messages, **options):
    return client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER, TIMER], temperature=0, **options
    )


def check_call(call, name, arguments):
    assert call.type == "function" and call.id
    assert call.function.name == name and json.loads(call.function.arguments) == arguments


def test_a_round_trip(client, model):
    answer = ask(client, model, QUESTION)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
    (call,) = message.tool_calls
    check_call(call, "get_weather", {"city": "Paris"})

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 12, "condition": "rainy"}'}
    second = ask(client, model, [*QUESTION, message, result])
    assert second.choices[0].message.content == "It is rainy in Paris, 12 degrees."
    assert second.choices[0].finish_reason == "stop" and not second.choices[0].message.tool_calls


def test_a_streamed_call_names_itself_once(client, model):
    calls, ends, text = {}, [], ""
    for chunk in ask(client, model, QUESTION, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
            for delta in choice.delta.tool_calls or []:
                call = calls.setdefault(delta.index, {"id": [], "name": [], "arguments": ""})
                call["id"] += [delta.id] if delta.id else []
                call["name"] += [delta.function.name] if delta.function.name else []
                call["arguments"] += delta.function.arguments or ""
    assert list(calls) == [0] and text == "" and ends == ["tool_calls"]
    assert len(calls[0]["id"]) == 1 and calls[0]["name"] == ["get_weather"]
    assert json.loads(calls[0]["arguments"]) == {"city": "Paris"}


def test_the_sdk_accumulates_a_streamed_call(client, model):
    with client.chat.completions.stream(
        model=model, messages=QUESTION, tools=[WEATHER, TIMER], temperature=0
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    check_call(message.tool_calls[0], "get_weather", {"city": "Paris"})


def test_listed_tools_are_not_forced(client, model):
    answer = ask(client, model, user("Hello"))
    assert answer.choices[0].message.content == "Hello! How can I help you today?"
    assert answer.choices[0].finish_reason == "stop" and not answer.choices[0].message.tool_calls


def test_tool_choice_none_hides_the_tools(client, model):
    hidden = ask(client, model, QUESTION, tool_choice="none")
    assert not hidden.choices[0].message.tool_calls
    assert hidden.usage.prompt_tokens < ask(client, model, QUESTION, tool_choice="auto").usage.prompt_tokens


def test_arguments_of_history_may_be_any_json_text(client, model):
    """SDKs send back what they got; the model sees it whatever its spacing."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{ "city":"Oslo" }'}}
    history = [
        *user("What is the weather in Oslo?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": '{"temperature": 3, "condition": "snowy"}'}],
        },
    ]
    assert ask(client, model, history).choices[0].message.content == "It is snowy in Oslo, 3 degrees."


def test_reasoning_is_kept_apart(client, model):
    answer = client.chat.completions.create(model=model, messages=user("What is 27 + 48? /think"), temperature=0)
    message = answer.choices[0].message
    assert "75" in message.content and "think>" not in message.content
    assert message.reasoning and "think>" not in message.reasoning
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


def test_reasoning_streams_before_the_answer(client, model):
    order, reasoning, text = [], "", ""
    stream = client.chat.completions.create(
        model=model, messages=user("What is 27 + 48? /think"), temperature=0, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            piece = getattr(choice.delta, "reasoning", None)
            if piece:
                order.append("reasoning")
                reasoning += piece
            if choice.delta.content:
                order.append("text")
                text += choice.delta.content
    assert order == sorted(order) and reasoning and "75" in text


def test_thinking_can_be_opened_by_the_template(client, model):
    options = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(
        model=model, messages=user("What is 27 + 48?"), temperature=0, extra_body=options
    )
    assert answer.choices[0].message.reasoning and "75" in answer.choices[0].message.content
