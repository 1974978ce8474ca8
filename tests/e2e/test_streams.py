"""Streams: the same answer in pieces, well formed to the last event."""

import json

import httpx
import pytest

from harness import text_of, user

COUNT = "Count from 1 to 30."


def test_a_stream_says_what_the_whole_answer_says(client, model):
    ask = {"model": model, "messages": user(COUNT), "temperature": 0}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert text_of(chunks) == whole.choices[0].message.content
    assert len(chunks) > 5, "an answer of eighty tokens comes in pieces"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_when_asked_for(client, model):
    ask = {"model": model, "messages": user("Hello"), "temperature": 0}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_bytes_of_a_stream(gateway, model):
    body = {"model": model, "messages": user("Hello"), "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        assert "x-request-id" in reply.headers
        raw = reply.read().decode()
    events = [block for block in raw.split("\n\n") if block and not block.startswith(":")]
    assert events[-1] == "data: [DONE]" and raw.count("[DONE]") == 1
    for event in events[:-1]:
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk"
        assert all("finish_reason" in choice for choice in chunk["choices"])


def test_choices_of_a_stream_interleave_and_each_finishes(client, model):
    ask = {"model": model, "messages": user("Tell me a story about a fox."), "temperature": 1, "seed": 4, "n": 3}
    whole = client.chat.completions.create(**ask, max_tokens=24)
    texts, ends = ["", "", ""], {}
    for chunk in client.chat.completions.create(**ask, max_tokens=24, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == dict.fromkeys(range(3), "length")


def test_stop_strings_leave_nothing_behind(client, model):
    counted = ", ".join(str(number) for number in range(1, 31))
    for stop in (" 7", "6, 7", ", 7,"):
        stream = client.chat.completions.create(
            model=model, messages=user(COUNT), stop=stop, stream=True, temperature=0
        )
        assert text_of(stream) == counted[: counted.index(stop)]


def test_characters_are_whole(client, model):
    pieces = []
    for chunk in client.chat.completions.create(model=model, messages=user("你好"), temperature=0, stream=True):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == "你好！有什么可以帮你的吗？" and "\ufffd" not in "".join(pieces)


def test_logprobs_of_a_stream_cover_its_bytes(client, model):
    collected, text = b"", ""
    stream = client.chat.completions.create(
        model=model, messages=user("你好"), temperature=0, stream=True, logprobs=True, top_logprobs=2
    )
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for entry in (choice.logprobs.content or []) if choice.logprobs else []:
                collected += bytes(entry.bytes)
    assert collected.decode() == text and text


def test_plain_completions_stream(client, model):
    ask = {"model": model, "prompt": "1, 2, 3, 4,", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_refused_stream_is_plain_json(gateway, path):
    body = {"model": "no-such-model", "messages": user("Hello"), "prompt": "Hello", "stream": True}
    reply = httpx.post(f"{gateway.url}{path}", json=body, timeout=30)
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
