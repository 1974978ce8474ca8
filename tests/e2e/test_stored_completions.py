"""Stored chat completions: kept with `store`, listed, labelled, deleted; what a killed gateway leaves."""

import openai
import pytest

from harness import serving, text_of, two_tenants, user, wait_until

ASK = {"messages": user("Say hello."), "max_tokens": 8, "temperature": 0}


def kept(client, model, **options):
    return client.chat.completions.create(model=model, store=True, **{**ASK, **options})


def test_a_completion_is_kept_until_it_is_deleted(client, model):
    made = kept(client, model, metadata={"b": "2", "a": "1"}, seed=7)
    assert made.id.startswith("chatcmpl-")
    stored = client.chat.completions.retrieve(made.id)
    assert (stored.choices, stored.usage, stored.created, stored.model) == (
        made.choices,
        made.usage,
        made.created,
        made.model,
    )
    assert stored.metadata == {"a": "1", "b": "2"} and stored.seed == 7 and stored.temperature == 0
    assert stored.request_id == made._request_id
    changed = client.chat.completions.update(made.id, metadata={"c": "3"})
    assert changed.metadata == {"c": "3"} and changed.choices == made.choices
    assert client.chat.completions.retrieve(made.id).metadata == {"c": "3"}
    gone = client.chat.completions.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "chat.completion.deleted")
    completions = client.chat.completions
    for call in (
        completions.retrieve,
        completions.delete,
        lambda id: completions.update(id, metadata={}),
        lambda id: list(completions.messages.list(id)),
    ):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    unkept = completions.create(model=model, **ASK)
    with pytest.raises(openai.NotFoundError):
        completions.retrieve(unkept.id)


def test_a_streamed_completion_is_kept_too(client, model):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    chunks = list(kept(client, model, stream=True, n=2, tools=tools))
    stored = client.chat.completions.retrieve(chunks[0].id)
    assert len(stored.choices) == 2 and stored.choices[0].message.content == text_of(
        chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == 0
    )
    assert stored.tools == tools and stored.usage.completion_tokens > 0


def test_lists_are_filtered_and_have_pages(client, model):
    made = [kept(client, model, metadata={"list": "pages", "odd": str(number % 2)}).id for number in range(5)]
    everything = {"metadata": {"list": "pages"}}
    for order, want in (("asc", made), ("desc", made[::-1])):
        assert [one.id for one in client.chat.completions.list(order=order, limit=2, **everything)] == want
    page = client.chat.completions.list(limit=2, **everything)
    assert page.has_more and [one.id for one in page.data] == made[:2]
    odd = client.chat.completions.list(metadata={"list": "pages", "odd": "1"}, model=model)
    assert [one.id for one in odd] == made[1::2]
    assert list(client.chat.completions.list(model="other", **everything)) == []
    assert list(client.chat.completions.list(after="chatcmpl-unknown", **everything)) == []
    for query in ({"limit": 0}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.list(**query)


def test_messages_are_those_of_the_request(client, model):
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts, "name": "ada"}]
    made = kept(client, model, messages=messages)
    first, second = client.chat.completions.messages.list(made.id)
    assert (first.role, first.content, first.content_parts) == ("system", "Be brief.", None)
    assert (second.content, second.name) == (None, "ada")
    assert [part.text for part in second.content_parts] == ["Say ", "hello."]
    assert [one.id for one in client.chat.completions.messages.list(made.id, order="desc", limit=1)] == [
        second.id,
        first.id,
    ]


@pytest.mark.parametrize("body", [{"metadata": {"a": 1}}, {"metadata": {"a" * 65: "1"}}, {}, {"seed": 7}], ids=str)
def test_updates_that_are_refused(client, model, body):
    made = kept(client, model)
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(f"/chat/completions/{made.id}", body=body, cast_to=object)
    assert refused.value.param.split(".")[0] in ("metadata", "seed")


def test_kept_by_a_gateway_that_was_killed(tmp_path):
    with serving(tmp_path) as gateway:
        client, model = gateway.client(), gateway.model()
        made = kept(client, model, metadata={"a": "1"})
        stored = client.chat.completions.retrieve(made.id)
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        assert client.chat.completions.retrieve(made.id) == stored
        wait_until(lambda: gateway.metric("penstock_response_bytes") > 512, "the bytes are counted")


def test_one_key_never_sees_anothers(tmp_path):
    with two_tenants(tmp_path) as (_, alice, bob):
        model = alice.models.list().data[0].id
        made = kept(alice, model, extra_headers={"x-request-id": "req_guess"}, metadata={"a": "1"})
        assert "guess" not in made.id
        completions = bob.chat.completions
        for attempt in (
            lambda: completions.retrieve(made.id),
            lambda: completions.update(made.id, metadata={}),
            lambda: completions.delete(made.id),
            lambda: list(completions.messages.list(made.id)),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        assert list(completions.list()) == [] and list(completions.list(after=made.id)) == []
        assert [one.id for one in alice.chat.completions.list()] == [made.id]
