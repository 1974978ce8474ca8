"""What one tenant does is neither free nor another's: seen from outside, through a provider that keeps what it was sent."""

import http.server
import json
import socket
import threading

import httpx
import pytest
from test_limits import KEY, OTHER, body_of, limited, metric, swarm  # noqa: F401

from harness import Gateway, serving, wait_until
from swarm import Swarm


class Upstream(http.server.ThreadingHTTPServer):
    """A provider that notes the header fields of each request."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.seen: list[dict[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append({name.lower(): value for name, value in self.headers.items()})
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def upstream():
    with Upstream() as server:
        yield server
        server.shutdown()


def leave(gateway: Gateway, swarm: Swarm, words: str) -> None:  # noqa: F811
    """Sends a request and leaves when the provider has it and has answered nothing."""
    path, body = body_of("chat", words, False, 8)
    before, data = len(swarm.seen.bills), json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nauthorization: Bearer {KEY}\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as client:
        client.sendall(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: len(swarm.seen.bills) > before, "the provider has the request")


def test_prompts_of_requests_that_were_left_count(tmp_path, swarm):  # noqa: F811
    """Each is reserved with its 4,100 bytes, and charged with about 1,000 tokens: after three of them no fourth fits into 7,000."""
    with limited(tmp_path, swarm, "tokens_per_day = 7000") as gateway:
        swarm.shut()
        for _ in range(3):
            leave(gateway, swarm, "<slow> " + "word " * 800)
            wait_until(lambda: metric(gateway, "penstock_limit_holds") == 0, "nothing is held for it")
        path, body = body_of("chat", "<full> " + "word " * 800, False, 8)
        answer = httpx.post(gateway.url + path, json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        assert answer.status_code == 429, "the provider has read three prompts of 1,000 tokens"


def test_idempotency_keys_of_tenants_are_apart(tmp_path, upstream):
    config = f"""
[[keys]]
id = "one"
key_env = "KEY_ONE"
[[keys]]
id = "two"
key_env = "KEY_TWO"
[[providers]]
id = "up"
base_url = "http://127.0.0.1:{upstream.server_port}/v1"
key_env = "KEY_UP"
models = ["m"]
"""
    env = {"KEY_ONE": KEY, "KEY_TWO": OTHER, "KEY_UP": "sk-up"}
    with serving(tmp_path, workers=0, config=config, env=env) as gateway:
        for key in [KEY, OTHER, KEY]:
            head = {"authorization": f"Bearer {key}", "idempotency-key": "order-17"}
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=head, timeout=60).raise_for_status()
    one, two, again = (seen["idempotency-key"] for seen in upstream.seen)
    assert one == again, "a repeated request is the same to the provider"
    assert len({one, two, "order-17"}) == 3, "tenants that choose the same value do not meet"
