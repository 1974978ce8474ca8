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


def both_ready(gateway: Gateway) -> Api:
    """Waits until both workers of CONFIG are ready, in their roles: one that is not ready yet is shown as mixed, and takes no prompts."""
    api = Api(gateway)
    wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers are ready", 90)
    wait_until(lambda: roles(api) == ["prefill", "mixed"], "the roles of the config")
    return api


def apart(gateway: Gateway) -> Api:
    """Gives both workers of CONFIG one role each: the first computes prompts, the second answers."""
    api = both_ready(gateway)
    admin(gateway, "workers", "role", api.get("/workers")["data"][1]["name"], "decode")
    wait_until(lambda: roles(api) == ["prefill", "decode"], "the role that the operator gave")
    return api


def transfer_is_shown(gateway: Gateway) -> float:
    """A long prompt is computed at one worker and answered at the other: metrics, the admin API and `top` say so. Returns the bytes."""
    long = " ".join(f"{number} apples and {number} pears." for number in range(200))
    answer = gateway.client().chat.completions.create(model=MODEL, messages=user(long), max_tokens=3)
    assert answer.usage.prompt_tokens > 1000
    done = ("penstock_prefilled_apart_total", "penstock_kv_transfers_total", "penstock_kv_first_tokens_total")
    wait_until(lambda: all(gateway.metric(name) == 1 for name in done), "the transfer is told")
    metrics = gateway.metrics()
    moved = metrics["penstock_kv_transfer_bytes_total"]
    assert moved >= metrics["penstock_kv_transfer_blocks_total"] * 96 * 1024, "the demo model's blocks"
    seconds = [metrics[f"penstock_kv_transfer_{kind}seconds_total"] for kind in ("hidden_", "prefill_", "")]
    assert 0 <= seconds[0] <= seconds[1] == seconds[2]
    assert metrics["penstock_kv_transfer_memory_bytes_total"] == moved, "both are on this machine"
    pool = json.loads(top(gateway, "--json"))["pools"][0]
    assert (pool["counts"]["prefilled_apart"], pool["transfers"]["completed"]) == (1, 1)
    assert pool["transfers"]["first_tokens"] == 1
    assert pool["transfers"]["bytes"] == moved and pool["kv_moved"].endswith(" MB")
    return moved


def test_roles_are_given_changed_and_shown(tmp_path):
    with serving(tmp_path, workers=0, config=CONFIG) as gateway:
        api = both_ready(gateway)
        second = api.get("/workers")["data"][1]["name"]
        assert second in admin(gateway, "workers", "role", second, "decode")
        wait_until(lambda: roles(api) == ["prefill", "decode"], "the role that the operator gave")
        # Before anybody knows how fast they are: who is known is preferred.
        moved = transfer_is_shown(gateway)
        # Whatever the roles: who asks is answered.
        answer = gateway.client().chat.completions.create(model=MODEL, messages=user("Hello."), max_tokens=5)
        assert answer.usage.completion_tokens == 5
        frame = json.loads(top(gateway, "--json"))
        assert [worker["role"] for worker in frame["workers"]] == ["prefill", "decode"]
        assert frame["pools"][0]["ready"] == "2 of 2" and frame["pools"][0]["counts"]["finished"] == 2
        text = top(gateway)
        assert "prefill" in text and "decode" in text and second in text
        assert "boss" in admin(gateway, "workers", "role", second, "boss", check=False)
        # A worker that starts anew gets its role again, and what was counted stays counted.
        tokens = gateway.metric("penstock_output_tokens_total")
        admin(gateway, "workers", "restart", second, "--patience", "1")
        wait_until(lambda: api.get(f"/workers/{second}")["starts"] == 2, "its next life", 60)
        wait_until(lambda: roles(api) == ["prefill", "decode"], "its role there", 60)
        assert gateway.metric("penstock_output_tokens_total") == tokens
        assert gateway.metric("penstock_kv_transfer_bytes_total") == moved
