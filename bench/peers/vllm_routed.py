#!/usr/bin/env python3
"""Conversations through a gateway that routes by cache: what it predicted against what the servers say.

vllm_routed.py GATEWAY_URL
"""

import json
import random
import re
import sys
import time
import urllib.request

from vllm_events import conversations

BLOCK_TOKENS_MAX = 64


def counters(url):
    """Sums over targets: routed, predicted, reported, connected feeds, by layer where there is one."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sums = {}
    for name, labels, value in re.findall(r"^(penstock_(?:routed|kv)_\w+)\{([^}]*)\} (\S+)$", text, re.M):
        layer = re.search(r'layer="(\w+)"', labels)
        key = (name, layer.group(1) if layer else "")
        sums[key] = sums.get(key, 0) + float(value)
    return sums


def ask(url, messages, max_tokens):
    body = {"model": "demo", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.headers["x-penstock-target"], json.load(answer)["usage"]


def settled(url, before, name):
    """The counters once they have moved on, and events have stopped coming."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        now = counters(url)
        if now.get(name, 0) > before.get(name, 0):
            batches = ("penstock_kv_event_batches_total", "")
            time.sleep(0.5)
            again = counters(url)
            if again.get(batches) == now.get(batches):
                return again
        time.sleep(0.1)
    raise SystemExit(f"{name} did not move")


def main():
    url = sys.argv[1]
    connected = ("penstock_kv_events_connected", "")
    deadline = time.monotonic() + 60
    while counters(url).get(connected, 0) < 2:
        if time.monotonic() > deadline:
            raise SystemExit("no events came")
        time.sleep(0.2)
    routed, predicted, reported = (
        (f"penstock_routed_{name}_total", "events")
        for name in ("prompt_tokens", "cached_tokens_predicted", "cached_tokens")
    )
    differ, totals, targets = 0, [0, 0, 0], {}
    before = counters(url)
    for messages, max_tokens in conversations(random.Random(11)):
        target, usage = ask(url, messages, max_tokens)
        after = settled(url, before, routed)
        deltas = [int(after.get(key, 0) - before.get(key, 0)) for key in (routed, predicted, reported)]
        # A prompt that is cached to its end is computed from the beginning of its last block on.
        whole = deltas[1] > usage["prompt_tokens"] - BLOCK_TOKENS_MAX and 0 < deltas[1] - deltas[2] <= BLOCK_TOKENS_MAX
        differ += deltas[1] != deltas[2] and not whole
        totals = [sum(pair) for pair in zip(totals, deltas, strict=True)]
        targets[target] = targets.get(target, 0) + 1
        print(f"{target}  prompt {deltas[0]:4}  predicted {deltas[1]:4}  reported {deltas[2]:4}", flush=True)
        before = after
    share = ", ".join(f"{name} {count}" for name, count in sorted(targets.items()))
    print(
        f"{sum(targets.values())} requests ({share}): {totals[0]} prompt tokens, {totals[1]} predicted, {totals[2]} reported cached"
    )
    if differ:
        raise SystemExit(f"{differ} requests differ")


if __name__ == "__main__":
    main()
