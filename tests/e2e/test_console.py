"""The web console of the real binary: sessions and what guards them over HTTP, then the pages in a browser."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from harness import DEMO_MODEL, HOLDS, Gateway, serving, wait_until

HERE = Path(__file__).resolve().parent
# A name that would run, close a tag or leave JSON, where somebody wrote it as markup.
HOSTILE = "<img src=x onerror=alert(1)>\"'</script><b>"
KEYS = {"owner": "psa_owner_of_the_tests", "operator": "psa_operator_of_the_tests", "viewer": "psa_viewer_of_the_tests"}
CONFIG = """
[[limits]]
id = "standard"
requests_per_minute = 1000

[[providers]]
id = "elsewhere"
base_url = "http://127.0.0.1:9/v1"
models = ['<img src=x onerror=alert(2)>', "far-model"]

[[models]]
name = "far"
to = [{ provider = "elsewhere", model = "far-model" }]
""" + "".join(
    f'[[admin_keys]]\nid = "{role}"\ndigest = "{hashlib.sha256(key.encode()).hexdigest()}"\nrole = "{role}"\n'
    for role, key in KEYS.items()
)
POOLS = f"""
[[pools]]
id = "penstock-demo"
model = "{DEMO_MODEL}"
workers = 2

[[pools]]
id = "second"
model = "{DEMO_MODEL}"
workers = 1

[[models]]
name = "priced"
to = [{{ pool = "penstock-demo" }}]
price = {{ input = 100, output = 200 }}

[[models]]
name = "tight"
to = [{{ pool = "penstock-demo" }}]

[[limits]]
id = "tight"
for = "everyone"
models = ["tight"]
requests_per_day = 1

[[models]]
name = "held"
to = [{{ pool = "penstock-demo" }}]

[[limits]]
id = "people"
models = ["held"]
requests_per_day = 1

[[plugins]]
name = "guard"
keys = ["console:*"]
[plugins.settings]
rules = [{{ name = "unsaid", words = ["unsayable"], action = "block", on = "prompt" }}]

[[plugins]]
id = '<img src=x onerror=alert(3)>'
name = "tags"
keys = ["console:trial"]
settings = {{ set = {{ "<b>tag</b>" = '<img src=x onerror=alert(4)>' }} }}

[[plugins]]
name = "pii"
keys = ["console:trial"]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Gateway]:
    limited = CONFIG.replace('role = "operator"\n', 'role = "operator"\nlimits = ["people"]\n')
    with serving(tmp_path_factory.mktemp("console"), workers=0, config=limited + POOLS) as gateway:
        yield gateway


class Person:
    """Somebody with a browser: cookies, the token of the session, and the fields that browsers send."""

    def __init__(self, gateway: Gateway, role: str = ""):
        self.url = (gateway.state / "admin.url").read_text().split()[0]
        self.client = httpx.Client(base_url=self.url, timeout=30, headers={"sec-fetch-site": "same-origin"})
        self.token = ""
        if role:
            answer = self.sign_in(KEYS[role])
            assert answer.status_code == 201, answer.text
            self.token = answer.json()["token"]

    def sign_in(self, key: str, **fields: str) -> httpx.Response:
        return self.client.post("/admin/v1/session", json={"key": key}, headers={"origin": self.url, **fields})

    def ask(self, method: str, path: str, json: object = None, **fields: str) -> httpx.Response:
        headers = {"x-penstock-session": self.token, "origin": self.url} | fields
        if method == "GET":
            del headers["origin"]
        return self.client.request(method, f"/admin/v1{path}", json=json, headers=headers)


# Compressed size of everything that the page loads, in bytes.
ASSETS_BYTES_MAX = 250_000


def test_the_page_is_strict_and_whole(served):
    person = Person(served)
    start = person.client.get("/")
    assert (start.status_code, start.headers["location"]) == (303, "/console/")
    page = person.client.get("/console/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'") and "unsafe" not in policy
    assert page.headers["x-frame-options"] == "DENY" and page.headers["referrer-policy"] == "no-referrer"
    names = re.findall(r'"(/console/[^"]+)"', page.text)
    assert len(names) > 10
    sizes = [len(page.content)]
    for name in names:
        with person.client.stream("GET", name) as packed:
            sizes.append(len(b"".join(packed.iter_raw())))
        file = person.client.get(name)
        assert file.status_code == 200 and file.headers["content-encoding"] == "gzip", name
        assert "immutable" in file.headers["cache-control"]
    assert min(sizes) > 0 and sum(sizes) <= ASSETS_BYTES_MAX, sum(sizes)
    for path in ["/console/../admin/v1/status", "/console/%2e%2e/admin/v1/status", "/console/x/app.js", "/console//"]:
        assert person.client.get(path).status_code in (401, 404), path
    assert httpx.get(f"{person.url}/console/", headers={"host": "evil.example"}).status_code == 403
    # A link of another page may lead there; nobody may post there.
    assert person.client.get("/console/", headers={"sec-fetch-site": "cross-site"}).status_code == 200
    assert person.client.post("/console/").status_code == 405


def test_a_cookie_is_for_this_browser_and_this_gateway(served):
    person = Person(served)
    answer = person.sign_in(KEYS["viewer"])
    cookie = answer.headers["set-cookie"]
    port = person.url.rsplit(":", 1)[1]
    found = re.fullmatch(rf"penstock_session_{port}=([\w-]{{43}}); Path=/admin/v1; HttpOnly; SameSite=Strict", cookie)
    assert found, cookie
    assert found[1] not in answer.text and answer.headers["cache-control"] == "no-store"
    again = person.sign_in(KEYS["viewer"]).headers["set-cookie"]
    assert found[1] not in again, "each sign-in has an id of its own"
    # A proxy in front that speaks TLS: the browser says so.
    host = person.url.removeprefix("http://")
    secure = person.client.post(
        "/admin/v1/session", json={"key": KEYS["viewer"]}, headers={"origin": f"https://{host}"}
    )
    assert secure.headers["set-cookie"].endswith("; SameSite=Strict; Secure")


def test_an_id_that_somebody_brings_is_worth_nothing(served):
    person = Person(served)
    port = person.url.rsplit(":", 1)[1]
    person.client.cookies.set(f"penstock_session_{port}", "chosen-by-somebody-else", path="/admin/v1")
    person.token = "chosen-too"
    assert person.ask("GET", "/whoami").status_code == 401
    answer = person.sign_in(KEYS["viewer"])
    assert "chosen-by-somebody-else" not in answer.headers["set-cookie"]
    held = {"cookie": f"penstock_session_{port}=chosen-by-somebody-else", "x-penstock-session": answer.json()["token"]}
    assert httpx.get(f"{person.url}/admin/v1/whoami", headers=held).status_code == 401


def test_the_cookie_alone_opens_nothing(served):
    owner = Person(served, "owner")
    assert owner.ask("GET", "/whoami").json() == {"key": "owner", "role": "owner"}
    token, owner.token = owner.token, ""
    assert owner.ask("GET", "/whoami").status_code == 403
    owner.token = token[:-1] + ("A" if token[-1] != "A" else "B")
    assert owner.ask("GET", "/whoami").status_code == 403
    assert httpx.get(f"{owner.url}/admin/v1/whoami", headers={"x-penstock-session": token}).status_code == 401
    owner.token = token
    # A bearer key is what it was, with a cookie beside it or not; a wrong one is not helped by the cookie.
    assert owner.ask("GET", "/whoami", authorization=f"Bearer {KEYS['viewer']}").json()["role"] == "viewer"
    assert owner.ask("GET", "/whoami", authorization="Bearer psa_no").status_code == 401
    assert owner.ask("GET", "/whoami", authorization="Basic b3duZXI6").status_code == 401


def test_other_pages_change_nothing(served):
    owner = Person(served, "owner")
    level = {"level": "info"}
    assert owner.ask("PUT", "/log-level", level).status_code == 200
    host = owner.url.removeprefix("http://")
    for origin in [
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        f"http://{host}.evil.example",
        "http://localhost",
    ]:
        assert owner.ask("PUT", "/log-level", level, origin=origin).status_code == 403, origin
    # Without an origin the browser has to vouch for the page.
    bare = {"x-penstock-session": owner.token}
    for site in ["same-site", "cross-site", "none", ""]:
        answer = owner.client.put("/admin/v1/log-level", json=level, headers=bare | {"sec-fetch-site": site})
        assert answer.status_code == 403, site
    assert owner.client.put("/admin/v1/log-level", json=level, headers=bare).status_code == 200
    assert owner.ask("PUT", "/log-level", level, **{"x-penstock-session": ""}).status_code == 403
    # A form of another page cannot sign anybody in, and a form is no JSON.
    assert owner.sign_in(KEYS["viewer"], origin="http://evil.example").status_code == 403
    form = owner.client.post("/admin/v1/session", data={"key": KEYS["viewer"]}, headers={"origin": owner.url})
    assert form.status_code == 415


def test_a_session_is_its_role_and_no_more(served):
    viewer, operator, owner = (Person(served, role) for role in ("viewer", "operator", "owner"))
    tried = [
        ("PUT", "/log-level", {"level": "info"}, (403, 200, 200)),
        ("POST", "/requests/999999/cancel", None, (403, 404, 404)),
        ("POST", "/keys", {"name": "x"}, (403, 403, 201)),
        ("POST", "/config/validate", {"text": ""}, (403, 403, 200)),
        ("POST", "/config/rollback", {"version": 999}, (403, 403, 404)),
        ("GET", "/audit", None, (403, 403, 200)),
        ("POST", "/playground", {"model": "nobody", "messages": [], "stream": True}, (403, 400, 400)),
        ("POST", "/plugins/dry-run", {"path": "/v1/chat/completions", "body": chat("Hello")}, (403, 200, 200)),
        ("GET", "/batches", None, (200, 200, 200)),
        ("POST", "/batches/batch_none/cancel", None, (403, 404, 404)),
        ("GET", "/files", None, (200, 200, 200)),
        ("DELETE", "/files/file-none", None, (403, 403, 404)),
        ("GET", "/live", None, (200, 200, 200)),
    ]
    for method, path, body, expected in tried:
        got = tuple(person.ask(method, path, body).status_code for person in (viewer, operator, owner))
        assert got == expected, (method, path)
    events = owner.ask("GET", "/audit?action=session.*").json()["data"]
    assert {event["actor"] for event in events} >= {"viewer", "operator", "owner"}
    assert all(key not in json.dumps(events) for key in KEYS.values())


def test_a_stream_lasts_as_long_as_its_session(served):
    person, other = Person(served, "viewer"), Person(served, "viewer")
    ask = {"accept": "text/event-stream", "x-penstock-session": person.token}
    with person.client.stream("GET", "/admin/v1/live", headers=ask) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        lines = answer.iter_lines()
        states = []
        while len(states) < 3:
            line = next(lines)
            if line.startswith("data: "):
                states.append(json.loads(line[6:]))
        assert states[2]["at_ms"] - states[0]["at_ms"] >= 1000, "at most twice a second"
        assert [worker["name"] for worker in states[0]["workers"]] == ["penstock-demo-0", "penstock-demo-1", "second-0"]
        assert person.ask("DELETE", "/session").status_code == 204
        rest = list(lines)
        assert "event: end" in rest, rest[-3:]
    assert person.ask("GET", "/whoami").status_code == 401
    assert other.ask("GET", "/whoami").status_code == 200, "another session of the same key goes on"
    headers = ask | {"x-penstock-session": other.token}
    streams = [other.client.stream("GET", "/admin/v1/live", headers=headers) for _ in range(5)]
    statuses = [stream.__enter__().status_code for stream in streams]
    assert statuses == [200] * 4 + [429]
    for stream in streams:
        stream.__exit__(None, None, None)
    # The places come back once the gateway has seen that nobody reads.
    wait_until(lambda: free(other, headers), "a place for a stream")
    # An admin key gets the state once, whatever it accepts.
    bearer = {"authorization": f"Bearer {KEYS['viewer']}", "accept": "text/event-stream"}
    assert httpx.get(f"{other.url}/admin/v1/live", headers=bearer).json()["version"]


def free(person: Person, headers: dict) -> bool:
    with person.client.stream("GET", "/admin/v1/live", headers=headers) as answer:
        return answer.status_code == 200


def test_a_session_ends_with_its_admin_key(tmp_path):
    with serving(tmp_path, workers=0, config=CONFIG) as gateway:
        viewer = Person(gateway, "viewer")
        ask = {"accept": "text/event-stream", "x-penstock-session": viewer.token}
        with viewer.client.stream("GET", "/admin/v1/live", headers=ask) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            wait_until(lambda: gateway.metric("penstock_console_sessions") == 1, "the session is counted")
            owner = {"authorization": f"Bearer {KEYS['owner']}"}
            digest = hashlib.sha256(KEYS["viewer"].encode()).hexdigest()
            changed = CONFIG.replace(f'[[admin_keys]]\nid = "viewer"\ndigest = "{digest}"\nrole = "viewer"\n', "")
            put = httpx.put(f"{viewer.url}/admin/v1/config", json={"text": changed}, headers=owner, timeout=30)
            assert put.status_code == 200, put.text
            assert "event: end" in list(lines)
        assert viewer.ask("GET", "/whoami").status_code == 401
        # The console can be switched off while it runs.
        person = Person(gateway, "owner")
        off = person.ask("PUT", "/config", {"text": changed + "[admin]\nconsole = false\n"})
        assert off.status_code == 200, off.text
        assert person.ask("GET", "/whoami").status_code == 401
        assert person.client.get("/console/").status_code == 404
        assert person.sign_in(KEYS["owner"]).status_code == 404
        assert httpx.get(f"{viewer.url}/admin/v1/whoami", headers=owner).status_code == 200


def test_guessing_is_slowed_down(tmp_path):
    with serving(tmp_path, workers=0, config=CONFIG) as gateway:
        person, owner = Person(gateway), Person(gateway, "owner")
        statuses = [person.sign_in(f"psa_guess_{number}").status_code for number in range(40)]
        assert statuses[0] == 401 and 429 in statuses
        again = owner.sign_in(KEYS["owner"])
        assert again.status_code == 201, "a key that has been good is let in"
        owner.token = again.json()["token"]
        events = owner.ask("GET", "/audit?action=session.create&outcome=denied").json()["data"]
        assert len(events) == 1, "a guesser does not fill the log"


def test_names_from_outside_are_inert(served):
    owner = Person(served, "owner")
    made = owner.ask("POST", "/keys", {"name": HOSTILE})
    assert made.status_code == 201
    for path in ["/keys", "/live", "/models", "/audit"]:
        answer = owner.ask("GET", path)
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert HOSTILE in [key["name"] for key in owner.ask("GET", "/keys").json()["data"]]
    assert owner.ask("POST", f"/keys/{made.json()['key']['id']}/revoke").status_code == 200


def chat(text: str, **more) -> dict:
    """A chat completion as the playground asks for it."""
    asked = {"model": "penstock-demo", "max_tokens": 8, "stream": True, "messages": [{"role": "user", "content": text}]}
    return asked | more


def chunks(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_the_playground_asks_as_everybody_does(served):
    """Plugins, limits, ledger, log and bounds act on what people ask at the console, as the key `console:ID`."""
    operator, owner = Person(served, "operator"), Person(served, "owner")
    asked = chat("Hello", model="priced", stream_options={"include_usage": True})
    answer = operator.ask("POST", "/playground", asked)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream", answer.text
    said = "".join(
        chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks(answer.text) if chunk["choices"]
    )
    assert said and "data: [DONE]" in answer.text
    usage = chunks(answer.text)[-1]["usage"]
    cost = float(re.search(r"^: x-penstock-cost: (\S+)$", answer.text, re.MULTILINE)[1])
    assert cost == pytest.approx((usage["prompt_tokens"] * 100 + usage["completion_tokens"] * 200) / 1e6)

    def noted():
        page = owner.ask("GET", "/usage/requests?key=console:operator").json()["data"]
        return [one for one in page if one["request_id"] == answer.headers["x-request-id"]]

    (entry,) = wait_until(noted, "the request is in the ledger")
    assert (entry["model"], entry["status"], entry["output_tokens"]) == ("priced", 200, usage["completion_tokens"])
    assert entry["usd"] == pytest.approx(cost)
    line = wait_until(
        lambda: [
            line for line in served.log().splitlines() if answer.headers["x-request-id"] in line and line[0] == "{"
        ],
        "the request is in the access log",
    )
    logged = json.loads(line[0])
    assert (logged["protocol"], logged["key"], logged["end"]) == ("console", "console:operator", "complete")

    # A limit for everyone, which counts each admin key alone.
    assert operator.ask("POST", "/playground", chat("Hello", model="tight")).status_code == 200
    refused = operator.ask("POST", "/playground", chat("Hello", model="tight"))
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_requests", refused.text
    assert owner.ask("POST", "/playground", chat("Hello", model="tight")).status_code == 200
    # A limit that only the operator's admin key names.
    held = [
        person.ask("POST", "/playground", chat("Hello", model="held")).status_code for person in (operator, owner) * 2
    ]
    assert held == [200, 200, 429, 200]
    # A plugin for these keys.
    assert operator.ask("POST", "/playground", chat("the unsayable word")).status_code in (400, 403)
    for body, status in [
        (chat("Hello", stream=False), 400),
        (chat("Hello", model=HOSTILE), 404),
        (chat("Hello", temperature="hot"), 400),
        ({"stream": True}, 400),
        ([], 400),
    ]:
        assert operator.ask("POST", "/playground", body).status_code == status, body
    # The key itself is no session: programs use API keys.
    bearer = operator.ask("POST", "/playground", chat("Hello"), authorization=f"Bearer {KEYS['owner']}")
    assert bearer.status_code == 409, bearer.text
    assert operator.ask("POST", "/playground", chat("Hello"), origin="http://evil.example").status_code == 403
    events = owner.ask("GET", "/audit?action=playground.ask").json()["data"]
    assert {event["outcome"] for event in events} == {"done", "failed", "denied"}
    assert "Hello" not in json.dumps(events)


def test_a_playground_stream_ends_with_its_operator_session_or_switch(tmp_path):
    long = chat("Tell me a story", max_tokens=100_000, n=8, ignore_eos=True, **HOLDS)
    config = f'{CONFIG}\n[[pools]]\nid = "penstock-demo"\nmodel = "{DEMO_MODEL}"\n'
    # Streams that nobody reads are larger than all buffers on the way, and must not end meanwhile.
    patient = config + "[server]\nwrite_stall_ms = 120_000\n"
    with serving(tmp_path, workers=0, config=patient) as gateway:
        owner = Person(gateway, "owner")

        def streaming(person: Person):
            fields = {"x-penstock-session": person.token, "origin": person.url}
            return person.client.stream("POST", "/admin/v1/playground", json=long, headers=fields)

        def running() -> dict | None:
            found = owner.ask("GET", "/requests").json()["data"]
            return next((one for one in found if one["key"] == "console:operator" and one["answering"]), None)

        def gone() -> bool:
            return owner.ask("GET", "/requests").json()["data"] == []

        # Cancelled by somebody else.
        operator = Person(gateway, "operator")
        with streaming(operator) as answer:
            live = wait_until(running, "the request is listed")
            assert live["client"] == "127.0.0.1" and not live["background"]
            assert owner.ask("POST", f"/requests/{live['id']}/cancel").status_code == 200
            last = chunks(answer.read().decode())[-1]
            assert "cancelled by an operator" in last["error"]["message"]
        wait_until(gone, "nothing is in flight")
        # Left by its reader.
        with streaming(operator) as answer:
            wait_until(running, "the request is listed")
        wait_until(gone, "nothing is in flight")
        # Signed out, which frees the worker too.
        with streaming(operator) as answer:
            wait_until(running, "the request is listed")
            assert operator.ask("DELETE", "/session").status_code == 204
            assert "event: end" in answer.read().decode()
        wait_until(gone, "nothing is in flight")
        gateway.idle()
        # No more than four event streams of a session.
        operator = Person(gateway, "operator")
        streams = [streaming(operator) for _ in range(5)]
        assert [stream.__enter__().status_code for stream in streams] == [200] * 4 + [429]
        # Lowered to a viewer, and then switched off.
        digest = hashlib.sha256(KEYS["operator"].encode()).hexdigest()
        lowered = patient.replace(f'digest = "{digest}"\nrole = "operator"', f'digest = "{digest}"\nrole = "viewer"')
        assert lowered != patient
        assert owner.ask("PUT", "/config", {"text": lowered}).status_code == 200
        wait_until(gone, "nothing is in flight")
        for stream in streams:
            stream.__exit__(None, None, None)
        assert operator.ask("POST", "/playground", chat("Hello")).status_code == 403
        off = owner.ask("PUT", "/config", {"text": patient + "[admin]\nplayground = false\n"})
        assert off.status_code == 200, off.text
        assert operator.ask("POST", "/playground", chat("Hello")).status_code == 404


class Hostile(BaseHTTPRequestHandler):
    """A provider whose answers are markup wherever text can be. One to "hold" does not end before its reader has left."""

    def do_POST(self):
        holds = b"hold" in self.rfile.read(int(self.headers["content-length"]))
        deltas = [
            {"role": "assistant", "reasoning_content": HOSTILE},
            {"content": HOSTILE},
            {
                "tool_calls": [
                    {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
                ]
            },
            {"tool_calls": [{"index": 0, "function": {"arguments": json.dumps({"at": HOSTILE})}}]},
        ]
        ends = [None] * len(deltas) + ["tool_calls"]
        choices = [
            {"index": 0, "delta": delta, "finish_reason": end} for delta, end in zip([*deltas, {}], ends, strict=True)
        ]
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "far-model"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        events = [{**head, "choices": [choice]} for choice in choices] + [{**head, "choices": [], "usage": usage}]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for event in events[:2] if holds else events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        if not holds:
            self.wfile.write(b"data: [DONE]\n\n")
            return
        self.wfile.flush()
        # The gateway sends nothing more: the end of its side is what comes next.
        self.connection.settimeout(120)
        self.connection.recv(1)

    def log_message(self, *_):
        pass


@contextmanager
def hostile_provider() -> Iterator[str]:
    """Its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def browse(script: str, told: dict, seconds: float) -> dict:
    """Runs a script of a person in Chromium; what its last line says."""
    assert shutil.which("chromium"), "Chromium is missing: make tools, or apt-get install chromium"
    command = ["node", str(HERE / script), json.dumps(told)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        steps = (error.stderr or b"").decode(errors="replace")
        raise AssertionError(f"{script} has not ended in {seconds} s; its steps:\n{steps[-6000:]}") from None
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_person_at_the_console(tmp_path):
    """The pages in Chromium: a key issued and used, a stream cancelled, a config rolled back, a worker killed, chats with models; every view in
    both themes, narrow and wide, without a violation of WCAG, an error in the console, a violation of the policy or a request to anybody else."""
    with hostile_provider() as url:
        config = CONFIG.replace("http://127.0.0.1:9/v1", url) + POOLS
        with serving(tmp_path, workers=0, config=config) as gateway:
            told = {
                "url": (gateway.state / "admin.url").read_text().split()[0],
                "key": KEYS["owner"],
                "viewer": KEYS["viewer"],
                "data": gateway.url,
                "hostile": HOSTILE,
                "shots": os.environ.get("PENSTOCK_SHOTS", ""),
            }
            assert browse("console.mjs", told, 240) == {"views": 44}
            assert " panicked" not in gateway.log()


def test_a_newcomer_gets_a_key_with_a_budget(tmp_path):
    """From a gateway that serves to a key with a budget, used in Python and as curl in every dialect, and its cost seen: by clicking alone."""
    pool = f'[[pools]]\nid = "penstock-demo"\nmodel = "{DEMO_MODEL}"\n'
    model = '[[models]]\nname = "assistant"\nto = [{ pool = "penstock-demo" }]\nprice = { input = 100, output = 200 }\n'
    with serving(tmp_path, workers=0, config=pool + model) as gateway:
        told = {
            "url": (gateway.state / "admin.url").read_text().split()[0],
            "key": (gateway.state / "admin.key").read_text().strip(),
            "python": sys.executable,
            "shots": os.environ.get("PENSTOCK_SHOTS", ""),
        }
        found = browse("newcomer.mjs", told, 180)
        assert found["dialects"] == 4 and found["usd"] > 0, found
