"""Which worker of a pool gets a request, and why: the header, the admin API, the command line, against the real binary with two workers."""

from __future__ import annotations

import json
import subprocess

import httpx
import pytest
from test_admin import Api, admin
from test_terminal import Terminal

from harness import Gateway, binary, serving, wait_until

CONFIG = """
[[pools]]
id = "chat"
explain = true
slo = { ttft_ms = 5000, tpot_ms = 500 }
"""

PROMPT = "The quick brown fox jumps over the lazy dog. " * 30


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("route")
    with serving(folder, config=f'{CONFIG}record = "{folder}/decisions.jsonl"\n', workers=2) as gateway:
        # Enough prompts for a worker's speed to be known: then its equals are taken to be as fast.
        for number in range(80):
            complete(gateway, f"{number} times upon a time", tokens=4)
        yield gateway


def complete(gateway: Gateway, prompt: str, tokens: int = 2, **headers: str) -> httpx.Response:
    body = {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()


def test_a_request_is_told_why_it_went_where_it_went(served: Gateway):
    """Only when it asks; the second time because its prefix is there."""
    explain = {"x-penstock-route": "explain"}
    first = complete(served, PROMPT, **explain).headers["x-penstock-route"]
    assert "policy=cache_aware" in first and first.startswith("worker=chat-"), first
    again = complete(served, PROMPT + "And again.", **explain).headers["x-penstock-route"]
    assert "why=cached" in again, again
    assert again.split()[0] == first.split()[0], "it goes where its prefix is"
    assert "x-penstock-route" not in complete(served, PROMPT).headers


def test_decisions_are_seen_and_asked_for(served: Gateway):
    """What was decided, and what would be."""
    complete(served, PROMPT)
    api = Api(served)
    made = api.get("/pools/chat/decisions?limit=3")["data"]
    assert made and len(made[0]["candidates"]) == 2, made
    last = made[0]
    assert {"queue", "own", "later", "harm", "decode", "pressure"} <= set(last["candidates"][0]["parts_seconds"])
    warm = [c["worker"] for c in last["candidates"] if c["found_tokens"]["device"] + c["found_tokens"]["promised"] > 0]
    assert last["worker"] in warm
    path = "/admin/v1/pools/chat/explain"
    asked = api.client.post(path, json={"prompt": PROMPT}).raise_for_status().json()
    assert (asked["worker"], asked["why"]) == (last["worker"], "cached")
    assert api.client.post(path, json={}).status_code == 400
    assert api.client.post("/admin/v1/pools/none/explain", json={"tokens": [1]}).status_code == 404
    assert last["worker"] in admin(served, "decisions", "chat")
    command = [str(binary()), "explain", "--state-dir", str(served.state), "--json", "chat", PROMPT]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["worker"] == last["worker"]
    shown = admin(served, "explain", "chat", PROMPT)
    assert shown.startswith(last["worker"]) and "pressure" in shown and "\u2588" not in shown, shown


def test_a_choice_is_drawn_on_a_terminal_and_on_a_page(served: Gateway, tmp_path):
    complete(served, PROMPT)
    page = tmp_path / "why.html"
    command = ["explain", "--state-dir", str(served.state), "chat", PROMPT, "--html", str(page)]
    terminal = Terminal(tmp_path, str(binary()), *command)
    try:
        assert "pressure" in terminal.sees("predicted cost in seconds, by worker")
        terminal.sees("\u2588" * 40)
        terminal.sees(f"page: {page}")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
    asked = json.loads(admin(served, "explain", "chat", PROMPT, "--json", "--html", str(page)))
    text = page.read_text()
    assert all(f">{one['worker']}<" in text for one in asked["candidates"]) and "fox" not in text, text
    assert f"<td>{asked['worker']}</td>" in text and f"<td>{asked['prompt_tokens']}</td>" in text, text
    assert not any(part in text for part in ("<script", "http://", "https://", "src=", "href=")), text
    assert "cannot be written" in admin(served, "explain", "chat", "x", "--html", str(tmp_path), check=False)


def test_predictions_are_measured(served: Gateway):
    """Predicted against real first tokens, and what decisions cost."""
    before = served.metric("penstock_router_first_tokens_total")
    complete(served, "Once.")
    wait_until(lambda: served.metric("penstock_router_first_tokens_total") > before, "the first token is counted")
    assert served.metric("penstock_router_decision_seconds_total") > 0
    assert served.metric("penstock_router_ttft_predicted_seconds_total") > 0


def test_what_was_decided_is_judged(served: Gateway):
    """What a pool records is played again by its own workers: as decided, and with other weights."""
    complete(served, PROMPT, tokens=8)
    record = served.folder / "decisions.jsonl"
    wait_until(lambda: len(record.read_text().splitlines()) > 80, "decisions are written down")
    last = json.loads(record.read_text().splitlines()[-1])
    # What a prefill of the prompt takes, of which any term may be 0: steps on a busy machine say little about one alone.
    base, token, context, *decodes = last["speed"]
    prompt = last["input_length"]
    assert base + prompt * token + prompt**2 * context > 0 and len(decodes) == 2 and min(last["speed"]) >= 0, last
    assert last["kv_tokens"] > 0 and len(last["candidates"]) == 2, last
    command = [str(binary()), "simulate", "--replay", str(record)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert "engines: 2" in done and "| as decided |" in done and "| own doubled |" in done, done
    assert "TTFT as recorded" in done and "regret: " in done, done


def test_a_cache_key_has_a_home_where_prefixes_do_not_decide(served: Gateway):
    """Prompts without a common block go to one worker for each key; without a key they are spread."""

    def worker(number: int, **fields) -> str:
        words = f"{number} {fields.get('prompt_cache_key', '')} ships sail."
        body = {"model": "chat", "messages": [{"role": "user", "content": words}], "max_tokens": 1, **fields}
        headers = {"x-penstock-route": "explain"}
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        return reply.raise_for_status().headers["x-penstock-route"].split()[0]

    def homes(key: str) -> set[str]:
        return {worker(number, prompt_cache_key=key) for number in range(4)}

    def settled() -> set[str] | None:
        keys = [homes(key) for key in ("a", "b", "c", "d", "e", "f", "g", "h")]
        return set().union(*keys) if all(len(found) == 1 for found in keys) else None

    served.idle()
    # A worker that seems much slower for a moment is left out for that long.
    assert len(wait_until(settled, "each key has one worker")) == 2, "keys are spread over the workers"
