"""Another process takes over: no stream is cut, no connection is refused, and nothing happens when it does not come up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from many import Many, Steady
from test_reload import config, hang_up, many_files, models

from harness import Gateway, binary, free_port, held, holding, serving, text_of, user, wait_until

STREAMS = 1000

__all__ = ["many_files"]


def processes(gateway: Gateway) -> list[int]:
    """Gateways with this one's state folder, oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if words[1:2] == [b"serve"] and str(gateway.state).encode() in words and fields[0] != "Z":
                found.append((int(fields[19]), int(entry.name)))
    return [pid for _, pid in sorted(found)]


def upgrade(gateway: Gateway, *args: str, ok: bool = True) -> subprocess.CompletedProcess:
    command = [str(binary()), "upgrade", "--state-dir", str(gateway.state), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode == 0) == ok, f"{done.stdout}{done.stderr}\n{gateway.log()[-3000:]}"
    return done


def end(gateway: Gateway) -> None:
    """Ends whatever serves now."""
    for pid in processes(gateway):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    try:
        wait_until(lambda: not processes(gateway), "all gateways have ended", 30)
    finally:
        for pid in processes(gateway):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def upgradable(folder: Path, *args: str, **options):
    with serving(folder, *args, **options) as gateway:
        try:
            yield gateway
        finally:
            end(gateway)


def quick(many: Many, more: str = "") -> str:
    return config(many.url, more, server="watch = false")


def test_upgrade_under_a_thousand_streams(tmp_path):
    with Many() as many, upgradable(tmp_path, workers=0, config=quick(many)) as gateway:
        many.begin(gateway.port, STREAMS)
        old = gateway.process.pid
        began = time.monotonic()
        with Steady(many, gateway.port, 40) as steady:
            upgrade(gateway)
            seconds = time.monotonic() - began
            wait_until(lambda: len(processes(gateway)) == 2, "old and new")
            assert processes(gateway)[0] == old
            # Twice in a row, while the first old one still has its streams.
            second = processes(gateway)[1]
            many.begin(gateway.port, 50)
            upgrade(gateway)
            wait_until(lambda: len(processes(gateway)) == 3, "two old ones and a new one")
            seen = steady.asked()
            wait_until(lambda: steady.asked() > seen + 20, "requests after the second upgrade", 60)
        assert steady.failures() == [], steady.failures()[:3]
        assert len(steady.results) > 20
        assert models(gateway) == ["m"]
        ended = [outcome for outcome in many.end() if outcome.words]
        assert len(ended) == STREAMS + 50
        assert all(one.complete for one in ended), [one for one in ended if not one.complete][:3]
        print(f"first upgrade in {seconds:.1f} s; {len(steady.results)} new connections, {len(ended)} streams")
        # The old ones end with their last streams, not after a fixed time.
        wait_until(lambda: old not in processes(gateway) and second not in processes(gateway), "the old ones end")
        assert models(gateway) == ["m"]


@pytest.mark.parametrize("leaves", [False, True], ids=["SIGTERM", "upgrade"])
def test_streams_that_outlast_their_time_are_told(tmp_path, leaves):
    """Each of them, and each is in the log."""
    log = tmp_path / "access.log"
    with Many() as many:
        text = config(many.url, server="watch = false\nupgrade_grace_ms = 1000")
        with upgradable(tmp_path, workers=0, config=text.replace('"off"', f'"{log}"')) as gateway:
            many.begin(gateway.port, 50)
            if leaves:
                upgrade(gateway)
            else:
                gateway.process.terminate()
            wait_until(lambda: gateway.process.poll() is not None, "the old one ends")
            ended = many.end()
            assert len(ended) == 50 and all("The server is shutting down." in one.why for one in ended), ended[:3]
            told = [json.loads(line) for line in log.read_text().splitlines()]
            assert [line["error"] for line in told if line.get("stream")] == ["Draining"] * 50


def test_a_command_needs_no_variable_of_the_gateway_s_environment(tmp_path):
    """A service manager gives keys to the gateway; whoever types a command, or a package's script, does not have them."""
    with Many() as many:
        text = config(many.url, server="watch = false", provider='key_env = "ONLY_SERVED"')
        assert "ONLY_SERVED" not in os.environ
        with upgradable(tmp_path, workers=0, config=text, env={"ONLY_SERVED": "s3cret"}) as gateway:
            place = ["--config", str(gateway.folder / "penstock.toml"), "--state-dir", str(gateway.state)]
            for command in (["keys", "list"], ["admin", "status"], ["models", "list"], ["upgrade"]):
                done = subprocess.run(
                    [str(binary()), *command, *place], capture_output=True, text=True, timeout=120, check=False
                )
                assert done.returncode == 0, (command, done.stderr)
            assert "serves" in done.stdout and models(gateway) == ["m"]


def test_one_upgrade_right_behind_another(tmp_path):
    """Whoever hears that one is done may ask for the next."""
    with Many() as many, upgradable(tmp_path, workers=0, config=quick(many)) as gateway:
        for _ in range(6):
            upgrade(gateway)
        assert models(gateway) == ["m"]


def test_connections_in_use_go_over(tmp_path):
    """A client that keeps its connection is told to open another one, and never finds it closed under its request."""
    with Many() as many, upgradable(tmp_path, workers=0, config=quick(many)) as gateway:
        stop, failures, closes, connected = threading.Event(), [], [], []

        def use():
            body = {"model": "m", "messages": user("hi")}
            with httpx.Client(timeout=30) as client:
                client.post(f"{gateway.url}/v1/chat/completions", json=body)
                connected.append(True)
                while not stop.is_set():
                    try:
                        answer = client.post(f"{gateway.url}/v1/chat/completions", json=body)
                        if answer.status_code != 200:
                            failures.append(answer.text)
                        closes.append(answer.headers.get("connection") == "close")
                    except httpx.HTTPError as error:
                        failures.append(repr(error))
                    time.sleep(0.002)

        users = [threading.Thread(target=use) for _ in range(4)]
        for one in users:
            one.start()
        try:
            wait_until(lambda: len(connected) == len(users), "each has a connection")
            upgrade(gateway)
            wait_until(lambda: gateway.process.poll() is not None, "the old one ends")
        finally:
            stop.set()
            for one in users:
                one.join()
        assert failures == []
        # One that does not come back within five seconds is closed without a word, as an idle one is.
        assert 1 <= closes.count(True) <= 4, "each is told once"


def test_a_new_process_that_does_not_come_up(tmp_path):
    with Many() as many, upgradable(tmp_path, workers=0, config=quick(many)) as gateway:
        many.begin(gateway.port, 20)
        pid = gateway.process.pid

        def still_serves(done: subprocess.CompletedProcess, *words: str):
            for word in words:
                assert word in done.stderr, done.stderr
            assert processes(gateway) == [pid] and models(gateway) == ["m"]

        with Steady(many, gateway.port, 40) as steady:
            still_serves(
                upgrade(gateway, "--program", "/nowhere/penstock", ok=False), "/nowhere/penstock cannot be started"
            )
            still_serves(
                upgrade(gateway, "--program", "/bin/false", ok=False), "ended before it served", "exit status: 1"
            )
            # It takes over, and dies before it serves.
            dying = tmp_path / "dying"
            dying.write_text(f'#!/bin/sh\n{binary()} "$@" --listen 127.0.0.1:1 --admin 127.0.0.1:1\nexit 3\n')
            dying.chmod(0o755)
            file = gateway.folder / "penstock.toml"
            good = file.read_text()
            file.write_text(good + "nonsense = 1\n")
            still_serves(upgrade(gateway, ok=False), "ended before it served")
            assert "nonsense" in gateway.log()
            file.write_text(good)
            # Whoever connects and says nothing, or something else, changes nothing.
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(gateway.state / "upgrade.sock"))
                stranger.sendall(b"\x07\0\0\0garbage")
            upgrade(gateway)
        assert steady.failures() == []
        assert all(outcome.complete for outcome in many.end())
        wait_until(lambda: pid not in processes(gateway), "then an upgrade is done as ever")


def test_a_new_process_killed_in_the_middle(tmp_path):
    """At any moment before it serves; afterwards it is the gateway, and dies as one."""
    with Many() as many, upgradable(tmp_path, workers=0, config=quick(many)) as gateway:
        pid = gateway.process.pid
        for wait in (0.0, 0.02, 0.05, 0.1):
            asked = subprocess.Popen(
                [str(binary()), "upgrade", "--state-dir", str(gateway.state)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            new = wait_until(lambda: [one for one in processes(gateway) if one != pid], "a new process", 20, 0.001)[0]
            time.sleep(wait)
            os.kill(new, signal.SIGSTOP)
            if asked.poll() is None and "another process serves" not in gateway.log():
                os.kill(new, signal.SIGKILL)
                asked.communicate(timeout=60)
                if asked.returncode == 0:
                    # It had said that it serves, and the old one had not read that yet: the gateway has died.
                    return
                assert asked.returncode == 1
                assert processes(gateway) == [pid]
            else:
                os.kill(new, signal.SIGCONT)
                asked.communicate(timeout=60)
                break
            assert models(gateway) == ["m"]
        assert models(gateway) == ["m"]


def test_workers_are_taken_over_warm(tmp_path):
    """Streams of the old process go on at the workers that the new one uses too."""
    text = f'[server]\nwatch = false\n{holding(tmp_path)}[[pools]]\nid = "penstock-demo"\n'
    with upgradable(tmp_path, config=text) as gateway:
        workers = gateway.worker_pids()
        client, old = gateway.client(), gateway.process.pid
        asked = {
            "model": "penstock-demo",
            "messages": user("Count from 1 to 30."),
            "max_tokens": 600,
            "seed": 1,
            "extra_body": {"ignore_eos": True},
        }
        whole = client.chat.completions.create(**asked).choices[0].message.content
        with held(gateway, **asked) as stream:
            text = text_of([next(stream), next(stream)])
            upgrade(gateway)
            assert gateway.worker_pids() == workers, "no worker was started or ended"
            with gateway.client() as fresh:
                again = fresh.chat.completions.create(**asked).choices[0].message.content
            assert again == whole
            assert old in processes(gateway), "the stream runs"
            text += text_of(stream)
        assert text == whole, "the stream of the old process is what it would have been"
        wait_until(lambda: old not in processes(gateway), "the old one ends")
        assert gateway.worker_pids() == workers, "the workers stay with the new one"
        assert gateway.metric("penstock_worker_starts_total") == 0
        # They end with it.
        end(gateway)
        wait_until(lambda: gateway.worker_pids() == [], "the workers end")


def test_the_new_process_has_the_new_config_and_listens_on_unix_too(tmp_path):
    place = tmp_path / "http.sock"
    with Many() as many:
        text = config(many.url, server=f'watch = false\nunix = "{place}"')
        admin = f"127.0.0.1:{free_port()}"
        with upgradable(tmp_path, "--admin", admin, workers=0, config=text) as gateway:
            more = '[[models]]\nname = "new"\nto = [{ provider = "talker", model = "m" }]\n'
            (gateway.folder / "penstock.toml").write_text(
                config(many.url, more, f'watch = false\nthreads = 3\nunix = "{place}"')
            )
            hang_up(gateway)
            wait_until(lambda: gateway.metric("penstock_config_keys_pending") == 1, "threads wait for an upgrade")
            upgrade(gateway)
            wait_until(lambda: gateway.process.poll() is not None, "the old one ends")
            assert gateway.metric("penstock_config_keys_pending") == 0
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(place))) as client:
                cards = client.get("http://gateway/v1/models").json()["data"]
            assert [card["id"] for card in cards] == ["new", "m"]

            # The admin API came over as well.
            def admin_answers() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"http://{admin}/admin/v1/openapi.json", timeout=5).status_code < 500
                return False

            wait_until(admin_answers, "the admin API answers")
            assert (gateway.state / "admin.url").read_text().split() == [f"http://{admin}"]


def test_limits_go_on_counting(tmp_path):
    """What the old process has counted and holds counts in the new one, and what it settles is settled there."""
    limit = '[[limits]]\nid = "all"\nfor = "everyone"\nby = "all"\nrequests_per_hour = 12\nin_flight = 5\n'
    with Many() as many, upgradable(tmp_path, workers=0, config=quick(many, limit)) as gateway:

        def ask(stream: bool) -> int:
            return many.run(many.ask(gateway.port, "m", stream)).result(60).status

        many.begin(gateway.port, 3)
        old = gateway.process.pid
        upgrade(gateway)
        wait_until(lambda: "draining" in gateway.log(), "the old one accepts no more")
        many.begin(gateway.port, 2)
        assert ask(True) == 429, "three are held by the old process, two by this one"
        wait_until(lambda: many.open == 5, "all five run")
        assert all(outcome.complete for outcome in many.end() if outcome.words)
        wait_until(lambda: old not in processes(gateway), "the old one ends")
        # Settled over there: five places are free again, and seven of the twelve requests are left.
        wait_until(lambda: gateway.metric("penstock_limit_holds") == 0, "nothing is held any more")
        assert [ask(False) for _ in range(9)] == [200] * 7 + [429] * 2
        upgrade(gateway)
        assert ask(False) == 429


def test_a_batch_goes_on_in_the_new_process(tmp_path):
    """No line is answered twice, no line is missing."""
    lines = [
        {
            "custom_id": f"n{at}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": user(f"line {at}")},
        }
        for at in range(80)
    ]
    with Many(delay=0.05) as many:
        text = quick(many, "[batches]\nconcurrency = 4\n")
        with upgradable(tmp_path, workers=0, config=text) as gateway:
            client = gateway.client()
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            file = client.files.create(file=("lines.jsonl", content), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            wait_until(lambda: many.served >= 20, "some lines are answered")
            old = gateway.process.pid
            upgrade(gateway)
            wait_until(lambda: old not in processes(gateway), "the old one ends")
            client = gateway.client()
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch ends", 60)
            done = client.batches.retrieve(batch.id)
            assert (done.request_counts.completed, done.request_counts.failed) == (80, 0)
            answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
            assert sorted(answer["custom_id"] for answer in answers) == sorted(line["custom_id"] for line in lines)
            assert many.served == 80, "each line was asked once"


def test_nobody_to_take_over_from(tmp_path):
    gateway = Gateway(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    done = upgrade(gateway, ok=False)
    assert "no gateway to take over from" in done.stderr


def test_the_service_manager_is_told(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, Many() as many:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        with upgradable(
            tmp_path / "g", workers=0, config=quick(many), env={"NOTIFY_SOCKET": str(tmp_path / "notify")}
        ) as gateway:
            assert manager.recv(1024).decode() == f"READY=1\nMAINPID={gateway.process.pid}"
            upgrade(gateway)
            told = manager.recv(1024).decode()
            assert f"MAINPID={processes(gateway)[-1]}" in told
