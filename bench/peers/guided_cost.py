#!/usr/bin/env python3
"""CPU time of held answers beside free ones, at two servers with one checkpoint: 32 streams of 200 tokens, free, under 32 regular
expressions, and under 32 JSON schemas.

Usage: guided_cost.py OURS_URL OURS_PROCESS OTHER_URL OTHER_PROCESS [MODEL=penstock-demo]

A process is named by a part of its command line; the CPU time of all processes with it counts. Three turns, servers interleaved.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import httpx

SERVERS = {"ours": (sys.argv[1], sys.argv[2]), "other": (sys.argv[3], sys.argv[4])}
MODEL = sys.argv[5] if len(sys.argv) > 5 else "penstock-demo"
STREAMS, TOKENS, TURNS = 32, 200, 3


def regex(at: int) -> dict:
    return {"structured_outputs": {"regex": f"([a-z0-9{at % 10}]+[ ,]){{400}}"}}


def schema(at: int) -> dict:
    members = {f"a{at}": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "y"]}}
    item = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    form = {"name": "x", "schema": {"type": "array", "items": item, "minItems": 60}}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


FORMS = {"free": lambda _: {}, "regexes": regex, "schemas": schema}


def cpu_seconds(process: str) -> float:
    ticks = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as cmdline, open(f"/proc/{pid}/stat") as stat:
                if process in cmdline.read().replace("\0", " ") and int(pid) != os.getpid():
                    fields = stat.read().rsplit(")", 1)[1].split()
                    ticks += int(fields[11]) + int(fields[12])
        except OSError:
            pass
    return ticks / os.sysconf("SC_CLK_TCK")


async def tokens_of(url: str, form, tokens: int) -> int:
    limits = httpx.Limits(max_connections=2 * STREAMS)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def one(at: int) -> int:
            messages = [{"role": "user", "content": f"Count from {at} to 300."}]
            body = {"model": MODEL, "messages": messages, "temperature": 1, "seed": at, "max_tokens": tokens}
            answer = await client.post(f"{url}/v1/chat/completions", json=body | {"ignore_eos": True} | form(at))
            answer.raise_for_status()
            return answer.json()["usage"]["completion_tokens"]

        return sum(await asyncio.gather(*[one(at) for at in range(STREAMS)]))


def main() -> None:
    for url, _ in SERVERS.values():
        asyncio.run(tokens_of(url, schema, 60))
    for turn in range(TURNS):
        for form, make in FORMS.items():
            for name, (url, process) in SERVERS.items():
                before, began = cpu_seconds(process), time.monotonic()
                tokens = asyncio.run(tokens_of(url, make, TOKENS))
                cost, rate = (cpu_seconds(process) - before) / tokens * 1e3, tokens / (time.monotonic() - began)
                print(f"{turn} {form:8} {name:6} {cost:.3f} CPU ms a token, {rate:.0f} tokens a second", flush=True)


main()
