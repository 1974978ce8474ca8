"""A worker is drained by the admin API while it answers: the answer moves to another worker with its keys and values, and nobody notices."""

from __future__ import annotations

import json
import threading
import time

import httpx
from test_admin import Api, admin

from harness import Gateway, serving, user, wait_until

TOKENS = 1200


def ask(gateway: Gateway, **more) -> dict:
    words = " ".join(f"word{number}" for number in range(120))
    return {
        "model": gateway.model(),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": 11,
        "messages": user(f"Say something long about {words}."),
    } | more


class Stream(threading.Thread):
    """Reads one answer: the text of each choice, and when its pieces came."""

    def __init__(self, gateway: Gateway, body: dict):
        super().__init__()
        self.gateway, self.body = gateway, body
        self.texts: dict[int, str] = {}
        self.came: list[float] = []
        self.usage: dict | None = None
        self.is_whole = False
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self.gateway.url}/v1/chat/completions", json=self.body, timeout=120) as answer:
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
            if text:
                self.came.append(time.monotonic())

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
        for moves, kind in enumerate(({"temperature": 0}, {"temperature": 1}, {"temperature": 0.8, "n": 2}), 1):
            undisturbed = Stream(gateway, ask(gateway, **kind)).end()
            stream = Stream(gateway, ask(gateway, **kind))
            wait_until(lambda stream=stream: len(stream.came) > 40, "it has begun", 60)
            left = wait_until(lambda: busy(api), "somebody answers", 10)
            drained = time.monotonic()
            admin(gateway, "workers", "drain", left)
            wait_until(lambda left=left: api.get(f"/workers/{left}")["requests"] == 0, "it has left", 30)
            moved_after = time.monotonic() - drained
            stream.end()
            assert stream.came[-1] > drained, "it was drained while it answered"
            assert stream.texts == undisturbed.texts, kind
            assert stream.usage["completion_tokens"] == undisturbed.usage["completion_tokens"]
            metrics = gateway.metrics()
            assert (metrics["penstock_moves_total"], metrics["penstock_resumes_total"]) == (moves, 0)
            assert metrics["penstock_moved_blocks_total"] > 0, "keys and values came with it"
            pauses = [after - before for before, after in zip(stream.came, stream.came[1:], strict=False)]
            usual = sorted(pauses)[len(pauses) // 2]
            gap = metrics["penstock_worker_gap_seconds_sum"]
            print(
                f"{kind}: left {moved_after * 1e3:.0f} ms after the drain; sum of gaps so far {gap * 1e3:.1f} ms; "
                f"longest pause of the client {max(pauses) * 1e3:.0f} ms, usual {usual * 1e3:.1f} ms"
            )
            assert gap < 5 * moves, "a step and a pull, not a prefill or a time-out"
            admin(gateway, "workers", "resume", left)
            wait_until(lambda left=left: api.get(f"/workers/{left}")["phase"] == "ready", "it is used again", 30)
        gateway.idle()
