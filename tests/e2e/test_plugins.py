"""Plugins around real requests: every API, streamed and whole, passed on, translated and from the own pool."""

import hashlib
import hmac
import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import openai
import pytest
from test_admin import admin as command
from test_batches import begin, ended, results

from drivers import DRIVERS, Wish
from harness import serving, text_of, user, wait_until
from providers import Anthropic, Gemini, OpenAi
from providers.server import Reply

KEYS = {"alice": "pk-alice", "bob": "pk-bob", "ops": "pk-ops"}
SECRETS = "write to ann.lee@example.com or call +49 30 901820, card 4111 1111 1111 1111"
REDACTED = "write to [EMAIL_1] or call [PHONE_1], card [CARD_1]"
CONFIG = """
[[keys]]
id = "alice"
key_env = "KEY_ALICE"

[[keys]]
id = "bob"
key_env = "KEY_BOB"

[[keys]]
id = "ops"
key_env = "KEY_OPS"
routes = ["/metrics"]

[[providers]]
id = "openai"
base_url = "{openai}/v1"
key_env = "KEY_OPENAI"
models = ["mock-openai", "judge", "embedder"]

[[providers]]
id = "anthropic"
protocol = "anthropic"
base_url = "{anthropic}/v1"
key_env = "KEY_ANTHROPIC"
models = ["mock-anthropic"]

[[providers]]
id = "gemini"
protocol = "gemini"
base_url = "{gemini}/v1beta"
key_env = "KEY_GEMINI"
models = ["mock-gemini"]
"""
MODELS = ("mock-openai", "mock-anthropic", "mock-gemini")


class World:
    """A gateway with plugins before one mock of every API."""

    def __init__(self, folder, plugins: str, pool: bool = False):
        self.mocks = {"openai": OpenAi(), "anthropic": Anthropic(), "gemini": Gemini()}
        for name, mock in self.mocks.items():
            mock.models = (f"mock-{name}", "judge", "embedder")
        config = CONFIG.format(**{name: mock.url for name, mock in self.mocks.items()}) + plugins
        config += '[[pools]]\nid = "penstock-demo"\n' if pool else ""
        env = {f"KEY_{name.upper()}": mock.key for name, mock in self.mocks.items()}
        env |= {f"KEY_{name.upper()}": key for name, key in KEYS.items()} | {"HOOK_SECRET": "hunter2"}
        self.serving = serving(folder, config=config, env=env, workers=1 if pool else 0)
        self.gateway = self.serving.__enter__()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.serving.__exit__(None, None, None)
        for mock in self.mocks.values():
            mock.close()

    def seen(self) -> list:
        return [seen for mock in self.mocks.values() for seen in mock.seen]

    def post(self, body: dict, key: str = "alice", **headers) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEYS[key]}", **headers}
        body = {"model": "mock-openai", "messages": user("Hello"), **body}
        return httpx.post(f"{self.gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=60)

    def say(self, driver, model: str, text: str, stream: bool, key: str = "alice"):
        conversation = driver(self.gateway.url, KEYS[key], model)
        conversation.say(text)
        return conversation.ask(Wish(), stream)

    def logged(self, request_id: str) -> dict:
        """The line of the access log."""

        def find():
            lines = (line for line in self.gateway.log().splitlines() if line.startswith("{"))
            return next((line for line in map(json.loads, lines) if line.get("request_id") == request_id), None)

        return wait_until(find, "the request is logged")


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    plugins = """
[[plugins]]
name = "pii"
on_fail = "closed"

[[plugins]]
name = "guard"
[[plugins.settings.rules]]
name = "weapons"
words = ["bomb", "grenade"]
"""
    with World(tmp_path_factory.mktemp("private"), plugins, pool=True) as world:
        yield world


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
def test_personal_data_stays_here(private, driver, model, stream):
    """The provider reads placeholders; the client reads what it wrote, whatever was translated and wherever it was cut."""
    for mock in private.mocks.values():
        mock.reset()
    with private.mocks[model.removeprefix("mock-")].behaving(cut="odd"):
        said = private.say(driver, model, f"Repeat: {SECRETS}", stream)
    assert said.text == SECRETS
    (seen,) = private.seen()
    assert REDACTED in json.dumps(seen.body or json.loads(seen.raw), ensure_ascii=False)
    for secret in (b"ann.lee", b"901820", b"4111"):
        assert secret not in seen.raw


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
def test_the_own_pool_has_the_same_plugins(private, driver, stream):
    said = private.say(driver, "penstock-demo", f"{SECRETS}. Hello!", stream)
    assert said.text
    with pytest.raises(Exception, match="rules of this service"):
        private.say(driver, "penstock-demo", "How do I build a bomb?", stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
def test_an_answer_ends_before_what_is_blocked(private, driver, model, stream):
    """The prompt passes, since the word is split there; the answer says it whole."""
    mock = private.mocks[model.removeprefix("mock-")]
    real = mock.answer
    mock.answer = lambda seen: real(joined(seen))
    try:
        said = private.say(driver, model, "Repeat: take a gre-nade and run", stream)
    finally:
        mock.answer = real
    assert said.text.strip() == "take a"
    assert said.finish in ("content_filter", "refusal", "SAFETY", "incomplete", "PROHIBITED_CONTENT"), said.finish


def joined(seen):
    """The request, with the word in one piece."""
    seen.raw = seen.raw.replace(b"gre-nade", b"grenade")
    seen.body = None
    return seen


def test_a_refusal_has_the_shape_of_the_api_and_its_reason_in_the_log(private):
    answer = private.post({"messages": user("about a bomb")})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "content_policy_violation"
    assert answer.headers["x-penstock-error-source"] == "gateway"
    line = private.logged(answer.headers["x-request-id"])
    assert line["detail"] == "rule weapons"
    answer = httpx.post(
        f"{private.gateway.url}/v1/messages",
        json={"model": "mock-openai", "max_tokens": 5, "messages": user("about a bomb")},
        headers={"x-api-key": KEYS["alice"]},
        timeout=60,
    )
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert "bomb" not in private.gateway.log()
    assert "ann.lee" not in private.gateway.log()


@pytest.mark.parametrize("text", [f"Repeat: {SECRETS}", "about a bomb", "Hello"])
def test_what_is_only_counted_meets_them_too(private, text):
    """A prompt whose tokens are counted goes to the provider as well: not with what plugins would have taken out of it."""
    mock = private.mocks["anthropic"]
    mock.reset()
    body = {"model": "mock-anthropic", "messages": user(text)}
    headers = {"x-api-key": KEYS["alice"]}
    url = f"{private.gateway.url}/v1/messages/count_tokens"
    answer = httpx.post(url, json=body, headers=headers, timeout=60)
    if "bomb" in text:
        assert answer.status_code == 400 and not mock.seen
        return
    assert answer.status_code == 200 and answer.json()["input_tokens"] > 0
    # What was edited is not what the client sent, so it is not passed on, but counted here.
    assert (answer.headers.get("x-penstock-estimate") == "true") == (text != "Hello")
    assert [seen.path for seen in mock.seen] == (["/v1/messages/count_tokens"] if text == "Hello" else [])


def test_batches_meet_the_same_plugins(private):
    private.mocks["openai"].reset()
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "mock-openai", "messages": user(text)},
        }
        for name, text in [("private", f"Repeat: {SECRETS}"), ("blocked", "about a bomb")]
    ]
    client = private.gateway.client(api_key=KEYS["alice"])
    batch = ended(client, begin(client, "\n".join(map(json.dumps, lines)).encode()).id)
    (good,) = results(client, batch.output_file_id)
    assert good["response"]["body"]["choices"][0]["message"]["content"] == SECRETS
    (bad,) = results(client, batch.error_file_id)
    assert bad["response"]["status_code"] == 400
    assert REDACTED.encode() in private.mocks["openai"].last.raw


def test_order_scope_headers_body_tags_and_routing(tmp_path):
    plugins = """
[[plugins]]
name = "tags"
settings = { set = { env = "test" }, headers = { team = "x-team" } }

[[plugins]]
name = "body"
keys = ["alice"]
settings = { set = { temperature = 0.25 }, default = { max_tokens = 3 } }

[[plugins]]
id = "one"
name = "headers"
settings = { request = { set = { "x-step" = "one" } }, response = { set = { "x-served" = "one" } } }

[[plugins]]
id = "two"
name = "headers"
models = ["mock-openai"]
settings = { request = { set = { "x-step" = "two" } }, response = { set = { "x-served" = "two" } } }

[[plugins]]
name = "route_by_rule"
routes = ["/v1/chat/*"]
[[plugins.settings.rules]]
words = ["claude"]
model = "mock-anthropic"
"""
    with World(tmp_path, plugins) as world:
        answer = world.post({"metadata": {"kept": "yes"}}, **{"x-team": "search"})
        seen = world.mocks["openai"].last
        body = json.loads(seen.raw)
        assert (body["temperature"], body["max_tokens"], body["metadata"]) == (0.25, 3, {"kept": "yes"})
        assert seen.headers["x-step"] == "two", "requests in the order of the file"
        assert answer.headers["x-served"] == "one", "answers the other way round"
        line = world.logged(answer.headers["x-request-id"])
        assert line["tags"] == {"env": "test", "team": "search"}
        world.post({}, key="bob")
        assert "temperature" not in json.loads(world.mocks["openai"].last.raw)
        answer = world.post({"messages": user("ask Claude"), "max_tokens": 50})
        assert answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["model"] == "mock-openai"
        assert json.loads(world.mocks["anthropic"].last.raw)["model"] == "mock-anthropic"
        assert world.mocks["anthropic"].last.headers["x-step"] == "two"
        headers = {"authorization": "Bearer pk-ops"}
        metrics = httpx.get(f"{world.gateway.url}/metrics", headers=headers, timeout=30).text
        assert 'penstock_plugin_calls_total{plugin="one",hook="request",outcome="pass"} 3' in metrics
        assert 'penstock_plugin_seconds_count{plugin="route_by_rule",hook="request"} 3' in metrics


def test_what_was_answered_is_answered_again_for_nothing(tmp_path):
    plugins = """
[[plugins]]
name = "cache"
[[limits]]
id = "few"
requests_per_minute = 1000
"""
    with World(tmp_path, plugins) as world:
        first = world.post({"messages": user("Count from 1 to 5")})
        again = world.post({"messages": user("Count from 1 to 5")})
        assert (first.headers["x-penstock-cache"], again.headers["x-penstock-cache"]) == ("miss", "hit")
        assert first.json()["choices"] == again.json()["choices"] and first.json()["usage"] == again.json()["usage"]
        client = world.gateway.client(api_key=KEYS["alice"])
        options = {"model": "mock-openai", "messages": user("Count from 1 to 5"), "stream": True}
        chunks = list(client.chat.completions.create(stream_options={"include_usage": True}, **options))
        assert text_of(chunks) == "1, 2, 3, 4, 5"
        assert chunks[-1].usage.completion_tokens == again.json()["usage"]["completion_tokens"]
        assert len(world.seen()) == 1, "asked once"
        assert world.post({"messages": user("Count from 1 to 5")}, key="bob").headers["x-penstock-cache"] == "miss"
        fresh = world.post({"messages": user("Count from 1 to 5")}, **{"cache-control": "no-cache"})
        assert fresh.headers["x-penstock-cache"] == "miss"
        assert len(world.seen()) == 3
        assert "cost_usd" not in world.logged(again.headers["x-request-id"])
        # A stream that broke is not kept.
        world.mocks["openai"].fail(cut_at=2)
        with pytest.raises((openai.APIError, httpx.TransportError)):
            list(client.chat.completions.create(**(options | {"messages": user("Count from 1 to 9")})))
        assert world.post({"messages": user("Count from 1 to 9")}).headers["x-penstock-cache"] == "miss"


def test_the_cache_keeps_placeholders_not_people(tmp_path):
    plugins = '[[plugins]]\nname = "pii"\n[[plugins]]\nname = "cache"\nsettings = { share = "all" }\n'
    with World(tmp_path, plugins) as world:
        one = world.post({"messages": user("Repeat: mail ann@example.com")})
        other = world.post({"messages": user("Repeat: mail bob@example.com")}, key="bob")
        assert one.json()["choices"][0]["message"]["content"] == "mail ann@example.com"
        assert other.json()["choices"][0]["message"]["content"] == "mail bob@example.com"
        assert other.headers["x-penstock-cache"] == "hit"


def test_other_models_are_asked(tmp_path):
    plugins = """
[[plugins]]
name = "moderation"
models = ["mock-anthropic"]
settings = { model = "judge", on = "both" }

[[plugins]]
name = "semantic_cache"
models = ["mock-openai"]
settings = { model = "embedder", threshold = 0.999 }
"""
    with World(tmp_path, plugins) as world:
        verdicts = []

        def moderate(body):
            verdicts.append(body["input"])
            flagged = "nasty" in body["input"]
            return Reply(
                {"id": "m", "model": "judge", "results": [{"flagged": flagged, "categories": {"hate": flagged}}]}
            )

        world.mocks["openai"]._moderate = moderate
        good = world.post({"model": "mock-anthropic", "messages": user("Repeat: kind words"), "stream": True})
        assert good.status_code == 200 and "kind" in good.text
        assert len(verdicts) == 2, "the prompt and the answer"
        bad = world.post({"model": "mock-anthropic", "messages": user("nasty words")})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "content_policy_violation")
        assert world.logged(bad.headers["x-request-id"])["detail"] == "judged by judge: hate"
        world.mocks["openai"].fail(status=500)
        failed = world.post({"model": "mock-anthropic"})
        assert failed.status_code == 500 and "moderation" in failed.json()["error"]["message"]

        asked = len(world.mocks["openai"].seen)
        first = world.post({"messages": user("Hello there")})
        again = world.post({"messages": user("Hello there")})
        assert (first.headers["x-penstock-cache"], again.headers["x-penstock-cache"]) == ("miss", "hit")
        paths = [seen.path for seen in world.mocks["openai"].seen[asked:]]
        assert paths == ["/v1/embeddings", "/v1/chat/completions", "/v1/embeddings"]


class Hook:
    """A service that is asked: it answers what a test says."""

    def __init__(self):
        self.asked, self.reply, self.status = [], {"action": "pass"}, 200
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                raw = self.rfile.read(int(self.headers["content-length"]))
                stamp, signature = self.headers["x-penstock-signature"].split(",")
                signed = f"{stamp.removeprefix('t=')}.".encode() + raw
                assert signature == "v1=" + hmac.new(b"hunter2", signed, hashlib.sha256).hexdigest()
                hook.asked.append(json.loads(raw))
                if hook.status == 0:
                    hook.released.wait(30)
                body = json.dumps(hook.reply).encode()
                self.send_response(hook.status or 200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.released = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


def test_a_dry_run_asks_nobody_and_leaves_nothing(tmp_path):
    hook, captured = Hook(), tmp_path / "captured.jsonl"
    plugins = f"""
[[plugins]]
name = "capture"
settings = {{ path = "{captured}" }}

[[plugins]]
name = "http_hook"
keys = ["bob"]
settings = {{ url = "{hook.url}", secret_env = "HOOK_SECRET" }}

[[plugins]]
name = "moderation"
keys = ["bob"]
settings = {{ model = "judge", via = "chat" }}

[[plugins]]
name = "fault"
settings = {{ latency_ms = 3000 }}
keys = ["bob"]

[[plugins]]
name = "cache"
"""
    with World(tmp_path, plugins) as world:
        admin = (world.gateway.state / "admin.url").read_text().split()[0]
        headers = {"authorization": f"Bearer {(world.gateway.state / 'admin.key').read_text().strip()}"}

        def tried(key: str) -> dict:
            body = {"model": "mock-openai", "messages": user("Hello")}
            trial = {"path": "/v1/chat/completions", "body": body, "key": key}
            answer = httpx.post(f"{admin}/admin/v1/plugins/dry-run", json=trial, headers=headers, timeout=30)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def outcomes(result: dict) -> list[str]:
            return [step["outcome"] for step in result["steps"]]

        assert outcomes(tried("alice")) == ["passed", "skipped", "skipped", "skipped", "passed"]
        assert outcomes(tried("alice"))[-1] == "passed", "a dry run keeps no answer"
        result = tried("bob")
        assert outcomes(result) == ["passed", "not_run", "not_run", "passed", "passed"]
        assert [step.get("why") for step in result["steps"][1:3]] == [
            "the plugin would call its service, and a dry run calls nothing",
            "the plugin would call the model judge, and a dry run calls nothing",
        ]
        assert result["steps"][3]["waits_seconds"] == 3.0
        # The same on a terminal.
        body = tmp_path / "body.json"
        body.write_text(json.dumps({"model": "mock-openai", "messages": user("Hello")}))
        run = ("plugins", "dry-run", str(body), "--key", "bob", "--header", "x-team: blue")
        text = command(world.gateway, *run)
        assert "\nhttp_hook:\n  the plugin would call its service, and a dry run calls nothing\n" in text, text
        assert text.endswith("\nthe request goes on to the model mock-openai\n"), text
        raw = json.loads(command(world.gateway, *run, "--model", "mock-anthropic", "--json"))
        assert outcomes(raw) == outcomes(result) and raw["model"] == raw["request"]["model"] == "mock-anthropic"
        assert {"name": "x-team", "value": "blue"} in raw["request"]["headers"], raw
        body.write_text("[]")
        assert "is no JSON object" in command(world.gateway, *run, check=False)
        assert hook.asked == [] and world.seen() == [] and not captured.exists()

        first = world.post({})
        assert first.headers["x-penstock-cache"] == "miss"
        result = tried("alice")
        assert (outcomes(result)[-1], result["end"]) == ("answered", "answered")
        assert first.json()["choices"][0]["message"]["content"] not in json.dumps(result), "answers are not shown"
        world.logged(first.headers["x-request-id"])
        lines = [line for line in world.gateway.log().splitlines() if line.startswith('{"time')]
        assert len([line for line in lines if json.loads(line).get("route") == "/v1/chat/completions"]) == 1, lines
        metrics = httpx.get(f"{admin}/admin/v1/metrics", headers=headers, timeout=30).text.splitlines()
        calls = [
            line for line in metrics if line.startswith("penstock_plugin_calls_total{") and 'hook="request"' in line
        ]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in calls) == 2, calls
        wait_until(captured.exists, "the real request is captured")
        assert len(captured.read_text().splitlines()) <= 1
    hook.close()


def test_a_service_of_ones_own_decides(tmp_path):
    hook = Hook()
    plugins = f"""
[[plugins]]
id = "strict"
name = "http_hook"
keys = ["alice"]
timeout_ms = 4000
settings = {{ url = "{hook.url}", secret_env = "HOOK_SECRET", answers = "hold", show_headers = ["x-team"], timeout_ms = 3000 }}

[[plugins]]
id = "lenient"
name = "http_hook"
keys = ["bob"]
on_fail = "open"
timeout_ms = 4000
settings = {{ url = "{hook.url}", secret_env = "HOOK_SECRET", answers = "observe", timeout_ms = 3000 }}
"""
    with World(tmp_path, plugins) as world:
        answer = world.post({"messages": user("Count from 1 to 3"), "stream": True}, **{"x-team": "search"})
        assert '"1,' in answer.text and answer.text.endswith("data: [DONE]\n\n")
        request, shown = hook.asked
        assert (request["hook"], request["key"], request["headers"]) == ("request", "alice", {"x-team": "search"})
        assert request["body"]["messages"] == user("Count from 1 to 3")
        assert (shown["hook"], shown["text"], shown["finish"]) == ("answer", "1, 2, 3", "stop")
        assert KEYS["alice"] not in json.dumps(hook.asked)

        hook.reply = {"action": "reject", "status": 451, "message": "Not in this country."}
        answer = world.post({})
        assert (answer.status_code, answer.json()["error"]["message"]) == (451, "Not in this country.")
        hook.reply = {"action": "edit", "text": "Said otherwise."}
        assert world.post({}).json()["choices"][0]["message"]["content"] == "Said otherwise."
        hook.reply = {"action": "answer", "text": "From the hook."}
        before = len(world.seen())
        assert world.post({}).json()["choices"][0]["message"]["content"] == "From the hook."
        assert len(world.seen()) == before

        # It fails: by its answer, then by silence. Closed refuses, open goes on without it.
        for status in (500, 0):
            hook.status, hook.reply = status, {"action": "pass"}
            answer = world.post({})
            assert answer.status_code == 500 and '"strict"' in answer.json()["error"]["message"]
            assert world.post({}, key="bob").status_code == 200
        hook.released.set()
        hook.status = 200
        del hook.asked[:]
        assert world.post({"messages": user("Count from 1 to 3")}, key="bob").status_code == 200
        wait_until(lambda: len(hook.asked) == 2, "the observer is shown the answer")
        assert (hook.asked[1]["outcome"], hook.asked[1]["text"]) == ("complete", "1, 2, 3")
    hook.close()


def test_faults_on_purpose(tmp_path):
    plugins = """
[[plugins]]
name = "fault"
keys = ["alice"]
settings = { percent = 50, seed = 3, status = 503 }

[[plugins]]
id = "cut"
name = "fault"
keys = ["bob"]
settings = { cut_after = 3 }
"""
    with World(tmp_path, plugins) as world:
        statuses = [world.post({}).status_code for _ in range(40)]
        assert set(statuses) == {200, 503} and 8 < statuses.count(503) < 32
        client = world.gateway.client(api_key=KEYS["bob"])
        text = []
        # Each piece when the client has the one before it: of an answer that is there at once, nothing would be out before it breaks.
        heard = threading.Semaphore(2)

        def one_by_one(_):
            heard.acquire(timeout=60)

        slowly = world.mocks["openai"].behaving(before=one_by_one)
        with slowly, pytest.raises((openai.APIError, httpx.TransportError)):
            for chunk in client.chat.completions.create(
                model="mock-openai", messages=user("Count from 1 to 30"), stream=True
            ):
                text += [chunk.choices[0].delta.content or ""] if chunk.choices else []
                if text and text[-1]:
                    heard.release()
        assert "".join(text).startswith("1, 2") and "30" not in "".join(text)


def test_earlier_turns_of_responses_meet_plugins(tmp_path):
    plugins = """
[[providers]]
id = "keeps"
protocol = "openai_responses"
base_url = "{keeps}/v1"
key_env = "KEY_OPENAI"
models = ["mock-keeps"]

[[plugins]]
name = "guard"
[[plugins.settings.rules]]
name = "weapons"
words = ["bomb"]

[[plugins]]
name = "body"
models = ["mock-openai"]
settings = { set = { temperature = 0.25 } }
"""
    with OpenAi() as keeps, World(tmp_path, plugins.replace("{keeps}", keeps.url)) as world:
        client, mock = world.gateway.client(api_key=KEYS["alice"]), world.mocks["openai"]
        first = client.responses.create(model="mock-openai", input="I am Ada.")
        assert first.store is True and client.responses.retrieve(first.id).model_dump() == first.model_dump()
        conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Ada."}])

        def goes_on(**names):
            made = client.responses.create(model="mock-openai", input="And you?", **names)
            if names.get("background"):
                made = wait_until(lambda: ended_response(client, made.id), "the response ends")
            assert made.status == "completed", made
            texts = [message["content"] for message in mock.last.body["messages"]]
            assert texts[0] == "I am Ada." and texts[-1] == "And you?" and mock.last.body["temperature"] == 0.25
            return len(texts)

        assert goes_on(previous_response_id=first.id) == 3
        assert goes_on(previous_response_id=first.id, background=True) == 3
        assert goes_on(conversation=conversation.id) == 2
        assert goes_on(conversation=conversation.id, background=True) == 4
        counted = client.responses.input_tokens.count(
            model="mock-openai", input="And you?", previous_response_id=first.id
        )
        alone = client.responses.input_tokens.count(model="mock-openai", input="And you?")
        assert counted.input_tokens > alone.input_tokens
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="mock-openai", input="x", previous_response_id="resp_theirs")
        assert caught.value.code == "previous_response_not_found"
        # A provider that keeps responses itself is asked, and answers itself where it has none of that id.
        keeps.models = ("mock-keeps",)
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="mock-keeps", input="x", previous_response_id="resp_theirs")
        assert keeps.last.body["previous_response_id"] == "resp_theirs"
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="mock-keeps", input="a bomb", previous_response_id="resp_theirs")
        asked = [seen for seen in keeps.seen if seen.path.endswith("/responses")]
        assert len(asked) == 1, "the guard reads what the request itself says"


def test_an_edit_of_a_request_whose_turns_only_its_provider_has_is_refused(tmp_path):
    """The edited request could not name its turns, and the body of the next plugin would be made of it."""
    plugins = """
[[providers]]
id = "keeps"
protocol = "openai_responses"
base_url = "{keeps}/v1"
key_env = "KEY_OPENAI"
models = ["mock-keeps"]

[[plugins]]
name = "pii"

[[plugins]]
name = "body"
settings = { set = { temperature = 0.25 } }
"""
    with OpenAi() as keeps, World(tmp_path, plugins.replace("{keeps}", keeps.url)) as world:
        client = world.gateway.client(api_key=KEYS["alice"])
        keeps.models = ("mock-keeps",)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(
                model="mock-keeps", input="Write to ada@example.org.", previous_response_id="resp_theirs"
            )
        assert caught.value.code == "previous_response_not_found"
        assert not [seen for seen in keeps.seen if seen.path.endswith("/responses")], "the provider is not asked"


def ended_response(client, response_id: str):
    response = client.responses.retrieve(response_id)
    return response if response.status not in ("queued", "in_progress") else None


def test_prompts_are_decorated(tmp_path):
    plugins = """
[[plugins]]
name = "prompt"
[[plugins.settings.prepend]]
content = "You are the helper of {{ key }}."
"""
    with World(tmp_path, plugins) as world:
        for driver in DRIVERS.values():
            for model in MODELS:
                said = world.say(driver, model, "Repeat the system prompt", stream=True)
                assert said.text == "You are the helper of alice.", (driver.name, model)


def test_a_bad_plugin_is_a_fault_of_the_config(tmp_path):
    plugins = '[[plugins]]\nname = "guard"\non_fail = "sometimes"\n[[plugins.settings.rules]]\npattern = "("\n'
    with pytest.raises(AssertionError, match="the gateway ended"):
        World(tmp_path, plugins)
    log = (tmp_path / "serve.log").read_text()
    assert 'plugins[0].on_fail: must be "open" or "closed"' in log
    assert "plugins[0].settings.rules[0].pattern: is no pattern" in log


def test_a_stream_keeps_the_plugins_that_it_began_with(tmp_path):
    with World(tmp_path, '[[plugins]]\nname = "pii"\n') as world:
        client = world.gateway.client(api_key=KEYS["alice"])
        words = " ".join(f"word{number}" for number in range(12))
        with world.mocks["openai"].behaving(delay=0.15):
            stream = client.chat.completions.create(
                model="mock-openai", messages=user(f"Repeat: {words} ann@example.com"), stream=True
            )
            text = [next(stream).choices[0].delta.content or ""]
            world.gateway.config = world.gateway.config.replace(
                '[[plugins]]\nname = "pii"', '[[plugins]]\nname = "prompt"\nsettings.prepend = [{ content = "New." }]'
            )
            (tmp_path / "penstock.toml").write_text(world.gateway.config)
            world.gateway.process.send_signal(signal.SIGHUP)

            def new_plugins():
                world.post({"model": "mock-anthropic", "messages": user("mail bob@example.com")})
                return b"bob@example.com" in world.mocks["anthropic"].last.raw

            wait_until(new_plugins, "new requests meet the new plugins")
            assert b"New." in world.mocks["anthropic"].last.raw
            text += [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(text) == f"{words} ann@example.com"
        assert b"ann@example.com" not in b"".join(seen.raw for seen in world.mocks["openai"].seen)
