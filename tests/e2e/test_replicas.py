"""The number of workers follows the load: our own processes, and those that a command starts and stops. Nobody's answer is cut off."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import openai
from test_admin import Api, admin
from test_pool import top
from test_reload import reload

from harness import Gateway, binary, serving, wait_until

MODEL = "penstock-demo"

LOCAL = f"""
[[pools]]
id = "{MODEL}"
workers = 1
workers_max = 2
replicas = "follow"
replica_idle_seconds = 2
sequences_max = 2
threads = 1
"""

DRY_RUN = """
[[pools]]
workers = 1
workers_max = 3
replicas = "dry_run"
"""

# Fails the first time that it is asked for anything.
SCRIPT = """
import json, os, pathlib, signal, subprocess, sys
folder, program, action, index = sys.argv[1:]
folder = pathlib.Path(folder)
told = json.load(sys.stdin)
with (folder / "told.jsonl").open("a") as file:
    print(json.dumps(told | {"env": os.environ["PENSTOCK_ACTION"]}), file=file)
if not (folder / "tried").exists():
    (folder / "tried").touch()
    sys.exit("no such unit")
pid = folder / f"{index}.pid"
if action == "start":
    command = [program, "worker", "--listen", f"unix://{folder}/{index}.sock", "--threads", "1"]
    with (folder / f"{index}.log").open("a") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    pid.write_text(str(child.pid))
else:
    os.kill(int(pid.read_text()), signal.SIGTERM)
    pid.unlink()
"""


class Crowd:
    """Clients that ask again and again; every answer must be the whole one."""

    def __init__(self, gateway: Gateway, count: int):
        self.gateway, self.stopping, self.faults, self.answers = gateway, threading.Event(), [], 0
        self.threads = [
            threading.Thread(target=self.run, args=(f"Story number {name}: once",)) for name in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def ask(self, client: openai.OpenAI, prompt: str) -> str:
        """In one piece: who reads many small ones is slower than a fast worker, which is no load then."""
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=400, temperature=0, extra_body={"ignore_eos": True}
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "length", choice.finish_reason
        return choice.text

    def run(self, prompt: str) -> None:
        whole, client = None, self.gateway.client()
        while not self.stopping.is_set():
            try:
                text = self.ask(client, prompt)
            except Exception as error:
                self.faults.append(repr(error))
                return
            whole = whole or text
            self.answers += 1
            if text != whole:
                self.faults.append(f"{prompt!r}: {text!r}, not {whole!r}")

    def end(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(120)
        assert self.faults == [] and self.answers >= len(self.threads)


@contextlib.contextmanager
def crowd(gateway: Gateway, count: int):
    crowd = Crowd(gateway, count)
    try:
        yield crowd
    finally:
        crowd.end()


def phases(api: Api) -> list[str]:
    return [worker["phase"] for worker in api.get("/workers")["data"]]


def replicas(api: Api) -> dict:
    return api.get("/pools")["data"][0]["replicas"]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_workers_are_started_and_stopped_with_the_load(tmp_path):
    with serving(tmp_path, workers=0, config=LOCAL) as gateway:
        api = Api(gateway)
        assert phases(api) == ["ready", "stopped"], "one at the start"
        assert "stopped" in admin(gateway, "workers", "drain", f"{MODEL}-1", check=False)
        with crowd(gateway, 4):
            wait_until(lambda: phases(api) == ["ready", "ready"], "a second one, because of the load", 90)
            pids = gateway.worker_pids()
            assert replicas(api)["starts"] == 1 and "start" in replicas(api)["last_change"]
        # Most of the load goes, and with it a worker: what runs meanwhile is whole.
        with crowd(gateway, 1):
            wait_until(lambda: "stopped" in phases(api), "one is stopped, because fewer are enough", 90)
        wait_until(lambda: len([pid for pid in pids if alive(pid)]) == 1, "its process has ended")
        pool = json.loads(top(gateway, "--json"))["pools"][0]
        assert pool["replicas_wanted"] == "1 (1 to 2)" and pool["replicas"]["stops"] == 1
        assert "stop penstock-demo" in top(gateway) and "wanted" in admin(gateway, "pools")
        # An operator's word counts at once, also while both have streams.
        admin(gateway, "pools", "replicas", MODEL, "--min", "2")
        wait_until(lambda: phases(api) == ["ready", "ready"], "as many as an operator wants", 90)
        with crowd(gateway, 2) as both:
            wait_until(lambda: both.answers >= 2, "both have work", 60)
            admin(gateway, "pools", "replicas", MODEL, "--min", "1", "--max", "1")
            wait_until(lambda: "stopped" in phases(api), "one is emptied and stopped", 90)
        metrics = gateway.metrics()
        assert metrics["penstock_worker_deaths_total"] == 0 and metrics["penstock_replica_failures_total"] == 0
        assert metrics["penstock_workers_wanted"] == 1
        assert "must be from 1 to 2" in admin(gateway, "pools", "replicas", MODEL, "--max", "3", check=False)
        admin(gateway, "pools", "replicas", MODEL, "--pause")
        assert replicas(api)["paused"] and "paused" in top(gateway)


def shares(gateway: Gateway) -> list[str]:
    """Of how many workers each was told to be one."""
    words = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in gateway.worker_pids()]
    return [line[line.index(b"--machine-share") + 1].decode() for line in words]


def test_other_bounds_keep_the_workers_that_run(tmp_path):
    config = LOCAL.replace("replica_idle_seconds = 2", "replica_idle_seconds = 600")
    with serving(tmp_path, workers=0, config=config) as gateway:
        api = Api(gateway)
        admin(gateway, "pools", "replicas", MODEL, "--min", "2")
        wait_until(lambda: phases(api) == ["ready", "ready"], "a second one, as an operator wants", 90)
        pids = set(gateway.worker_pids())
        assert shares(gateway) == ["2", "2"]
        with crowd(gateway, 2) as clients:
            wait_until(lambda: clients.answers >= 2, "they have work", 60)
            reload(gateway, config.replace("workers_max = 2", "workers_max = 3"))
            wait_until(lambda: replicas(api)["max"] == 3, "the other bound is in force")
            # Those that ran serve the new pool; then each gets its third of the machine, and the answers go on meanwhile.
            wait_until(lambda: not pids & set(gateway.worker_pids()), "both have started anew", 120)
        wait_until(lambda: phases(api).count("ready") >= 2, "no fewer than before", 90)
        assert set(shares(gateway)) == {"3"}
        assert gateway.metric("penstock_worker_deaths_total") == 0


def test_workers_of_a_killed_gateway_get_their_share(tmp_path):
    """Its config says another number now: those that it left are taken over, and start anew while others answer."""
    pool = f'[[pools]]\nid = "{MODEL}"\nthreads = 1\nsequences_max = 2\nworkers = %d\n'
    with serving(tmp_path, workers=0, config=pool % 2) as first:
        pids = set(first.worker_pids())
        first.process.kill()
        first.process.wait()
        with serving(tmp_path, workers=0, config=pool % 3) as second, crowd(second, 2):
            wait_until(lambda: not pids & set(second.worker_pids()), "both have started anew", 120)
            wait_until(lambda: phases(Api(second)) == ["ready"] * 3, "all serve", 90)
            assert shares(second) == ["3", "3", "3"]
            assert second.metric("penstock_worker_deaths_total") == 0


def test_a_dry_run_changes_nothing(tmp_path):
    with serving(tmp_path, workers=0, config=DRY_RUN) as gateway:
        api = Api(gateway)
        admin(gateway, "pools", "replicas", MODEL, "--min", "2")
        wait_until(lambda: (replicas(api)["last_change"] or "").startswith("start a worker"), "what would be done")
        told = replicas(api)
        assert (told["wanted"], told["running"], told["starts"], told["dry_run"]) == (2, 1, 0, True)
        assert phases(api) == ["ready"] and "dry run" in top(gateway)
        assert "number of workers follows the load" in gateway.log()


def test_a_command_starts_and_stops_workers_elsewhere(tmp_path):
    """It fails at first: that is said, counted, and tried again."""
    script = tmp_path / "scale.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path), str(binary()), "{action}", "{index}"]
    config = f"""
[[pools]]
id = "{MODEL}"
connect = ["unix://{tmp_path}/0.sock", "unix://{tmp_path}/1.sock"]
replicas = "follow"
replica_command = {command!r}
"""
    gateway = Gateway(tmp_path / "gateway", workers=0, config=config)
    try:
        gateway.start(ready=False)
        api = wait_until(lambda: reached(gateway), "the admin API", 60)
        wait_until(lambda: replicas(api)["failures"] == 1, "the first try fails", 60)
        assert "no such unit" in replicas(api)["last_failure"]
        wait_until(lambda: phases(api) == ["ready", "stopped"], "the next one does not", 90)
        admin(gateway, "pools", "replicas", MODEL, "--min", "2")
        wait_until(lambda: phases(api) == ["ready", "ready"], "a second one", 90)
        pids = {at: int((tmp_path / f"{at}.pid").read_text()) for at in (0, 1)}
        with crowd(gateway, 2) as both:
            wait_until(lambda: both.answers >= 2, "both have work", 60)
            admin(gateway, "pools", "replicas", MODEL, "--min", "1", "--max", "1")
            wait_until(lambda: "stopped" in phases(api), "one is emptied and stopped", 90)
        wait_until(lambda: [alive(pid) for pid in pids.values()].count(True) == 1, "its process has ended")
        told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
        assert [(one["action"], one["replicas"]) for one in told] == [
            ("start", 1),
            ("start", 1),
            ("start", 2),
            ("stop", 1),
        ]
        assert all(one["pool"] == MODEL and one["env"] == one["action"] for one in told)
        assert gateway.metric("penstock_replica_failures_total") == 1
    finally:
        gateway.stop()
        for file in tmp_path.glob("[01].pid"):
            with contextlib.suppress(OSError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def reached(gateway: Gateway) -> Api | None:
    """The admin API, once the gateway has one."""
    try:
        api = Api(gateway)
        api.get("/pools")
    except Exception:
        return None
    return api
