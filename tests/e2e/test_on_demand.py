"""Models on demand: loaded by the first request, stopped when nobody asks, several of them on one machine."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from test_reload import reload

from harness import DEMO_MODEL, serving, user, wait_until

CONFIG = f"""
[server]
unix = "{{unix}}"

[[pools]]
id = "first"
model = "{DEMO_MODEL}"
on_demand = true
keep_alive = "{{keep_alive}}"
threads = 1

[[pools]]
id = "second"
model = "{DEMO_MODEL}"
on_demand = true
keep_alive = "-1"
threads = 1
"""


@pytest.fixture
def run(tmp_path):
    def start(keep_alive):
        config = CONFIG.format(unix=tmp_path / "http.sock", keep_alive=keep_alive)
        return serving(tmp_path, workers=0, config=config)

    return start


def loaded(gateway):
    return [model["name"] for model in httpx.get(f"{gateway.url}/api/ps").raise_for_status().json()["models"]]


def ask(gateway, model, **more):
    return gateway.client().chat.completions.create(
        model=model, messages=user("What is the capital of France?"), max_tokens=8, temperature=0, **more
    )


def test_a_model_is_loaded_by_its_first_request_and_stopped_when_nobody_asks(run):
    with run("1s") as gateway:
        assert gateway.worker_pids() == [] and loaded(gateway) == [], "ready, and nothing runs"
        assert [model.id for model in gateway.client().models.list().data] == ["first", "second"]
        said = ask(gateway, "first").choices[0].message.content
        assert said
        assert len(gateway.worker_pids()) == 1, "the other model is not loaded"
        wait_until(lambda: loaded(gateway) == [] and gateway.worker_pids() == [], "the worker is stopped")
        assert httpx.get(f"{gateway.url}/ready").status_code == 200
        # The second load: a stream, whose request waits in the queue.
        parts = [chunk.choices[0].delta.content or "" for chunk in ask(gateway, "first", stream=True) if chunk.choices]
        assert "".join(parts) == said
        ask(gateway, "second")
        assert "second" in loaded(gateway)
        wait_until(lambda: loaded(gateway) == ["second"], "the first is stopped, the other stays")
        # A stop counts when the process has ended, a moment after the worker is no longer listed.
        wait_until(lambda: gateway.metric("penstock_replica_changes_total") >= 5, "three starts and two stops")
        assert "panicked" not in gateway.log()


def test_many_requests_wait_for_one_load(run):
    with run("0") as gateway, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ask(gateway, "first").choices[0].message.content, range(12)))
        assert len(set(answers)) == 1 and answers[0]
        wait_until(lambda: gateway.worker_pids() == [], "at once after the answer")
        # Requests that come while the worker leaves: none fails.
        for _ in range(5):
            assert ask(gateway, "first").choices[0].message.content == answers[0]


def test_garbage_loads_nothing_and_a_client_that_leaves_ends_the_wait(run):
    with run("0") as gateway:
        refused = httpx.post(f"{gateway.url}/v1/chat/completions", json={"model": "first", "messages": "x"})
        assert refused.status_code == 400
        assert gateway.worker_pids() == []
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": "first", "messages": user("Hello"), "max_tokens": 4000, "ignore_eos": True}
            httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=0.05)
        wait_until(lambda: gateway.worker_pids() == [], "nobody asks any more")


def test_a_reload_keeps_what_is_loaded_and_changes_how_long(run, tmp_path):
    with run("-1") as gateway:
        said = ask(gateway, "first").choices[0].message.content
        pids = gateway.worker_pids()
        reload(gateway, CONFIG.format(unix=tmp_path / "http.sock", keep_alive="1h"))
        assert ask(gateway, "first").choices[0].message.content == said
        assert gateway.worker_pids() == pids, "the worker was taken over"
        reload(gateway, CONFIG.format(unix=tmp_path / "http.sock", keep_alive="1s"))
        wait_until(lambda: gateway.worker_pids() == [], "the new time holds")
        assert ask(gateway, "first").choices[0].message.content == said


def test_a_model_that_cannot_be_loaded_says_so(run):
    with run("5s") as gateway:
        # Every worker is killed as soon as it is there.
        over = threading.Event()

        def kill():
            while not over.is_set():
                for pid in gateway.worker_pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with pytest.raises(openai.InternalServerError) as failed:
                ask(gateway, "first")
            assert failed.value.status_code == 503 and "SIGKILL" in str(failed.value)
        finally:
            over.set()
            killer.join()
        wait_until(lambda: httpx.get(f"{gateway.url}/ready").status_code == 200, "it takes requests again")
        assert ask(gateway, "first").choices[0].message.content
