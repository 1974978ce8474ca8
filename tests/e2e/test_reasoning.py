"""Budgets of reasoning tokens, enforced by the pool's own workers, through every API that has one."""

import hashlib
import json

import anthropic
import pytest
from google import genai

from harness import Gateway, serving, user, wait_until
from swarm import Swarm

QUESTION = user("What is 27 + 48?")
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["sum"],
    "additionalProperties": False,
}


def ask(client, model, budget=None, **more):
    extra = THINKING | ({} if budget is None else {"thinking_token_budget": budget})
    asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 400} | more
    return client.chat.completions.create(model=model, **asked, extra_body=extra)


def thought(message) -> str:
    return getattr(message, "reasoning", None) or ""


def reasoned(answer) -> int:
    return answer.usage.completion_tokens_details.reasoning_tokens


def test_a_budget_is_kept_to_the_token(client, model):
    whole = ask(client, model)
    free = reasoned(whole)
    assert free > 4, "a model that reasons"
    for budget in range(free + 2):
        answer = ask(client, model, budget)
        message = answer.choices[0].message
        assert reasoned(answer) <= budget, (budget, message)
        assert "think>" not in thought(message), message
        if budget == 0:
            assert not thought(message)
        elif budget <= free:
            assert thought(whole.choices[0].message).startswith(thought(message)[:-1]), message
        else:
            assert message == whole.choices[0].message
    assert ask(client, model, -1).choices[0].message == whole.choices[0].message


def test_the_reasoning_that_the_model_opens_is_counted_too(client, model):
    asked = {"messages": user("What is 27 + 48? /think"), "temperature": 0, "max_tokens": 400}
    extra = {"thinking_token_budget": 3, "chat_template_kwargs": {}}
    free = client.chat.completions.create(model=model, **asked)
    answer = client.chat.completions.create(model=model, **asked, extra_body=extra)
    assert 0 < reasoned(answer) <= 3 < reasoned(free)
    assert "think>" not in thought(answer.choices[0].message)


def test_streams_choices_and_logprobs_say_the_same(client, model):
    answer = ask(client, model, 6, temperature=1.0, seed=5, n=3)
    assert reasoned(answer) <= 18
    told = ask(client, model, 6, temperature=1.0, seed=5, n=3, logprobs=True)
    assert [c.message.content for c in told.choices] == [c.message.content for c in answer.choices]
    assert [thought(c.message) for c in told.choices] == [thought(c.message) for c in answer.choices]
    text, reasoning = [""] * 3, [""] * 3
    for chunk in ask(client, model, 6, temperature=1.0, seed=5, n=3, stream=True):
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            reasoning[choice.index] += getattr(choice.delta, "reasoning", None) or ""
    assert text == [c.message.content for c in answer.choices]
    assert reasoning == [thought(c.message) for c in answer.choices]


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 8])
def test_a_form_begins_behind_the_reasoning_that_was_closed(client, model, budget):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SUM}}
    answer = ask(client, model, budget, response_format=form)
    assert isinstance(json.loads(answer.choices[0].message.content)["sum"], int)
    assert reasoned(answer) <= budget
    tools = [{"type": "function", "function": {"name": "add", "parameters": SUM}}]
    answer = ask(client, model, budget, tools=tools, tool_choice="required")
    assert isinstance(json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["sum"], int)
    assert reasoned(answer) <= budget


def test_responses(client, model):
    extra = THINKING | {"thinking_token_budget": 4}
    answer = client.responses.create(model=model, input="What is 27 + 48?", temperature=0, extra_body=extra)
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens <= 4 and answer.output_text


def test_anthropic(gateway, model):
    client = anthropic.Anthropic(api_key="none", base_url=gateway.url)
    asked = {"model": model, "messages": user("What is 27 + 48? /think"), "max_tokens": 2000}
    asked["extra_body"] = {"temperature": 0}
    answer = client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
    assert answer.content[0].type == "thinking" and "75" in answer.content[1].text
    # The model opens the reasoning by itself; it is closed at once.
    answer = client.messages.create(**asked, thinking={"type": "disabled"})
    assert {block.type for block in answer.content} == {"text"}


def test_gemini(gateway, model):
    client = genai.Client(api_key="none", http_options={"base_url": gateway.url})
    config = {"temperature": 0, "thinking_config": {"thinking_budget": 4, "include_thoughts": True}}
    answer = client.models.generate_content(model=model, contents="What is 27 + 48?", config=config)
    assert 0 < answer.usage_metadata.thoughts_token_count <= 4 and answer.text


def test_closed_reasonings_are_counted(client, model, gateway):
    def closed():
        return sum(v for name, v in gateway.metrics().items() if name.startswith("penstock_reasonings_closed_total"))

    before = closed()
    ask(client, model, 2)
    wait_until(lambda: closed() >= before + 1, "a closed reasoning")


def turns(thought, text="75"):
    """A conversation whose second turn is the model's, with this block of reasoning."""
    said = [thought, {"type": "text", "text": text}]
    return [*QUESTION, {"role": "assistant", "content": said}, *user("And 1 + 1?")]


def thought_of(client, model, **more):
    asked = {"model": model, "messages": user("What is 27 + 48? /think"), "max_tokens": 2000} | more
    return client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024}).content[0]


def test_thinking_comes_back_as_it_was_or_not_at_all(gateway, model):
    client = anthropic.Anthropic(api_key="none", base_url=gateway.url)
    thought = thought_of(client, model)
    assert thought.signature.startswith("penstock1.")
    with client.messages.stream(
        model=model,
        messages=user("What is 27 + 48? /think"),
        max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        streamed = stream.get_final_message().content[0]
    block = thought.model_dump(exclude_none=True)

    def go_on(block):
        client.messages.create(model=model, messages=turns(block), max_tokens=20)
        client.messages.count_tokens(model=model, messages=turns(block))

    go_on(block)
    go_on(streamed.model_dump(exclude_none=True))
    # A block without a signature is left out.
    go_on({"type": "thinking", "thinking": "I think.", "signature": ""})
    for wrong in (
        block | {"thinking": thought.thinking + " And more."},
        block | {"signature": thought.signature[:-1]},
        block | {"signature": "EqQBCkYIBxgCKkBUd3RpbQ=="},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"},
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            go_on(wrong)
        assert "messages.1.content.0: Invalid `" in str(refused.value), refused.value


def test_signatures_are_of_a_tenant_and_outlive_the_process(tmp_path):
    keys = "".join(
        f'[[keys]]\nid = "{name}"\ndigest = "{hashlib.sha256(name.encode() * 8).hexdigest()}"\n'
        for name in ("ada", "bob")
    )
    config = f'{keys}[[pools]]\nid = "strict"\n[[pools]]\nid = "lenient"\nforeign_reasoning = "drop"\n'
    gateway = Gateway(tmp_path, workers=0, config=config).start()
    try:
        ada, bob = (anthropic.Anthropic(api_key=name * 8, base_url=gateway.url) for name in ("ada", "bob"))
        block = thought_of(ada, "strict").model_dump(exclude_none=True)
        gateway.stop()
        gateway.start()
        asked = {"messages": turns(block), "max_tokens": 5}
        assert ada.messages.create(model="strict", **asked).content
        with pytest.raises(anthropic.BadRequestError, match="signature"):
            bob.messages.create(model="strict", **asked)
        # Where conversations come from other models too, their reasoning is left out.
        lent = ada.messages.create(model="lenient", **asked).usage
        without = [asked["messages"][0], {"role": "assistant", "content": "75"}, asked["messages"][2]]
        plain = ada.messages.create(model="lenient", messages=without, max_tokens=5).usage
        read = [usage.input_tokens + usage.cache_read_input_tokens for usage in (lent, plain)]
        assert read[0] == read[1]
    finally:
        gateway.stop()


def test_signatures_of_the_pool_go_to_no_provider(tmp_path):
    """A conversation that began at a pool goes on at Anthropic; one that began there keeps each byte."""
    swarm = Swarm()
    config = f"""
[[providers]]
id = "anthropic"
protocol = "anthropic"
base_url = "{swarm.url}/v1"
models = ["m"]
"""
    try:
        with serving(tmp_path, workers=0, config=config) as gateway:
            client = anthropic.Anthropic(api_key="none", base_url=gateway.url, max_retries=0)
            for signature, stays in [("penstock1." + "ab" * 32, False), ("EqQBCkYIBxgCKkBUd3RpbQ==", True)]:
                block = {"type": "thinking", "thinking": "27 and 48 are 75.", "signature": signature}
                client.messages.create(model="m", messages=turns(block), max_tokens=20)
                assert (signature in json.dumps(swarm.seen.bodies[-1])) == stays, swarm.seen.bodies[-1]
    finally:
        swarm.close()
