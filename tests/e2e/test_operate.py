"""What operators do to a gateway: signals, a second one by mistake, a config that cannot start, output that nobody reads to its end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from test_admin import admin
from test_upgrade import processes, upgradable, upgrade

from harness import Gateway, binary, free_port, serving, user, wait_until

PROVIDER = """[log]
access = "off"
[[providers]]
id = "up"
base_url = "http://127.0.0.1:1/v1"
models = ["m"]
"""


def run(*args: str, env: dict | None = None) -> subprocess.CompletedProcess:
    """The program, to its end."""
    command = [str(binary()), *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | (env or {})
    )


def test_signals_for_the_gateway_end_no_worker(tmp_path):
    with serving(tmp_path) as gateway:
        (worker,) = gateway.worker_pids()
        words = Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")
        assert (Path(f"/proc/{worker}/comm").read_text(), words[0]) == ("penstock-worker\n", b"penstock-worker")
        assert Path(f"/proc/{gateway.process.pid}/comm").read_text() == "penstock\n"
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker, number)
        wait_until(lambda: gateway.log().count("signal ignored") == 3, "the worker says that it ignores them")
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(gateway.process.pid, number)
        wait_until(lambda: gateway.log().count("signal ignored") == 5, "so does the gateway")
        answer = gateway.client().chat.completions.create(
            model="penstock-demo", messages=user("Say: hello"), max_tokens=5
        )
        assert answer.usage.completion_tokens > 0
        assert gateway.worker_pids() == [worker] and gateway.metric("penstock_worker_deaths_total") == 0


def test_the_state_folder_has_one_gateway(tmp_path):
    """The default one too. What the first has is left alone, and kill -9 frees it."""
    env = {"XDG_STATE_HOME": str(tmp_path)}
    (tmp_path / "penstock.toml").write_text(PROVIDER)
    arguments = ["serve", "--config", str(tmp_path / "penstock.toml"), "--listen"]

    class Default(Gateway):
        """Without --state-dir."""

        def start(self, ready: bool = True) -> Gateway:
            with open(self.log_path, "ab") as log:
                command = [str(binary()), *arguments, f"127.0.0.1:{self.port}"]
                self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | env)
            wait_until(self._is_ready, "ready", 60)
            return self

    first = Default(tmp_path).start()
    try:
        state = tmp_path / "penstock"
        before = (state / "admin.url").read_text()
        second = run(*arguments, f"127.0.0.1:{free_port()}", env=env)
        assert second.returncode == 1 and "panicked" not in second.stderr
        for words in (str(state), f"process {first.process.pid}", "--state-dir"):
            assert words in second.stderr, second.stderr
        assert (state / "admin.url").read_text() == before
        assert "version" in admin(first, "status", state=str(state))
        # The kernel frees it.
        first.process.kill()
        first.process.wait()
        first.start()
    finally:
        first.stop()


def test_an_upgrade_hands_the_state_folder_over(tmp_path):
    with upgradable(tmp_path, workers=0, config=PROVIDER) as gateway:
        upgrade(gateway)
        gateway.process.wait(60)
        (new,) = processes(gateway)
        second = run("serve", "--state-dir", str(gateway.state), "--config", str(tmp_path / "penstock.toml"))
        assert second.returncode == 1 and f"process {new}" in second.stderr, second.stderr
        os.kill(new, signal.SIGKILL)
        wait_until(lambda: not processes(gateway), "it is gone")
        gateway.start()


def test_check_refuses_what_serve_refuses(tmp_path):
    file = tmp_path / "penstock.toml"
    bad = PROVIDER.replace('access = "off"', 'access = "/nowhere/access.log"')
    bad += (
        '[server.tls]\ncertificate = "/nowhere/c.pem"\nkey = "/nowhere/k.pem"\n[admin]\nunix = "/nowhere/admin.sock"\n'
    )
    file.write_text(bad)
    places = ("--config", str(file), "--state-dir", str(tmp_path / "state"))
    checked, served = run("check", *places), run("serve", "--listen", "127.0.0.1:0", *places)
    assert (checked.returncode, served.returncode) == (1, 1)
    for words in ("log.access: /nowhere/access.log: No such", "server.tls: /nowhere/c.pem", "admin.unix: /nowhere"):
        assert words in checked.stderr and words in served.stderr, (checked.stderr, served.stderr)
    assert "nothing is wrong" not in checked.stdout
    file.write_text(PROVIDER + '[[pools]]\nid = "far"\nconnect = ["tcp://127.0.0.1:1"]\nkey_file = "/nowhere/key"\n')
    checked = run("check", *places)
    assert checked.returncode == 1 and "pool far: /nowhere/key: No such" in checked.stderr, checked.stderr
    file.write_text(PROVIDER.replace("[log]", '[log]\nlevel = "penstock="'))
    assert "log.level" in run("check", *places).stderr
    assert not (tmp_path / "state").exists(), "a check makes nothing"


@pytest.mark.parametrize("command", ["check", "simulate --help", "keys list", "admin --help", "help"])
def test_a_closed_pipe_is_no_panic(tmp_path, command):
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    try:
        done = subprocess.run(
            [str(binary()), *command.split()],
            check=False,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env=env,
        )
    finally:
        os.close(write)
    assert done.stderr == "", done.stderr


def test_help_and_version_are_commands():
    assert run("version").stdout == run("--version").stdout != ""
    assert run("help").stdout == run("--help").stdout
    assert run("help", "serve").stdout == run("serve", "--help").stdout
