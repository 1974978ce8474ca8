"""Bad input as the SDK's typed exceptions: the right class, code and parameter, and a server that is none the worse."""

import hashlib
import http.client
import json
import socket

import httpx
import openai
import pytest

from harness import serving, user

BAD = openai.BadRequestError


@pytest.fixture(autouse=True)
def still_serving(gateway, client, model):
    """Whatever a test sent, the next request is answered."""
    yield
    answer = client.chat.completions.create(model=model, messages=user("Hello"), temperature=0)
    assert answer.choices[0].message.content == "Hello! How can I help you today?"


def refused(call) -> openai.APIStatusError:
    """The exception, its body checked to have OpenAI's four keys."""
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    error = caught.value
    body = error.response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"} and isinstance(body["message"], str) and body["message"]
    assert body["code"] is None or isinstance(body["code"], str)
    assert error.response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 1_000_000),
        ("n", 1.5),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("logit_bias", {"1": 500}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", [1]),
        ("stop", 7),
        ("stop", ["a"] * 1000),
        ("top_logprobs", 5),
        ("seed", "x"),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        ("messages", "Hello"),
        ("tools", "all"),
        ("priority", "high"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_parameter_out_of_bounds_is_named(client, model, param, value):
    body = {"model": model, "messages": user("Hello"), param: value}
    error = refused(lambda: client.post("/chat/completions", body=body, cast_to=object))
    assert type(error) is BAD
    assert (error.param or "").startswith(param), error.response.text


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "9" * 400], ids=lambda text: text[:8])
def test_absurd_numbers_are_refused(gateway, model, number):
    body = json.dumps({"model": model, "messages": user("a"), "temperature": 0.5}).replace("0.5", number)
    reply = post(gateway, body.encode())
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_a_message_is_named_by_its_path(client, model):
    messages = [{"role": "user", "content": "Hello"}, {"role": "wizard", "content": "?"}]
    error = refused(lambda: client.chat.completions.create(model=model, messages=messages))
    assert type(error) is BAD and "messages[1]" in error.param


def test_unknown_models_are_not_served(client):
    error = refused(lambda: client.chat.completions.create(model="gpt-9", messages=user("Hello")))
    assert type(error) is openai.NotFoundError and error.code == "model_not_found"
    error = refused(lambda: client.models.retrieve("gpt-9"))
    assert type(error) is openai.NotFoundError


def test_a_missing_model_or_prompt_is_said(client, model):
    assert (
        refused(lambda: client.post("/chat/completions", body={"messages": user("a")}, cast_to=object)).param == "model"
    )
    error = refused(lambda: client.post("/chat/completions", body={"model": model}, cast_to=object))
    assert error.param == "messages"
    assert refused(lambda: client.post("/completions", body={"model": model}, cast_to=object)).param == "prompt"


def test_a_prompt_beyond_the_context_is_refused_with_the_known_code(client, model):
    words = "blue otter " * 9000
    error = refused(lambda: client.chat.completions.create(model=model, messages=user(words)))
    assert type(error) is BAD and error.code == "context_length_exceeded"


def test_more_tokens_than_the_context_holds_are_capped(client, model):
    answer = client.chat.completions.create(model=model, messages=user("Hello"), max_tokens=100_000, temperature=0)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "options",
    [
        {"extra_body": {"structured_outputs": {"structural_tag": "{}"}}},
        {"extra_body": {"structured_outputs": {"grammar": "root ::= <think>"}}},
        {"extra_body": {"use_beam_search": True}},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_not_ignored(client, model, options):
    error = refused(lambda: client.chat.completions.create(model=model, messages=user("a"), **options))
    assert type(error) is BAD


def test_pictures_are_refused(client, model):
    parts = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}]
    error = refused(lambda: client.chat.completions.create(model=model, messages=[{"role": "user", "content": parts}]))
    assert type(error) is BAD


def test_text_response_format_is_fine(client, model):
    client.chat.completions.create(model=model, messages=user("a"), max_tokens=1, response_format={"type": "text"})


def test_unknown_fields_are_ignored(client, model):
    extra = {"some_new_field": {"deep": [1, 2, 3]}, "user": "u-1", "metadata": {"a": "b"}, "store": False}
    client.chat.completions.create(model=model, messages=user("a"), max_tokens=1, extra_body=extra)


def post(gateway, body: bytes, **headers):
    headers = {"content-type": "application/json", **headers}
    return httpx.post(f"{gateway.url}/v1/chat/completions", content=body, headers=headers, timeout=30)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"hello"',
        b'{"model": "m"} trailing',
        b'{"model": "a", "model": "b", "messages": []}',
        b'{"model": "\xff\xfe", "messages": []}',
        b'{"model": "\\ud800", "messages": []}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_that_are_no_request(gateway, body):
    reply = post(gateway, body)
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error", reply.text


def test_a_body_over_the_limit_is_refused_before_it_is_read(gateway):
    reply = post(gateway, b'{"messages": "' + b"x" * (33 << 20) + b'"}')
    assert reply.status_code == 413 and reply.json()["error"]["code"]


def test_paths_and_methods(gateway):
    reply = httpx.get(f"{gateway.url}/v1/nothing", timeout=30)
    assert reply.status_code == 404 and reply.json()["error"]["message"]
    reply = httpx.get(f"{gateway.url}/v1/embeddings", timeout=30)
    assert reply.status_code == 405 and reply.json()["error"]["message"] and "POST" in reply.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/../metrics", "/v1//models", "/V1/models", "/v1/models/%2e%2e", "/v1/%6dodels"])
def test_a_path_means_one_thing(gateway, path):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    connection.request("GET", path)  # As it is: httpx would resolve the dots.
    assert connection.getresponse().status in (400, 404)


def test_bodies_of_another_type_are_refused(gateway):
    assert post(gateway, b"model=x", **{"content-type": "application/x-www-form-urlencoded"}).status_code in (400, 415)
    assert post(gateway, b"\x1f\x8b", **{"content-encoding": "gzip"}).status_code in (400, 415)


POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
RAW_FAULTS = {
    "two lengths": f"{POST}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}",
    "length and chunked": f"{POST}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": f"{POST}Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "no host": "GET /v1/models HTTP/1.1\r\n\r\n",
    "two hosts": "GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "bad host": "GET /v1/models HTTP/1.1\r\nHost: a b\r\n\r\n",
    "folded header": "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n",
    "space before colon": "GET /v1/models HTTP/1.1\r\nHost : x\r\n\r\n",
    "control byte": "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nA: b\x00c\r\n\r\n",
    "target with control byte": "GET /v1/mo\x01dels HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "relative target": "GET v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "negative length": f"{POST}Content-Length: -1\r\n\r\n",
    "trace": "TRACE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "connect": "CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
    "endless head": "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + "A: b\r\n" * 60_000 + "\r\n",
    "no http": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("fault", RAW_FAULTS)
def test_malformed_http_gets_one_refusal_and_a_close(gateway, fault):
    received = b""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        try:
            connection.sendall(RAW_FAULTS[fault].encode("latin-1"))
            while piece := connection.recv(65536):
                received += piece
        except ConnectionError:
            pass  # It refused before it had read everything.
    statuses = [line.split()[1] for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    assert len(statuses) <= 1 and all(
        status in (b"400", b"404", b"405", b"413", b"431", b"501") for status in statuses
    ), received[:200]


def test_keys_are_asked_for_when_configured(tmp_path):
    secret = "sk-e2e-0123456789abcdef"
    config = f'[[keys]]\nid = "team-a"\ndigest = "{hashlib.sha256(secret.encode()).hexdigest()}"\n'
    with serving(tmp_path, config=config) as gateway:
        for key in ("sk-wrong", "", secret + "x", secret[:-1]):
            with pytest.raises(openai.AuthenticationError) as caught:
                gateway.client(api_key=key or "x").models.list()
            assert caught.value.code == "invalid_api_key"
        assert httpx.get(f"{gateway.url}/v1/models", timeout=30).status_code == 401
        model = gateway.client(api_key=secret).models.list().data[0].id
        assert gateway.client(api_key=secret).chat.completions.create(model=model, messages=user("Hello")).choices
        assert httpx.get(f"{gateway.url}/health", timeout=30).status_code == 200, "liveness needs no key"
        assert secret not in gateway.log()
