"""What users of a drop-in OpenAI endpoint trip over, with other people's models behind it: one that is passed through and one that
is translated."""

import base64
import json
import struct

import httpx
import openai
import pytest

from harness import serving, user
from providers import OpenAi
from upstreams import CLIENT_KEY, fleet, model_of

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = user("What is the weather in Paris?")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("drop-in"), kinds=("openai", "anthropic"), pool=False) as running:
        yield running


@pytest.fixture(params=["openai", "anthropic"])
def model(request):
    return model_of(request.param)


@pytest.fixture
def client(foreign):
    return openai.OpenAI(base_url=f"{foreign.gateway.url}/v1", api_key=CLIENT_KEY, max_retries=0)


def frames(foreign, body) -> list[str]:
    """The data of every event, as it stands on the wire."""
    headers = {"authorization": f"Bearer {CLIENT_KEY}"}
    reply = httpx.post(f"{foreign.gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    return [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]


def test_unknown_models_are_refused_and_known_ones_shown(client, model):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=user("Hello"))
    fault = caught.value
    assert (fault.code, fault.param, fault.type) == ("model_not_found", "model", "invalid_request_error")
    assert fault.request_id
    assert model in [card.id for card in client.models.list()]
    assert client.models.retrieve(model).id == model


def test_every_answer_has_an_id_of_its_request(client, model):
    answer = client.chat.completions.create(model=model, messages=user("Hello"), max_tokens=50)
    assert answer._request_id
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=user("Hello"), max_tokens=50, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"


def test_keys_may_come_as_x_api_key(foreign, model):
    body = {"model": model, "messages": user("Hello"), "max_tokens": 50}
    url = f"{foreign.gateway.url}/v1/chat/completions"
    assert httpx.post(url, json=body, headers={"x-api-key": CLIENT_KEY}, timeout=30).status_code == 200
    refused = httpx.post(url, json=body, headers={"x-api-key": "wrong"}, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_malformed_bodies_are_the_clients_fault(foreign):
    url, headers = f"{foreign.gateway.url}/v1/chat/completions", {"authorization": f"Bearer {CLIENT_KEY}"}
    headers["content-type"] = "application/json"
    for body in (b"{", b"[]", b'{"model":"a","model":"b"}', b"\xff", b'{"messages":[]}'):
        reply = httpx.post(url, content=body, headers=headers, timeout=30)
        error = reply.json()["error"]
        assert reply.status_code == 400 and set(error) == {"message", "type", "param", "code"}, (body, reply.text)


def test_usage_comes_when_asked_for_and_only_then(foreign, model):
    body = {"model": model, "messages": user("Hello"), "max_tokens": 50, "stream": True}
    plain = frames(foreign, body)
    assert plain.count("[DONE]") == 1 and plain[-1] == "[DONE]"
    chunks = [json.loads(data) for data in plain[:-1]]
    assert all(chunk["choices"] for chunk in chunks), "no chunk with usage alone"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("finish_reason" in chunk["choices"][0] for chunk in chunks)
    asked = [json.loads(data) for data in frames(foreign, body | {"stream_options": {"include_usage": True}})[:-1]]
    assert asked[-1]["choices"] == [] and asked[-1]["usage"]["total_tokens"] > 0
    assert all(chunk.get("usage") is None for chunk in asked[:-1])


def test_calls_have_one_head_each_and_no_text_beside_them(foreign, client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, tools=[TOOL], max_tokens=500)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
    assert json.loads(message.tool_calls[0].function.arguments)["city"] == "Paris"
    body = {"model": model, "messages": QUESTION, "tools": [TOOL], "max_tokens": 500, "stream": True}
    deltas = [json.loads(data)["choices"][0]["delta"] for data in frames(foreign, body)[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert [call["index"] for call in calls if call.get("id")] == [0], "id and name once, in the first delta"
    assert sum("name" in call["function"] for call in calls) == 1
    assert json.loads("".join(call["function"].get("arguments", "") for call in calls))["city"] == "Paris"


def test_a_forced_call_has_an_object_for_its_arguments(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=500,
    )
    assert isinstance(json.loads(answer.choices[0].message.tool_calls[0].function.arguments), dict)


def test_reasoning_has_both_names_where_it_is_said_again(foreign):
    body = {"model": model_of("anthropic"), "messages": user("Hello"), "max_tokens": 4000, "reasoning_effort": "low"}
    reply = httpx.post(
        f"{foreign.gateway.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {CLIENT_KEY}"},
        timeout=30,
    )
    message = reply.json()["choices"][0]["message"]
    assert message["reasoning"] and message["reasoning"] == message["reasoning_content"]


def test_responses_are_complete_and_numbered(client, model):
    answer = client.responses.create(model=model, input="Hello", max_output_tokens=50)
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    events = list(client.responses.create(model=model, input="Hello", max_output_tokens=50, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"


def test_vectors_come_in_base64_and_as_numbers(client):
    model = model_of("openai")
    by_default = client.embeddings.create(model=model, input=["a", "b"])
    floats = client.embeddings.create(model=model, input=["a", "b"], encoding_format="float")
    assert [item.index for item in floats.data] == [0, 1]
    assert by_default.data[0].embedding == pytest.approx(floats.data[0].embedding, rel=1e-6)
    raw = client.embeddings.with_raw_response.create(model=model, input="a", encoding_format="base64")
    packed = base64.b64decode(json.loads(raw.text)["data"][0]["embedding"])
    assert struct.unpack("<f", packed[:4])[0] == pytest.approx(floats.data[0].embedding[0], rel=1e-6)


def test_moderations_without_a_model_ask_the_one_of_the_config(tmp_path):
    with OpenAi() as mock:
        mock.models = ("watch-1",)
        config = (
            f'[[providers]]\nid = "mock"\nbase_url = "{mock.url}/v1"\nkey_env = "PROVIDER_KEY"\nmodels = ["watch-1"]\n'
            '[[models]]\nname = "watch"\nto = [{ provider = "mock", model = "watch-1" }]\n'
        )
        for named, key in ((True, 'moderation_model = "watch"\n'), (False, "")):
            settings = {"config": f"[server]\n{key}{config}", "env": {"PROVIDER_KEY": mock.key}, "workers": 0}
            with serving(tmp_path / str(named), **settings) as gateway:
                client = gateway.client()
                if named:
                    assert client.moderations.create(input="x").model == "watch-1"
                else:
                    with pytest.raises(openai.NotFoundError) as caught:
                        client.moderations.create(input="x")
                    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
                assert client.moderations.create(input="x", model="watch").model == "watch-1"
