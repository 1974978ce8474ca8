"""What a browser can send to a gateway as it starts by default, and what a page may do once the config lists its origin."""

from __future__ import annotations

import json
import subprocess

import httpx
import pytest

from harness import Gateway, serving

ASK = json.dumps({"model": "penstock-demo", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]})
APP = "https://app.example"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    config = f'[cors]\norigins = ["{APP}"]\n'
    with serving(tmp_path_factory.mktemp("browsers"), config=config) as running:
        yield running


def chat(gateway: Gateway, **headers: str) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/chat/completions", content=ASK, headers=headers, timeout=60)


def test_the_first_command_of_the_guide_works(gateway):
    command = ["curl", "-sS", f"{gateway.url}/v1/chat/completions", "-d", ASK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"], done.stdout


def test_a_rebound_name_reads_nothing(gateway):
    for path in ["/v1/models", "/metrics", "/health", "/v1/files", "/v1/responses/resp_1", "/status", "/nothing"]:
        answer = httpx.get(gateway.url + path, headers={"Host": "evil.test"})
        assert answer.status_code == 403, path
        assert "server.hosts" in answer.json()["error"]["message"]
    assert httpx.get(f"{gateway.url}/v1/models", headers={"Host": "localhost:1"}).status_code == 200
    assert gateway.metric("penstock_pages_refused_total") >= 7


def test_a_foreign_page_sends_nothing_without_a_preflight(gateway):
    for headers in [
        {"Origin": "https://evil.test"},
        {"Origin": "null", "Content-Type": "text/plain;charset=UTF-8"},
        {"Sec-Fetch-Site": "cross-site", "Content-Type": "application/x-www-form-urlencoded"},
    ]:
        answer = chat(gateway, **headers)
        assert answer.status_code == 403, headers
        assert "access-control-allow-origin" not in answer.headers
    upload = httpx.post(
        f"{gateway.url}/v1/files",
        data={"purpose": "batch"},
        files={"file": ("f.jsonl", b"{}\n")},
        headers={"Origin": "https://evil.test"},
    )
    assert upload.status_code == 403
    asked = {"Origin": "https://evil.test", "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{gateway.url}/v1/chat/completions", headers=asked)
    assert preflight.status_code == 403
    assert "access-control-allow-origin" not in preflight.headers


def test_a_listed_page_may_do_what_an_sdk_does(gateway):
    asked = {
        "Origin": APP,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os,x-stainless-retry-count",
    }
    preflight = httpx.options(f"{gateway.url}/v1/chat/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == APP
    assert set(preflight.headers["access-control-allow-headers"].split(", ")) == set(
        asked["Access-Control-Request-Headers"].split(",")
    )
    answer = chat(gateway, Origin=APP, **{"Sec-Fetch-Site": "cross-site", "Content-Type": "application/json"})
    wrong = chat(gateway, Origin=APP, **{"Content-Type": "text/html"})
    assert (answer.status_code, wrong.status_code) == (200, 415)
    for reply in [answer, wrong]:
        assert reply.headers["access-control-allow-origin"] == APP
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert reply.headers["vary"].lower() == "origin"
