"""Limits in front of a pool of our own: every unit is reserved by what the prompt really has, and settled by what the answer has used."""

from __future__ import annotations

import json
import socket
import time

import httpx
import openai
import pytest

from harness import serving, user, wait_until

INPUT_USD, OUTPUT_USD = 1.0, 2.0
UNITS = """
requests_per_day = 1000
tokens_per_day = 6000000
input_tokens_per_day = 6000000
output_tokens_per_day = 6000000
usd_per_day = 100
in_flight = 4
"""
CONFIG = f"""
[[pools]]
id = "own"
workers = 1
sequences_max = 1

[[limits]]
id = "likely"
for = "everyone"
by = "all"
models = ["likely"]
{UNITS}
[[limits]]
id = "most"
for = "everyone"
by = "all"
models = ["most"]
reserve = "most"
{UNITS}
"""
for name in ("likely", "most"):
    price = f"{{ input = {INPUT_USD}, cached_input = {INPUT_USD}, cache_write = {INPUT_USD}, output = {OUTPUT_USD} }}"
    CONFIG += f'\n[[models]]\nname = "{name}"\naliases = ["{name}-alias"]\nto = [{{ pool = "own" }}]\nprice = {price}\n'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("limited"), workers=0, config=CONFIG) as gateway:
        yield gateway


def idle(gateway):
    """Waits until the worker has nothing of what an earlier test cancelled, and has told all that it made of it."""
    wait_until(lambda: gateway.metric("penstock_sequences_running") == 0, "the worker is idle")


def used(gateway, limit: str) -> dict[str, float]:
    """What counts of every unit, once nothing is held."""

    def settled():
        answer = httpx.get(f"{gateway.url}/status", timeout=30).raise_for_status().json()
        measures = next(one for one in answer["limits"] if one["id"] == limit)["measures"]
        return all(one["reserved"] == 0 for one in measures) and {one["measure"]: one["used"] for one in measures}

    return wait_until(settled, "nothing is held")


def asked(gateway, model: str, stream: bool, **bound) -> tuple[int, int, dict]:
    """Tokens of the prompt and of the answer, as the answer says, and its line in the access log."""

    # Not the logs of workers, which grow too.
    def lines() -> list[str]:
        return gateway.log_path.read_text().splitlines()

    before = len(lines())
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = gateway.client().chat.completions.create(
        model=model, messages=user("What is it like?"), stop=[" "], stream=stream, **bound, **options
    )
    usage = list(answer)[-1].usage if stream else answer.usage

    def line():
        ended = [line for line in lines()[before:] if '"reserved_tokens"' in line]
        return ended and json.loads(ended[0])

    return usage.prompt_tokens, usage.completion_tokens, wait_until(line, "its line in the log")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", ["likely", "most"])
def test_every_unit_is_reserved_and_settled_by_what_it_is(gateway, limit, stream):
    context = httpx.get(f"{gateway.url}/v1/models", timeout=30).json()["data"][0]["max_model_len"]
    # A bound above the context is served; no more is held than the context leaves.
    for model, bound in ((limit, {"max_tokens": 5}), (f"{limit}-alias", {"max_tokens": 100_000})):
        before = used(gateway, limit)
        prompt, output, line = asked(gateway, model, stream, **bound)
        held = min(bound["max_tokens"], context - prompt)
        assert line["reserved_tokens"] == prompt + held
        assert line["reserved_usd"] == pytest.approx((prompt * INPUT_USD + held * OUTPUT_USD) / 1e6)
        assert line["charged_tokens"] == prompt + output and not line.get("estimated")
        after = used(gateway, limit)
        grown = {name: after[name] - before[name] for name in after}
        assert grown.pop("usd_per_day") == pytest.approx((prompt * INPUT_USD + output * OUTPUT_USD) / 1e6)
        assert grown == {
            "requests_per_day": 1,
            "tokens_per_day": prompt + output,
            "input_tokens_per_day": prompt,
            "output_tokens_per_day": output,
            "in_flight": 0,
        }
    # Without a bound the most is what the context leaves; what is likely is never more.
    prompt, _, line = asked(gateway, limit, stream)
    assert line["reserved_tokens"] == (context if limit == "most" else prompt + min(1024, context - prompt))


def test_a_prompt_in_prefill_counts_though_its_answer_is_not_polled_any_more(gateway):
    """A cancelled background response is dropped with its task, which is not told before the first token that a worker has the prompt."""
    client = gateway.client()

    def cancelled_in_prefill(number: int) -> tuple[int, dict] | None:
        """Tokens of a prompt, and what counted of it; `None`: an answer was further than that."""
        # The one place is taken, so the task has found nothing to take before a worker gets its prompt.
        endless = {"max_output_tokens": 8000, "extra_body": {"ignore_eos": True}}
        idle(gateway)
        first = client.responses.create(model="most", input="Count.", background=True, **endless)
        wait_until(lambda: gateway.metric("penstock_sequences_running") == 1, "the place is taken")
        text = f"{number} " + "What is it like to be a long prompt? " * 600
        counted = httpx.post(f"{gateway.url}/tokenize", json={"model": "likely", "messages": user(text)}, timeout=60)
        before = used(gateway, "likely")
        second = client.responses.create(model="likely", input=text, background=True, **endless)

        def waits() -> bool:
            return gateway.metric("penstock_queue_waiting") == 1

        def runs() -> bool:
            return client.responses.retrieve(first.id).status in ("queued", "in_progress")

        def cancelled(response) -> bool:
            try:
                return client.responses.cancel(response.id).status == "cancelled"
            except openai.BadRequestError:
                return False  # It has ended.

        wait_until(lambda: waits() or not runs(), "it waits")
        in_time = waits() and cancelled(first)
        wait_until(lambda: not waits(), "a worker has it", step=0)
        in_time = cancelled(second) and in_time
        after = used(gateway, "likely")
        grown = {name: after[name] - before[name] for name in after}
        if grown["output_tokens_per_day"] or not in_time:
            return None
        return counted.raise_for_status().json()["count"], grown

    found = next(filter(None, map(cancelled_in_prefill, range(100))), None)
    assert found, "no prompt was cancelled in its prefill"
    prompt, grown = found
    assert grown.pop("usd_per_day") == pytest.approx(prompt * INPUT_USD / 1e6)
    assert grown == {
        "requests_per_day": 1,
        "tokens_per_day": prompt,
        "input_tokens_per_day": prompt,
        "output_tokens_per_day": 0,
        "in_flight": 0,
    }


def test_output_that_was_not_read_counts(gateway):
    """A client that stops reading and leaves: what the worker has sent by then was computed, and counts in every unit."""
    body = {
        "model": "likely",
        "messages": user("Count."),
        "max_tokens": 8000,
        "ignore_eos": True,
        "stream": True,
        # Large pieces, so that the buffers on the way to the client fill up soon.
        "logprobs": True,
        "top_logprobs": 20,
    }
    prompt = (
        httpx.post(f"{gateway.url}/tokenize", json={"model": "likely", "messages": body["messages"]}, timeout=60)
        .raise_for_status()
        .json()["count"]
    )
    idle(gateway)
    before, made = used(gateway, "likely"), gateway.metric("penstock_output_tokens_total")
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{gateway.port}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", gateway.port))
        client.sendall(head.encode() + raw)

        def stalled():
            """Nothing more is made: the gateway waits for the reader, and the worker for the gateway."""
            seen = gateway.metric("penstock_output_tokens_total")
            time.sleep(2)
            return seen > made and gateway.metric("penstock_output_tokens_total") == seen

        wait_until(stalled, "the worker waits", 60)
        assert gateway.metric("penstock_sequences_running") == 1
    after = used(gateway, "likely")
    output = gateway.metric("penstock_output_tokens_total") - made
    assert output < 8000
    grown = {name: after[name] - before[name] for name in after}
    assert grown["output_tokens_per_day"] == output
    assert grown["input_tokens_per_day"] == prompt
    assert grown["usd_per_day"] == pytest.approx((prompt * INPUT_USD + output * OUTPUT_USD) / 1e6)
