"""Google's official SDK, unchanged, against the demo model: contents, streams, functions, counting, models, errors; and its URLs by hand."""

import hashlib
import json
import threading

import httpx
import pytest
from google import genai
from google.genai import errors, types

from harness import serving
from upstreams import CLIENT_KEY, fleet

WEATHER = types.FunctionDeclaration(
    name="get_weather",
    description="Get the weather in a city",
    parameters=types.Schema(
        type=types.Type.OBJECT,
        properties={"city": types.Schema(type=types.Type.STRING, description="The city")},
        required=["city"],
    ),
)
TIMER = types.FunctionDeclaration(
    name="set_timer",
    description="Set a timer",
    parameters_json_schema={
        "type": "object",
        "properties": {"minutes": {"type": "integer", "description": "Minutes to wait"}},
        "required": ["minutes"],
    },
)
QUESTION = "What is the weather in Paris?"


def sdk(gateway, key: str = "none") -> genai.Client:
    options = types.HttpOptions(base_url=gateway.url, timeout=120_000, retry_options=types.HttpRetryOptions(attempts=1))
    return genai.Client(api_key=key, vertexai=False, http_options=options)


@pytest.fixture(scope="module")
def gemini(gateway):
    return sdk(gateway)


def config(**options) -> types.GenerateContentConfig:
    off = types.AutomaticFunctionCallingConfig(disable=True)
    return types.GenerateContentConfig(
        **{"temperature": 0, "max_output_tokens": 100, "automatic_function_calling": off, **options}
    )


def ask(gemini, model, contents, **options) -> types.GenerateContentResponse:
    return gemini.models.generate_content(model=model, contents=contents, config=config(**options))


def chunks(gemini, model, contents, **options) -> list[types.GenerateContentResponse]:
    return list(gemini.models.generate_content_stream(model=model, contents=contents, config=config(**options)))


def path(gateway, model: str, action: str) -> str:
    return f"{gateway.url}/v1beta/models/{model}:{action}"


BODY = {"contents": [{"parts": [{"text": "Hello"}]}], "generationConfig": {"temperature": 0, "maxOutputTokens": 40}}


def test_an_answer_whole_and_streamed(gemini, model):
    answer = ask(gemini, model, "Hello")
    candidate = answer.candidates[0]
    assert answer.text and candidate.finish_reason == types.FinishReason.STOP and candidate.content.role == "model"
    assert answer.model_version == model and answer.response_id
    usage = answer.usage_metadata
    assert usage.prompt_token_count > 0 and usage.candidates_token_count > 0
    counts = (usage.prompt_token_count, usage.candidates_token_count, usage.thoughts_token_count or 0)
    assert usage.total_token_count == sum(counts)
    streamed = chunks(gemini, model, "Hello")
    assert "".join(chunk.text or "" for chunk in streamed) == answer.text
    assert streamed[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert streamed[-1].usage_metadata.candidates_token_count == usage.candidates_token_count
    assert {chunk.response_id for chunk in streamed} == {streamed[0].response_id}


def test_the_answer_is_that_of_the_other_dialect(gemini, client, model):
    other = client.chat.completions.create(
        model=model,
        max_tokens=100,
        temperature=0,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    )
    answer = ask(gemini, model, "Hello", system_instruction="Be brief.")
    assert answer.text == other.choices[0].message.content
    assert answer.usage_metadata.prompt_token_count == other.usage.prompt_tokens


def test_a_model_may_be_named_with_its_collection(gemini, model):
    assert ask(gemini, f"models/{model}", "Hello").text == ask(gemini, model, "Hello").text


def test_the_limit_ends_an_answer(gemini, model):
    answer = ask(gemini, model, "Hello", max_output_tokens=2)
    assert answer.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS


def test_candidates_and_logprobs(gemini, model):
    answer = ask(
        gemini,
        model,
        "Hello",
        candidate_count=2,
        temperature=1,
        seed=7,
        response_logprobs=True,
        logprobs=2,
        max_output_tokens=4,
    )
    assert [candidate.index for candidate in answer.candidates] == [0, 1]
    result = answer.candidates[0].logprobs_result
    assert len(result.chosen_candidates) == len(result.top_candidates) >= 1
    assert len(result.top_candidates[0].candidates) == 2


def test_a_function_is_called_whole_and_streamed(gemini, model):
    tools = [types.Tool(function_declarations=[WEATHER, TIMER])]
    whole = ask(gemini, model, QUESTION, tools=tools)
    streamed = [call for chunk in chunks(gemini, model, QUESTION, tools=tools) for call in chunk.function_calls or []]
    for calls in (whole.function_calls, streamed):
        assert len(calls) == 1 and calls[0].name == "get_weather" and calls[0].id
        assert "Paris" in calls[0].args["city"]


@pytest.mark.parametrize("with_id", [True, False])
def test_what_a_function_returned_is_read(gemini, model, with_id):
    tools = [types.Tool(function_declarations=[WEATHER])]
    first = ask(gemini, model, QUESTION, tools=tools)
    call = first.function_calls[0]
    turn = first.candidates[0].content
    response = types.FunctionResponse(name=call.name, response={"temperature": 12, "condition": "rainy"})
    if with_id:
        response.id = call.id
    else:
        for part in turn.parts:
            if part.function_call:
                part.function_call.id = None
    contents = [
        types.UserContent(QUESTION),
        turn,
        types.Content(role="user", parts=[types.Part(function_response=response)]),
    ]
    answer = ask(gemini, model, contents, tools=tools)
    assert answer.text == "It is rainy in Paris, 12 degrees." and not answer.function_calls


def test_a_function_runs_by_itself(gemini, model):
    asked = []

    def get_weather(city: str) -> dict:
        """Get the weather in a city.

        Args:
            city: The city
        """
        asked.append(city)
        return {"temperature": 12, "condition": "rainy"}

    chat = gemini.chats.create(
        model=model, config=types.GenerateContentConfig(temperature=0, max_output_tokens=100, tools=[get_weather])
    )
    answer = chat.send_message(QUESTION)
    assert asked == ["Paris"] and answer.text == "It is rainy in Paris, 12 degrees."


def test_tokens_are_counted_as_they_are_read(gemini, model):
    counted = gemini.models.count_tokens(model=model, contents="Hello")
    answer = ask(gemini, model, "Hello")
    assert counted.total_tokens == answer.usage_metadata.prompt_token_count


def test_models_are_shown_in_its_shape(gemini, model):
    listed = [shown.name for shown in gemini.models.list()]
    assert f"models/{model}" in listed
    shown = gemini.models.get(model=model)
    assert shown.name == f"models/{model}" and shown.input_token_limit > 0
    assert "generateContent" in shown.supported_actions


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cached_content": "cachedContents/x"}, "cachedContent"),
        ({"tools": [types.Tool(google_search=types.GoogleSearch())]}, "googleSearch"),
        ({"temperature": 3}, "temperature"),
        ({"response_mime_type": "text/x.enum"}, "responseSchema"),
        ({"response_mime_type": "text/x.yaml"}, "responseMimeType"),
    ],
)
def test_what_is_refused_names_the_parameter(gemini, model, options, says):
    with pytest.raises(errors.ClientError) as refused:
        ask(gemini, model, "Hello", **options)
    assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
    assert says in refused.value.message


def test_an_unknown_model_is_not_found(gemini):
    for call in (lambda: ask(gemini, "nobody", "Hello"), lambda: chunks(gemini, "nobody", "Hello")):
        with pytest.raises(errors.ClientError) as refused:
            call()
        assert (refused.value.code, refused.value.status) == (404, "NOT_FOUND")


def test_this_model_makes_no_vectors(gemini, model):
    with pytest.raises(errors.ClientError) as refused:
        gemini.models.embed_content(model=model, contents="Hello")
    assert refused.value.code == 400 and "vectors" in refused.value.message


def test_a_stream_without_sse_is_one_array(gateway, model):
    answer = httpx.post(path(gateway, model, "streamGenerateContent"), json=BODY, timeout=120)
    assert answer.headers["content-type"] == "application/json"
    whole = httpx.post(path(gateway, model, "generateContent"), json=BODY, timeout=120).json()
    said = "".join(
        part.get("text", "") for chunk in answer.json() for part in chunk["candidates"][0]["content"]["parts"]
    )
    assert said == whole["candidates"][0]["content"]["parts"][0]["text"]


def test_both_spellings_are_one(gateway, model):
    snake = {"contents": BODY["contents"], "generation_config": {"temperature": 0, "max_output_tokens": 40}}
    answers = [httpx.post(path(gateway, model, "generateContent"), json=body, timeout=120) for body in (BODY, snake)]
    assert len({answer.json()["candidates"][0]["content"]["parts"][0]["text"] for answer in answers}) == 1
    twice = httpx.post(path(gateway, model, "generateContent"), json=BODY | {"generation_config": {}}, timeout=120)
    assert twice.status_code == 400 and "twice" in twice.json()["error"]["message"]


def test_a_key_goes_in_a_header_or_in_the_query_and_never_into_the_log(tmp_path):
    key = "sk-gemini-secret-0123456789"
    digest = hashlib.sha256(key.encode()).hexdigest()
    config_text = f'[[keys]]\nid = "team"\ndigest = "{digest}"\n'
    with serving(tmp_path / "keys", config=config_text) as gateway:
        headers = {"authorization": f"Bearer {key}"}
        model = httpx.get(f"{gateway.url}/v1/models", headers=headers, timeout=30).json()["data"][0]["id"]
        assert sdk(gateway, key).models.count_tokens(model=model, contents="Hello").total_tokens > 0
        url = path(gateway, model, "countTokens")
        body = {"contents": BODY["contents"]}
        assert httpx.post(url, params={"key": key}, json=body, timeout=30).status_code == 200
        for given in (
            {},
            {"params": {"key": "wrong"}},
            {"params": {"key": key}, "headers": {"x-goog-api-key": key}},
            {"params": [("key", key), ("key", key)]},
        ):
            refused = httpx.post(url, json=body, timeout=30, **given)
            error = refused.json()["error"]
            assert (refused.status_code, error["status"]) == (401, "UNAUTHENTICATED"), json.dumps(error)
            assert error["details"][0]["reason"] == "API_KEY_INVALID"
        with pytest.raises(errors.ClientError) as denied:
            ask(sdk(gateway, "wrong"), model, "Hello")
        assert denied.value.code == 401
        assert key not in gateway.log()


class Tapped(httpx.HTTPTransport):
    """A client's connection to the gateway: what it brings, and its signs of life one by one."""

    def __init__(self):
        super().__init__()
        self.pieces: list[bytes] = []
        self.signs = threading.Semaphore(0)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        answer.stream = Tap(answer.stream, self)
        return answer


class Tap(httpx.SyncByteStream):
    """The body of an answer at such a connection."""

    def __init__(self, stream: httpx.SyncByteStream, tapped: Tapped):
        self.stream, self.tapped = stream, tapped

    def __iter__(self):
        for piece in self.stream:
            self.tapped.pieces.append(piece)
            if not piece.strip():
                self.tapped.signs.release()
            yield piece

    def close(self) -> None:
        self.stream.close()


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """Providers that say nothing for so long that their clients are shown signs of life."""
    models = "".join(
        f'[[models]]\nname = "late-{name}"\nto = [{{ provider = "{name}", model = "mock-{name}" }}]\nprice = {{ input = 1, output = 1 }}\n'
        for name in ("gemini", "openai")
    )
    more = f"[stream]\ncommit_ms = 1\nheartbeat_ms = 100\n{models}"
    with fleet(tmp_path_factory.mktemp("late"), ("gemini", "openai"), more, pool=False) as running:
        yield running


@pytest.mark.parametrize("cost", [False, True])
@pytest.mark.parametrize("crlf", [False, True])
@pytest.mark.parametrize("name", ["gemini", "openai"])
def test_signs_of_life_are_no_chunks(late, name, crlf, cost):
    tap, mock = Tapped(), late.mocks[name]
    mock.reset()

    def after_a_sign(number: int) -> None:
        """Before the first event, and before the third, when the client has some of the answer."""
        if number not in (0, 2):
            return
        while tap.signs.acquire(blocking=False):
            pass
        assert tap.signs.acquire(timeout=60), "no sign of life"

    mock.fail(before=after_a_sign, crlf=crlf)
    with httpx.Client(transport=tap) as connection:
        options = types.HttpOptions(
            base_url=late.gateway.url,
            timeout=120_000,
            headers={"x-penstock-cost": "1"} if cost else {},
            httpx_client=connection,
        )
        client = genai.Client(api_key=CLIENT_KEY, vertexai=False, http_options=options)
        said = list(client.models.generate_content_stream(model=f"late-{name}", contents="Count from 1 to 3"))
    assert "1, 2, 3" in "".join(chunk.text or "" for chunk in said)
    assert said[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert sum(not piece.strip() for piece in tap.pieces) >= 2
    lines = b"".join(tap.pieces).replace(b"\r\n", b"\n").split(b"\n")
    assert all(line.startswith(b"data: ") for line in lines if line), "nothing but data"
    # Google's SDK for Go reads an event to its empty line, and takes what is between two for a chunk.
    told = [event for event in b"".join(tap.pieces).replace(b"\r\n", b"\n").split(b"\n\n") if event]
    assert len(told) == len(said) and all(event.startswith(b"data: ") for event in told)


def test_a_streamed_answer_is_one_turn_of_a_chat(late):
    """The SDK's history has a content for each chunk."""
    mock = late.mocks["openai"]
    mock.reset()
    options = types.HttpOptions(base_url=late.gateway.url, timeout=120_000)
    client = genai.Client(api_key=CLIENT_KEY, vertexai=False, http_options=options)
    tools = [types.Tool(function_declarations=[WEATHER])]
    chat = client.chats.create(model="late-openai", config=config(tools=tools))
    asked = chat.send_message_stream("What is the weather in Paris and Rome?")
    calls = [call for chunk in asked for call in chunk.function_calls or []]
    results = [types.FunctionResponse(id=call.id, name=call.name, response={"result": "rain"}) for call in calls]
    answered = chat.send_message_stream([types.Part(function_response=result) for result in results])
    text = "".join(chunk.text or "" for chunk in answered)
    list(chat.send_message_stream("Count from 1 to 3"))
    messages = mock.last.body["messages"]
    assert [said["role"] for said in messages] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == [call.id for call in calls] and len(calls) == 2
    assert text and messages[4]["content"] == text
