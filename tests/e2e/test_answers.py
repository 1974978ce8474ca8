"""What a user of the official Python SDK gets: parameters, answers, usage."""

import json

import httpx
import openai
import pytest

from harness import DEMO_MODEL, user

COUNT = "Count from 1 to 30."
COUNTED = ", ".join(str(number) for number in range(1, 31))


def golden_cases():
    """Reference answers of another implementation, in float32."""
    cases = json.loads((DEMO_MODEL / "goldens.json").read_text())["cases"]
    return [case for case in cases if case["messages"] and case["end_at"] and not case["tools"]]


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["messages"][-1]["content"][:20])
def test_answers_are_those_of_the_reference(client, model, case):
    answer = client.chat.completions.create(model=model, messages=case["messages"], temperature=0)
    choice = answer.choices[0]
    assert choice.message.content == case["output_text"].split("<|im_end|>")[0]
    assert choice.finish_reason == "stop" and choice.message.role == "assistant"
    assert answer.usage.prompt_tokens == len(case["prompt_ids"])
    assert answer.usage.completion_tokens in (case["end_at"], case["end_at"] + 1)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.object == "chat.completion" and answer.model == model and answer.id


def test_plain_completion_continues(client, model):
    answer = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=12, temperature=0)
    assert answer.choices[0].text.startswith(" 5, 6, 7") and answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 12


def test_plain_completion_has_16_tokens_by_default(client, model):
    answer = client.completions.create(model=model, prompt="1, 2, 3, 4,", temperature=0)
    assert answer.usage.completion_tokens == 16


def test_prompts_of_a_list_are_numbered(client, model):
    prompts = ["1, 2, 3, 4,", "10, 20, 30, 40,"]
    answer = client.completions.create(model=model, prompt=prompts, max_tokens=4, n=2, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]


def test_a_long_list_of_prompts_is_answered_in_order(client, model):
    """More than one request may have in the queue at once; each answer is that of its prompt alone."""
    prompts = [f"{number}, {number + 1}, {number + 2}," for number in range(40)]
    answer = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == list(range(40))
    for number in (0, 15, 16, 39):
        alone = client.completions.create(model=model, prompt=prompts[number], max_tokens=4, temperature=0)
        assert answer.choices[number].text == alone.choices[0].text


def test_prompt_as_token_ids(gateway, client, model):
    ids = tokens_of(gateway, model, "1, 2, 3, 4,")
    by_ids = client.completions.create(model=model, prompt=ids, max_tokens=8, temperature=0)
    by_text = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=8, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text and by_ids.usage.prompt_tokens == len(ids)


def tokens_of(gateway, model, text):
    reply = (
        httpx.post(f"{gateway.url}/tokenize", json={"model": model, "prompt": text}, timeout=30)
        .raise_for_status()
        .json()
    )
    return reply["tokens"]


def test_tokenize_and_detokenize_are_inverse(gateway, model):
    text = "Grüße 你好 12"
    ids = tokens_of(gateway, model, text)
    reply = (
        httpx.post(f"{gateway.url}/detokenize", json={"model": model, "tokens": ids}, timeout=30)
        .raise_for_status()
        .json()
    )
    assert reply["prompt"] == text


def test_what_clients_of_vllm_read(gateway, model):
    ask = {"model": model, "prompt": " 你好 is", "return_token_strs": True}
    said = httpx.post(f"{gateway.url}/tokenize", json=ask, timeout=30).raise_for_status().json()
    assert said["count"] == len(said["tokens"]) == len(said["token_strs"])
    assert "\ufffd" not in "".join(said["token_strs"]) and said["token_strs"][-1].endswith("is")
    card = httpx.get(f"{gateway.url}/v1/models/{model}", timeout=30).json()
    assert card["root"] == card["id"] == model and card["parent"] is None
    assert card["max_model_len"] == said["max_model_len"] and card["permission"][0]["allow_sampling"] is True
    assert httpx.get(f"{gateway.url}/version", timeout=30).json()["version"]
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{gateway.url}/ping", timeout=30).status_code == 200


def test_tokenize_of_messages_equals_usage(gateway, client, model):
    messages = user("What is penstock?")
    reply = httpx.post(
        f"{gateway.url}/tokenize", json={"model": model, "messages": messages}, timeout=30
    ).raise_for_status()
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=1)
    assert len(reply.json()["tokens"]) == answer.usage.prompt_tokens


def test_max_tokens_ends_an_answer(client, model):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model=model, messages=user(COUNT), temperature=0, **{name: 9})
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 9


def test_stop_strings_end_an_answer_and_are_cut_off(client, model):
    for stop in (" 5", [" 9", " 5"], "4, 5"):
        answer = client.chat.completions.create(model=model, messages=user(COUNT), temperature=0, stop=stop)
        text = answer.choices[0].message.content
        first = min(COUNTED.index(mark) for mark in ([stop] if isinstance(stop, str) else stop))
        assert text == COUNTED[:first] and answer.choices[0].finish_reason == "stop"


def test_min_tokens_and_ignore_eos(client, model):
    extra = {"ignore_eos": True}
    answer = client.chat.completions.create(model=model, messages=user("Hello"), max_tokens=40, extra_body=extra)
    assert answer.usage.completion_tokens == 40 and answer.choices[0].finish_reason == "length"
    extra = {"min_tokens": 20}
    answer = client.chat.completions.create(model=model, messages=user("Hello"), max_tokens=40, extra_body=extra)
    assert answer.usage.completion_tokens >= 20


def test_a_seed_repeats_and_choices_differ(client, model):
    def ask(seed):
        answer = client.chat.completions.create(
            model=model, messages=user("Tell me a story about a fox."), temperature=1.2, seed=seed, n=4, max_tokens=32
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.message.content for choice in answer.choices]

    first = ask(7)
    assert ask(7) == first
    assert len(set(first)) > 1, "choices of one request draw their own random numbers"
    assert ask(8) != first


def test_usage_counts_the_prompt_once(client, model):
    one = client.chat.completions.create(model=model, messages=user("Hello"), max_tokens=5, temperature=0)
    three = client.chat.completions.create(model=model, messages=user("Hello"), max_tokens=5, temperature=0, n=3)
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens


def test_a_repeated_prefix_is_read_from_the_cache(client, model):
    facts = " ".join(f"The code for item {number} is {number * 37 % 1000}." for number in range(40))
    ask = {"model": model, "messages": user(f"Remember: {facts} What is the code for item 7?"), "max_tokens": 8}
    first = client.chat.completions.create(**ask, temperature=0)
    second = client.chat.completions.create(**ask, temperature=0)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < second.usage.prompt_tokens and cached % 32 == 0
    assert first.usage.prompt_tokens_details.cached_tokens < cached
    assert second.choices[0].message.content == first.choices[0].message.content


def test_logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=user("Hello"), temperature=0, logprobs=True, top_logprobs=5
    )
    choice = answer.choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    assert len(entries) == answer.usage.completion_tokens, "the end has an entry too"
    for entry in entries:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 5 and best == sorted(best, reverse=True)
        assert entry.logprob == pytest.approx(best[0], abs=1e-6) and entry.logprob <= 0


def test_logprobs_are_those_of_the_reference(client, model):
    """Within what bfloat16 arithmetic may differ from float32."""
    case = golden_cases()[0]
    answer = client.chat.completions.create(
        model=model, messages=case["messages"], temperature=0, logprobs=True, top_logprobs=5
    )
    for entry, step in zip(answer.choices[0].logprobs.content, case["steps"], strict=False):
        assert entry.logprob == pytest.approx(step["top5"][0][1], abs=0.05)


def test_logprobs_do_not_depend_on_temperature(client, model):
    def first(temperature):
        answer = client.completions.create(
            model=model, prompt="1, 2, 3, 4,", max_tokens=1, temperature=temperature, logprobs=3, seed=1
        )
        return answer.choices[0].logprobs.top_logprobs[0]

    assert first(0) == pytest.approx(first(1.5), abs=1e-4)


def test_echo_with_logprobs_scores_the_prompt(client, model):
    answer = client.completions.create(
        model=model, prompt="1, 2, 3, 4,", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith("1, 2, 3, 4,") and choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens + 1
    assert choice.logprobs.text_offset[0] == 0 and "".join(choice.logprobs.tokens) == choice.text
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_tokens_are_named_by_id(client, model):
    ask = {"model": model, "temperature": 0, "max_tokens": 4}
    more = {"extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}}
    choice = client.chat.completions.create(
        **ask, messages=user("Hello"), logprobs=True, top_logprobs=2, **more
    ).choices[0]
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{id}" for id in choice.token_ids]
    choice = client.completions.create(**ask, prompt="1, 2, 3,", logprobs=2, **more).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{id}" for id in choice.token_ids]
    assert all(name.startswith("token_id:") for best in choice.logprobs.top_logprobs for name in best)


@pytest.mark.parametrize("choices", [1, 2])
def test_running_counts_are_those_of_the_chunks_so_far(client, model, choices):
    stream = client.chat.completions.create(
        model=model,
        messages=user("What is penstock?"),
        max_tokens=24,
        n=choices,
        temperature=0,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"ignore_eos": True},
    )
    held, counted = 0, []
    for chunk in stream:
        for choice in chunk.choices:
            held += len(choice.logprobs.content or []) if choice.logprobs else 0
        assert chunk.usage.completion_tokens == held, f"a chunk behind {counted}"
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + held
        counted.append(held)
    assert held == 24 * choices and len(set(counted)) > 3 and counted[0] == 0


def test_keys_of_vllm_are_null_where_nobody_asked(gateway, model):
    ask = {"model": model, "max_tokens": 1}
    said = httpx.post(f"{gateway.url}/v1/chat/completions", json=ask | {"messages": user("Hello")}, timeout=60).json()
    assert said["prompt_logprobs"] is said["prompt_token_ids"] is said["choices"][0]["token_ids"] is None
    choice = httpx.post(f"{gateway.url}/v1/completions", json=ask | {"prompt": "a"}, timeout=60).json()["choices"][0]
    assert choice["prompt_logprobs"] is choice["prompt_token_ids"] is choice["token_ids"] is None


def test_prompts_are_truncated(gateway, client, model):
    ids = tokens_of(gateway, model, "1, 2, 3, 4, 5, 6, 7, 8,")
    ask = {"model": model, "max_tokens": 4, "temperature": 0}
    kept = {"truncate_prompt_tokens": 6, "return_token_ids": True}
    cut = client.completions.create(**ask, prompt=ids, extra_body=kept)
    tail = client.completions.create(**ask, prompt=ids[-6:])
    assert cut.choices[0].prompt_token_ids == ids[-6:] and cut.choices[0].text == tail.choices[0].text
    assert cut.usage.prompt_tokens == 6
    chat = client.chat.completions.create(**ask, messages=user("What is this?"), extra_body=kept)
    assert len(chat.prompt_token_ids) == chat.usage.prompt_tokens == 6
    long = {"model": model, "prompt": [ids[0]] * 9000, "max_tokens": 1}
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**long)
    assert client.completions.create(**long, extra_body={"truncate_prompt_tokens": 9}).usage.prompt_tokens == 9


def test_chat_echoes_what_it_goes_on_from(client, model):
    ask = {"model": model, "temperature": 0, "max_tokens": 4}
    turns = [*user("Hello"), {"role": "assistant", "content": "Hello! How"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    plain = client.chat.completions.create(**ask, messages=turns, extra_body=goes_on)
    for choices in (1, 2):
        echoed = client.chat.completions.create(**ask, messages=turns, n=choices, extra_body=goes_on | {"echo": True})
        for choice in echoed.choices:
            assert choice.message.content == "Hello! How" + plain.choices[0].message.content
    stream = client.chat.completions.create(**ask, messages=turns, stream=True, extra_body=goes_on | {"echo": True})
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert said == "Hello! How" + plain.choices[0].message.content
    quiet = client.chat.completions.create(**ask, messages=user("Hello"), extra_body={"echo": True})
    assert quiet.choices[0].message.content.startswith("Hello!"), "a new turn has nothing to say first"


def test_logit_bias_forbids_and_forces(gateway, client, model):
    (token,) = tokens_of(gateway, model, "!")
    ask = {"model": model, "messages": user("Hello"), "max_tokens": 3, "temperature": 0}
    forced = client.chat.completions.create(**ask, logit_bias={str(token): 100})
    assert forced.choices[0].message.content == "!!!"
    free = client.chat.completions.create(**ask)
    (hello,) = tokens_of(gateway, model, "Hello")
    banned = client.chat.completions.create(**ask, logit_bias={str(hello): -100})
    assert free.choices[0].message.content.startswith("Hello")
    assert not banned.choices[0].message.content.startswith("Hello")


def test_named_tokens_have_their_log_probabilities(gateway, client, model):
    ids = [7, 4000, 12]
    ask = {"model": model, "max_tokens": 4, "temperature": 0, "extra_body": {"return_tokens_as_token_ids": True}}
    ask["extra_body"]["logprob_token_ids"] = ids
    chat = client.chat.completions.create(**ask, messages=user("Hello"), logprobs=True, top_logprobs=2)
    for token in chat.choices[0].logprobs.content:
        assert [top.token for top in token.top_logprobs] == [f"token_id:{one}" for one in ids]
        assert all(top.logprob <= token.logprob for top in token.top_logprobs), "the best was drawn"
    whole = client.completions.create(**ask, prompt="Hello", logprobs=0)
    told = whole.choices[0].logprobs
    for token, top in zip(told.tokens, told.top_logprobs, strict=True):
        assert set(top) == {token} | {f"token_id:{one}" for one in ids}
    with pytest.raises(openai.BadRequestError) as error:
        ask["extra_body"]["logprob_token_ids"] = [10**6]
        client.completions.create(**ask, prompt="Hello", logprobs=0)
    assert error.value.param == "logprob_token_ids[0]"


def test_bad_words_are_not_said(client, model):
    ask = {"model": model, "messages": user("Hello"), "max_tokens": 12, "temperature": 0}
    free = client.chat.completions.create(**ask).choices[0].message.content
    assert "Hello" in free and "help you" in free
    for words in (["Hello"], ["help you"], ["Hello", "help you"]):
        said = client.chat.completions.create(**ask, extra_body={"bad_words": words}).choices[0].message.content
        assert said and not [word for word in words if word in said], said


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_p": 0.9},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1}},
        {"temperature": 2, "extra_body": {"top_k": 1}},
    ],
    ids=str,
)
def test_sampling_parameters_are_taken(client, model, options):
    answer = client.chat.completions.create(model=model, messages=user("Hello"), max_tokens=16, seed=3, **options)
    assert answer.usage.completion_tokens > 0


def test_top_k_of_one_is_greedy(client, model):
    ask = {"model": model, "messages": user(COUNT), "max_tokens": 24}
    greedy = client.chat.completions.create(**ask, temperature=0)
    hot = client.chat.completions.create(**ask, temperature=2, seed=5, extra_body={"top_k": 1})
    assert hot.choices[0].message.content == greedy.choices[0].message.content


def test_best_of_returns_the_most_likely(client, model):
    answer = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=12, n=2, best_of=6, temperature=1.3, seed=11, logprobs=0
    )
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in answer.choices]
    assert len(means) == 2 and means[0] >= means[1] and [c.index for c in answer.choices] == [0, 1]


def test_null_means_absent_and_parts_are_joined(client, model):
    plain = client.chat.completions.create(model=model, messages=user("Hello"), temperature=0)
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    nulls = {"stop": None, "seed": None, "logit_bias": None, "tools": None, "stream": None, "n": None}
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": parts}], temperature=0, extra_body=nulls
    )
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens


def test_developer_is_system(client, model):
    def ask(role):
        messages = [{"role": role, "content": "You are a helpful assistant."}, *user("Hello")]
        return client.chat.completions.create(model=model, messages=messages, temperature=0).usage.prompt_tokens

    assert ask("developer") == ask("system")


def test_models(client, model):
    assert client.models.retrieve(model).id == model
    assert [entry.object for entry in client.models.list().data] == ["model"] * len(client.models.list().data)


def test_every_answer_has_a_request_id(client, model):
    raw = client.chat.completions.with_raw_response.create(model=model, messages=user("Hello"), max_tokens=1)
    assert raw.headers["x-request-id"] and raw.parse()._request_id == raw.headers["x-request-id"]
