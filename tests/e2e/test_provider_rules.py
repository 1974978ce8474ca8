"""What providers refuse, and what only they know: mocks as strict as the real services, asked by clients of every API."""

import openai
import pytest

from upstreams import CLIENT_KEY, fleet

FILE = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}


@pytest.fixture(scope="module")
def providers(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("rules"), kinds=("openai", "responses", "anthropic"), pool=False) as running:
        yield running


@pytest.fixture
def client(providers):
    for mock in providers.mocks.values():
        mock.reset()
    return providers.gateway.client(api_key=CLIENT_KEY)


ONLY_THERE = {
    "a tool": {"tools": [{"type": "web_search"}]},
    "a file": {"input": [{"role": "user", "content": [FILE, {"type": "input_text", "text": "Hello"}]}]},
    "a call": {"input": [{"role": "user", "content": "Hello"}, SEARCH, {"role": "user", "content": "Hello"}]},
    "a field": {"prompt": {"id": "pmpt_1"}},
}


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("what", list(ONLY_THERE))
def test_what_only_the_provider_knows_is_passed_on(providers, client, what, store):
    ask = {"input": "Hello", **ONLY_THERE[what]}
    mock = providers.mocks["responses"]
    answer = client.responses.create(model="mock-responses", store=store, **ask)
    assert answer.output_text and answer.id == "resp_mock", "the provider's own answer"
    assert mock.seen[-1].body == {"model": "mock-responses", "store": store, **ask}
    with client.responses.stream(model="mock-responses", store=store, **ask) as stream:
        assert stream.get_final_response().output_text == answer.output_text
    counted = client.responses.input_tokens.count(model="mock-responses", **ask)
    assert counted.input_tokens == answer.usage.input_tokens
    # A response that only the provider keeps is the provider's to know, too.
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="mock-responses", store=store, previous_response_id="resp_theirs", **ask)
    assert refused.value.code == "previous_response_not_found" and mock.seen[-1].refused


@pytest.mark.parametrize("what", list(ONLY_THERE))
@pytest.mark.parametrize("model", ["mock-openai", "mock-anthropic"])
def test_what_only_one_provider_knows_is_refused_for_others(client, model, what):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=model, **{"input": "Hello", **ONLY_THERE[what]})
    assert refused.value.param.split("[")[0] in ("tools", "input", "prompt"), refused.value


def test_what_the_gateway_keeps_must_be_known_to_it(client):
    """A response that the gateway keeps is resolved here, and one in the background is made from here."""
    kept = client.responses.create(model="mock-openai", input="Hello")
    for more in ({"previous_response_id": kept.id}, {"background": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="mock-responses", input="Hello", tools=[{"type": "web_search"}], **more)
        assert refused.value.param.startswith("tools"), refused.value
