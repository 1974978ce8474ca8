"""Stored responses: conversations by id, answers in the background, and what a killed gateway leaves."""

import contextlib

import openai
import pytest

from harness import serving, two_tenants, wait_until
from providers import OpenAi

ASK = {"input": "Say hello.", "max_output_tokens": 8, "temperature": 0}


def ended(client, response_id: str, seconds: float = 120.0):
    def look():
        response = client.responses.retrieve(response_id)
        return response if response.status not in ("queued", "in_progress") else None

    return wait_until(look, "the response ends", seconds, 0.05)


def test_a_response_is_kept_until_it_is_deleted(client, model):
    made = client.responses.create(model=model, **ASK)
    assert made.id.startswith("resp_") and made.store is True
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    unkept = client.responses.create(model=model, store=False, **ASK)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_what_takes_its_time_is_kept_as_it_was_said(tmp_path):
    with OpenAi() as mock:
        config = f'[[providers]]\nid = "up"\nbase_url = "{mock.url}/v1"\nkey_env = "KEY_UP"\nmodels = ["mock-model"]\n'
        with serving(tmp_path, config=config, env={"KEY_UP": mock.key}, workers=0) as gateway:
            client = gateway.client()
            with mock.behaving(head_delay=1.5):
                made = client.responses.create(model="mock-model", input="Hello")
                *_, last = client.responses.create(model="mock-model", input="Hello", stream=True)
            for said in (made, last.response):
                assert client.responses.retrieve(said.id).model_dump() == said.model_dump()


def test_a_streamed_response_is_kept_too(client, model):
    *_, last = client.responses.create(model=model, stream=True, **ASK)
    final = last.response
    kept = client.responses.retrieve(final.id)
    assert kept.output_text == final.output_text and kept.status == final.status


def test_a_conversation_goes_on_by_id(client, model):
    """The same tokens as if the client had sent everything again."""
    turns = ["My name is Ada.", "What is my name?", "And now?"]
    previous, items = None, []
    for text in turns:
        items.append({"role": "user", "content": text})
        whole = client.responses.create(model=model, store=False, input=items, max_output_tokens=12, temperature=0)
        extra = {"previous_response_id": previous.id} if previous else {}
        previous = client.responses.create(model=model, input=text, max_output_tokens=12, temperature=0, **extra)
        assert previous.output_text == whole.output_text
        assert previous.usage.input_tokens == whole.usage.input_tokens
        items += [item.model_dump(exclude_none=True) for item in whole.output]
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=model, previous_response_id="resp_unknown", **ASK)
    assert caught.value.code == "previous_response_not_found"


def test_instructions_are_not_inherited(client, model):
    first = client.responses.create(model=model, instructions="Answer in French.", **ASK)
    second = client.responses.create(model=model, previous_response_id=first.id, **ASK)
    assert second.instructions is None
    # The same as everything sent again, but for the instructions.
    items = [
        {"role": "user", "content": ASK["input"]},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": ASK["input"]},
    ]
    whole = client.responses.create(model=model, store=False, **{**ASK, "input": items})
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output_text == whole.output_text


def test_input_items_have_pages(client, model):
    items = [{"role": "user", "content": f"Line {number}."} for number in range(5)]
    made = client.responses.create(model=model, input=items, max_output_tokens=4)
    for order, want in (("asc", items), ("desc", items[::-1])):
        listed = list(client.responses.input_items.list(made.id, order=order, limit=2))
        assert len({item.id for item in listed}) == 5
        assert [item.content for item in listed] == [item["content"] for item in want]


def test_background_answers_while_the_client_is_away(client, model):
    queued = client.responses.create(model=model, background=True, **ASK)
    assert queued.status == "queued" and queued.background is True and queued.output == []
    final = ended(client, queued.id)
    live = client.responses.create(model=model, **ASK)
    assert final.output_text == live.output_text and final.created_at == queued.created_at
    following = client.responses.create(model=model, previous_response_id=queued.id, **ASK)
    assert following.usage.input_tokens > final.usage.input_tokens
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(queued.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=model, background=True, store=False, **ASK)


def test_background_can_be_cancelled(gateway, client, model):
    slow = {"input": "Count.", "max_output_tokens": 8000, "extra_body": {"ignore_eos": True}}

    def in_time() -> str | None:
        """A response that was cancelled: one that has ended by then cannot be."""
        queued = client.responses.create(model=model, background=True, **slow)
        with contextlib.suppress(openai.BadRequestError):
            assert client.responses.cancel(queued.id).status == "cancelled"
            return queued.id
        assert client.responses.retrieve(queued.id).status == "incomplete"

    cancelled = wait_until(in_time, "one is cancelled before it ends")
    assert client.responses.cancel(cancelled).status == "cancelled"
    gateway.idle()
    assert client.responses.retrieve(cancelled).status == "cancelled"


def test_a_killed_gateway_answers_when_it_is_back(tmp_path):
    with serving(tmp_path) as gateway:
        client, model = gateway.client(), gateway.model()
        kept = client.responses.create(model=model, **ASK)
        slow = {**ASK, "max_output_tokens": 300, "extra_body": {"ignore_eos": True}}
        queued = [client.responses.create(model=model, background=True, **slow) for _ in range(4)]
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        finals = [ended(client, response.id) for response in queued]
        assert len({final.output_text for final in finals}) == 1 and finals[0].output_text
        assert client.responses.retrieve(kept.id).output_text == kept.output_text


def test_a_request_above_a_keys_share_of_the_memory_is_answered_in_the_background(tmp_path):
    """The request and the response that repeats its instructions are held together: more than the half that a key may have. What is more
    than there ever is fails with a reason, and in the way of nothing."""
    with OpenAi() as mock:
        config = f"[server]\nbody_bytes_max = {1 << 20}\nbody_memory_bytes_max = {2 << 20}\n"
        config += f'[[providers]]\nid = "up"\nbase_url = "{mock.url}/v1"\nkey_env = "KEY_UP"\nmodels = ["mock-model"]\n'
        config += '[[keys]]\nid = "alice"\nkey_env = "ALICE_KEY"\n'
        env = {"KEY_UP": mock.key, "ALICE_KEY": "sk-alice"}
        with serving(tmp_path, config=config, env=env, workers=0) as gateway:
            client = gateway.client(api_key="sk-alice")

            def asked(size: int):
                texts = {"instructions": "i" * size, "input": "Hello"}
                return client.responses.create(model="mock-model", background=True, **texts)

            # 1.2, 2 and 1.5 MiB are held; a key has 1 MiB, and a body that is not small finds 1.75 MiB of the 2.
            for size, status in ((600_000, "completed"), (1_000_000, "failed"), (750_000, "completed")):
                final = ended(client, asked(size).id)
                assert final.status == status and len(final.instructions) == size
                if status == "failed":
                    assert final.error.code == "server_error" and "body_memory_bytes_max" in final.error.message
            assert mock.last.body["messages"][0]["content"] == "i" * 750_000
            assert client.responses.create(model="mock-model", input="Hello").status == "completed"


def test_one_key_never_sees_anothers(tmp_path):
    with two_tenants(tmp_path) as (_, alice, bob):
        model = alice.models.list().data[0].id
        # An id that a client chose for its request is no id of a response.
        made = alice.responses.create(model=model, extra_headers={"x-request-id": "req_guess"}, **ASK)
        assert "guess" not in made.id
        attempts = [
            lambda: bob.responses.retrieve(made.id),
            lambda: bob.responses.delete(made.id),
            lambda: bob.responses.cancel(made.id),
            lambda: list(bob.responses.input_items.list(made.id)),
            lambda: bob.responses.create(model=model, previous_response_id=made.id, **ASK),
        ]
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError):
                attempt()
        assert alice.responses.retrieve(made.id).id == made.id
