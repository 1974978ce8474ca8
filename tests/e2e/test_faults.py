"""Workers die; clients do not notice, or are told."""

import contextlib
import os
import signal
import threading
from pathlib import Path

import openai
import pytest

import harness
from harness import HOLDS, held, holding, text_of, user, wait_until

STORY = {"messages": user("Count from 1 to 30."), "max_tokens": 400, "extra_body": {"ignore_eos": True}}

# An answer of a form, with parts that the form alone decides and parts that the model does.
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
ITEMS = {"type": "array", "items": ITEM, "minItems": 40, "maxItems": 40}
GUIDED = {"response_format": {"type": "json_schema", "json_schema": {"name": "items", "schema": ITEMS}}}
KINDS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.1, "seed": 42},
    "guided": {"temperature": 1, "seed": 42} | GUIDED,
}


def serving(folder: Path, **options):
    """A gateway whose streams can be held."""
    return harness.serving(folder, config=f"[server]\n{holding(folder)}", **options)


def undisturbed(gateway, model, **options) -> str:
    return text_of(gateway.client().chat.completions.create(model=model, stream=True, **STORY, **HOLDS, **options))


def disturbed(gateway, model, disturb, **options) -> str:
    """The same stream, held; `disturb` is called once, after its first pieces."""
    text = ""
    with held(gateway, model=model, **STORY, **options) as stream:
        for number, chunk in enumerate(stream):
            text += text_of([chunk])
            if number == 5:
                disturb()
    return text


def cpu_nanoseconds(pid: int) -> int:
    """What all threads of a process have computed so far."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(path.read_text().split()[0])
    return total


class Busy:
    """Tells which worker computes: the one whose CPU time has grown most since this object was made."""

    def __init__(self, gateway):
        self.gateway = gateway
        self.before = {pid: cpu_nanoseconds(pid) for pid in gateway.worker_pids()}
        assert self.before, "there are no workers"

    def stop(self) -> int:
        """Freezes the busy worker at once, so that nothing ends in the meantime; its sequence still runs. Its pid."""
        grown = {pid: cpu_nanoseconds(pid) - before for pid, before in self.before.items()}
        pid = max(grown, key=grown.get)
        os.kill(pid, signal.SIGSTOP)
        # One is the scrape itself.
        assert self.gateway.metric("penstock_requests_in_flight") >= 2, "the stream ended before its worker was stopped"
        return pid

    def kill(self) -> None:
        """Kills the busy worker while its sequence runs."""
        os.kill(self.stop(), signal.SIGKILL)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A gateway with two workers."""
    with serving(tmp_path_factory.mktemp("pair"), workers=2) as gateway:
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers are ready", 90)
        yield gateway


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_is_not_noticed(pair, kind):
    model, options = pair.model(), KINDS[kind]
    want = undisturbed(pair, model, **options)
    deaths = pair.metric("penstock_worker_deaths_total")
    resumes = pair.metric("penstock_resumes_total")
    got = disturbed(pair, model, Busy(pair).kill, **options)
    assert got == want
    assert (kind == "guided") == got.startswith('[{"number":')
    wait_until(lambda: pair.metric("penstock_resumes_total") > resumes, "the stream went on elsewhere")
    assert pair.metric("penstock_worker_deaths_total") == deaths + 1
    assert pair.metric("penstock_resumes_total") == resumes + 1
    assert pair.metric("penstock_resumes_inexact_total") == 0
    wait_until(lambda: pair.metric("penstock_workers_ready") == 2, "the dead worker is replaced", 90)


def test_a_stopped_worker_is_left(pair):
    """SIGSTOP: it neither speaks nor dies. Its stream goes on at the other one."""
    model = pair.model()
    want = undisturbed(pair, model, temperature=0)
    busy = Busy(pair)
    stopped = []

    def stop():
        stopped.append(busy.stop())

    try:
        assert disturbed(pair, model, stop, temperature=0) == want
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    wait_until(lambda: pair.metric("penstock_workers_ready") == 2, "two workers are ready again", 90)
    assert undisturbed(pair, model, temperature=0) == want


def test_many_streams_survive_a_killed_worker(pair):
    model = pair.model()
    want = undisturbed(pair, model, temperature=0)
    resumes = pair.metric("penstock_resumes_total")
    results = [None] * 8
    # All have begun and none reads on while the worker is killed.
    begun = threading.Barrier(len(results), action=Busy(pair).kill, timeout=120)

    def one(index):
        results[index] = disturbed(pair, model, begun.wait, temperature=0)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert results == [want] * len(results)
    wait_until(lambda: pair.metric("penstock_resumes_total") > resumes, "a stream went on elsewhere")
    wait_until(lambda: pair.metric("penstock_workers_ready") == 2, "the dead worker is replaced", 90)


def test_the_only_worker_killed(tmp_path):
    """It is started again and the stream goes on, or the stream ends in an error; never as if it were complete."""
    with serving(tmp_path) as gateway:
        model = gateway.model()
        want = undisturbed(gateway, model, temperature=0)
        (worker,) = gateway.worker_pids()
        try:
            assert disturbed(gateway, model, lambda: os.kill(worker, signal.SIGKILL), temperature=0) == want
        except openai.APIError as error:
            assert error.code in ("worker_failed", "no_worker_ready"), error
        assert gateway.process.poll() is None, "the gateway lives"
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 1, "the worker is started again", 90)
        assert gateway.worker_pids() != [worker]
        assert undisturbed(gateway, model, temperature=0) == want


def test_no_worker_at_all(tmp_path):
    """Killed as fast as they start: requests are refused with a time to come back, streams end in an error."""
    with serving(tmp_path) as gateway:
        model = gateway.model()
        over, struck = threading.Event(), threading.Event()
        # Ten megabytes: no worker says that between two looks of the storm, and no socket holds it, however slow they are.
        long = STORY | {"max_tokens": 7000}

        def storm():
            while not over.wait(0.02):
                for pid in gateway.worker_pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    struck.set()

        thread = threading.Thread(target=storm)
        thread.start()
        try:
            assert struck.wait(20), "the storm does not begin"
            with (
                pytest.raises(openai.APIError) as caught,
                held(gateway, model=model, temperature=0, **long) as stream,
            ):
                text_of(stream)
            if isinstance(caught.value, openai.APIStatusError):
                assert caught.value.status_code in (502, 503)
                if caught.value.status_code == 503:
                    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 120
        finally:
            over.set()
            thread.join()
        assert gateway.process.poll() is None
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 1, "it recovers", 120)
        assert undisturbed(gateway, model, temperature=0)


def test_the_next_gateway_adopts_the_workers(tmp_path):
    """kill -9 of the gateway: its workers wait for the next one, which takes them over without loading anything."""
    with serving(tmp_path) as first:
        model = first.model()
        want = undisturbed(first, model, temperature=0)
        workers = first.worker_pids()
        first.process.kill()
        first.process.wait()
        with serving(tmp_path) as second:
            assert second.worker_pids() == workers
            assert second.metric("penstock_worker_starts_total") == 0
            assert undisturbed(second, model, temperature=0) == want


def test_stopping_leaves_nothing_behind(tmp_path):
    with serving(tmp_path) as gateway:
        assert gateway.worker_pids()
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(harness.STOP_SECONDS) == 0
        assert gateway.worker_pids() == []
