"""What a client says beside its body: how long it waits, and which conversation a request belongs to. Two workers with one place each."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import time

import httpx
import pytest

from harness import Gateway, promised, serving, wait_until

CONFIG = """
[[pools]]
id = "chat"
policy = "session"
sequences_max = 1
explain = true
"""

# One for all: making one takes as long as an answer on a busy machine.
CLIENT = httpx.Client(timeout=60)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("patience"), config=CONFIG, workers=2) as gateway:
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers", 90)
        # So long that somebody who waits for a place waits longer than a moment, on a machine of any speed.
        for number in range(4):
            complete(gateway, f"{number} times upon a time", 200)
        yield gateway


def complete(gateway: Gateway, prompt: str, tokens: int = 2, headers: dict | None = None, **fields) -> httpx.Response:
    body = {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
    return CLIENT.post(f"{gateway.url}/v1/completions", json=body, headers=headers or {})


def worker(answer: httpx.Response) -> str:
    return answer.raise_for_status().headers["x-penstock-route"].split()[0]


def where(gateway: Gateway, prompt: str, headers: dict | None = None, **fields) -> str:
    return worker(complete(gateway, prompt, headers={"x-penstock-route": "explain", **(headers or {})}, **fields))


def test_a_conversation_stays_at_its_worker(served: Gateway):
    """By header, by prompt_cache_key, by user; many conversations use all workers."""
    named = [
        lambda name: {"headers": {"x-session-id": name}},
        lambda name: {"prompt_cache_key": name},
        lambda name: {"user": name},
    ]
    for how in named:
        homes = {name: where(served, f"{name} begins", **how(name)) for name in map(str, range(8))}
        assert len(set(homes.values())) == 2, homes
        for name, home in homes.items():
            assert where(served, f"something else for {name}", **how(name)) == home


def test_the_header_wins_over_the_body(served: Gateway):
    """So that a proxy can say it for clients that say something else."""
    for name in map(str, range(6)):
        home = where(served, "a", headers={"x-session-id": name})
        assert where(served, "b", headers={"x-session-id": name}, prompt_cache_key="other", user="third") == home


def test_a_chat_has_a_conversation_too(served: Gateway):
    """Chat completions and responses read the same fields."""
    chat = {
        "model": "chat",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "prompt_cache_key": "one",
    }
    reply = {"model": "chat", "input": "Hi", "max_output_tokens": 2, "prompt_cache_key": "one", "store": False}
    home = where(served, "a", prompt_cache_key="one")
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", reply)):
        answer = httpx.post(f"{served.url}{path}", json=body, headers={"x-penstock-route": "explain"}, timeout=60)
        assert worker(answer) == home


def test_what_is_no_time_is_refused(served: Gateway):
    """The client meant something: better to say that it was not understood."""
    for text in ("soon", "0", "-5"):
        answer = complete(served, "a", headers={"x-request-timeout-ms": text})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-request-timeout-ms", answer.text
    assert complete(served, "a", headers={"x-request-timeout-ms": "30000"}).status_code == 200


@contextlib.contextmanager
def busy(gateway: Gateway):
    """Twelve long answers at two places: nobody else has one, and those who have time are all answered."""
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        patient = [pool.submit(complete, gateway, f"long {name}", 700, user=name) for name in "abcdefghijkl"]
        wait_until(lambda: gateway.metric("penstock_queue_waiting") >= 4, "workers are busy")
        yield
        assert [answer.result().status_code for answer in patient] == [200] * 12


def test_who_would_wait_longer_than_he_says_is_told_at_once(served: Gateway):
    """503 with Retry-After, before anything is computed, while those with more patience wait and are answered."""

    def told_after() -> float:
        with busy(served):
            began = time.monotonic()
            answer = complete(served, "me too", headers={"x-request-timeout-ms": "20"})
            took = time.monotonic() - began
        if answer.status_code in (200, 504):
            # Where this process stood still for seconds, they have been answered meanwhile; and how long they take is learnt from them.
            return math.inf
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1, answer.text
        assert answer.json()["error"]["code"] == "overloaded"
        return took

    promised(2, told_after)
    served.idle()


def test_time_that_is_over_ends_an_answer_and_frees_its_worker(served: Gateway):
    """A running answer too."""
    answer = complete(served, "a very long one", tokens=8000, headers={"x-request-timeout-ms": "250"})
    assert answer.status_code == 504, answer.text
    served.idle()
    assert complete(served, "the next").status_code == 200
