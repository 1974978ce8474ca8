"""The admin API of the real binary: found by the command line, checked against its own document, and in charge of what runs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import httpx
import pytest

from harness import ROOT, Gateway, binary, promised, serving, user, wait_until
from swarm import Swarm, ask, until

# `make test-admin E2E_ARGS=…` and PENSTOCK_ADMIN_EXAMPLES go deeper.
EXAMPLES = int(os.environ.get("PENSTOCK_ADMIN_EXAMPLES", "6"))

CONFIG = """
[[limits]]
id = "standard"
requests_per_minute = 1000
"""


def admin(gateway: Gateway, *args: str, check: bool = True, state: str = "") -> str:
    """`penstock admin` as a person on the gateway's machine runs it: what it prints, or without `check` what it complains of."""
    command = [str(binary()), "admin", "--state-dir", state or str(gateway.state), *args]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout if check else done.stderr


class Api:
    """The admin API over HTTP, with this machine's key."""

    def __init__(self, gateway: Gateway):
        self.url = (gateway.state / "admin.url").read_text().split()[0]
        self.key = (gateway.state / "admin.key").read_text().strip()
        self.client = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=30)

    def get(self, path: str) -> dict:
        return self.client.get(f"/admin/v1{path}").raise_for_status().json()

    def post(self, path: str) -> None:
        self.client.post(f"/admin/v1{path}").raise_for_status()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("admin"), config=CONFIG) as gateway:
        yield gateway


def long_stream(gateway: Gateway, seen: list[str], begun: threading.Event) -> threading.Thread:
    """A stream of 60 000 tokens, read on a thread."""

    def read() -> None:
        body = {
            "model": gateway.model(),
            "stream": True,
            "max_tokens": 100_000,
            "n": 8,
            "ignore_eos": True,
            "messages": user("x"),
        }
        try:
            with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    seen.append(line)
                    if "content" in line:
                        begun.set()
        except httpx.HTTPError as error:
            seen.append(f"cut: {type(error).__name__}")

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_it_is_found_without_being_told(served):
    status = json.loads(admin(served, "status", "--json"))
    assert status["workers_ready"] == 1 and status["unready"] == []
    assert "penstock-demo" in admin(served, "models")
    assert "local" in admin(served, "whoami") and "owner" in admin(served, "whoami")
    assert (served.state / "admin.key").stat().st_mode & 0o777 == 0o600
    assert "no gateway serves an admin API" in admin(served, "status", state="/nonexistent", check=False)


def test_nothing_is_open_but_health_and_the_name_of_the_provider(served):
    api = Api(served)
    open_paths = {"/admin/v1/health": {"status": "ok"}, "/admin/v1/sign-on": {"provider": None}}
    for path, said in open_paths.items():
        assert httpx.get(f"{api.url}{path}", timeout=30).json() == said
    for path in api.get("/openapi.json")["paths"]:
        if path not in open_paths:
            assert httpx.get(f"{api.url}{path}", timeout=30).status_code == 401, path
    # The data port knows nothing of it, nor of its key.
    assert httpx.get(f"{served.url}/admin/v1/status", timeout=30).status_code == 404
    headers = {"host": "evil.example", "authorization": f"Bearer {api.key}"}
    rebound = httpx.get(f"{api.url}/admin/v1/status", headers=headers, timeout=30)
    assert rebound.status_code == 403


def test_a_cancelled_stream_ends_at_once_and_says_so(served):
    api, seen, begun = Api(served), [], threading.Event()
    reader = long_stream(served, seen, begun)
    assert begun.wait(60), seen
    live = wait_until(lambda: [one for one in api.get("/requests")["data"] if one["stream"]], "the request is listed")
    assert live[0]["model"] == "penstock-demo" and live[0]["answering"], live
    wait_until(lambda: api.get(f"/requests/{live[0]['id']}")["completion_tokens"] > 0, "tokens are counted")
    worker = api.get("/workers")["data"][0]["name"]
    assert "is cancelled" in admin(served, "requests", "cancel", live[0]["id"])
    reader.join(60)
    assert not reader.is_alive(), "the client was not told"
    text = "\n".join(seen)
    assert "cancelled by an operator" in text and "[DONE]" not in text, text[-500:]
    wait_until(lambda: api.get(f"/workers/{worker}")["sequences_running"] == 0, "its compute is free")
    wait_until(lambda: api.get("/requests")["data"] == [], "it is listed no more")


def test_a_cancelled_stream_frees_its_place_within_a_moment(served):
    api = Api(served)

    def freed_after() -> float:
        seen, begun = [], threading.Event()
        reader = long_stream(served, seen, begun)
        assert begun.wait(60), seen
        (live,) = [one for one in api.get("/requests")["data"] if one["stream"]]
        began = time.monotonic()
        api.client.post(f"/admin/v1/requests/{live['id']}/cancel").raise_for_status()
        gone = lambda: api.client.get(f"/admin/v1/requests/{live['id']}").status_code == 404  # noqa: E731
        wait_until(gone, "it is listed no more", step=0)
        took = time.monotonic() - began
        reader.join(60)
        return took

    # A release build on a quiet machine takes a few milliseconds.
    promised(1.0, freed_after)


def test_a_cancelled_stream_of_a_provider_is_let_go_within_a_tenth_of_a_second(tmp_path):
    """From the operator's call until the client has its last event, and until the provider's connection is closed."""
    swarm = Swarm()
    config = f'[[providers]]\nid = "up"\nbase_url = "{swarm.url}/v1"\nmodels = ["m"]\n'
    try:
        with serving(tmp_path, workers=0, config=config) as gateway:
            api = Api(gateway)
            took = promised(0.1, lambda: asyncio.run(cancelled(gateway, api, swarm)))
            assert gateway.metrics().get("penstock_panics_total", 0) == 0
    finally:
        swarm.close()
    print(f"cancelled within {took * 1000:.0f} ms")


async def cancelled(gateway: Gateway, api: Api, swarm: Swarm) -> float:
    """Begins a stream, cancels it, and says how long it took."""
    body = {"model": "m", "stream": True, "messages": user("<slow> <tokens=2000>")}
    stream = asyncio.create_task(ask(gateway.port, "/v1/chat/completions", body))
    await until(lambda: swarm.seen.now == 1, "the provider is asked")

    def begun() -> list[dict]:
        return [one for one in api.get("/requests")["data"] if one["answering"]]

    await until(begun, "the stream runs")
    url = f"{api.url}/admin/v1/requests/{begun()[0]['id']}/cancel"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api.key}"}, timeout=30) as client:
        began = time.monotonic()
        (await client.post(url)).raise_for_status()
    answer = await stream
    assert b"cancelled by an operator" in answer.body and b"[DONE]" not in answer.body, answer.body[-300:]
    while swarm.seen.now > 0:
        assert time.monotonic() - began < 10, "the provider still talks"
        await asyncio.sleep(0.002)
    return time.monotonic() - began


def test_keys_are_issued_used_and_revoked(served):
    secret = admin(
        served, "keys", "create", "--name", "search", "--limits", "standard", "--models", "penstock-*"
    ).strip()
    ask = lambda key: served.client(api_key=key).models.list().data  # noqa: E731
    wait_until(lambda: _answers(ask, secret), "the key is good")
    (key,) = json.loads(admin(served, "keys", "list", "--json"))
    assert key["name"] == "search" and secret not in json.dumps(key) and secret.endswith(key["ends_with"])
    assert "is revoked" in admin(served, "keys", "revoke", key["id"])
    wait_until(lambda: not _answers(ask, secret), "it is revoked")
    events = json.loads(admin(served, "audit", "--action", "key.*", "--json"))
    assert [event["action"] for event in events] == ["key.revoke", "key.create"]
    assert secret not in served.log() and secret not in json.dumps(events)


def test_a_key_is_changed_by_what_is_named(served):
    secret = admin(served, "keys", "create", "--name", "changed", "--models", "nothing", "--expires", "12h").strip()
    api = Api(served)
    (key,) = [one for one in api.get("/keys?limit=1000")["data"] if secret.endswith(one["ends_with"])]
    said = admin(served, "keys", "set", key["id"], "--models", "penstock-*", "--limits", "standard", "--json")
    now = json.loads(said)
    assert (now["allowed"]["models"], now["limits"]) == (["penstock-*"], ["standard"])
    assert (now["name"], now["expires"]) == ("changed", key["expires"]), "the rest stays"
    admin(served, "keys", "set", key["id"], "--limits", "", "--expires", "never", "--team", "")
    last = api.get(f"/keys/{key['id']}")
    assert (last["limits"], last["expires"], last["allowed"]["models"]) == ([], None, ["penstock-*"])
    assert "name what is to change" in admin(served, "keys", "set", key["id"], check=False)
    assert "nowhere" in admin(served, "keys", "set", key["id"], "--limits", "nowhere", check=False)
    admin(served, "keys", "revoke", key["id"])


def test_a_list_that_is_cut_says_so(served):
    """Three keys are more than two rows, and three rows are all of them."""
    ids = [json.loads(admin(served, "keys", "create", "--name", "row", "--json"))["key"]["id"] for _ in range(3)]
    command = [str(binary()), "admin", "--state-dir", str(served.state), "keys", "list", "--json", "--rows"]
    asked = {
        rows: subprocess.run([*command, rows], check=False, capture_output=True, text=True, timeout=60)
        for rows in ("2", "3")
    }
    assert [len(json.loads(done.stdout)) for done in asked.values()] == [2, 3]
    assert "first 2 rows" in asked["2"].stderr and asked["3"].stderr == ""
    for key in ids:
        admin(served, "keys", "revoke", key)


def test_the_key_of_the_machine_is_printed_where_it_opens_something(served, tmp_path):
    """The image has no shell: nothing else prints the file."""
    assert admin(served, "key") == f"{Api(served).key}\n"
    assert json.loads(admin(served, "key", "--json")) == {"key": Api(served).key}
    assert "is not for http://" in admin(served, "key", "--url", "http://127.0.0.1:1", check=False)
    assert "cannot be read" in admin(served, "key", check=False, state=str(tmp_path / "nothing"))
    config = tmp_path / "penstock.toml"
    config.write_text('[[admin_keys]]\nid = "ops"\nkey_env = "OPS_KEY"\nrole = "owner"\n')
    said = admin(served, "key", "--config", str(config), check=False)
    assert "[[admin_keys]]" in said, said


def test_nothing_is_unset_where_there_is_nothing(served):
    said = admin(served, "providers", "set", "tpyo", "--unset", "ca_file", check=False)
    assert "there is no entry" in said, said
    assert Api(served).get("/config/providers")["data"] == []


def _answers(ask, key: str) -> bool:
    try:
        return bool(ask(key))
    except Exception:  # noqa: BLE001
        return False


def test_the_config_is_compared_applied_and_taken_back(tmp_path):
    with serving(tmp_path / "gateway", config=CONFIG) as gateway:
        new = tmp_path / "new.toml"
        new.write_text(CONFIG + "[server]\nexplain = true\n")
        assert "server.explain" in admin(gateway, "config", "diff", str(new))
        assert "version 2 is in force" in admin(gateway, "config", "apply", str(new), "--note", "look", "--expect", "1")
        assert "(412)" in admin(gateway, "config", "apply", str(new), "--expect", "1", check=False)
        assert "explain = true" in admin(gateway, "config", "show")
        broken = tmp_path / "broken.toml"
        broken.write_text("[server]\nlissten = 1\n")
        assert "did you mean" in admin(gateway, "config", "validate", str(broken), check=False)
        assert "did you mean" in admin(gateway, "config", "apply", str(broken), check=False)
        assert "in force" in admin(gateway, "config", "rollback", "1")
        assert "explain = true" not in admin(gateway, "config", "show")
        assert "look" in admin(gateway, "config", "history")


def test_a_worker_starts_anew_and_the_log_is_turned_up(tmp_path):
    with serving(tmp_path, workers=2) as gateway:
        api = Api(gateway)
        first = api.get("/workers")["data"][0]
        assert first["name"] in admin(gateway, "workers", "restart", first["name"], "--patience", "5")

        def fresh() -> bool:
            worker = api.get(f"/workers/{first['name']}")
            return worker["phase"] == "ready" and worker["pid"] != first["pid"]

        wait_until(fresh, "another process", 60)
        assert api.get(f"/workers/{first['name']}")["deaths"] == 0
        assert "draining" in admin(gateway, "workers", "drain", first["name"])
        assert gateway.client().models.list().data
        assert "ready" in admin(gateway, "workers", "resume", first["name"])
        assert "debug" in admin(gateway, "log-level", "debug")
        assert "log level" in admin(gateway, "log-level", "loud", check=False)


def test_answers_are_what_the_document_says(tmp_path):
    """Schemathesis: no 500, every answer as the document has it, no route without its key."""
    with serving(tmp_path, config=CONFIG) as gateway:
        run_schemathesis(gateway)


def run_schemathesis(gateway: Gateway) -> None:
    """Every operation, with what its schema allows and what it does not. It changes whatever it can."""
    api = Api(gateway)
    places = [os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    runner = shutil.which("schemathesis", path=os.pathsep.join(places))
    assert runner, "schemathesis is not installed: see requirements.txt"
    command = [
        runner,
        f"--config-file={ROOT / 'tests' / 'e2e' / 'schemathesis.toml'}",
        "run",
        f"{api.url}/admin/v1/openapi.json",
        f"--url={api.url}",
        f"--header=Authorization: Bearer {api.key}",
        f"--max-examples={EXAMPLES}",
        "--phases=examples,coverage,fuzzing",
        "--generation-deterministic",
        "--request-timeout=20",
        "--checks=all",
        # A wish may contradict what is there (a team that does not exist), which no schema can say.
        # Every route is tried with every kind of credential in the crate's own tests; here it would only slow this address down.
        "--exclude-checks=positive_data_acceptance,ignored_auth",
        "--no-color",
    ]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHONWARNINGS": "ignore"}
    )
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
    assert " panicked" not in gateway.log()
