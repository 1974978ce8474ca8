"""Providers fail in every way that providers fail; clients notice as little as can be, and are told the rest."""

import dataclasses
import json
import math
import socket
import threading
import time

import httpx
import openai
import pytest

from drivers import BROKEN, DRIVERS, Wish
from harness import promised, serving, text_of, user, wait_until
from providers import Anthropic, Fault, OpenAi
from providers.brain import GREETING

CLIENT_KEY = "pk-client-secret"
CONFIG = """
[[keys]]
id = "client"
key_env = "KEY_CLIENT"

[[providers]]
id = "first"
base_url = "{first}/v1"
keys_env = ["KEY_ONE", "KEY_TWO"]
first_token_timeout_ms = 4000
idle_timeout_ms = 3000
answer_timeout_ms = 5000

[[providers]]
id = "second"
protocol = "anthropic"
base_url = "{second}/v1"
key_env = "KEY_SECOND"

[[models]]
name = "alone"
to = [{{ provider = "first", model = "mock-model" }}]
retries = 0

[[models]]
name = "chain"
to = [{{ provider = "first", model = "mock-model" }}]
fallback = [{{ provider = "second", model = "mock-model" }}]
retries = 0
retry_budget_percent = 100

[[models]]
name = "hedged"
to = [{{ provider = "first", model = "mock-model" }}, {{ provider = "second", model = "mock-model" }}]
policy = "order"
hedge_after_ms = 150
retry_budget_percent = 100

[[models]]
name = "patient"
to = [{{ provider = "first", model = "mock-model" }}, {{ provider = "second", model = "mock-model" }}]
policy = "order"
hedge_after_ms = 20000
retry_budget_percent = 100
"""


class World:
    """A gateway, and two providers behind it: OpenAI's and, as what it falls back to, Anthropic's."""

    def __init__(self, folder, config: str = CONFIG):
        self.first, self.second = OpenAi(), Anthropic()
        # Either key is good, so that both can be seen.
        self.first.check_key = lambda seen: None
        env = {"KEY_CLIENT": CLIENT_KEY, "KEY_ONE": "sk-one", "KEY_TWO": "sk-two", "KEY_SECOND": self.second.key}
        config = config.format(first=self.first.url, second=self.second.url)
        self.serving = serving(folder, config=config, env=env, workers=0)
        self.gateway = self.serving.__enter__()
        self.client = self.gateway.client(api_key=CLIENT_KEY)

    def close(self):
        self.serving.__exit__(None, None, None)
        self.first.close()
        self.second.close()

    def ask(self, model: str, stream: bool = False, **options):
        return self.client.chat.completions.create(model=model, messages=user("Hello"), stream=stream, **options)

    def text(self, model: str, stream: bool) -> str:
        answer = self.ask(model, stream)
        return text_of(answer) if stream else answer.choices[0].message.content


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("resilience"))
    yield world
    world.close()


@pytest.fixture
def world(running):
    """A world in which nothing went wrong yet."""
    running.first.reset()
    wait_until(lambda: works(running), "the first provider is trusted again", 60, 0.2)
    running.first.reset()
    running.second.reset()
    return running


@pytest.fixture
def fresh(tmp_path):
    """A world of its own: a key that was limited rests as long as the provider asked for, and no other test may have done that."""
    world = World(tmp_path)
    yield world
    world.close()


def works(world) -> bool:
    """Earlier faults may have taken the provider out for a while."""
    try:
        return world.text("alone", False) == GREETING
    except openai.APIStatusError:
        return False


BEFORE = {
    "500": Fault(status=500),
    "503": Fault(status=503),
    "429": Fault(status=429, headers={"retry-after": "1"}),
    "hang up": Fault(hang_up=True),
    "garbage": Fault(body=b"<html>oops</html>", content_type="text/html"),
}
IN_STREAM = {
    "error first": Fault(error_at=0),
    "error second": Fault(error_at=1),
    "cut first": Fault(cut_at=0),
    "cut second": Fault(cut_at=1),
    "reset second": Fault(reset_at=1),
    "ends second": Fault(end_at=1),
    "silent": Fault(stall_at=0),
    "silent second": Fault(stall_at=1),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", BEFORE.values(), ids=BEFORE)
def test_the_fallback_answers(world, fault, stream):
    # It may be asked again first: with its other key, on a new connection.
    world.first.fail(fault, times=8)
    assert world.text("chain", stream) == GREETING
    assert 1 <= len(world.first.seen) <= 4 and len(world.second.seen) == 1


def test_refused_keys_are_the_gateways_trouble(tmp_path):
    """They rest for minutes, so this has a world of its own: the fallback answers, and without one the client is not blamed."""
    world = World(tmp_path)
    try:
        world.first.fail(status=401, message="Incorrect API key provided: sk-one.", times=2)
        with pytest.raises(openai.InternalServerError) as failed:
            world.ask("alone")
        assert (
            failed.value.status_code == 502 and failed.value.response.headers["x-penstock-error-source"] == "upstream"
        )
        assert "sk-one" not in str(failed.value) + str(failed.value.response.headers) + world.gateway.log()
        assert world.text("chain", True) == GREETING and len(world.first.seen) == 2, "refused keys are not tried again"
    finally:
        world.close()


@pytest.mark.parametrize("fault", IN_STREAM.values(), ids=IN_STREAM)
def test_the_fallback_answers_when_the_stream_has_begun(world, fault):
    """Status 200 and the first events are nothing that binds: no text has been said."""
    world.first.fail(fault)
    raw = world.client.chat.completions.with_raw_response.create(model="chain", messages=user("Hello"), stream=True)
    assert text_of(raw.parse()) == GREETING
    assert len(world.second.seen) == 1


MIDDLE = {
    "error": Fault(error_at=8),
    "cut": Fault(cut_at=8),
    "reset": Fault(reset_at=8),
    "ends": Fault(end_at=8),
    "silent": Fault(stall_at=8),
}


@pytest.mark.parametrize("fault", MIDDLE.values(), ids=MIDDLE)
@pytest.mark.parametrize("dialect", list(DRIVERS))
def test_a_stream_that_breaks_looks_broken(world, dialect, fault):
    """After the first text there is no second provider: the client is told, in its dialect."""
    heard = threading.Event()
    # Once the first text is out: what comes together with the fault has bound nobody yet.
    world.first.fail(dataclasses.replace(fault, before=lambda number: number == 8 and heard.wait(60)))
    talk = DRIVERS[dialect](world.gateway.url, CLIENT_KEY, "chain")
    talk.heard = heard.set
    talk.say("Hello")
    with pytest.raises(talk.fault("stream")):
        talk.ask(Wish(), True)
    assert len(world.second.seen) == 0


def test_a_stream_without_its_last_event_is_broken(world):
    """Passed on as it is, so the gateway cannot know what is missing: docs/guide/providers.md."""
    world.first.fail(no_done=True, delay=0.1)
    with pytest.raises((openai.APIError, *BROKEN)):
        world.text("alone", True)


@pytest.mark.parametrize("cut", ["byte", "odd", "line", "whole"])
@pytest.mark.parametrize("dialect", list(DRIVERS))
def test_streams_cut_anywhere_are_the_same_streams(world, dialect, cut):
    for provider in (world.first, world.second):
        with provider.behaving(cut=cut, crlf=cut == "odd", comments=cut == "line"):
            if provider is world.second:
                world.first.fail(status=500)
            talk = DRIVERS[dialect](world.gateway.url, CLIENT_KEY, "chain")
            talk.say("Hello")
            assert talk.ask(Wish(), True).text == GREETING


def test_an_upstream_error_says_whose_it_is(world):
    world.first.fail(status=429, headers={"retry-after": "7"}, message="Slow down, please.", times=4)
    with pytest.raises(openai.RateLimitError) as limited:
        world.ask("alone")
    headers = limited.value.response.headers
    assert headers["x-penstock-error-source"] == "upstream"
    assert 1 <= int(headers["retry-after"]) <= 7
    assert "x-request-id" in headers and limited.value.body["message"]


def test_a_gateway_error_says_whose_it_is(world):
    with pytest.raises(openai.NotFoundError) as unknown:
        world.ask("no-such-model")
    assert unknown.value.response.headers["x-penstock-error-source"] != "upstream"
    assert unknown.value.code == "model_not_found"


def test_a_client_fault_is_not_tried_elsewhere(world):
    """What one provider refuses as wrong is wrong: a 400 goes back, nothing is asked twice."""
    world.first.fail(status=400, message="Bad, bad request.")
    with pytest.raises(openai.BadRequestError) as refused:
        world.ask("chain")
    assert "Bad, bad request." in str(refused.value)
    assert len(world.first.seen) == 1 and len(world.second.seen) == 0


def test_a_hedge_says_so(world):
    def answered_after() -> float:
        world.first.reset()
        world.second.reset()
        world.first.fail(first_delay=1.5)
        began = time.monotonic()
        raw = world.client.chat.completions.with_raw_response.create(
            model="hedged", messages=user("Hello"), stream=True
        )
        answered_after.headers = raw.headers
        assert text_of(raw.parse()) == GREETING
        return time.monotonic() - began

    promised(1.2, answered_after)
    headers = answered_after.headers
    assert "x-penstock-hedged" in headers and "second" in headers["x-penstock-target"], headers
    assert len(world.first.seen) == 1 and len(world.second.seen) == 1
    # The one that lost is left at once.
    wait_until(lambda: world.first.last.left_at, "the loser is cancelled")


def test_without_need_nothing_is_hedged(world):
    raw = world.client.chat.completions.with_raw_response.create(model="patient", messages=user("Hello"), stream=True)
    assert text_of(raw.parse()) == GREETING
    assert "x-penstock-hedged" not in raw.headers
    assert len(world.first.seen) == 1 and len(world.second.seen) == 0


def test_keys_take_turns_and_one_that_is_limited_rests(fresh):
    for _ in range(4):
        fresh.text("alone", False)
    used = [seen.headers["authorization"] for seen in fresh.first.seen]
    assert set(used) == {"Bearer sk-one", "Bearer sk-two"}, used
    fresh.first.reset()
    fresh.first.fail(status=429, headers={"retry-after": "30"})
    answers = []
    for _ in range(5):
        try:
            answers.append(fresh.text("alone", False))
        except openai.RateLimitError:
            answers.append("limited")
    limited = fresh.first.seen[0].headers["authorization"]
    later = {seen.headers["authorization"] for seen in fresh.first.seen[1:]}
    assert limited not in later and later, (limited, later, answers)
    assert answers[-1] == GREETING, answers


def leave(world, dialect: str, stream: bool, delay: float) -> tuple[float, int]:
    """Asks by a bare socket, leaves during the answer; seconds until the provider sees it, and events it wrote after that."""
    path, body = {
        "chat": ("/v1/chat/completions", {"messages": user("Count from 1 to 400."), "stream": stream}),
        "messages": ("/v1/messages", {"messages": user("Count from 1 to 400."), "stream": stream, "max_tokens": 900}),
    }[dialect]
    raw = json.dumps({"model": "alone", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {CLIENT_KEY}\r\ncontent-length: {len(raw)}\r\n\r\n"
    with world.first.behaving(delay=delay, head_delay=0 if stream else 20):
        with socket.create_connection(("127.0.0.1", world.gateway.port)) as connection:
            connection.sendall(head.encode() + raw)
            if stream:
                got = b""
                while got.count(b"data:") < 5:
                    got += connection.recv(65536)
            wait_until(lambda: world.first.seen, "the provider is asked")
            seen = world.first.last
            left, written = time.monotonic(), seen.written
        wait_until(lambda: seen.left_at, "the provider sees the client leave", step=0.001)
        return seen.left_at - left, seen.written - written


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_client_that_leaves_takes_the_provider_along(world, dialect, stream, record_property):

    def left_after() -> float:
        world.first.reset()
        seconds, chunks = leave(world, dialect, stream, delay=0.02)
        print(f"left: {dialect} {'stream' if stream else 'whole'}: {seconds * 1000:.1f} ms, {chunks} chunks more")
        # Its answer has 400 of them, one every 20 ms.
        return seconds if chunks <= 50 else math.inf

    # Far more than it takes, far less than the answer would: a busy machine is no failure.
    record_property("milliseconds", round(promised(2, left_after) * 1000, 1))


def test_secrets_stay_where_they_belong(world):
    world.first.fail(status=500, message="The key sk-one broke us.")
    with pytest.raises(openai.APIError) as failed:
        world.ask("alone")
    assert "sk-one" not in str(failed.value)
    reply = httpx.post(
        f"{world.gateway.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {CLIENT_KEY}"},
        json={"model": "chain", "messages": user("Hello")},
        timeout=60,
    )
    assert reply.status_code == 200
    said = reply.text + str(reply.headers) + world.gateway.log()
    for secret in ("sk-one", "sk-two", world.second.key, CLIENT_KEY):
        assert secret not in said, f"{secret} was told"
    for seen in [*world.first.seen, *world.second.seen]:
        assert CLIENT_KEY not in str(seen.headers) and CLIENT_KEY.encode() not in seen.raw
