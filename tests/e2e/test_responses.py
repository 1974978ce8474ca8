"""The Responses API through the official SDK: whole, streamed, the stream helper, tools, broken off."""

import json

import httpx
import openai
import pytest
from openai.types.responses import Response

from harness import serving, user

GREETING = "Hello! How can I help you today?"
QUESTION = "What is the weather in Paris?"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
    "strict": False,
}
ENDS = {"response.completed", "response.incomplete"}


def strictly(response: Response) -> Response:
    """The SDK reads leniently; here the answer must be what its types say."""
    return Response.model_validate(response.model_dump(), strict=False)


def test_a_text(client, model):
    response = strictly(client.responses.create(model=model, input="Hello", temperature=0))
    assert response.output_text == GREETING
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0
    assert usage.input_tokens_details.cached_tokens >= 0
    chat = client.chat.completions.create(model=model, messages=user("Hello"), temperature=0)
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)


def test_every_key_is_there(gateway, model):
    body = httpx.post(f"{gateway.url}/v1/responses", json={"model": model, "input": "Hello"}, timeout=60).json()
    keys = """id object created_at completed_at status background error incomplete_details instructions max_output_tokens
        max_tool_calls model output parallel_tool_calls previous_response_id prompt_cache_key reasoning safety_identifier
        service_tier store temperature text tool_choice tools top_logprobs top_p truncation usage user metadata
        presence_penalty frequency_penalty""".split()
    assert [key for key in keys if key not in body] == []


def test_instructions_and_turns(client, model):
    turns = [*user("Hello"), {"role": "assistant", "content": GREETING}, *user("Hello")]
    response = client.responses.create(model=model, instructions="Be brief.", input=turns, temperature=0)
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "system", "content": "Be brief."}, *turns], temperature=0
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.instructions == "Be brief."
    # What was answered goes back as it came.
    again = client.responses.create(model=model, input=[*turns, *response.output, *user("Hello")], temperature=0)
    assert again.status == "completed"


def test_a_stream_says_what_the_whole_answer_says(client, model):
    ask = {"model": model, "input": "Count from 1 to 30.", "temperature": 0}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 5 and "".join(deltas) == whole.output_text
    assert [event.type for event in events if event.type in ENDS] == ["response.completed"]
    last = strictly(events[-1].response)
    assert last.output_text == whole.output_text and last.usage.output_tokens == whole.usage.output_tokens


def test_the_stream_helper(client, model):
    with client.responses.stream(model=model, input="Hello", temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == GREETING == final.output_text


def test_parse_reads_what_fits_the_type(client, model):
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=12)

    parsed = client.responses.parse(model=model, input="Which city?", text_format=City, temperature=0)
    assert isinstance(parsed.output_parsed, City)
    parsed = client.responses.parse(model=model, input="Hello", temperature=0)
    assert parsed.output_text == GREETING and parsed.output_parsed is None


def test_a_tool_there_and_back(client, model):
    ask = {"model": model, "tools": [WEATHER], "temperature": 0}
    first = strictly(client.responses.create(**ask, input=QUESTION))
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Paris"}, "completed")
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 12, "condition": "rainy"}',
    }
    second = client.responses.create(**ask, input=[*user(QUESTION), *first.output, result])
    assert second.output_text == "It is rainy in Paris, 12 degrees."


def test_a_streamed_call(client, model):
    with client.responses.stream(model=model, tools=[WEATHER], input=QUESTION, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and json.loads(call.arguments) == {"city": "Paris"}
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments


def test_the_end_of_the_tokens_is_incomplete(client, model):
    ask = {"model": model, "input": "Count from 1 to 30.", "temperature": 0, "max_output_tokens": 16}
    response = strictly(client.responses.create(**ask))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete" and response.usage.output_tokens == 16
    events = list(client.responses.create(**ask, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "incomplete"


def test_a_conversation_that_does_not_fit_can_be_truncated(client, model):
    turns = [*user("word " * 9000), {"role": "assistant", "content": "So many."}, *user("Hello")]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=model, input=turns)
    assert refused.value.code == "context_length_exceeded"
    response = client.responses.create(model=model, input=turns, truncation="auto", temperature=0)
    assert (response.truncation, response.output_text) == ("auto", GREETING)
    assert response.usage.input_tokens < 100, "without the turn that is too long"
    fitting = client.responses.create(model=model, input="Hello", truncation="auto", temperature=0)
    assert (fitting.truncation, fitting.output_text) == ("auto", GREETING)


def test_logprobs(client, model):
    response = client.responses.create(
        model=model, input="Hello", temperature=0, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    (part,) = response.output[0].content
    assert len(part.logprobs) == response.usage.output_tokens or len(part.logprobs) > 0
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode().startswith(GREETING)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "truncation": "some"}, "truncation"),
        ({"input": "a", "temperature": 9}, "temperature"),
        ({"input": "a", "prompt": {"id": "pmpt_1"}}, "prompt"),
    ],
    ids=str,
)
def test_refusals_name_the_parameter(client, model, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=model, **fields)
    assert refused.value.param == param


def test_counting_agrees_with_usage(client, model):
    ask = {"model": model, "tools": [WEATHER], "instructions": "Be brief.", "input": QUESTION}
    reply = client.responses.input_tokens.with_raw_response.count(**ask)
    assert "x-penstock-estimate" not in reply.headers
    counted, made = reply.parse(), client.responses.create(**ask, max_output_tokens=8, temperature=0)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
    # Turns of before count, with something new and without; and what is left out of a conversation that does not fit does not.
    for more in ({"input": "And in Rome?"}, {}):
        turn = {"model": model, "previous_response_id": made.id, **more}
        counted = client.responses.input_tokens.count(**turn)
        if more:
            following = client.responses.create(**turn, max_output_tokens=8)
            assert counted.input_tokens == following.usage.input_tokens
        else:
            assert 0 < counted.input_tokens < following.usage.input_tokens
    long = [part for number in range(400) for part in (*user(f"Line {number}, and more of it."),)]
    cut = {"model": model, "input": long, "truncation": "auto"}
    answered = client.responses.create(**cut, max_output_tokens=8)
    assert client.responses.input_tokens.count(**cut).input_tokens <= answered.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"previous_response_id": "resp_unknown"}, 404, "previous_response_id"),
    ],
    ids=str,
)
def test_counts_that_are_refused(client, model, fields, status, param):
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.input_tokens.count(model=model, **fields)
    assert (refused.value.status_code, refused.value.param) == (status, param)


def test_a_wish_for_length_that_the_template_cannot_pass_on_is_refused(client, model):
    assert client.responses.create(model=model, input="a", text={"verbosity": "medium"}).text.verbosity == "medium"
    client.chat.completions.create(model=model, messages=user("a"), verbosity="medium", max_tokens=1)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=model, input="a", text={"verbosity": "low"})
    assert (refused.value.param, refused.value.code) == ("text.verbosity", "unsupported_value")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=user("a"), verbosity="high")
    assert (refused.value.param, refused.value.code) == ("verbosity", "unsupported_value")


def test_surfaces_that_a_text_model_does_not_have(client, model):
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=model, input="a")
    assert refused.value.param == "model"


@pytest.fixture(scope="module", params=["openai", "openai_responses"])
def behind(request, gateway, model, tmp_path_factory):
    """A gateway whose provider is the first one, asked through one API or the other."""
    config = f"""
        [[providers]]
        id = "other"
        protocol = "{request.param}"
        base_url = "{gateway.url}/v1"
        models = ["{model}"]
    """
    with serving(tmp_path_factory.mktemp(request.param), config=config, workers=0) as second:
        client = second.client()
        client.protocol = request.param
        yield client


def test_through_another_server_in_both_apis(behind, client, model):
    """One of the two requests is passed on, the other is translated: the same answers either way."""
    chat = {"model": model, "messages": user("Count from 1 to 30."), "temperature": 0}
    items = {"model": model, "input": "Count from 1 to 30.", "temperature": 0}
    expected = client.chat.completions.create(**chat)
    text, usage = expected.choices[0].message.content, expected.usage
    answer = behind.chat.completions.create(**chat)
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == (text, usage.completion_tokens)
    chunks = behind.chat.completions.create(**chat, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    response = strictly(behind.responses.create(**items))
    assert (response.output_text, response.usage.output_tokens) == (text, usage.completion_tokens)
    with behind.responses.stream(**items) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text


def test_counts_through_another_server(behind, client, model):
    """A server of this API is asked; with the other protocol the count is an estimate, and says so."""
    exact = client.responses.input_tokens.count(model=model, input=QUESTION).input_tokens
    reply = behind.responses.input_tokens.with_raw_response.count(model=model, input=QUESTION)
    if "x-penstock-estimate" in reply.headers:
        assert reply.parse().input_tokens > 0
    else:
        assert reply.parse().input_tokens == exact
    assert ("x-penstock-estimate" in reply.headers) == (behind.protocol == "openai")


def test_tools_through_another_server(behind, model):
    ask = {"model": model, "tools": [WEATHER], "temperature": 0}
    with behind.responses.stream(**ask, input=QUESTION) as stream:
        first = stream.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 12, "condition": "rainy"}',
    }
    second = behind.responses.create(**ask, input=[*user(QUESTION), *first.output, result])
    assert second.output_text == "It is rainy in Paris, 12 degrees."
    tool = {"type": "function", "function": {key: WEATHER[key] for key in ("name", "description", "parameters")}}
    answer = behind.chat.completions.create(model=model, tools=[tool], messages=user(QUESTION), temperature=0)
    (called,) = answer.choices[0].message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_refusals_of_another_server(behind, model):
    with pytest.raises(openai.BadRequestError) as refused:
        behind.responses.create(model=model, input="blue otter " * 9000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        behind.chat.completions.create(
            model=model, messages=user("a"), extra_body={"structured_outputs": {"regex": "("}}
        )
