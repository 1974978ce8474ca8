"""A worker is drained by the admin API while it answers: the answer moves to another worker with its keys and values, and nobody notices."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
import jsonschema
from test_admin import Api, admin

import harness
from harness import Gateway, user, wait_until

# With their alternatives, more than the socket between and the worker's token window hold: while a client does not
# read, its answer does not end, on a machine of any speed.
TOKENS = 1200
HELD_AFTER = 40


ITEM = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 0, "maximum": 99999},
        "kind": {"enum": ["a rather long kind", "another kind", "none"]},
        "word": {"type": "string", "maxLength": 8},
    },
    "required": ["number", "kind", "word"],
    "additionalProperties": False,
}
# Reasoning that its budget closes, and behind it a form with forced parts and free ones.
GUIDED = {
    "temperature": 1,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "array", "items": ITEM, "minItems": 35, "maxItems": 35}},
    },
    "chat_template_kwargs": {"enable_thinking": True},
    "thinking_token_budget": 25,
}


def unix_socket(folder: Path) -> Path:
    return folder / "http.sock"


def serving(folder: Path, **options):
    """A gateway that listens on a Unix socket too."""
    return harness.serving(folder, config=f'[server]\nunix = "{unix_socket(folder)}"\n', **options)


def ask(gateway: Gateway, **more) -> dict:
    words = " ".join(f"word{number}" for number in range(120))
    return {
        "model": gateway.model(),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "seed": 11,
        "messages": user(f"Say something long about {words}."),
    } | more


class Stream(threading.Thread):
    """Reads one answer: the text of each choice. A held one waits after some pieces."""

    def __init__(self, gateway: Gateway, body: dict, held: bool = False):
        super().__init__()
        self.gateway, self.body = gateway, body
        self.begun, self.goes_on = threading.Event(), threading.Event()
        if not held:
            self.goes_on.set()
        self.texts: dict[int, str] = {}
        self.pieces = 0
        self.usage: dict | None = None
        self.is_whole = False
        self.start()

    def run(self) -> None:
        transport = httpx.HTTPTransport(uds=str(unix_socket(self.gateway.folder)))
        with (
            httpx.Client(transport=transport, timeout=120) as http,
            http.stream("POST", f"{self.gateway.url}/v1/chat/completions", json=self.body) as answer,
        ):
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.is_whole = True
                elif line.startswith("data: "):
                    self.take(json.loads(line.removeprefix("data: ")))

    def take(self, chunk: dict) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + text
            self.pieces += bool(text)
        if self.pieces == HELD_AFTER:
            self.begun.set()
            assert self.goes_on.wait(60), "it was never let go on"

    def end(self) -> Stream:
        self.join(120)
        assert self.is_whole, f"{self.texts}\n{self.gateway.log()[-3000:]}"
        return self


def busy(api: Api) -> str | None:
    """The worker that has the request."""
    return next((worker["name"] for worker in api.get("/workers")["data"] if worker["requests"]), None)


def test_a_drained_worker_hands_its_streams_over(tmp_path):
    with serving(tmp_path, workers=2) as gateway:
        api = Api(gateway)
        wait_until(lambda: all(worker["phase"] == "ready" for worker in api.get("/workers")["data"]), "both", 90)
        kinds = ({"temperature": 0}, {"temperature": 1}, {"temperature": 0.8, "n": 2}, GUIDED, GUIDED | {"n": 2})
        for moves, kind in enumerate(kinds, 1):
            undisturbed = Stream(gateway, ask(gateway, **kind)).end()
            # What is said of workers is some 200 ms old.
            wait_until(lambda: not busy(api), "it is known to have ended", 10)
            stream = Stream(gateway, ask(gateway, **kind), held=True)
            assert stream.begun.wait(60), "it has begun"
            left = wait_until(lambda: busy(api), "somebody answers", 10)
            drained = time.monotonic()
            api.post(f"/workers/{left}/drain")
            wait_until(lambda left=left: api.get(f"/workers/{left}")["requests"] == 0, "it has left", 30)
            moved = time.monotonic()
            stream.goes_on.set()
            stream.end()
            assert stream.texts == undisturbed.texts, kind
            assert stream.usage["completion_tokens"] == undisturbed.usage["completion_tokens"]
            if "response_format" in kind:
                for text in stream.texts.values():
                    items = json.loads(text)
                    jsonschema.validate(items, kind["response_format"]["json_schema"]["schema"])
                    assert len(items) == 35
            metrics = gateway.metrics()
            assert (metrics["penstock_moves_total"], metrics["penstock_resumes_total"]) == (moves, 0)
            assert metrics["penstock_moved_blocks_total"] > 0, "keys and values came with it"
            gap = metrics["penstock_worker_gap_seconds_sum"]
            print(f"{kind}: left {(moved - drained) * 1e3:.0f} ms after the drain; gaps so far {gap * 1e3:.1f} ms")
            assert gap < 5 * moves, "a step and a pull, not a prefill or a time-out"
            admin(gateway, "workers", "resume", left)
            wait_until(lambda left=left: api.get(f"/workers/{left}")["phase"] == "ready", "it is used again", 30)
        gateway.idle()
