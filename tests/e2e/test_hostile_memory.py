"""Both memory budgets at once, under providers and clients that do everything to pass them, while another key is served."""

import asyncio
import contextlib
import json
import random
import re
import threading
import time

import httpx
import pytest
from test_memory import memory

from harness import serving, user, wait_until

MIB = 1 << 20
BODY_BYTES, BODIES = 8 * MIB, 32 * MIB
ANSWERS = 128 * MIB
# Beside both budgets: what moves at one moment (buffers of sockets, a buffer that is copied as it grows), and what the allocator has not
# given back yet. 40 to 90 MiB were measured.
SLACK = 128 * MIB
# Attackers of each hostile key at once. Bodies that are small as yet, 64 KiB of each, fit into what is kept for small ones (4 MiB) together.
CLIENTS = 16
# Names of each hostile model: a breaker that opens for one of them does not end the attack.
NAMES = 6
# The attack goes on until both budgets were driven, as a rule before it has lasted `SECONDS`; longer where the machine is busy.
SECONDS, SECONDS_MAX, ASKED_MIN = 20, 300, 40
PIECE = b"x" * (64 * 1024)
KEYS = ("mallory", "trudy", "bob", "watch")


def event(content: str, choice: int = 0) -> bytes:
    delta = {"index": choice, "delta": {"content": content}, "finish_reason": None}
    return b"data: " + json.dumps({"id": "a", "choices": [delta]}).encode() + b"\n\n"


START = b'{"id":"a","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"'
END = b'"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'


def end(loop: asyncio.AbstractEventLoop, thread: threading.Thread):
    """Cancels everything that runs in a loop, and ends its thread."""

    async def cancelled():
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(cancelled(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


class Provider:
    """Answers as the model's name says, before the `-`; counts what it was asked."""

    def __init__(self):
        self.asked, self.loop = {}, asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=512))
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def stop(self):
        self.loop.call_soon_threadsafe(self.server.close)
        end(self.loop, self.thread)

    def table(self) -> str:
        kinds = [name.removeprefix("do_") for name in dir(self) if name.startswith("do_")]
        names = [f"{kind}-{number}" for kind in kinds for number in range(NAMES)]
        return f'[[providers]]\nid = "up"\nbase_url = "{self.url}"\nkey_env = "KEY_UP"\nmodels = {json.dumps(names)}\n'

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])
                asked = json.loads(await reader.readexactly(length))
                kind = asked["model"].split("-")[0]
                self.asked[kind] = self.asked.get(kind, 0) + 1
                if not await getattr(self, f"do_{kind}")(writer, asked):
                    break
        writer.close()

    async def say(self, writer, data: bytes, kind: str | None = None, length: int | None = None):
        """Sends bytes, behind the head of an answer of that content type."""
        if kind:
            framing = "connection: close" if length is None else f"content-length: {length}"
            data = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{framing}\r\n\r\n".encode() + data
        writer.write(data)
        await writer.drain()

    async def do_quick(self, writer, asked):
        """An answer as it should be."""
        if asked.get("stream"):
            done = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
            parts = [event("a" * 4000) for _ in range(10)] + [b"data: " + json.dumps(done).encode() + b"\n\n"]
            await self.say(writer, b"".join(parts) + b"data: [DONE]\n\n", "text/event-stream")
            return False
        body = START + b"a" * 40_000 + END
        await self.say(writer, body, "application/json", len(body))
        return True

    async def do_line(self, writer, _):
        """A line without end."""
        await self.say(writer, event("a") + b"data: ", "text/event-stream")
        for _ in range(1024):
            await self.say(writer, PIECE)

    async def do_events(self, writer, _):
        """Events of 3 MiB, one after the other."""
        large = event("y" * (3 * MIB))
        await self.say(writer, event("a"), "text/event-stream")
        for _ in range(20):
            await self.say(writer, large)

    async def do_choices(self, writer, _):
        """A choice that was not asked for in each event."""
        await self.say(writer, event("a"), "text/event-stream")
        for turn in range(400):
            await self.say(writer, b"".join(event("z" * 2000, 64 * turn + choice) for choice in range(64)))

    async def do_drip(self, writer, asked):
        """One byte of the answer every 50 ms."""
        if asked.get("stream"):
            await self.say(writer, b"", "text/event-stream")
        else:
            await self.say(writer, START, "application/json", len(START) + 10 * MIB)
        for _ in range(400):
            await asyncio.sleep(0.05)
            await self.say(writer, event("d") if asked.get("stream") else b"d")

    async def do_whole(self, writer, _):
        """A large answer that lacks its end, for as long as somebody waits for it."""
        await self.say(writer, START, "application/json", len(START) + 24 * MIB + len(END))
        for _ in range(24 * 16):
            await self.say(writer, PIECE)
        await asyncio.sleep(10)
        await self.say(writer, END)
        return True

    async def do_endless(self, writer, _):
        """An answer that is read whole, without an end."""
        await self.say(writer, START, "application/json")
        for _ in range(2048):
            await self.say(writer, PIECE)

    async def do_cut(self, writer, _):
        """A large answer that breaks off."""
        await self.say(writer, START, "application/json", 20 * MIB)
        for _ in range(16 * 8):
            await self.say(writer, PIECE)

    async def do_silent(self, writer, _):
        """No answer, for as long as somebody waits for it."""
        await asyncio.sleep(10)


class Attack:
    """Clients of one key, from a seed: each does one hostile thing after the other."""

    def __init__(self, port: int, key: str, seed: int, models: list[str]):
        self.port, self.key, self.models, self.done = port, key, models, {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        for number in range(CLIENTS):
            asyncio.run_coroutine_threadsafe(self.client(random.Random(f"{seed} {key} {number}")), self.loop)

    def stop(self):
        """Ends all clients at once, whatever they are in the middle of."""
        end(self.loop, self.thread)

    async def client(self, chance: random.Random):
        ways = [self.slow_body, self.endless_body, self.unread, self.left, self.read]
        while True:
            way = chance.choice(ways)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    async with asyncio.timeout(6):
                        await way(chance, reader, writer)
                finally:
                    # Without a word, and with what was not read.
                    writer.transport.abort()
                    self.done[way.__name__] = self.done.get(way.__name__, 0) + 1

    def head(self, chance: random.Random, framing: str) -> bytes:
        path = chance.choice(["/v1/chat/completions", "/v1/messages"])
        fields = f"host: localhost\r\nauthorization: Bearer {self.key}-key\r\ncontent-type: application/json"
        return f"POST {path} HTTP/1.1\r\n{fields}\r\n{framing}\r\n\r\n".encode()

    async def slow_body(self, chance, reader, writer):
        """Most of a body, then little by little."""
        length = chance.randrange(100, BODY_BYTES)
        writer.write(self.head(chance, f"content-length: {length}") + b" " * chance.randrange(length))
        while not reader.at_eof():
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(b" " * 50)

    async def endless_body(self, chance, reader, writer):
        """Chunks without end."""
        writer.write(self.head(chance, "transfer-encoding: chunked"))
        size = chance.choice([1000, 60_000, 1_000_000])
        chunk = f"{size:x}\r\n".encode() + b" " * size + b"\r\n"
        for _ in range(2 * BODY_BYTES // size):
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(chance.choice([0, 0.01]))
        await reader.read(1000)

    async def ask(self, chance, writer):
        padding = " " * chance.choice([10, 100_000, 2_000_000, 7_000_000])
        asked = {"model": chance.choice(self.models), "messages": user("x" + padding), "max_tokens": 100}
        body = json.dumps(asked | {"stream": chance.random() < 0.5}).encode()
        writer.write(self.head(chance, f"content-length: {len(body)}") + body)
        await writer.drain()

    async def unread(self, chance, reader, writer):
        """A request whose answer is not read: little more than what the sockets hold is taken."""
        await self.ask(chance, writer)
        await asyncio.sleep(chance.uniform(0.5, 4))

    async def left(self, chance, reader, writer):
        """A request that is left, sooner or later."""
        await self.ask(chance, writer)
        await asyncio.sleep(chance.choice([0, 0.05, 0.5]))
        await asyncio.wait_for(reader.read(chance.randrange(1, 100_000)), 2)

    async def read(self, chance, reader, writer):
        """A request whose answer is read, slowly or not."""
        await self.ask(chance, writer)
        pause = chance.choice([0, 0, 0.02])
        while await reader.read(64 * 1024):
            await asyncio.sleep(pause)


class Watch:
    """Largest held bytes and memory of a gateway, looked at again and again."""

    def __init__(self, gateway, headers: dict):
        self.gateway, self.headers, self.most, self.over = gateway, headers, [0.0, 0.0, 0.0], threading.Event()
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def look(self) -> tuple[float, float, float]:
        """Held bytes of request bodies and of answers, and resident bytes."""
        answer = httpx.get(f"{self.gateway.url}/metrics", headers=self.headers, timeout=60).raise_for_status()
        held = [
            float(re.search(rf"^{name} (\S+)$", answer.text, re.MULTILINE)[1])
            for name in ("penstock_body_bytes", "penstock_answer_bytes")
        ]
        return *held, memory(self.gateway.process.pid)

    def run(self):
        try:
            while not self.over.wait(0.02):
                self.most = [max(pair) for pair in zip(self.most, self.look(), strict=True)]
        except Exception as failure:
            self.failure = failure

    def stop(self):
        """Ends the looks; raises what has ended them before."""
        self.over.set()
        self.thread.join(120)
        assert not self.thread.is_alive(), "a look takes more than 120 s"
        if self.failure:
            raise self.failure


CONFIG = f"""
[server]
body_bytes_max = {BODY_BYTES}
body_memory_bytes_max = {BODIES}
body_timeout_ms = 3000
answer_memory_bytes_max = {ANSWERS}
write_stall_ms = 3000
"""


@pytest.fixture
def provider():
    provider = Provider()
    yield provider
    provider.stop()


@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_providers_and_clients_never_pass_the_memory_budgets(tmp_path, provider, seed):
    routes = {"watch": 'routes = ["/metrics"]\n'}
    keys = "".join(f'[[keys]]\nid = "{key}"\nkey_env = "{key.upper()}_KEY"\n{routes.get(key, "")}' for key in KEYS)
    env = {"KEY_UP": "k", **{f"{key.upper()}_KEY": f"{key}-key" for key in KEYS}}
    kinds = [name.removeprefix("do_") for name in dir(provider) if name.startswith("do_") and name != "do_quick"]
    models = [f"{kind}-{number}" for kind in kinds for number in range(NAMES)]
    with serving(tmp_path, config=CONFIG + provider.table() + keys, env=env, workers=0) as gateway:
        bearer = lambda who: {"authorization": f"Bearer {who}-key"}  # noqa: E731

        def served(number: int) -> bool:
            """A request and an answer that both need some of the memory, of whoever does no harm."""
            streamed = number % 2 == 0
            asked = {"model": f"quick-{number % NAMES}", "messages": user("Hello " + "a" * 30_000), "stream": streamed}
            url = f"{gateway.url}/v1/chat/completions"
            try:
                answer = httpx.post(url, json=asked, headers=bearer("bob"), timeout=60)
            except httpx.TransportError:
                return False
            whole = "[DONE]" in answer.text if streamed else answer.text.endswith(END.decode())
            return answer.status_code == 200 and whole

        assert all(served(number) for number in range(4))
        before = memory(gateway.process.pid)
        watch = Watch(gateway, bearer("watch"))
        attacks = [Attack(gateway.port, key, seed, models) for key in ("mallory", "trudy")]

        def driven() -> bool:
            """Both budgets were driven, by every model and in each way."""
            bodies, answers, _ = watch.most
            gone = set(provider.asked) == {"quick", *kinds} and all(len(attack.done) == 5 for attack in attacks)
            return gone and bodies > BODIES / 2 and answers > ANSWERS / 2

        try:
            began, good = time.monotonic(), []
            while not watch.failure and (lasted := time.monotonic() - began) < SECONDS_MAX:
                if lasted >= SECONDS and len(good) >= ASKED_MIN and driven():
                    break
                good.append(served(len(good)))
        finally:
            for attack in attacks:
                attack.stop()
            watch.stop()
        bodies, answers, resident = watch.most
        print(
            f"seed {seed}, {lasted:.0f} s: {sum(good)} of {len(good)} served; at most {bodies / MIB:.0f} MiB of bodies and {answers / MIB:.0f} of answers"
        )
        print(
            f"{before / MIB:.0f} MiB before, {(resident - before) / MIB:.0f} MiB more; {provider.asked}; {[attack.done for attack in attacks]}"
        )
        assert len(good) >= ASKED_MIN and sum(good) >= 0.95 * len(good), f"{sum(good)} of {len(good)} served"
        assert bodies <= BODIES and answers <= ANSWERS
        assert driven()
        assert resident <= before + BODIES + ANSWERS + SLACK, f"{(resident - before) / MIB:.0f} MiB more"
        wait_until(lambda: watch.look()[:2] == (0, 0), "both budgets are given back", 60)
        assert served(0) and " panicked" not in gateway.log()
