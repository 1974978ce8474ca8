"""A thousand streams at once: a provider that goes on talking until it is told to end, and clients that read every byte.

Both live on one event loop in a thread of the test, because a thousand threads would be the load that is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field

from harness import wait_until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(delta: dict, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


async def next_chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a body, empty at its end; an error where the connection ends before."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    data = await reader.readexactly(size + 2)
    assert data.endswith(b"\r\n"), data
    return data[:-2]


@dataclass
class Outcome:
    """What became of one request."""

    status: int = 0
    # The stream ended as it should, with everything in it.
    complete: bool = False
    words: int = 0
    why: str = ""
    headers: bytes = b""


@dataclass
class Many:
    """See above. `pace`: seconds between two words of a stream."""

    pace: float = 0.5
    # Seconds before a whole answer.
    delay: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    def __enter__(self) -> Many:
        self.loop = asyncio.new_event_loop()
        # Handlers that are cancelled at the end have nothing to say.
        self.loop.set_exception_handler(lambda *_: None)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.open = self.talking = self.served = 0
        self.models: list[str] = []
        self.run(self._listen()).result(20)
        return self

    def __exit__(self, *_):
        self.run(self._end()).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)

    def run(self, work: Coroutine):
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _listen(self):
        self.release = asyncio.Event()
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _end(self):
        self.release.set()
        self.server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the provider ----

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                asked = json.loads(body or b"{}")
                self.models.append(asked.get("model", head.split(b" ")[1].decode()))
                self.served += 1
                if not asked.get("stream"):
                    await asyncio.sleep(self.delay)
                    choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
                    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
                    data = json.dumps(
                        answer | {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
                    )
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
                    )
                    writer.write(data.encode())
                    await writer.drain()
                    continue
                self.talking += 1
                try:
                    await self._talk(writer)
                finally:
                    self.talking -= 1
        writer.close()

    async def _talk(self, writer: asyncio.StreamWriter):
        writer.write(HEAD + event({"role": "assistant", "content": ""}))
        number = 0
        while not self.release.is_set():
            writer.write(event({"content": f"w{number} "}))
            await writer.drain()
            number += 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.release.wait(), self.pace)
        writer.write(event({"content": f"end{number}"}) + event({}, "stop") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()

    # ---- clients ----

    async def ask(self, port: int, model: str, stream: bool, key: str | None = None) -> Outcome:
        """One request on a connection of its own."""
        outcome = Outcome()
        body = json.dumps({"model": model, "stream": stream, "messages": [{"role": "user", "content": "go"}]}).encode()
        auth = f"authorization: Bearer {key}\r\n" if key else ""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{auth}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + body)
            outcome.headers = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            outcome.status = int(outcome.headers.split(b" ")[1])
            if not stream or outcome.status != 200:
                length = [
                    line for line in outcome.headers.lower().split(b"\r\n") if line.startswith(b"content-length:")
                ]
                await reader.readexactly(int(length[0].split(b":")[1]))
                outcome.complete = True
                return outcome
            self.open += 1
            try:
                await self._read(reader, outcome)
            finally:
                self.open -= 1
        except Exception as error:  # noqa: BLE001
            # Whatever it is: nobody looks at the task.
            outcome.why = outcome.why or repr(error)
        finally:
            if writer:
                writer.close()
            self.outcomes.append(outcome)
        return outcome

    async def _read(self, reader: asyncio.StreamReader, outcome: Outcome):
        """Takes all chunks. Where the text is cut into events is not the provider's alone to say: a plugin may hold some of it back."""
        rest, text, done = b"", "", False
        while data := await asyncio.wait_for(next_chunk(reader), 120):
            *events, rest = (rest + data).split(b"\n\n")
            for one in events:
                done = done or one == b"data: [DONE]"
                if one.startswith(b"data: {"):
                    said = json.loads(one[6:])
                    outcome.why = outcome.why or (json.dumps(said["error"]) if "error" in said else "")
                    choices = said.get("choices") or [{}]
                    text += choices[0].get("delta", {}).get("content") or ""
            outcome.words = len(text.split())
        whole = [f"w{number}" for number in range(outcome.words - 1)] + [f"end{outcome.words - 1}"]
        if not done or rest or text.split() != whole:
            outcome.why = outcome.why or f"[DONE]: {done}, behind it: {rest!r}, said: {text!r}"
        outcome.complete = not outcome.why

    def begin(self, port: int, count: int, model: str = "m", key: str | None = None) -> None:
        """Opens streams and waits until all of them talk."""
        before = self.open

        async def all_of_them():
            for at in range(count):
                asyncio.ensure_future(self.ask(port, model, True, key))
                if at % 50 == 49:
                    # No SYN shall be dropped for the length of a queue: that would be the machine's doing.
                    await asyncio.sleep(0.01)

        self.run(all_of_them()).result(60)
        wait_until(lambda: self.open >= before + count and self.talking >= before + count, f"{count} streams", 90, 0.05)

    def end(self) -> list[Outcome]:
        """Lets all streams end and returns what became of them."""
        self.loop.call_soon_threadsafe(self.release.set)
        wait_until(lambda: self.open == 0, "all streams have ended", 90, 0.05)
        return self.run(self._taken()).result(60)

    async def _taken(self) -> list[Outcome]:
        """On the loop, where nothing has ended that is not among the outcomes yet."""
        ended, self.outcomes = self.outcomes, []
        self.release.clear()
        return ended


class Steady:
    """New connections at a steady rate, from before a change to after it."""

    def __init__(self, many: Many, port: int, rate: float = 40.0, model: str = "m", key: str | None = None):
        self.many, self.port, self.rate, self.model, self.key = many, port, rate, model, key
        self.results: list[Outcome] = []
        self.count, self.stop = 0, False

    def __enter__(self) -> Steady:
        self.task = self.many.run(self._run())
        return self

    def __exit__(self, *_):
        self.stop = True
        self.task.result(90)

    def asked(self) -> int:
        """Requests so far."""
        return self.count

    async def _run(self):
        asked = []
        while not self.stop:
            self.count += 1
            asked.append(asyncio.ensure_future(self.many.ask(self.port, self.model, False, self.key)))
            await asyncio.sleep(1 / self.rate)
        self.results = list(await asyncio.gather(*asked))

    def failures(self) -> list[Outcome]:
        return [result for result in self.results if not (result.complete and result.status == 200)]
