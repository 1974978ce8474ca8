"""Anthropic's batches of messages: what the official SDK sees, and what a killed gateway leaves."""

import json

import anthropic
import httpx
import pytest
from test_batches import lines

from harness import Gateway, serving, two_tenants, user, wait_until
from providers import Anthropic

UP = """
[[providers]]
id = "up"
protocol = "anthropic"
base_url = "{url}/v1"
key_env = "KEY_UP"
models = ["mock-model"]
"""
ASK = {"max_tokens": 4, "temperature": 0}


def sdk(gateway: Gateway, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def claude(gateway):
    return sdk(gateway)


def request(number: int, model: str, **params) -> dict:
    params = {"model": model, "messages": user(f"Say {number}."), **ASK, **params}
    return {"custom_id": f"line-{number}", "params": params}


def ended(client, batch_id: str, seconds: float = 300.0):
    def look():
        batch = client.messages.batches.retrieve(batch_id)
        return batch if batch.processing_status == "ended" else None

    return wait_until(look, "the batch ends", seconds, 0.05)


def results(client, batch_id: str) -> dict:
    found = list(client.messages.batches.results(batch_id))
    assert len({one.custom_id for one in found}) == len(found)
    return {one.custom_id: one.result for one in found}


def counts(batch) -> tuple[int, ...]:
    asked = batch.request_counts
    return asked.processing, asked.succeeded, asked.errored, asked.canceled, asked.expired


def test_a_batch_from_creation_to_deletion(claude, model):
    wrong = [request(3, "no-such-model"), request(4, model, max_tokens=0), request(5, model, stream=True)]
    made = claude.messages.batches.create(requests=[request(number, model) for number in range(3)] + wrong)
    assert made.id.startswith("msgbatch_") and (made.type, made.processing_status) == ("message_batch", "in_progress")
    assert counts(made) == (6, 0, 0, 0, 0) and made.results_url is None and made.ended_at is None
    assert (made.expires_at - made.created_at).total_seconds() == 24 * 3600
    final = ended(claude, made.id)
    assert counts(final) == (0, 3, 3, 0, 0) and final.ended_at >= final.created_at
    said = results(claude, made.id)
    live = claude.messages.create(model=model, messages=user("Say 1."), max_tokens=4, extra_body={"temperature": 0})
    assert said["line-1"].type == "succeeded" and said["line-1"].message.content == live.content
    assert said["line-1"].message.usage.input_tokens + said["line-1"].message.usage.cache_read_input_tokens > 0
    errors = {name: said[name].error.error for name in ("line-3", "line-4", "line-5")}
    assert [error.type for error in errors.values()] == ["not_found_error", *["invalid_request_error"] * 2]
    assert errors["line-4"].message.startswith("max_tokens") and "stream" in errors["line-5"].message
    assert said["line-3"].error.request_id.startswith("req_")
    gone = claude.messages.batches.delete(made.id)
    assert (gone.id, gone.type) == (made.id, "message_batch_deleted")
    for call in (claude.messages.batches.retrieve, claude.messages.batches.cancel, claude.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError) as refused:
            call(made.id)
        assert refused.value.body["error"]["type"] == "not_found_error"


def test_a_batch_survives_kills_of_the_gateway(tmp_path):
    with serving(tmp_path, "--access-log", "off") as gateway:
        client, model, count = sdk(gateway), gateway.model(), 300
        made = client.messages.batches.create(requests=[request(number, model) for number in range(count)])
        for done in (count // 5, count // 2):
            wait_until(
                lambda done=done: gateway.metrics().get("penstock_batch_lines_total", 0) >= done / 2,
                f"{done} lines ran",
            )
            gateway.process.kill()
            gateway.process.wait()
            gateway.start()
        assert counts(ended(client, made.id)) == (0, count, 0, 0, 0)
        said = results(client, made.id)
        assert len(said) == count and {one.type for one in said.values()} == {"succeeded"}


def test_a_cancelled_batch_keeps_what_it_has(tmp_path):
    with (
        Anthropic() as mock,
        serving(tmp_path, config=UP.format(url=mock.url), env={"KEY_UP": mock.key}, workers=0) as gateway,
    ):
        client = sdk(gateway)
        # Three are answered, and nobody else while the batch runs.
        mock.fail(times=3)
        with mock.behaving(head_delay=60):
            made = client.messages.batches.create(requests=[request(at, "mock-model") for at in range(300)])
            wait_until(lambda: len(mock.seen) > 4, "more are asked")
            with pytest.raises(anthropic.BadRequestError):
                client.messages.batches.delete(made.id)
            early = httpx.get(f"{gateway.url}/v1/messages/batches/{made.id}/results", timeout=30)
            assert early.status_code == 404 and early.json()["error"]["type"] == "not_found_error"
            wait_until(lambda: gateway.metrics().get("penstock_batch_lines_total", 0) >= 3, "three are answered")
            assert client.messages.batches.cancel(made.id).processing_status in ("canceling", "ended")
            final = ended(client, made.id)
        assert final.cancel_initiated_at is not None and counts(final) == (0, 3, 0, 297, 0)
        said = [one.type for one in results(client, made.id).values()]
        assert (said.count("succeeded"), said.count("canceled")) == (3, 297)
        assert client.messages.batches.delete(made.id).id == made.id


def test_lists_have_pages_in_both_directions(tmp_path):
    with serving(tmp_path) as gateway:
        client, model = sdk(gateway), gateway.model()
        made = [client.messages.batches.create(requests=[request(0, model)]).id for _ in range(5)]
        assert [one.id for one in client.messages.batches.list(limit=2)] == made[::-1]
        page = client.messages.batches.list(limit=2, after_id=made[3])
        assert [one.id for one in page.data] == [made[2], made[1]] and page.has_more
        page = client.messages.batches.list(limit=2, before_id=made[1])
        assert [one.id for one in page.data] == [made[3], made[2]] and page.has_more
        assert (page.first_id, page.last_id) == (made[3], made[2])
        # The two APIs do not show each other's batches and files.
        openai = gateway.client()
        assert list(openai.batches.list()) == [] and list(openai.files.list()) == []
        uploaded = openai.files.create(file=("requests.jsonl", lines(1, model)), purpose="batch")
        theirs = openai.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert [one.id for one in client.messages.batches.list(limit=20)] == made[::-1]
        for foreign in (theirs.id, theirs.id.replace("batch_", "msgbatch_")):
            with pytest.raises(anthropic.NotFoundError):
                client.messages.batches.retrieve(foreign)
        reply = httpx.get(f"{gateway.url}/v1/batches/{made[0].removeprefix('msg')}", timeout=30)
        assert reply.status_code == 404
        refused = httpx.post(
            f"{gateway.url}/v1/batches",
            json={"input_file_id": uploaded.id, "endpoint": "/v1/messages", "completion_window": "24h"},
            timeout=30,
        )
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "endpoint"


@pytest.mark.parametrize(
    ("requests", "where"),
    [
        ([], "requests"),
        ([{"params": {}}], "requests[0].custom_id"),
        ([{"custom_id": "a b", "params": {}}], "requests[0].custom_id"),
        ([{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}], "requests[1].custom_id"),
        ([{"custom_id": "a", "params": 1}], "requests[0].params"),
    ],
    ids=["none", "no id", "no such id", "an id twice", "no params"],
)
def test_requests_that_are_none(claude, requests, where):
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.batches.create(requests=requests)
    error = refused.value.body["error"]
    assert error["type"] == "invalid_request_error" and error["message"].startswith(f"{where}:")


def test_lines_of_an_anthropic_provider_go_up_as_they_are(tmp_path):
    with (
        Anthropic() as mock,
        serving(tmp_path, config=UP.format(url=mock.url), env={"KEY_UP": mock.key}, workers=0) as gateway,
    ):
        client = sdk(gateway)
        made = client.messages.batches.create(
            requests=[request(0, "mock-model", metadata={"user_id": "ada"}), request(1, "mock-model")]
        )
        assert counts(ended(client, made.id)) == (0, 2, 0, 0, 0)
        assert {one.type for one in results(client, made.id).values()} == {"succeeded"}
        assert {"user_id": "ada"} in [json.loads(seen.raw).get("metadata") for seen in mock.seen]


def test_one_key_never_sees_anothers(tmp_path):
    with two_tenants(tmp_path, alice='dialects = ["anthropic"]') as (gateway, *_):
        alice, bob = sdk(gateway, "sk-alice"), sdk(gateway, "sk-bob")
        model = gateway.client(api_key="sk-bob").models.list().data[0].id
        made = alice.messages.batches.create(requests=[request(0, model)])
        # A key of this API alone may use it for its batches too.
        assert counts(ended(alice, made.id)) == (0, 1, 0, 0, 0)
        for call in (
            bob.messages.batches.retrieve,
            bob.messages.batches.cancel,
            bob.messages.batches.delete,
            bob.messages.batches.results,
        ):
            with pytest.raises(anthropic.NotFoundError):
                call(made.id)
        assert list(bob.messages.batches.list()) == []
        assert len(results(alice, made.id)) == 1
