"""What a gateway holds for others is bounded: memory for answers, room for stored responses, places in the background."""

import contextlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import openai
import pytest
from test_memory import memory

from harness import serving, user, wait_until

MIB = 1 << 20
ANSWER_BYTES = 24 * MIB
BUDGET = 96 * MIB
# Beside the budget: what moves at one moment, and what the allocator has not given back yet.
SLACK = 64 * MIB
# Left of large answers once they are gone: what is too little to be returned at once, and buffers of connections.
GIVEN_BACK = 24 * MIB
# Stands for the large text in an event.
BULK = "BULK"
ENDLESS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}


class Hostile(ThreadingHTTPServer):
    """Answers `huge` with all but the end of a large answer, `endless` with a line that does not end, `silent` not at all.

    `limited` is a 429 for two minutes, `page` and `picture` are streams of one event as large as the prompt says, in MiB.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answering)
        self.release, self.asked = threading.Event(), 0
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def table(self) -> str:
        models = '["huge", "endless", "silent", "quick", "limited", "page"]'
        return f'[[providers]]\nid = "up"\nbase_url = "{self.url}/v1"\nkey_env = "KEY_UP"\nmodels = {models}\n'


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked += 1
        with contextlib.suppress(OSError):
            # Gemini's model is in the path.
            getattr(self, asked.get("model", "picture"))(asked)

    def huge(self, _):
        start, end = (
            b'{"id":"a","object":"chat.completion","created":1,"model":"huge","choices":[{"index":0,"message":',
            b"}]}",
        )
        start += b'{"role":"assistant","content":"'
        end = b'"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
        self.head("application/json", len(start) + ANSWER_BYTES + len(end))
        self.wfile.write(start + b"x" * ANSWER_BYTES)
        self.server.release.wait(120)
        self.wfile.write(end)

    def endless(self, _):
        self.head("text/event-stream", None)
        event = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\ndata: ")
        for _ in range(64):
            self.wfile.write(b"x" * MIB)

    def limited(self, _):
        self.send_response(429)
        self.send_header("retry-after", "120")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def page(self, asked):
        choice = {"index": 0, "delta": {"content": BULK}, "finish_reason": "stop"}
        self.event({"choices": [choice]}, int(asked["messages"][0]["content"]), b"data: [DONE]\n\n")

    def picture(self, asked):
        part = {"inlineData": {"mimeType": "image/png", "data": BULK}}
        candidate = {"content": {"parts": [part], "role": "model"}, "finishReason": "STOP"}
        self.event({"candidates": [candidate]}, int(asked["contents"][0]["parts"][0]["text"]), b"")

    def event(self, document: dict, mebibytes: int, end: bytes):
        """Sends an event with the bulk in its place, and waits for the test before the blank line that ends the event."""
        self.head("text/event-stream", None)
        before, behind = json.dumps(document).encode().split(BULK.encode())
        self.wfile.write(b"data: " + before + b"x" * (mebibytes * MIB) + behind)
        self.wfile.flush()
        self.server.release.wait(120)
        self.wfile.write(b"\n\n" + end)

    def silent(self, _):
        self.server.release.wait(120)

    def quick(self, _):
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = json.dumps(
            {
                "id": "a",
                "object": "chat.completion",
                "created": 1,
                "model": "quick",
                "choices": [choice],
                "usage": usage,
            }
        )
        self.head("application/json", len(body))
        self.wfile.write(body.encode())

    def head(self, kind: str, length: int | None):
        self.send_response(200)
        self.send_header("content-type", kind)
        if length is None:
            self.send_header("connection", "close")
        else:
            self.send_header("content-length", str(length))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hostile():
    server = Hostile()
    yield server
    server.release.set()
    server.shutdown()


def test_large_answers_share_one_budget(tmp_path, hostile):
    config = f"[server]\nanswer_memory_bytes_max = {BUDGET}\n{hostile.table()}"
    with serving(tmp_path, config=config, env={"KEY_UP": "k"}, workers=0) as gateway:
        before = memory(gateway.process.pid)

        def held() -> float:
            return gateway.metric("penstock_answer_bytes")

        def ask(_) -> httpx.Response:
            asked = {"model": "huge", "messages": user("Hello")}
            return httpx.post(f"{gateway.url}/v1/chat/completions", json=asked, timeout=120)

        with ThreadPoolExecutor(12) as pool:
            asking = [pool.submit(ask, number) for number in range(12)]
            wait_until(lambda: sum(one.done() for one in asking) >= 9, "what does not fit is refused", 90)
            refused = [one.result() for one in asking if one.done()]
            assert {one.status_code for one in refused} == {503}
            # Those answers were made, and would be billed again: no retry is advised.
            assert all(one.headers["x-should-retry"] == "false" and one.json()["error"]["code"] for one in refused)
            assert all("retry-after" not in one.headers for one in refused)
            wait_until(lambda: held() >= 3 * ANSWER_BYTES, "the others are held", 60)
            assert held() <= BUDGET
            grown = memory(gateway.process.pid) - before
            print(f"{grown / MIB:.0f} MiB for a budget of {BUDGET / MIB:.0f}")
            assert grown <= BUDGET + SLACK, f"{grown / MIB:.0f} MiB"
            # A small answer has memory of its own.
            asked = {"model": "quick", "messages": user("Hello")}
            assert httpx.post(f"{gateway.url}/v1/chat/completions", json=asked, timeout=60).status_code == 200
            hostile.release.set()
            answered = [one.result() for one in asking if one.result().status_code == 200]
        assert len(answered) == 3
        assert all(len(one.json()["choices"][0]["message"]["content"]) == ANSWER_BYTES for one in answered)
        wait_until(lambda: held() == 0, "all of it is given back", 60)
        # By the allocator too, though nothing is asked of the gateway any more.
        wait_until(lambda: memory(gateway.process.pid) - before <= GIVEN_BACK, "the system has it back", 60)


PAIR = """
[[keys]]
id = "alice"
key_env = "ALICE_KEY"

[[keys]]
id = "bob"
key_env = "BOB_KEY"

[[keys]]
id = "watch"
key_env = "WATCH_KEY"
routes = ["/metrics"]
"""


def test_large_answers_of_one_key_leave_half_of_the_memory_to_others(tmp_path, hostile):
    config = f"[server]\nanswer_memory_bytes_max = {2 * BUDGET}\n{hostile.table()}{PAIR}"
    env = {"KEY_UP": "k", "ALICE_KEY": "alice-key", "BOB_KEY": "bob-key", "WATCH_KEY": "watch-key"}
    with serving(tmp_path, config=config, env=env, workers=0) as gateway, ThreadPoolExecutor(8) as pool:

        def bearer(who: str) -> dict:
            return {"authorization": f"Bearer {who}-key"}

        def ask(who: str) -> httpx.Response:
            asked = {"model": "huge", "messages": user("Hello")}
            return httpx.post(f"{gateway.url}/v1/chat/completions", json=asked, headers=bearer(who), timeout=120)

        def held() -> float:
            text = httpx.get(f"{gateway.url}/metrics", headers=bearer("watch"), timeout=30).raise_for_status().text
            return float(re.search(r"^penstock_answer_bytes (\S+)$", text, re.MULTILINE)[1])

        alice = [pool.submit(ask, "alice") for _ in range(6)]

        def open_ones() -> int:
            return sum(not one.done() for one in alice)

        # Three fit into half of the budget; those that grow at the same time may stand in each other's way.
        wait_until(lambda: open_ones() <= 3 and held() >= open_ones() * ANSWER_BYTES, "the others are held", 90)
        assert open_ones() >= 1 and held() <= BUDGET
        refused = [one.result() for one in alice if one.done()]
        assert {one.status_code for one in refused} == {503}
        assert all("of this key" in one.json()["error"]["message"] for one in refused)
        bob = pool.submit(ask, "bob")
        wait_until(lambda: held() >= (open_ones() + 1) * ANSWER_BYTES, "another key's answer has memory", 60)
        hostile.release.set()
        assert bob.result().status_code == 200
        assert sorted(one.result().status_code for one in alice) == (6 - len(refused)) * [200] + len(refused) * [503]


@pytest.mark.parametrize("api", list(ENDLESS))
def test_an_endless_line_costs_its_limit_and_ends_as_broken(tmp_path, hostile, api):
    with serving(tmp_path, config=hostile.table(), env={"KEY_UP": "k"}, workers=0) as gateway:
        before, most = memory(gateway.process.pid), 0

        def ask(_) -> str:
            asked = {"model": "endless", "messages": user("Hello"), "stream": True, "max_tokens": 100}
            said = ""
            with contextlib.suppress(httpx.RemoteProtocolError):
                with httpx.stream("POST", f"{gateway.url}{ENDLESS[api]}", json=asked, timeout=120) as reply:
                    for text in reply.iter_text():
                        said += text
                raise AssertionError("a clean end")
            return said

        with ThreadPoolExecutor(6) as pool:
            asking = [pool.submit(ask, number) for number in range(6)]
            while not all(one.done() for one in asking):
                most = max(most, memory(gateway.process.pid) - before)
        for one in asking:
            assert "error" in one.result() and "[DONE]" not in one.result() and "message_stop" not in one.result()
        print(f"{most / MIB:.0f} MiB for six endless lines")
        assert most <= 6 * 4 * MIB + 40 * MIB, f"{most / MIB:.0f} MiB"


KEYS = """
[[keys]]
id = "alice"
key_env = "ALICE_KEY"
limits = ["few"]

[[keys]]
id = "bob"
key_env = "BOB_KEY"

[[keys]]
id = "watch"
key_env = "WATCH_KEY"
routes = ["/metrics"]

[[limits]]
id = "few"
requests_per_minute = 1000
tokens_per_day = 3000000
"""


def test_what_a_key_keeps_is_bounded_and_its_places_are_shared(tmp_path, hostile):
    config = f"[store]\nkey_response_bytes_max = 400000\n{hostile.table()}{KEYS}"
    env = {"KEY_UP": "k", "ALICE_KEY": "alice-key", "BOB_KEY": "bob-key", "WATCH_KEY": "watch-key"}
    with serving(tmp_path, config=config, env=env, workers=0) as gateway:
        alice, bob = (
            gateway.client(api_key="alice-key", max_retries=0),
            gateway.client(api_key="bob-key", max_retries=0),
        )

        def metric(name: str) -> float:
            text = httpx.get(f"{gateway.url}/metrics", headers={"authorization": "Bearer watch-key"}, timeout=30).text
            return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])

        # Old ones make room.
        made = [alice.responses.create(model="quick", input="x" * 150_000, max_output_tokens=9).id for _ in range(3)]

        def is_kept(client, response_id: str) -> bool:
            try:
                return bool(client.responses.retrieve(response_id))
            except openai.NotFoundError:
                return False

        wait_until(lambda: is_kept(alice, made[2]), "the newest is kept", 60)
        assert [is_kept(alice, one) for one in made] == [False, True, True]
        # What her limit would not let in is not kept.
        kept = metric("penstock_response_bytes")
        with pytest.raises(openai.RateLimitError):
            alice.responses.create(model="quick", input="x" * 1_000_000, max_output_tokens=2_900_000, background=True)
        # One that never fits is refused, and deletes nothing.
        with pytest.raises(openai.PermissionDeniedError) as refused:
            alice.responses.create(model="quick", input="x" * 250_000, max_output_tokens=9, background=True)
        assert refused.value.code == "storage_quota_exceeded"
        assert [is_kept(alice, one) for one in made] == [False, True, True]
        assert metric("penstock_response_bytes") >= kept
        # She takes every place that she gets, for as long as the upstream is silent.
        for _ in range(150):
            alice.responses.create(model="silent", input="x", max_output_tokens=9, background=True)
        wait_until(lambda: metric("penstock_background_responses") >= 64, "hers run", 60)
        for _ in range(3):
            his = bob.responses.create(model="quick", input="Hello", background=True).id
            wait_until(lambda his=his: bob.responses.retrieve(his).status == "completed", "his does not wait", 60)
        assert metric("penstock_background_responses") <= 128


def test_a_response_that_waits_out_a_429_has_no_place(tmp_path, hostile):
    with serving(tmp_path, config=hostile.table(), env={"KEY_UP": "k"}, workers=0) as gateway:
        client = gateway.client(max_retries=0)

        def create(model: str) -> str:
            return client.responses.create(model=model, input="Hello", max_output_tokens=9, background=True).id

        # More than the places that one key gets, which is half of 128.
        waiting = [create("limited") for _ in range(80)]
        wait_until(lambda: hostile.asked >= 1, "the provider says 429", 60)
        for _ in range(3):
            quick = create("quick")
            # The pause of the others is two minutes.
            wait_until(lambda quick=quick: client.responses.retrieve(quick).status == "completed", "it has a place", 60)
        wait_until(lambda: gateway.metric("penstock_background_responses") == 0, "the others have none", 60)
        statuses = {client.responses.retrieve(one).status for one in waiting}
        assert statuses <= {"queued", "in_progress"}, statuses


def test_images_have_a_limit_of_events_of_their_own(tmp_path, hostile):
    """An image may be larger than a text: 4 MiB for an event of text (the default), here 8 MiB for one of images."""
    gemini = '[[providers]]\nid = "gemini"\nprotocol = "gemini"\nkey_env = "KEY_UP"\nmodels = ["picture"]\n'
    config = (
        f'[server]\nimage_event_bytes_max = {8 * MIB}\n{hostile.table()}{gemini}base_url = "{hostile.url}/v1beta"\n'
    )
    with serving(tmp_path, config=config, env={"KEY_UP": "k"}, workers=0) as gateway:

        def page(mebibytes: int) -> tuple[str, dict]:
            return "/v1/chat/completions", {"model": "page", "messages": user(str(mebibytes)), "stream": True}

        def picture(mebibytes: int) -> tuple[str, dict]:
            asked = {"contents": [{"parts": [{"text": str(mebibytes)}]}]}
            return "/v1beta/models/picture:streamGenerateContent?alt=sse", asked

        def ask(path: str, asked: dict) -> httpx.Response:
            return httpx.post(f"{gateway.url}{path}", json=asked, timeout=120)

        def held() -> float:
            return gateway.metric("penstock_answer_bytes")

        with ThreadPoolExecutor(1) as pool:
            for kind, mebibytes in [(page, 3), (picture, 6)]:
                asking = pool.submit(ask, *kind(mebibytes))
                wait_until(lambda size=mebibytes: held() >= size * MIB, "the event is charged while it is held", 60)
                hostile.release.set()
                reply = asking.result()
                assert (reply.status_code, reply.text.count("x" * MIB)) == (200, mebibytes), reply.text[:200]
                hostile.release.clear()
                wait_until(lambda: held() == 0, "it is given back", 60)
            for kind, mebibytes, most in [(page, 6, 4), (picture, 9, 8)]:
                reply = ask(*kind(mebibytes))
                assert reply.status_code == 502, reply.text[:200]
                assert f"larger than {most * MIB} bytes" in reply.text
