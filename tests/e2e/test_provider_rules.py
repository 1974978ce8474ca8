"""What providers refuse, and what only they know: mocks as strict as the real services, asked by clients of every API."""

import anthropic
import openai
import pytest

from providers.anthropic import SIGNATURE
from upstreams import CLIENT_KEY, fleet

FILE = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}


@pytest.fixture(scope="module")
def providers(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("rules"), pool=False) as running:
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
    if "prompt" not in ask:
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
    empty = client.conversations.create()
    for more in ({"previous_response_id": kept.id}, {"conversation": empty.id}, {"background": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="mock-responses", input="Hello", tools=[{"type": "web_search"}], **more)
        assert refused.value.param.startswith("tools"), refused.value


def anthropic_client(providers) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=providers.gateway.url, api_key=CLIENT_KEY, max_retries=0)


MODELS = ["mock-openai", "mock-responses", "mock-anthropic", "mock-azure", "mock-gemini", "anthropic.claude-mock-v1:0"]
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize("model", MODELS)
def test_a_long_id_of_a_user_is_taken(providers, client, model):
    """Claude Code sends an account and a session."""
    id = f"user_{'a' * 64}_account__session_{'b' * 36}"
    messages = [{"role": "user", "content": "Hello"}]
    claude = anthropic_client(providers)
    assert claude.messages.create(model=model, max_tokens=99, metadata={"user_id": id}, messages=messages).content
    for user in ("x" * 500, "ann@example.com"):
        ids = {"user": user, "prompt_cache_key": "k" * 99}
        # Clients of the provider's own API are told what the provider says.
        if model in ("mock-openai", "mock-azure"):
            assert client.responses.create(model=model, input="Hello", store=False, **ids).output_text
        else:
            answer = client.chat.completions.create(model=model, messages=messages, **ids)
            assert answer.choices[0].message.content


@pytest.mark.parametrize("signature", ["gAAAAABotheirs", "openai:theirs", "gemini:QUJD", "call_signature:QUJD"])
@pytest.mark.parametrize("model", MODELS)
def test_a_signature_of_another_provider_is_left_out(providers, client, model, signature):
    thought = {"type": "thinking", "thinking": "Hm.", "signature": signature}
    text = {"type": "text", "text": "I am well."}
    messages = [
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": [thought, text]},
        {"role": "user", "content": "Hello"},
    ]
    claude = anthropic_client(providers)
    if (model, signature) == ("mock-responses", "openai:theirs"):
        with pytest.raises(anthropic.BadRequestError, match="could not be verified"):
            claude.messages.create(model=model, max_tokens=99, messages=messages)
        return
    assert claude.messages.create(model=model, max_tokens=99, messages=messages).content[0].text
    if model == "mock-anthropic":
        assert claude.messages.count_tokens(model=model, messages=messages).input_tokens > 0


@pytest.mark.parametrize("encrypted", ["gAAAAABotheirs", f"anthropic:{SIGNATURE}", "gemini:QUJD"])
@pytest.mark.parametrize("model", MODELS)
def test_reasoning_of_another_provider_is_left_out(client, model, encrypted):
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": encrypted}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I am well."}]}
    items = [{"role": "user", "content": "How are you?"}, thought, said, {"role": "user", "content": "Hello"}]
    assert client.responses.create(model=model, input=items, store=False).output_text


# A compatible server takes images where they are; this one does not.
@pytest.mark.parametrize("model", [model for model in MODELS if model != "mock-openai"])
def test_an_image_in_a_result_is_taken(providers, client, model):
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [PNG]}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}]
    claude = anthropic_client(providers)
    assert claude.messages.create(model=model, max_tokens=99, tools=tools, messages=messages).content
    messages += [{"role": "assistant", "content": "A fox."}, {"role": "user", "content": "Hello"}]
    assert claude.messages.create(model=model, max_tokens=99, tools=tools, messages=messages).content


def test_a_refusal_can_be_sent_back(client):
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    messages = [{"role": "user", "content": "Do."}, refused, {"role": "user", "content": "Hello"}]
    for model in MODELS:
        assert client.chat.completions.create(model=model, messages=messages).choices[0].message.content
