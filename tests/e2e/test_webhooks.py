"""Webhooks of the real binary: a local receiver fails twice, then takes the message, and checks its signature."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
from test_admin import Api

from harness import binary, serving, user, wait_until
from providers import OpenAi

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

CONFIG = """
[[webhooks]]
name = "ops"
url = "{url}/hook?from=penstock"
secret_env = "HOOK_SECRET"
events = ["budget.threshold", "key.expiring"]
expiring_days = 30
budget_percent = 1

[[keys]]
id = "search"
key_env = "SEARCH_KEY"
limits = ["budget"]
{expires}

[[limits]]
id = "budget"
usd_per_day = 0.02

[[providers]]
id = "acme"
base_url = "{upstream}/v1"
key_env = "UPSTREAM_KEY"

[[models]]
name = "dear"
to = [{{ provider = "acme", model = "mock-model" }}]
price = {{ input = 100, output = 100 }}
"""


class Receiver:
    """An HTTP server that answers its first requests with these statuses, and 204 from then on."""

    def __init__(self, *statuses: int):
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        waiting, seen = list(statuses), self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(waiting.pop(0) if waiting else 204)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> Receiver:
        self.thread.start()
        return self

    def __exit__(self, *_args) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def events(self, kind: str) -> list[dict]:
        return [told for told in (json.loads(body) for _, _, body in list(self.seen)) if told["type"] == kind]


def check_signature(headers: dict[str, str], body: bytes) -> None:
    """As a receiver does it by the text of Standard Webhooks."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    made = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{made}"


def test_a_budget_is_told_signed_and_again_until_it_is_taken(tmp_path):
    # A redirect is followed nowhere.
    with Receiver(500, 302) as receiver, OpenAi() as upstream:
        config = CONFIG.format(url=receiver.url, upstream=upstream.url, expires="")
        env = {"HOOK_SECRET": SECRET, "SEARCH_KEY": "sk-search", "UPSTREAM_KEY": upstream.key}
        with serving(tmp_path, workers=0, config=config, env=env) as gateway:
            client = gateway.client(api_key="sk-search", max_retries=0)
            client.chat.completions.create(model="dear", messages=user("Hello"), max_tokens=1)
            api = Api(gateway)

            def counted() -> bool:
                lines = api.client.get("/admin/v1/metrics").raise_for_status().text.splitlines()
                return any(
                    line.startswith("penstock_webhook_messages_total{") and 'outcome="sent"' in line for line in lines
                )

            wait_until(counted, "a message is sent")
            first, second, third = receiver.seen[:3]
            for path, headers, body in (first, second, third):
                assert path == "/hook?from=penstock" and headers["content-type"] == "application/json"
                check_signature(headers, body)
            assert first[1]["webhook-id"] == second[1]["webhook-id"] == third[1]["webhook-id"]
            assert first[2] == second[2] == third[2]
            told = json.loads(first[2])
            assert told["type"] == "budget.threshold" and told["data"]["limit"] == "budget", told
            assert (told["data"]["subject"], told["data"]["state"]) == ("search", "firing"), told
            text = gateway.log()
            assert SECRET not in text and "from=penstock" not in text and "sk-search" not in str(receiver.seen)


def test_an_expiring_key_is_told_once_and_a_place_that_does_not_answer_harms_nobody(tmp_path):
    with Receiver() as receiver, OpenAi() as upstream:
        soon = (datetime.now(UTC) + timedelta(days=3)).strftime("%Y-%m-%dT%H:%M:%SZ")
        config = CONFIG.format(url=receiver.url, upstream=upstream.url, expires=f"expires = {soon}")
        config += '[[webhooks]]\nname = "gone"\nurl = "http://127.0.0.1:1/x"\nsecret_env = "HOOK_SECRET"\n'
        env = {"HOOK_SECRET": SECRET, "SEARCH_KEY": "sk-search", "UPSTREAM_KEY": upstream.key}
        with serving(tmp_path, workers=0, config=config, env=env) as gateway:
            wait_until(lambda: receiver.events("key.expiring"), "the key is told")
            client = gateway.client(api_key="sk-search", max_retries=0)
            client.chat.completions.create(model="dear", messages=user("Hello"), max_tokens=1)
            wait_until(lambda: receiver.events("budget.threshold"), "later looks are told")
            assert [told["data"]["key"] for told in receiver.events("key.expiring")] == ["search"]
            assert httpx.get(f"{gateway.url}/ready", timeout=30).status_code == 200


def test_a_check_refuses_what_could_not_be_sent(tmp_path):
    file = tmp_path / "penstock.toml"
    file.write_text('[[webhooks]]\nname = "a"\nurl = "http://hooks.example/x"\nsecret_env = "HOOK_UNSET"\n')
    command = [str(binary()), "check", "--config", str(file), "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout
    assert "must be https://" in done.stderr and "HOOK_UNSET is not set" in done.stderr, done.stderr
