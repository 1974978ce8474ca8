"""Streams from the real server: `serve.py PENSTOCK CHECKPOINT [DEVICE] [STREAMS,...] [TOKENS]`.

For each number of streams: all begin at once, each with a prompt of 128 tokens of its own and an answer of TOKENS (256) tokens. Prints tokens per
second from the first request to the last answer, time to first token (TTFT) and time per further token (TPOT), median and p99.
"""

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POOL = "local"
PROMPT_TOKENS = 128
# Longest time of one number of streams.
LIMIT_SECONDS = 60
USAGE = re.compile(rb'"completion_tokens":(\d+)')


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def stream(port, tokens):
    """One request: seconds to the first token, seconds to the last one, number of tokens."""
    prompt = [random.randrange(1, 4000) for _ in range(PROMPT_TOKENS)]
    body = {"model": POOL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        began, first, last, tail = time.monotonic(), None, None, b""
        writer.write(head.encode() + text)
        await writer.drain()
        while chunk := await reader.read(1 << 16):
            tail = (tail + chunk)[-8192:]
            if b'"text":"' in chunk and b'"finish_reason":null' in chunk:
                last = time.monotonic()
                first = first or last
        found = USAGE.search(tail)
        if not found or first is None:
            kind = RuntimeError if tail.startswith(b"HTTP/1.1 4") else ConnectionError
            raise kind(f"no tokens: {tail[-600:]!r}")
        return first - began, last - began, int(found[1])
    finally:
        writer.close()


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


async def level(port, streams, tokens):
    began = time.monotonic()
    tasks = [asyncio.create_task(stream(port, tokens)) for _ in range(streams)]
    done, late = await asyncio.wait(tasks, timeout=LIMIT_SECONDS)
    wall = time.monotonic() - began
    for task in late:
        task.cancel()
    errors = [task.exception() for task in done if task.exception()]
    results = [task.result() for task in done if not task.exception()]
    if errors:
        print(f"x{streams}: {len(errors)} failed, the first: {errors[0]!r}")
    if late:
        print(f"x{streams}: {len(late)} were not done after {LIMIT_SECONDS} s")
    if results:
        total = sum(count for _, _, count in results)
        firsts = [1e3 * first for first, _, _ in results]
        each = [1e3 * (last - first) / max(count - 1, 1) for first, last, count in results]
        print(
            f"x{streams}: {total / wall:.0f} tokens/s ({total} in {wall:.2f} s), "
            f"TTFT {percentile(firsts, 0.5):.0f} ms, p99 {percentile(firsts, 0.99):.0f}, "
            f"TPOT {percentile(each, 0.5):.2f} ms, p99 {percentile(each, 0.99):.2f}",
            flush=True,
        )
    return not errors and not late


async def ready(port, process, logs):
    deadline = time.monotonic() + 90
    while True:
        try:
            return await stream(port, 2)
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not answer: {error!r}\n{logs()[-6000:]}") from error
            await asyncio.sleep(0.1)


async def main():
    penstock, checkpoint = sys.argv[1], Path(sys.argv[2]).resolve()
    rest = dict(enumerate(sys.argv[3:]))
    device, tokens = rest.get(0, "cuda"), int(rest.get(2, 256))
    sizes = [int(size) for size in rest.get(1, "1,32,256").split(",")]
    with tempfile.TemporaryDirectory() as folder:
        port, log = free_port(), Path(folder, "serve.log")

        def logs():
            return "\n".join(path.read_text() for path in sorted(Path(folder).glob("*.log")))

        config = Path(folder, "penstock.toml")
        pool = {"id": POOL, "model": str(checkpoint), "device": device, "sequences_max": max(sizes)}
        config.write_text("[[pools]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in pool.items()))
        command = [penstock, "serve", "--config", str(config), "--listen", f"127.0.0.1:{port}", "--state-dir", folder]
        began = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--access-log", "off"], stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        try:
            await ready(port, process, logs)
            print(f"{checkpoint.name} on {device}: first answer {time.monotonic() - began:.1f} s after the start")
            for line in logs().splitlines():
                if "load_ms" in line or "a GPU computes" in line:
                    print(line)
            good = [await level(port, streams, tokens) for streams in sizes]
            if not all(good):
                print(logs()[-3000:])
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    asyncio.run(main())
