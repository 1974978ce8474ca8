"""Issued keys as an operator and a client see them: `penstock keys` beside running gateways."""

import json
import re
import sqlite3
import subprocess

import httpx
import openai
import pytest
from test_admin import admin

from harness import Gateway, binary, last_good, promised, serving, user, wait_until


def keys(gateway: Gateway, *args: str, ok: bool = True) -> str:
    """What `penstock keys` prints, on the store of a gateway."""
    config = ["--config", str(gateway.folder / "penstock.toml")] if gateway.config else []
    command = [str(binary()), "keys", args[0], "--state-dir", str(gateway.state), *config, *args[1:]]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == ok, done.stderr
    return done.stdout if ok else done.stderr


def issue(gateway: Gateway, *args: str) -> dict:
    return json.loads(keys(gateway, "create", "--json", *args))


def status(gateway: Gateway, key: str | None) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{gateway.url}/v1/models", headers=headers, timeout=30).status_code


def test_the_life_of_a_key(tmp_path):
    with serving(tmp_path) as gateway:
        assert status(gateway, None) == 200, "open on loopback, without keys"
        shown = keys(gateway, "create", "--name", "laptop").strip()
        assert re.fullmatch(r"sk-ps-[A-Za-z0-9]{49}", shown)
        assert status(gateway, shown) == 200, "good at once"
        assert status(gateway, None) == 401, "and now everybody needs one"
        assert shown not in keys(gateway, "list") and "laptop" in keys(gateway, "list")
        listed = json.loads(keys(gateway, "list", "--json"))[0]
        assert listed["ends_with"] == shown[-4:] and "key" not in listed
        pepper = gateway.state / "pepper"
        assert pepper.stat().st_mode & 0o777 == 0o600

        rotated = json.loads(keys(gateway, "rotate", listed["id"], "--grace", "1h", "--json"))
        assert status(gateway, rotated["key"]) == 200 and status(gateway, shown) == 200
        child = issue(gateway, "--parent", listed["id"])
        assert status(gateway, child["key"]) == 200

        keys(gateway, "revoke", listed["id"])
        for key in (rotated["key"], shown, child["key"]):
            wait_until(lambda key=key: status(gateway, key) == 401, "it is worth nothing")
        assert "revoked" in keys(gateway, "show", listed["id"])
        states = {key["id"]: key["state"] for key in json.loads(keys(gateway, "list", "--all", "--json"))}
        assert (states[listed["id"]], states[child["id"]]) == ("revoked", "parent_revoked"), "as requests are told"
        assert "parent_revoked" in keys(gateway, "--all"), "bare is list"
        assert "parent_revoked" in admin(gateway, "keys") and "parent_revoked" in admin(gateway, "keys", "list")
        assert "is revoked" in keys(gateway, "rotate", listed["id"], ok=False)
        assert "there is no" in keys(gateway, "revoke", "key_none", ok=False)

        # A restart knows the same keys.
        fresh = issue(gateway)["key"]
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        assert status(gateway, fresh) == 200 and status(gateway, shown) == 401


def test_a_scope_is_said_in_the_client_s_words(tmp_path):
    with serving(tmp_path, config='[[teams]]\nid = "small"\nmodels = ["none-*"]\n') as gateway:
        key = issue(gateway, "--routes", "/v1/models*,/v1/chat/completions", "--dialects", "openai")["key"]
        model = gateway.client(api_key=key).models.list().data[0].id
        answer = gateway.client(api_key=key).chat.completions.create(model=model, messages=user("Hi."), max_tokens=2)
        assert answer.choices[0].finish_reason
        with pytest.raises(openai.PermissionDeniedError, match="may not use /v1/completions"):
            gateway.client(api_key=key).completions.create(model=model, prompt="Hi.", max_tokens=2)
        other = issue(gateway, "--models", "other-*")["key"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            gateway.client(api_key=other).chat.completions.create(model=model, messages=user("Hi."), max_tokens=2)
        bound = issue(gateway, "--team", "small")["key"]
        assert gateway.client(api_key=bound).models.list().data == []
        elsewhere = issue(gateway, "--addresses", "192.0.2.0/24")["key"]
        with pytest.raises(openai.PermissionDeniedError, match="from this address"):
            gateway.client(api_key=elsewhere).models.list()
        short = issue(gateway, "--expires", "2s")["key"]
        wait_until(lambda: status(gateway, short) == 401, "the key ends")
        with pytest.raises(openai.AuthenticationError, match="expired"):
            gateway.client(api_key=short).models.list()
        for wrong in (["--team", "none"], ["--routes", "chat"], ["--dialects", "soap"], ["--expires", "2020-01-01"]):
            assert keys(gateway, "create", *wrong, ok=False).startswith("penstock: ")


@pytest.mark.parametrize("head", [("--limits", "few"), ("--team", "crowd")], ids=["its own limit", "its team's limit"])
def test_children_spend_what_is_their_parent_s(tmp_path, head):
    config = '[[limits]]\nid = "few"\nrequests_per_day = 4\n[[teams]]\nid = "crowd"\nlimits = ["few"]\n'
    with serving(tmp_path, config=config) as gateway:
        model = gateway.model()
        parent = issue(gateway, *head)
        children = [issue(gateway, "--parent", parent["id"]) for _ in range(2)]
        grandchild = issue(gateway, "--parent", children[0]["id"])

        def ask(key: dict) -> int:
            body = {"model": model, "messages": user("Hi."), "max_tokens": 2}
            headers = {"authorization": f"Bearer {key['key']}"}
            return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code

        assert [ask(key) for key in (children[0], children[1], grandchild, parent)] == [200] * 4
        everybody = (parent, *children, grandchild)
        assert [ask(key) for key in everybody] == [429] * 4, "no family has more than its head"
        # The ledger knows each of them, and whose they are: also after a crash, once it was written.
        database = sqlite3.connect(f"file:{gateway.state}/penstock.db?mode=ro", uri=True)
        wait_until(lambda: database.execute("SELECT count(*) FROM ledger").fetchone() == (4,), "it is written")
        database.close()
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        assert [ask(key) for key in everybody] == [429] * 4
        assert ask(issue(gateway, *head)) == 200, "another family"


def test_what_pools_have_answered_is_counted_by_provider_after_a_crash(tmp_path):
    config = '[[limits]]\nid = "each"\nfor = "everyone"\nby = "provider"\nrequests_per_day = 2\n'
    with serving(tmp_path, config=config) as gateway:

        def ask() -> int:
            body = {"model": model, "messages": user("Hi."), "max_tokens": 2}
            return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60).status_code

        model = httpx.get(f"{gateway.url}/v1/models", timeout=60).json()["data"][0]["id"]
        assert [ask() for _ in range(3)] == [200, 200, 429]
        wait_until(lambda: gateway.metric("penstock_ledger_waiting") == 0, "the ledger is written")
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        assert ask() == 429


def test_gateways_on_one_store_share_keys_and_revocations(tmp_path):
    pepper = tmp_path / "pepper"
    pepper.write_text("p" * 40)
    pepper.chmod(0o600)
    config = f'[store]\npath = "{tmp_path}/shared.db"\n[auth]\npepper_file = "{pepper}"\n'
    with serving(tmp_path / "one", config=config) as one, serving(tmp_path / "two", config=config) as two:

        def revoked_after() -> float:
            parent = issue(one)
            family = [parent["key"], issue(one, "--parent", parent["id"])["key"]]
            assert {status(gateway, key) for gateway in (one, two) for key in family} == {200}
            keys(two, "revoke", parent["id"])
            return last_good(lambda: 200 in {status(gateway, key) for gateway in (one, two) for key in family})

        promised(1.0, revoked_after)


@pytest.mark.parametrize("issuer", ["command", "admin API"])
def test_a_store_that_has_lost_its_keys_does_not_open_a_gateway_that_starts(tmp_path, issuer):
    odd = "the store has no issued key although this gateway has known one"
    with serving(tmp_path) as gateway:
        marker = gateway.state / "keys.issued"

        def restart() -> None:
            gateway.stop()
            for path in gateway.state.glob("penstock.db*"):
                path.unlink()
            gateway.start()

        restart()
        assert status(gateway, None) == 200 and not marker.exists(), "no key was ever issued"
        made = keys(gateway, "create") if issuer == "command" else admin(gateway, "keys", "create", "--name", "laptop")
        assert marker.stat().st_mode & 0o777 == 0o600, "when the key is known, so is that there is one"
        assert (status(gateway, made.strip()), status(gateway, None)) == (200, 401)
        gateway.stop()
        gateway.start()
        assert status(gateway, made.strip()) == 200 and odd not in gateway.log()

        restart()
        assert (status(gateway, None), status(gateway, made.strip())) == (401, 401)
        assert gateway.log().count(odd) == 1 and str(marker) in gateway.log()
        config = ["--state-dir", str(gateway.state)]
        checked = subprocess.run(
            [str(binary()), "check", *config], check=True, capture_output=True, text=True, timeout=60
        )
        assert "nobody is served without one: a key was issued" in checked.stdout
        assert status(gateway, keys(gateway, "create").strip()) == 200, "and it goes on from there"

        marker.unlink()
        restart()
        assert status(gateway, None) == 200 and gateway.log().count(odd) == 1, "as on the first day"


def test_a_gateway_that_denies_serves_nobody_without_a_key(tmp_path):
    with serving(tmp_path, config='[auth]\nanonymous = "deny"\n') as gateway:
        assert status(gateway, None) == 401 and status(gateway, "none") == 401
        assert "there are no keys" in gateway.log()
        assert status(gateway, issue(gateway)["key"]) == 200
