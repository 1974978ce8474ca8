"""Ollama's official SDK, unchanged, against the demo model and a provider: conversations, prompts, vectors, lists, limits, errors; and its URLs by hand.
What it can do with every upstream is in the matrix."""

import json

import httpx
import ollama
import pytest

from harness import serving
from providers import OpenAi

GREEDY = {"temperature": 0, "num_predict": 60}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(gateway):
    return ollama.Client(host=gateway.url, timeout=120)


def hello(content: str = "Hello") -> list[dict]:
    return [{"role": "user", "content": content}]


def test_a_prompt_is_answered_whole_and_streamed(client, model):
    whole = client.generate(model, "Hello", options=GREEDY)
    assert whole.response and whole.done and whole.done_reason == "stop" and whole.eval_count > 0
    pieces = list(client.generate(model, "Hello", options=GREEDY, stream=True))
    assert len(pieces) > 2 and "".join(piece.response for piece in pieces) == whole.response
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].prompt_eval_count == whole.prompt_eval_count
    chat = client.chat(model, hello(), options=GREEDY)
    assert chat.message.content == whole.response and chat.model == model
    longer = client.generate(model, "Hello", system="Be brief.", options=GREEDY)
    assert longer.prompt_eval_count > whole.prompt_eval_count
    # A plain continuation has no template around it.
    raw = client.generate(model, "Hello", raw=True, options=GREEDY)
    assert 0 < raw.prompt_eval_count < whole.prompt_eval_count


def test_options_and_forms_hold(client, model):
    cut = client.generate(model, "Count from 1 to 30.", options={"temperature": 0, "num_predict": 9})
    assert (cut.done_reason, cut.eval_count) == ("length", 9)
    stopped = client.generate(model, "Count from 1 to 30.", options={**GREEDY, "stop": [" 7"]})
    assert stopped.response == "1, 2, 3, 4, 5, 6,"
    seeded = [
        client.generate(model, "Hello", options={"temperature": 1.5, "seed": 7, "num_predict": 20}) for _ in range(2)
    ]
    assert seeded[0].response == seeded[1].response
    question = hello("Give me JSON with name and age: Alice is 31")
    answer = client.chat(model, question, format=SCHEMA, options={"temperature": 0, "num_predict": 200})
    assert set(json.loads(answer.message.content)) == {"name", "age"}, answer
    # Nothing tells the model when an object of any form is long enough.
    assert client.chat(model, question, format="json", options=GREEDY).message.content.lstrip().startswith("{")
    named = client.chat(model, hello(), logprobs=True, top_logprobs=2, options=GREEDY)
    # The token that ends the answer has one too.
    assert "".join(entry.token for entry in named.logprobs).startswith(named.message.content)
    assert len(named.logprobs[0].top_logprobs) == 2


def test_reasoning_is_apart(client, model):
    said = client.chat(model, hello("What is 27 + 48?"), think=True, options={"temperature": 0})
    assert "15" in said.message.thinking and "75" in said.message.content
    assert (
        client.chat(model, hello("What is 27 + 48?"), think=False, options={"temperature": 0}).message.thinking is None
    )


def test_models_are_listed_and_shown(client, model, gateway):
    assert [entry.model for entry in client.list().models] == [model]
    assert [entry.model for entry in client.ps().models] == [model]
    shown = client.show(model)
    assert shown.modelinfo["penstock.context_length"] > 0 and "completion" in shown.capabilities
    assert httpx.get(f"{gateway.url}/api/version").json()["version"]


def test_faults_are_said_in_its_words(client, model, gateway):
    for act, status, words in (
        (lambda: client.chat("nothing", hello()), 404, "nothing"),
        (lambda: client.show("nothing"), 404, "nothing"),
        (lambda: client.chat(model, []), 400, "messages"),
        (lambda: client.generate(model, ""), 400, "prompt"),
        (lambda: client.chat(model, hello(), options={"temperature": 9}), 400, "temperature"),
        (lambda: client.pull("llama3"), 404, "URL"),
        (lambda: client.embed(model, "a"), 400, ""),
    ):
        with pytest.raises(ollama.ResponseError) as refused:
            act()
        assert refused.value.status_code == status and words in refused.value.error, refused.value
    wrong = httpx.get(f"{gateway.url}/api/chat")
    assert wrong.status_code == 405 and list(wrong.json()) == ["error"]


def test_a_stream_is_lines(model, gateway):
    body = {"model": model, "messages": hello(), "options": GREEDY}
    with httpx.stream("POST", f"{gateway.url}/api/chat", json=body, timeout=120) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson" and answer.headers["x-request-id"]
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert len(lines) > 2 and lines[-1]["done"]
    whole = httpx.post(f"{gateway.url}/api/chat", json={**body, "stream": False}, timeout=120).json()
    assert whole["message"]["content"] == "".join(line["message"]["content"] for line in lines)


def test_vectors_limits_and_keys(tmp_path):
    with OpenAi() as mock:
        config = f"""
[[providers]]
id = "up"
base_url = "{mock.url}/v1"
key_env = "KEY_UP"
[[models]]
name = "m"
to = [{{ provider = "up", model = "mock-model" }}]
[[limits]]
id = "few"
tokens_per_minute = 300
reserve = "most"
[[keys]]
id = "app"
key_env = "KEY_APP"
limits = ["few"]
dialects = ["ollama"]
[[keys]]
id = "free"
key_env = "KEY_FREE"
dialects = ["openai", "ollama"]
"""
        env = {"KEY_UP": mock.key, "KEY_APP": "sk-app", "KEY_FREE": "sk-free"}
        with serving(tmp_path, config=config, env=env, workers=0) as gateway:

            def client(key: str) -> ollama.Client:
                return ollama.Client(host=gateway.url, headers={"authorization": f"Bearer {key}"}, timeout=60)

            free = client("sk-free")
            vectors = free.embed("m", ["a", "b"])
            assert len(vectors.embeddings) == 2 and vectors.embeddings[0] != vectors.embeddings[1]
            assert list(free.embeddings("m", "a").embedding) == list(vectors.embeddings[0])
            # A stream is the default of the API, so a limit counts it as one; the bound is the one that was reserved.
            app = client("sk-app")
            with pytest.raises(ollama.ResponseError) as refused:
                app.chat("m", hello(), options={"num_predict": 1000})
            assert refused.value.status_code == 429, refused.value
            assert app.chat("m", hello(), options={"num_predict": 10}).done
            # A key for this API alone opens no other.
            for key, status in (("sk-app", 403), ("sk-free", 200)):
                body = {"model": "m", "messages": hello()}
                headers = {"authorization": f"Bearer {key}"}
                assert (
                    httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers).status_code == status
                )
            with pytest.raises(ollama.ResponseError) as refused:
                client("sk-wrong").list()
            assert refused.value.status_code == 401
