"""Pools of our own engines, steered: roles that the config gives and an operator changes, and what `penstock top` shows of them."""

from __future__ import annotations

import json
import subprocess

from test_admin import Api, admin

from harness import Gateway, binary, serving, user, wait_until

MODEL = "penstock-demo"

CONFIG = """
[[pools]]
workers = 2
prefill_workers = 1
roles = "dry_run"
"""


def top(gateway: Gateway, *args: str) -> str:
    """One frame of `penstock top`."""
    command = [str(binary()), "top", "--state-dir", str(gateway.state), "--once", "--every", "0.2", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def roles(api: Api) -> list[str]:
    return [worker["role"] for worker in api.get("/workers")["data"]]


def test_roles_are_given_changed_and_shown(tmp_path):
    with serving(tmp_path, workers=0, config=CONFIG) as gateway:
        api = Api(gateway)
        wait_until(lambda: roles(api) == ["prefill", "mixed"], "the roles of the config", 60)
        second = api.get("/workers")["data"][1]["name"]
        assert second in admin(gateway, "workers", "role", second, "decode")
        wait_until(lambda: roles(api) == ["prefill", "decode"], "the role that the operator gave", 10)
        # Whatever the roles: who asks is answered.
        answer = gateway.client().chat.completions.create(model=MODEL, messages=user("Hello."), max_tokens=5)
        assert answer.usage.completion_tokens == 5
        frame = json.loads(top(gateway, "--json"))
        assert [worker["role"] for worker in frame["workers"]] == ["prefill", "decode"]
        assert frame["pools"][0]["ready"] == "2 of 2" and frame["pools"][0]["counts"]["finished"] == 1
        text = top(gateway)
        assert "prefill" in text and "decode" in text and second in text
        assert "boss" in admin(gateway, "workers", "role", second, "boss", check=False)
        # A worker that starts anew gets its role again.
        admin(gateway, "workers", "restart", second, "--patience", "1")
        wait_until(lambda: api.get(f"/workers/{second}")["starts"] == 2, "its next life", 60)
        wait_until(lambda: roles(api) == ["prefill", "decode"], "its role there", 60)
