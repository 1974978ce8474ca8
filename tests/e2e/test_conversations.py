"""Conversations: their items, responses that go on with them, races, and what a killed gateway leaves."""

import contextlib
import threading

import httpx
import openai
import pytest
from test_stored_responses import ended

from harness import Gateway, holding, serving, two_tenants, user, wait_until

ASK = {"max_output_tokens": 12, "temperature": 0}


@contextlib.contextmanager
def held_response(gateway: Gateway, **asked):
    """A response that does not end before its caller reads on, on a machine of any speed: see `harness.held`."""
    place = str(gateway.folder / "http.sock")
    holds = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 4000}
    with httpx.Client(transport=httpx.HTTPTransport(uds=place), timeout=120) as http:
        client = gateway.client(http_client=http)
        with client.responses.create(**asked, **holds, stream=True, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
            yield stream


@pytest.fixture(scope="module")
def holder(tmp_path_factory):
    """A gateway whose streams a test can hold."""
    folder = tmp_path_factory.mktemp("holder")
    with serving(folder, config=f"[server]\n{holding(folder)}") as gateway:
        yield gateway


def texts(client, conversation_id: str) -> list[tuple[str, str]]:
    items = client.conversations.items.list(conversation_id, order="asc")
    return [(item.role, item.content[0].text) for item in items if item.type == "message"]


def refused(kind, call, **options):
    with pytest.raises(kind) as caught:
        call(**options)
    return caught.value


def test_a_conversation_is_made_labelled_and_deleted(client):
    made = client.conversations.create(metadata={"b": "2", "a": "1"}, items=user("Hello."))
    assert made.id.startswith("conv_") and made.object == "conversation" and made.metadata == {"a": "1", "b": "2"}
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"c": "3"}).metadata == {"c": "3"}
    assert client.conversations.retrieve(made.id).metadata == {"c": "3"}
    assert texts(client, made.id) == [("user", "Hello.")]
    gone = client.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for call in (
        client.conversations.retrieve,
        client.conversations.delete,
        lambda id: client.conversations.update(id, metadata={}),
        lambda id: list(client.conversations.items.list(id)),
        lambda id: client.conversations.items.create(id, items=user("x")),
        lambda id: client.conversations.items.retrieve("msg_1", conversation_id=id),
    ):
        assert made.id in str(refused(openai.NotFoundError, lambda call=call: call(made.id)))
    assert client.conversations.create().metadata == {}


def test_items_are_added_listed_and_deleted(client):
    made = client.conversations.create()
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    added = client.conversations.items.create(
        made.id,
        items=[
            *user("One."),
            {"type": "message", "role": "assistant", "content": "Two."},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
    )
    assert [item.type for item in added.data] == ["message", "message", "function_call", "function_call_output"]
    assert len({item.id for item in added.data}) == 4 and not added.has_more
    assert added.data[1].content[0].type == "output_text" and added.data[0].content[0].type == "input_text"
    ids = [item.id for item in added.data]
    for order, want in (("asc", ids), ("desc", ids[::-1])):
        assert [item.id for item in client.conversations.items.list(made.id, order=order, limit=3)] == want
    assert client.conversations.items.retrieve(ids[0], conversation_id=made.id).id == ids[0]
    assert client.conversations.items.delete(ids[0], conversation_id=made.id).id == made.id
    assert [item.id for item in client.conversations.items.list(made.id, order="asc")] == ids[1:]
    for method in (client.conversations.items.retrieve, client.conversations.items.delete):
        with pytest.raises(openai.NotFoundError):
            method(ids[0], conversation_id=made.id)


def test_a_response_goes_on_with_its_conversation(client, model):
    """The same tokens as if the client had sent everything again, streamed or not; items are added, however it is asked."""
    made = client.conversations.create(items=[{"role": "developer", "content": "Be brief."}])
    items = [{"role": "developer", "content": "Be brief."}]
    for at, text in enumerate(["My name is Ada.", "What is my name?", "And now?"]):
        items.append({"role": "user", "content": text})
        whole = client.responses.create(model=model, store=False, input=items, **ASK)
        asked = made.id if at else {"id": made.id}
        if at == 1:
            *_, last = client.responses.create(model=model, input=text, conversation=asked, stream=True, **ASK)
            said = last.response
        else:
            said = client.responses.create(model=model, input=text, conversation=asked, store=at < 2, **ASK)
        assert said.conversation.id == made.id and said.output_text == whole.output_text
        assert said.usage.input_tokens == whole.usage.input_tokens
        counted = client.responses.input_tokens.count(model=model, input="More.", conversation=made.id)
        assert counted.input_tokens > said.usage.input_tokens
        items += [item.model_dump(exclude_none=True) for item in whole.output]
    want = [
        (item["role"], item["content"] if isinstance(item["content"], str) else item["content"][0]["text"])
        for item in items
    ]
    assert texts(client, made.id) == want
    listed = client.conversations.items.list(made.id, order="desc", limit=1).data[0]
    assert listed.id == said.output[0].id
    # A reference to an item of the conversation is no item of its own.
    again = [{"type": "item_reference", "id": listed.id}, *user("Again.")]
    client.responses.create(model=model, input=again, conversation=made.id, **ASK)
    assert len(texts(client, made.id)) == len(want) + 2


def test_answers_that_fail_add_nothing(client, model):
    made = client.conversations.create(items=user("Hello."))
    refused(
        openai.BadRequestError, client.responses.create, model=model, input="blue otter " * 9000, conversation=made.id
    )
    refused(openai.NotFoundError, client.responses.create, model="nothing", input="a", conversation=made.id)
    with client.responses.create(
        model=model,
        input="Count.",
        conversation=made.id,
        stream=True,
        max_output_tokens=4000,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))
    assert texts(client, made.id) == [("user", "Hello.")]
    # Whoever left holds nothing.
    assert wait_until(lambda: went_on(client, model, made.id), "the conversation is free")


def went_on(client, model, conversation_id: str) -> bool:
    try:
        return bool(client.responses.create(model=model, input="Hi.", conversation=conversation_id, **ASK).output)
    except openai.BadRequestError as error:
        assert error.code == "conversation_locked"
        return False


def test_one_response_at_a_time(holder):
    client, model = holder.client(), holder.model()
    made = client.conversations.create()
    with held_response(holder, model=model, input="Count.", conversation=made.id):
        for call in (
            lambda: client.responses.create(model=model, input="Hi.", conversation=made.id, **ASK),
            lambda: client.conversations.items.create(made.id, items=user("Hi.")),
        ):
            error = refused(openai.BadRequestError, call)
            assert (error.code, error.param) == ("conversation_locked", "conversation")
        # What was there can be read, and the whole deleted; the response goes on without it.
        assert texts(client, made.id) == []
        # A response in the background waits for its turn, and fails where there is nothing any more to go on with.
        waiting = client.responses.create(model=model, input="Hi.", background=True, conversation=made.id)
        assert client.conversations.delete(made.id).deleted
    refused(openai.NotFoundError, client.conversations.retrieve, conversation_id=made.id)
    failed = ended(client, waiting.id)
    assert failed.status == "failed" and made.id in failed.error.message


def test_a_conversation_that_is_deleted_meanwhile_keeps_the_response(holder):
    client, model = holder.client(), holder.model()
    made = client.conversations.create(items=user("Hello."))
    with held_response(holder, model=model, input="Hi.", conversation=made.id) as stream:
        client.conversations.delete(made.id)
        *_, last = stream
    assert last.type in ("response.completed", "response.incomplete")
    assert client.responses.retrieve(last.response.id).output_text == last.response.output_text
    refused(openai.NotFoundError, client.conversations.retrieve, conversation_id=made.id)


def test_many_at_once_add_whole_turns(client, model):
    made = client.conversations.create()
    done: list[str] = []

    def ask(number: int) -> None:
        while True:
            try:
                client.responses.create(model=model, input=f"Turn {number}.", conversation=made.id, **ASK)
                return done.append(f"Turn {number}.")
            except openai.BadRequestError as error:
                assert error.code == "conversation_locked"

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    said = texts(client, made.id)
    assert [role for role, _ in said] == ["user", "assistant"] * 6
    assert sorted(text for role, text in said if role == "user") == sorted(done)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"conversation": "conv_unknown"}, 404, "conversation"),
        ({"conversation": "nothing"}, 404, "conversation"),
        ({"conversation": {"name": "x"}}, 400, "conversation.id"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, 400, "conversation"),
        ({"conversation": "conv_unknown", "background": True}, 404, "conversation"),
    ],
    ids=str,
)
def test_refusals_name_the_parameter(client, model, fields, status, param):
    error = refused(openai.APIStatusError, client.responses.create, model=model, input="a", **fields)
    assert (error.status_code, error.param) == (status, param)


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "items"),
        ([{"type": "web_search_call"}], "items[0].type"),
        ([{"role": "user"}], "items[0].content"),
        (user("x") * 21, "items"),
    ],
    ids=["none", "of another type", "without content", "too many"],
)
def test_items_that_are_refused(client, items, param):
    made = client.conversations.create()
    error = refused(openai.BadRequestError, client.conversations.items.create, conversation_id=made.id, items=items)
    assert error.param == param


def test_in_the_background_and_after_a_kill(tmp_path):
    with serving(tmp_path) as gateway:
        client, model = gateway.client(), gateway.model()
        made = client.conversations.create(items=user("Hello."), metadata={"a": "1"})
        slow = {"max_output_tokens": 300, "extra_body": {"ignore_eos": True}}
        queued = [
            client.responses.create(model=model, input=f"{at}", background=True, conversation=made.id, **slow)
            for at in range(3)
        ]
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        finals = [ended(client, response.id) for response in queued]
        assert {final.status for final in finals} == {"incomplete"}
        said = texts(client, made.id)
        assert [role for role, _ in said] == ["user", *["user", "assistant"] * 3]
        assert {text for role, text in said if role == "assistant"} == {final.output_text for final in finals}
        assert client.conversations.retrieve(made.id).metadata == {"a": "1"}


def test_one_key_never_sees_anothers(tmp_path):
    with two_tenants(tmp_path) as (_, alice, bob):
        model = alice.models.list().data[0].id
        made = alice.conversations.create(items=user("A secret."))
        (item,) = alice.conversations.items.list(made.id)
        for attempt in (
            lambda: bob.conversations.retrieve(made.id),
            lambda: bob.conversations.update(made.id, metadata={}),
            lambda: bob.conversations.delete(made.id),
            lambda: list(bob.conversations.items.list(made.id)),
            lambda: bob.conversations.items.create(made.id, items=user("x")),
            lambda: bob.conversations.items.retrieve(item.id, conversation_id=made.id),
            lambda: bob.conversations.items.delete(item.id, conversation_id=made.id),
            lambda: bob.responses.create(model=model, input="What is it?", conversation=made.id),
            lambda: bob.responses.input_tokens.count(model=model, conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        assert texts(alice, made.id) == [("user", "A secret.")]
