"""The web console where something goes wrong or is large: providers with rules of their own, lists of many pages, requests that fail, a page that nobody sees."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from test_console import CONFIG, KEYS, Person, browse, chat, chunks

from harness import serving

MORE = """
[[teams]]
id = "in-the-file"

[[models]]
name = "careful"
to = [{ provider = "strict", model = "strict-model" }]
price = { input = 100, output = 200 }

[[limits]]
id = "shared"
by = "team"
requests_per_day = 10
"""


class Strict(BaseHTTPRequestHandler):
    """A provider that knows `max_completion_tokens` alone, and whose events have another form than the gateway's: no blank, CRLF."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "max_tokens" in body:
            said = {
                "message": "Unsupported parameter: 'max_tokens'.",
                "type": "invalid_request_error",
                "param": "max_tokens",
            }
            self.answer(400, "application/json", json.dumps({"error": said}))
            return
        self.server.bodies.append(body)
        if not body.get("stream"):
            said = {"role": "assistant", "content": "Good day."}
            whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "strict-model"}
            whole["choices"] = [{"index": 0, "message": said, "finish_reason": "stop"}]
            whole["usage"] = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
            self.answer(200, "application/json", json.dumps(whole))
            return
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "strict-model"}
        choices = [
            {"index": 0, "delta": {"role": "assistant", "content": "Good day."}, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        ]
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        events = [{**head, "choices": [choice]} for choice in choices] + [{**head, "choices": [], "usage": usage}]
        text = "".join(f"data:{json.dumps(event)}\r\n\r\n" for event in events)
        self.answer(200, "text/event-stream", text + "data:[DONE]\r\n\r\n")

    def answer(self, status: int, kind: str, text: str):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextmanager
def strict_provider() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Strict)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def console(folder) -> Iterator[tuple]:
    """A gateway whose models are a strict provider's, and that provider."""
    with strict_provider() as server:
        provider = f"""
[[providers]]
id = "strict"
protocol = "azure"
api_version = "2024-10-21"
base_url = "http://127.0.0.1:{server.server_port}"
key_env = "STRICT_KEY"
models = ["strict-model"]
"""
        config = CONFIG + provider + MORE
        with serving(folder, workers=0, config=config, env={"STRICT_KEY": "sk-strict"}) as gateway:
            yield gateway, server


def test_the_playground_asks_every_provider_in_its_own_words(tmp_path):
    """The page writes `max_tokens`; a provider that refuses it gets the name that it knows, and the page reads the answer in one form."""
    with console(tmp_path) as (gateway, server):
        answer = Person(gateway, "operator").ask("POST", "/playground", chat("Hello", model="strict-model"))
        assert answer.status_code == 200, answer.text
        said = [chunk["choices"][0]["delta"].get("content") for chunk in chunks(answer.text) if chunk["choices"]]
        assert "".join(filter(None, said)) == "Good day." and "\r" not in answer.text and "data: [DONE]" in answer.text
        (body,) = server.bodies
        assert body["max_completion_tokens"] == 8 and "max_tokens" not in body


def test_the_config_says_whether_changes_reach_its_file(tmp_path):
    for writes in (False, True):
        text = CONFIG + f"\n[server]\nconfig_writes = {str(writes).lower()}\n"
        with serving(tmp_path / str(writes), workers=0, config=text) as gateway:
            assert Person(gateway, "viewer").ask("GET", "/config").json()["writes"] is writes


def test_the_console_loses_nothing_at_its_edges(tmp_path):
    """The pages in Chromium, with answers of the admin API that fail, come page by page, or are of another day."""
    with console(tmp_path) as (gateway, _):
        owner = Person(gateway, "owner")
        wish = {"name": "edge", "team": "in-the-file", "limits": ["shared"], "expires": int(time.time()) + 12 * 3600}
        made = owner.ask("POST", "/keys", wish)
        assert made.status_code == 201, made.text
        asked = gateway.client(api_key=made.json()["secret"], max_retries=0).chat.completions.create(
            model="careful", messages=[{"role": "user", "content": "Hello"}]
        )
        assert asked.choices[0].message.content == "Good day."
        told = {
            "url": (gateway.state / "admin.url").read_text().split()[0],
            "key": KEYS["owner"],
            "id": made.json()["key"]["id"],
            "expires": wish["expires"],
            "shots": os.environ.get("PENSTOCK_SHOTS", ""),
        }
        found = browse("console_edges.mjs", told, 240)
        assert found["limits"] == 3, (
            "the budget of a key that was not issued is gone, that of the one that was is there"
        )
        assert " panicked" not in gateway.log()
