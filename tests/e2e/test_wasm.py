"""Plugins that are WebAssembly in the real binary: a plugin of a public kit, and another module in its place while streams run."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from many import Many, Steady
from test_guide import blocks, commands, one, shell
from test_memory import memory
from test_reload import hang_up, reloads, talk

from harness import ROOT, Gateway, binary, serving, user, wait_until

SDK = ROOT / "plugins" / "wasm" / "tests" / "sdk" / "plugin.wasm"
STREAMS = 1000


def has_wasm(folder) -> bool:
    """Whether the binary under test was built with the feature."""
    path = folder / "check.toml"
    path.write_text(f'[[plugins]]\nname = "wasm"\non_fail = "closed"\n[plugins.settings]\nfile = "{SDK}"\n')
    done = subprocess.run(
        [binary(), "check", "--config", path], check=False, capture_output=True, text=True, timeout=60
    )
    if "built without WebAssembly" in done.stdout + done.stderr:
        return False
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@pytest.fixture(autouse=True)
def needs_wasm(tmp_path_factory):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    if not has_wasm(tmp_path_factory.mktemp("check")):
        pytest.skip("the binary has no WebAssembly: `make test-wasm` builds one")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Echo:
    """A provider that says what it was sent, and an endpoint that a plugin asks whether somebody may pass."""

    def __enter__(self) -> Echo:
        echo = self
        self.bodies, self.headers, self.allows, self.checks = [], [], True, 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                echo.checks += 1
                self._say(200 if echo.allows and self.path == "/check" else 403, b"")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                echo.bodies.append(body)
                echo.headers.append({name.lower(): value for name, value in self.headers.items()})
                said = "hello, " + body["messages"][-1]["content"]
                message = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
                answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [message]}
                usage = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
                self._say(200, json.dumps(answer | {"usage": usage}).encode())

            def _say(self, status: int, body: bytes):
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()


def config(url: str, module, settings: str = "", on_fail: str = "closed") -> str:
    return f"""[server]
grace_ms = 1000
watch = false
[log]
access = "off"
[[providers]]
id = "talker"
base_url = "{url}/v1"
models = ["m"]
[[plugins]]
name = "wasm"
id = "kit"
on_fail = "{on_fail}"
[plugins.settings]
file = "{module}"
{settings}
"""


def ask(gateway: Gateway, content: str, **headers: str) -> httpx.Response:
    body = {"model": "m", "messages": user(content)}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_a_plugin_of_a_public_kit(tmp_path):
    with Echo() as echo:
        settings = f'config = "kit"\nupstreams = {{ auth = "{echo.url}" }}'
        with serving(tmp_path, workers=0, config=config(echo.url, SDK, settings)) as gateway:
            answer = ask(gateway, "my secret")
            assert answer.status_code == 200, answer.text
            # Request headers and body, answer headers and body.
            assert echo.headers[-1]["x-plugin"] == "kit"
            assert echo.bodies[-1]["messages"][-1]["content"] == "my ******"
            assert answer.headers["x-plugin-answers"] == "1"
            assert answer.json()["choices"][0]["message"]["content"] == "HELLO, my ******"
            assert ask(gateway, "again").headers["x-plugin-answers"] == "2"
            # Its log, with what was used.
            wait_until(lambda: "used 7 completion tokens" in gateway.log(), "the plugin's line in the log")

            # Its timer, by its own metric.
            wait_until(lambda: gateway.metric("penstock_plugin_value") > 0, "a tick")

            denied = ask(gateway, "hi", **{"x-deny": "yes"})
            assert (denied.status_code, denied.headers["x-denied"]) == (403, "yes")
            assert denied.json()["error"]["message"] == "denied by the plugin"

            checked = ask(gateway, "hi", **{"x-check": "me"})
            assert (checked.status_code, echo.checks, echo.headers[-1]["x-checked"]) == (200, 1, "yes")
            echo.allows = False
            assert ask(gateway, "hi", **{"x-check": "me"}).status_code == 401


def test_the_guide_s_plugin(tmp_path):
    """The page's config and commands: checked, used, and another module in its place."""
    page, module, file = "wasm-plugins.md", tmp_path / "etc" / "plugin.wasm", tmp_path / "g" / "penstock.toml"
    module.parent.mkdir()
    shutil.copy(SDK, module)
    (check,), replace = (commands(one(page, "console", holds)) for holds in ("penstock check", "sha256sum"))
    with Echo() as echo:
        plugin = one(page, "toml", 'name = "wasm"').replace("/etc/penstock/plugin.wasm", str(module))
        plugin = plugin.replace("http://127.0.0.1:9000", echo.url)
        up = f'[[providers]]\nid = "up"\nbase_url = "{echo.url}/v1"\nmodels = ["chat-m", "m"]\n'
        config = f"[server]\nwatch = false\n{up}{plugin}"
        with serving(file.parent, workers=0, config=config) as gateway:

            def said(command: str) -> str:
                for there, here in (("penstock.toml", file), ("plugin.wasm", module)):
                    command = command.replace(f"/etc/penstock/{there}", str(here))
                return shell(
                    command,
                    tmp_path,
                    {
                        "PENSTOCK_ADMIN_URL": (gateway.state / "admin.url").read_text().split()[0],
                        "PENSTOCK_ADMIN_KEY": (gateway.state / "admin.key").read_text().strip(),
                    },
                )

            def told(model: str) -> httpx.Response:
                body = {"model": model, "messages": user("my secret")}
                headers = {"x-check": "me"}
                return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=60)

            assert said(check)
            assert told("chat-m").json()["choices"][0]["message"]["content"] == "HELLO, my ******"
            assert echo.checks == 1, "it asked the service that the config names"
            assert told("m").json()["choices"][0]["message"]["content"] == "hello, my secret", "not its model"

            # A custom section at the end: another module that does the same.
            (tmp_path / "plugin.wasm").write_bytes(SDK.read_bytes() + b"\0\5\4note")
            move, pin, reload = replace
            said(move)
            said(reload)
            wait_until(lambda: reloads(gateway, "refused") == 1, "it is not the pinned one", 60)
            assert told("chat-m").status_code == 200
            said(pin)
            said(reload)
            wait_until(lambda: reloads(gateway, "applied") == 1, "another module is in force", 60)
            assert told("chat-m").json()["choices"][0]["message"]["content"] == "HELLO, my ******"


def test_the_guide_s_plugin_is_built_as_it_says(tmp_path):
    """With the kit from npm's registry, where that can be reached: the very module that the page pins."""
    if subprocess.run(["npm", "ping"], check=False, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("npm's registry cannot be reached")
    shutil.copytree(SDK.parent / "assembly", tmp_path / "assembly")
    build = next(block for block in blocks("wasm-plugins.md", "") if "npx asc" in block)
    shell(build, tmp_path, {}, 300)
    pinned = one("wasm-plugins.md", "toml", "sha256").split('sha256 = "')[1].split('"')[0]
    assert hashlib.sha256((tmp_path / "plugin.wasm").read_bytes()).hexdigest() == pinned


def test_what_cannot_run_is_refused_with_the_config(tmp_path):
    def faults(settings: str) -> str:
        path = tmp_path / "bad.toml"
        path.write_text(config("http://127.0.0.1:1", SDK, settings))
        done = subprocess.run(
            [binary(), "check", "--config", path], check=False, capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0
        return done.stdout + done.stderr

    assert "SHA-256" in faults('sha256 = "00"')
    assert "proxy_on_configure returned false" in faults('config = "wrong"')
    assert "unknown key" in faults("fule = 3")


def test_another_module_under_a_thousand_streams(tmp_path):
    """Each reload compiles the module anew: streams stay with theirs, and what nobody uses is freed."""
    module = tmp_path / "plugin.wasm"
    shutil.copy(SDK, module)

    def swap(gateway: Gateway, at: int):
        # A custom section at the end: another module that does the same.
        note = b"note" + str(at).encode()
        payload = bytes([4]) + note
        replacement = tmp_path / "next.wasm"
        replacement.write_bytes(SDK.read_bytes() + bytes([0, len(payload)]) + payload)
        replacement.replace(module)
        before = reloads(gateway, "unchanged") + reloads(gateway, "applied")
        hang_up(gateway)
        wait_until(
            lambda: reloads(gateway, "unchanged") + reloads(gateway, "applied") > before, "the module is swapped", 60
        )

    with Many() as many:
        settings = "streams_max = 4096"
        with serving(tmp_path, workers=0, config=config(many.url, module, settings)) as gateway:
            kept = []
            for wave in range(3):
                many.begin(gateway.port, STREAMS)
                began = time.monotonic()
                with Steady(many, gateway.port, 20) as steady:
                    for at in range(17):
                        swap(gateway, wave * 17 + at)
                        assert talk(gateway, "m").status_code == 200
                seconds = time.monotonic() - began
                assert steady.failures() == [], steady.failures()[:3]
                ended = [outcome for outcome in many.end() if outcome.words]
                assert len(ended) == STREAMS
                assert all(one.complete for one in ended), [one for one in ended if not one.complete][:3]
                wait_until(lambda: gateway.metric("penstock_connections") <= 2, "all connections gone", 30)
                kept.append(memory(gateway.process.pid))
                print(
                    f"wave {wave}: 17 swaps in {seconds:.1f} s under {STREAMS} streams, {kept[-1] / 1e6:.1f} MB after"
                )
            # A machine and its code are more than 0.3 MB: seventeen that stayed would be above this.
            assert kept[2] - kept[1] < 4e6, kept
