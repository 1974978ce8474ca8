"""Many at once, and clients that leave."""

import asyncio
import contextlib
import json
import threading

import httpx
import openai
import pytest

from harness import user, wait_until

COUNT = "Count from 1 to 30."
LONG = {"max_tokens": 4000, "stream": True, "extra_body": {"ignore_eos": True}}


def test_64_streams_at_once_are_all_right(gateway, model):
    """Every stream gets the answer that it gets alone: whatever else is in the batch."""
    prompts = [f"Repeat after me: blue otter {number}" for number in range(60)] + [COUNT] * 4
    client = gateway.client()
    alone = {
        prompt: client.chat.completions.create(model=model, messages=user(prompt), temperature=0)
        .choices[0]
        .message.content
        for prompt in {prompts[0], prompts[31], COUNT}
    }

    async def one(session, prompt):
        text, ended = "", None
        stream = await session.chat.completions.create(model=model, messages=user(prompt), temperature=0, stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ended = choice.finish_reason or ended
        return text, ended

    async def everyone():
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as session:
            return await asyncio.gather(*(one(session, prompt) for prompt in prompts))

    answers = asyncio.run(asyncio.wait_for(everyone(), 300))
    assert all(ended == "stop" and text for text, ended in answers)
    for prompt, (text, _) in zip(prompts, answers, strict=True):
        assert text == alone.get(prompt, text)
    gateway.idle()


def free_blocks(gateway) -> float:
    return gateway.metric("penstock_kv_blocks_free")


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_frees_its_sequence(gateway, client, model, streaming):
    gateway.idle()
    before = free_blocks(gateway)
    body = {"model": model, "messages": user(COUNT), "max_tokens": 4000, "ignore_eos": True, "stream": streaming}

    def leave_in_the_middle():
        url = f"{gateway.url}/v1/chat/completions"
        with contextlib.suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=1.0) as reply:
            for count, _ in enumerate(reply.iter_raw()):
                if count == 10:
                    return

    leave_in_the_middle()
    wait_until(lambda: gateway.metric("penstock_sequences_running") == 0, "the sequence is gone")
    gateway.idle()
    wait_until(lambda: free_blocks(gateway) == before, "its blocks are free")


def test_two_hundred_cancellations_leave_no_trace(gateway, model):
    gateway.idle()
    before = free_blocks(gateway)

    async def one(session, number):
        stream = await session.chat.completions.create(model=model, messages=user(f"{COUNT} {number}"), **LONG)
        async for _ in stream:
            await stream.close()
            return

    async def everyone():
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as session:
            for start in range(0, 200, 50):
                await asyncio.gather(*(one(session, number) for number in range(start, start + 50)))

    asyncio.run(asyncio.wait_for(everyone(), 300))
    gateway.idle()
    wait_until(lambda: free_blocks(gateway) == before, "all blocks are free")
    assert len(gateway.worker_pids()) == 1 and gateway.metric("penstock_worker_deaths_total") == 0


def test_a_reader_that_stops_slows_only_itself(gateway, model):
    """Its own sequence is stalled by its window; others are served meanwhile."""
    body = {"model": model, "messages": user(COUNT), "max_tokens": 6000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60) as stopped:
        next(stopped.iter_raw())
        done = threading.Event()

        def another():
            for _ in range(5):
                gateway.client().chat.completions.create(model=model, messages=user("Hello"), temperature=0)
            done.set()

        thread = threading.Thread(target=another)
        thread.start()
        thread.join(120)
        assert done.is_set(), "others wait for a reader that stopped"
    gateway.idle()


def test_metrics_speak_of_what_happened(gateway, client, model):
    before = gateway.metrics()
    client.chat.completions.create(model=model, messages=user("Hello"), temperature=0)
    names = (
        "gen_ai_server_request_duration_seconds_count",
        "gen_ai_server_time_to_first_token_seconds_count",
        "gen_ai_client_token_usage_count",
    )

    def counted() -> dict | None:
        metrics = gateway.metrics()
        # Each: a request of before that ends late, without a token, may move one of them.
        return metrics if all(metrics.get(name, 0) > before.get(name, 0) for name in names) else None

    metrics = wait_until(counted, "the request is counted")
    assert metrics["penstock_kv_blocks"] >= metrics["penstock_kv_blocks_free"] > 0


def test_the_log_has_one_json_line_per_request_and_no_prompt(gateway, client, model):
    secret = "zebra-violin-77"
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=user(f"Repeat after me: {secret}"), max_tokens=30, temperature=0
    )
    request_id = raw.headers["x-request-id"]
    lines = wait_until(
        lambda: [line for line in gateway.log().splitlines() if request_id in line], "the request is logged"
    )
    assert len(lines) == 1 and isinstance(json.loads(lines[0]), dict)
    assert secret not in gateway.log() and "zebra" not in gateway.log()
