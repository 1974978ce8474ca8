"""Responses that are streamed in the background: clients leave and come back, cancels, kills, several gateways."""

import contextlib
import sqlite3
import threading
import time

import httpx
import openai
import pytest
from test_stored_responses import ended

from harness import serving, two_tenants, wait_until
from providers import OpenAi

ASK = {"input": "Say hello.", "max_output_tokens": 24, "temperature": 0}
MOCK = '[[providers]]\nid = "up"\nbase_url = "{url}/v1"\nkey_env = "KEY_UP"\nmodels = ["mock-model"]\n'
COUNT = {"model": "mock-model", "input": "Count from 1 to 40.", "background": True}


class Gate:
    """Lets the mock go on with its answer up to an event, and a test wait for that."""

    def __init__(self):
        self.changed = threading.Condition()
        self.open_to = -1

    def before(self, number: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: number <= self.open_to, 60)

    def open(self, to: int) -> None:
        with self.changed:
            self.open_to = to
            self.changed.notify_all()


@pytest.fixture(scope="module")
def mock():
    with OpenAi() as mock:
        yield mock


@pytest.fixture(scope="module")
def slow(tmp_path_factory, mock):
    """A gateway in front of a provider that answers as fast as a test lets it."""
    options = {"config": MOCK.format(url=mock.url), "env": {"KEY_UP": mock.key}, "workers": 0}
    with serving(tmp_path_factory.mktemp("slow"), **options) as gateway:
        yield gateway


@pytest.fixture
def gate(mock):
    gate = Gate()
    with mock.behaving(before=gate.before):
        yield gate
        gate.open(1 << 30)


def again(client, response_id: str, after: int | None = None) -> list:
    more = {} if after is None else {"starting_after": after}
    return list(client.responses.retrieve(response_id, stream=True, **more))


def numbers(events) -> list[int]:
    return [event.sequence_number for event in events]


def text(events) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def until_text(stream) -> list:
    """Events up to the first piece of text."""
    events = []
    for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            return events
    raise AssertionError([event.type for event in events])


def test_events_come_and_come_again(client, model):
    events = list(client.responses.create(model=model, background=True, stream=True, **ASK))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert events[0].response.status == events[1].response.status == "queued"
    assert numbers(events) == list(range(len(events)))
    final = events[-1].response
    assert final.status in ("completed", "incomplete") and kinds[-1] == f"response.{final.status}"
    live = client.responses.create(model=model, **ASK)
    assert text(events) == final.output_text == live.output_text and final.usage.output_tokens > 0
    assert client.responses.retrieve(final.id).model_dump() == final.model_dump()
    assert again(client, final.id) == events
    for after in range(len(events) - 1):
        assert again(client, final.id, after) == events[after + 1 :]
    # Whoever has seen everything is told the end again.
    (last,) = again(client, final.id, 5000)
    assert last.type == kinds[-1] and last.sequence_number == 5001 and last.response == final
    # It is a stored response as any other.
    following = client.responses.create(model=model, previous_response_id=final.id, **ASK)
    assert following.usage.input_tokens > final.usage.input_tokens
    client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        again(client, final.id)


def test_a_client_leaves_and_comes_back(slow, gate):
    client = slow.client()
    gate.open(5)
    with client.responses.create(stream=True, **COUNT) as stream:
        seen = until_text(stream)
    response = seen[0].response
    assert client.responses.retrieve(response.id).status == "in_progress"
    # Two follow live, one of them from the beginning.
    follow = [again_in_thread(client, response.id, after) for after in (seen[-1].sequence_number, None)]
    gate.open(1 << 30)
    rest, whole = (done() for done in follow)
    assert numbers(seen + rest) == numbers(whole) == list(range(len(whole)))
    assert text(whole) == text(seen + rest) == ", ".join(map(str, range(1, 41)))
    final = client.responses.retrieve(response.id)
    assert final.status == "completed" and final.output_text == text(whole)
    assert again(client, response.id) == whole


def again_in_thread(client, response_id: str, after: int | None):
    """Follows in a thread, which has seen an event or waits for the next when this returns."""
    got: list = []
    thread = threading.Thread(target=lambda: got.extend(again(client, response_id, after)))
    thread.start()

    def done() -> list:
        thread.join(120)
        assert not thread.is_alive()
        return got

    return done


def test_a_cancelled_stream_ends(slow, gate):
    client = slow.client()
    gate.open(5)
    with client.responses.create(stream=True, **COUNT) as stream:
        events = until_text(stream)
        assert client.responses.cancel(events[0].response.id).status == "cancelled"
        events += list(stream)
    last = events[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert numbers(events) == list(range(len(events)))
    assert again(client, last.response.id) == events
    assert client.responses.retrieve(last.response.id).status == "cancelled"


def test_a_deleted_stream_breaks(slow, gate):
    client = slow.client()
    gate.open(5)
    with client.responses.create(stream=True, **COUNT) as stream:
        events = until_text(stream)
        client.responses.delete(events[0].response.id)
        with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
            list(stream)


def test_a_failure_after_text_is_the_last_event(slow, mock):
    client = slow.client()
    mock.fail(cut_at=6)
    events = list(client.responses.create(stream=True, **COUNT))
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed") and last.response.error.message
    assert numbers(events) == list(range(len(events))) and text(events)
    assert again(client, last.response.id, len(events) - 2) == events[-1:]
    # One before it is tried again.
    mock.fail(status=503, times=2)
    events = list(client.responses.create(stream=True, **COUNT))
    assert events[-1].type == "response.completed" and numbers(events) == list(range(len(events)))


def test_a_killed_gateway_says_that_it_failed(tmp_path, mock, gate):
    options = {"config": MOCK.format(url=mock.url), "env": {"KEY_UP": mock.key}, "workers": 0}
    with serving(tmp_path, **options) as gateway:
        client = gateway.client()
        gate.open(5)
        with client.responses.create(stream=True, **COUNT) as stream:
            seen = until_text(stream)
            gateway.process.kill()
            gateway.process.wait()
        gate.open(1 << 30)
        gateway.start()
        client, response = gateway.client(), seen[0].response
        (last,) = again(client, response.id, seen[-1].sequence_number)
        assert last.type == "response.failed" and last.sequence_number > seen[-1].sequence_number
        final = client.responses.retrieve(response.id)
        assert final.status == "failed" and final.error.code == "server_error" and "ended before" in final.error.message


def test_kept_events_are_bounded(tmp_path, mock):
    config = MOCK.format(url=mock.url) + "[store]\nresponse_event_bytes_max = 65536\n"
    with serving(tmp_path, config=config, env={"KEY_UP": mock.key}, workers=0) as gateway:
        client = gateway.client()
        # Some 300 bytes an event, and those at the end repeat the text.
        with client.responses.create(stream=True, **{**COUNT, "input": "Count from 1 to 1000."}) as stream:
            response = next(iter(stream)).response
        final = ended(client, response.id)
        assert final.status == "completed"

        def kept(after: int) -> list:
            with contextlib.suppress(openai.BadRequestError):
                return again(client, final.id, after)
            return []

        with pytest.raises(openai.BadRequestError) as refused:
            again(client, final.id, 5)
        assert refused.value.param == "starting_after"
        after, events = next((after, events) for after in range(10, 5000, 10) if (events := kept(after)))
        assert numbers(events) == list(range(after + 1, after + 1 + len(events))) and len(events) > 50
        assert events[-1].type == "response.completed" and events[-1].response == final
        wait_until(lambda: 0 < gateway.metric("penstock_response_bytes") < 250_000, "it is counted")


def test_what_cannot_be_streamed(client, model):
    whole = client.responses.create(model=model, **ASK)
    queued = client.responses.create(model=model, background=True, **ASK)
    for response in (whole, queued, ended(client, queued.id)):
        with pytest.raises(openai.BadRequestError) as refused:
            again(client, response.id)
        assert refused.value.param == "stream"
    for after in ("x", "-1"):
        with pytest.raises(openai.BadRequestError) as refused:
            list(client.responses.retrieve(queued.id, stream=True, extra_query={"starting_after": after}))
        assert refused.value.param == "starting_after"
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=model, background=True, stream=True, store=False, **ASK)


def test_another_gateway_of_the_store_tells_the_events(tmp_path, mock, gate):
    """One of two gateways runs what is in the background; a client of the other gets the same events, though later."""
    config = MOCK.format(url=mock.url) + f'[store]\npath = "{tmp_path / "shared.db"}"\n'
    options = {"config": config, "env": {"KEY_UP": mock.key}, "workers": 0}
    with serving(tmp_path / "a", **options) as one:
        # The first leads once it has answered something in the background.
        gate.open(1 << 30)
        ended(one.client(), one.client().responses.create(**COUNT).id)
        with serving(tmp_path / "b", **options) as other:
            gate.open(5)
            with other.client().responses.create(stream=True, **COUNT) as stream:
                events = [next(iter(stream))]
                response = events[0].response
                assert response.status == "queued"
                wait_until(
                    lambda: one.client().responses.retrieve(response.id).status == "in_progress", "it is answered"
                )
                gate.open(1 << 30)
                events += list(stream)
            assert numbers(events) == list(range(len(events))) and events[-1].type == "response.completed"
            assert again(one.client(), response.id) == again(other.client(), response.id) == events


def test_a_client_of_another_gateway_follows_on_while_the_store_is_away(tmp_path, mock, gate):
    path = tmp_path / "shared.db"
    options = {
        "config": MOCK.format(url=mock.url) + f'[store]\npath = "{path}"\n',
        "env": {"KEY_UP": mock.key},
        "workers": 0,
    }

    def rename(table: str, to: str) -> None:
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as database:
            database.execute(f"ALTER TABLE {table} RENAME TO {to}")

    with serving(tmp_path / "a", **options) as one:
        gate.open(1 << 30)
        ended(one.client(), one.client().responses.create(**COUNT).id)
        with serving(tmp_path / "b", **options) as other:
            gate.open(5)
            with one.client().responses.create(stream=True, **COUNT) as stream:
                seen = until_text(stream)
            # The other gateway has no events yet, and asks the store every 2 s.
            following = other.client().responses.retrieve(seen[0].response.id, stream=True)
            rename("responses", "responses_away")
            try:
                time.sleep(5)
            finally:
                rename("responses_away", "responses")
            gate.open(1 << 30)
            events = list(following)
            assert numbers(events) == list(range(len(events))) and events[-1].type == "response.completed"


def test_one_key_never_sees_anothers(tmp_path):
    with two_tenants(tmp_path) as (_, alice, bob):
        model = alice.models.list().data[0].id
        events = list(alice.responses.create(model=model, background=True, stream=True, **ASK))
        with pytest.raises(openai.NotFoundError):
            again(bob, events[-1].response.id)
