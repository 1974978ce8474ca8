"""A provider that bills, and many clients at once: plain asyncio, so that a thousand streams cost little.

What the provider bills is the truth that budgets are held against: the prompt by the bytes of the request, each token that it has
written. How it behaves is said by the request itself, in its prompt: `full`, `mute` (no usage), `break` (ends in the middle), `fail`
(status 500), `slow` (a token every 20 ms, and only half of them while the gate is shut: nothing else is certain to last). With `deaf` it
obeys no bound. A body in which a name stands twice is an error of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PROMPT_USD, OUTPUT_USD = 2.0, 10.0  # per million tokens


@dataclass
class Bill:
    """What one request is billed."""

    path: str
    prompt: int
    output: int = 0
    refused: bool = False

    @property
    def usd(self) -> float:
        return 0.0 if self.refused else (self.prompt * PROMPT_USD + self.output * OUTPUT_USD) / 1e6


@dataclass
class Seen:
    """What came."""

    bills: list[Bill] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    now: int = 0
    most: int = 0


class Swarm:
    """The provider, on a thread of its own."""

    def __init__(self):
        self.seen = Seen()
        self._gate = asyncio.Event()
        self._gate.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self):
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def shut(self) -> None:
        """No slow answer ends from now on."""
        self._loop.call_soon_threadsafe(self._gate.clear)

    def open(self) -> None:
        """They go on."""
        self._loop.call_soon_threadsafe(self._gate.set)

    @property
    def usd(self) -> float:
        return sum(bill.usd for bill in self.seen.bills)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(re.search(r"content-length: (\d+)", head, re.IGNORECASE)[1])
                body = await reader.readexactly(length)
                self.seen.now += 1
                self.seen.most = max(self.seen.most, self.seen.now)
                try:
                    await self._answer(head.split()[1], body, writer)
                finally:
                    self.seen.now -= 1
        writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter):
        asked = json.loads(body, object_pairs_hook=_once)
        self.seen.bodies.append(asked)
        prompt = body.decode()
        bill = Bill(path, max(1, len(body) // 4))
        self.seen.bills.append(bill)
        how = next((word for word in ("mute", "break", "fail", "slow") if f"<{word}>" in prompt), "full")
        wanted = re.search(r"<tokens=(\d+)>", prompt)
        api = next(api for api in APIS if api.match(path))
        bound = 10_000 if "<deaf>" in prompt else api.bound(asked) or 10_000
        tokens = min(bound, int(wanted[1]) if wanted else 8)
        if how == "fail":
            bill.refused = True
            return await _respond(writer, 500, b'{"error":{"message":"broken","type":"server_error"}}')
        if not api.streams(path, asked):
            if how == "slow":
                await self._gate.wait()
            bill.output = 0 if api is EMBED else tokens
            usage = None if how == "mute" else (bill.prompt, bill.output)
            return await _respond(writer, 200, json.dumps(api.whole(tokens, usage)).encode())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in api.begin(bill.prompt):
            _chunk(writer, event)
        for number in range(tokens):
            if how == "break" and number >= tokens // 2:
                writer.close()
                return None
            if how == "slow" and number >= tokens // 2:
                await self._gate.wait()
            bill.output += 1
            _chunk(writer, api.token())
            await writer.drain()
            await asyncio.sleep(0.02 if how == "slow" else 0)
        for event in api.end(None if how == "mute" else (bill.prompt, tokens), asked):
            _chunk(writer, event)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return None


def _once(pairs: list[tuple[str, object]]) -> dict:
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), f"a name stands twice: {names}"
    return dict(pairs)


async def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Waits while streams of the same loop go on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        await asyncio.sleep(0.01)


async def _respond(writer, status: int, body: bytes):
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


def _chunk(writer, data: dict | str, name: str = ""):
    name = data.get("type", "") if isinstance(data, dict) else ""
    text = (f"event: {name}\n" if name else "") + f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
    writer.write(f"{len(text):x}\r\n{text}\r\n".encode())


class Chat:
    """OpenAI's chat completions."""

    def match(self, path):
        return "/chat/completions" in path

    def bound(self, asked):
        return asked.get("max_tokens") or asked.get("max_completion_tokens")

    def streams(self, path, asked):
        return asked.get("stream", False)

    def _event(self, **more):
        return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], **more}

    def begin(self, prompt):
        return [
            self._event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        ]

    def token(self):
        return self._event(choices=[{"index": 0, "delta": {"content": " a"}, "finish_reason": None}])

    def end(self, usage, asked):
        out = [self._event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])]
        if usage and asked.get("stream_options", {}).get("include_usage"):
            out.append(self._event(usage=self._usage(usage)))
        return [*out, "[DONE]"]

    def _usage(self, usage):
        return {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}

    def whole(self, tokens, usage):
        message = {"role": "assistant", "content": " a" * tokens}
        out = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        out["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return out | ({"usage": self._usage(usage)} if usage else {})


class Messages:
    """Anthropic's messages."""

    def match(self, path):
        return "/messages" in path

    def bound(self, asked):
        return asked["max_tokens"]

    def streams(self, path, asked):
        return asked.get("stream", False)

    def _message(self, content, usage):
        usage = usage or (0, 0)
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": content,
            "stop_reason": "end_turn" if content else None,
            "stop_sequence": None,
            "usage": {"input_tokens": usage[0], "output_tokens": usage[1]},
        }

    def begin(self, prompt):
        start = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return [{"type": "message_start", "message": self._message([], (prompt, 1))}, start]

    def token(self):
        return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " a"}}

    def end(self, usage, asked):
        delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}}
        delta["usage"] = {"output_tokens": usage[1] if usage else 0}
        return [{"type": "content_block_stop", "index": 0}, delta, {"type": "message_stop"}]

    def whole(self, tokens, usage):
        return self._message([{"type": "text", "text": " a" * tokens}], usage)


class Generate:
    """Google's generateContent."""

    def match(self, path):
        return "enerateContent" in path

    def bound(self, asked):
        return asked.get("generationConfig", {}).get("maxOutputTokens")

    def streams(self, path, asked):
        return "streamGenerateContent" in path

    def _answer(self, text, usage, finish=None):
        out = {
            "candidates": [{"content": {"role": "model", "parts": [{"text": text}]}, "index": 0}],
            "modelVersion": "m",
        }
        if finish:
            out["candidates"][0]["finishReason"] = finish
        if usage:
            out["usageMetadata"] = {
                "promptTokenCount": usage[0],
                "candidatesTokenCount": usage[1],
                "totalTokenCount": sum(usage),
            }
        return out

    def begin(self, prompt):
        return []

    def token(self):
        return self._answer(" a", None)

    def end(self, usage, asked):
        return [self._answer("", usage, "STOP")]

    def whole(self, tokens, usage):
        return self._answer(" a" * tokens, usage, "STOP")


class Embed:
    """OpenAI's embeddings."""

    def match(self, path):
        return "/embeddings" in path

    def bound(self, asked):
        return 0

    def streams(self, path, asked):
        return False

    def whole(self, tokens, usage):
        out = {"object": "list", "model": "m", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}]}
        return out | ({"usage": {"prompt_tokens": usage[0], "total_tokens": usage[0]}} if usage else {})


EMBED = Embed()
APIS = [Chat(), Messages(), Generate(), EMBED]


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes


async def ask(port: int, path: str, body: dict, key: str = "", leave_after: int | None = None) -> Answer:
    """One request on a connection of its own; `leave_after` so many bytes of the answer, if at all."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return Answer(0, {}, b"")
    data = json.dumps(body).encode()
    auth = f"authorization: Bearer {key}\r\n" if key else ""
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n{auth}"
        f"content-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    got = b""
    with contextlib.suppress(ConnectionError):
        while leave_after is None or len(got) < leave_after:
            piece = await asyncio.wait_for(reader.read(65536), 120)
            if not piece:
                break
            got += piece
    writer.close()
    head, _, rest = got.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    if len(lines[0].split()) < 2:
        return Answer(0, {}, b"")
    fields = (line.partition(":") for line in lines[1:])
    return Answer(int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in fields}, rest)
