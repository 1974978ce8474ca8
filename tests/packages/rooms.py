"""What the tests of packages share: the binary, gateways in roots of their own, requests to them. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
DEMO_MODEL = ROOT / "models" / "penstock-demo"
# A debug build on two busy cores needs some seconds to load the model; a hang is a failure all the same.
START_SECONDS = 120.0
STOP_SECONDS = 60.0


def binary() -> Path:
    """The binary under test: $PENSTOCK_BIN, or the debug build."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = Path(os.environ.get("PENSTOCK_BIN", target / "debug" / "penstock"))
    assert path.is_file(), f"{path} does not exist: build, or set PENSTOCK_BIN"
    return path


def run(*command, **more) -> subprocess.CompletedProcess:
    """Runs a command, and fails with all that it printed when it fails."""
    done = subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def free_port() -> int:
    """A port that the system gives to nobody who does not name it."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, first_given)))
            return probe.getsockname()[1]


def wait_until(condition: Callable[[], object], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.1)


def migration_seconds() -> int:
    """Longest time that a migration of the store may take, before which nothing is served."""
    schema = (ROOT / "gateway/store/src/postgres/schema.rs").read_text()
    return int(re.search(r"^const MIGRATION_TIMEOUT: Duration = Duration::from_secs\((\d+)\);$", schema, re.M)[1])


def ask(url: str, body: dict | None = None, key: str = "") -> bytes | None:
    """The answer's body; `None` without an answer, or with another status than 200."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()
    except (urllib.error.URLError, OSError):
        return None


def chat(url: str, key: str = "") -> str:
    """Text of one answer of the demo model."""
    body = {"model": "penstock-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    said = ask(f"{url}/v1/chat/completions", body, key)
    assert said, "no answer"
    return json.loads(said)["choices"][0]["message"]["content"]


class Served:
    """One gateway that runs in a root."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path):
        self.process, self.url, self.log = process, url, log

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def served_in(root: Path, log: Path, command: list[str], env: dict[str, str], user: str) -> Iterator[Served]:
    """Runs `command` with this root, as this user, with a /proc and a /dev as every container and every machine has them; `command` gets a
    free port. Stops it by SIGTERM, which must end it with status 0."""
    port = free_port()
    words = " ".join(f"'{word}'" for word in [*command, "--listen", f"127.0.0.1:{port}"])
    settings = " ".join(f"'{name}={value}'" for name, value in env.items())
    script = (
        f"mount --bind /proc '{root}/proc' && mount --rbind /dev '{root}/dev' && "
        f"exec /usr/bin/env -i {settings} /usr/sbin/chroot --userspec={user} '{root}' {words}"
    )
    with open(log, "wb") as out:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "bash", "-c", script],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
    served = Served(process, f"http://127.0.0.1:{port}", log)
    try:

        def ready() -> bool:
            assert process.poll() is None, served.text()
            return ask(f"{served.url}/ready") is not None

        wait_until(ready, f"the gateway in {root} is ready", START_SECONDS)
        yield served
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS) == 0, served.text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


OWN_KEY = '[[admin_keys]]\nid = "ops"\nrole = "owner"\ndigest = "' + "0" * 64 + '"\n'


def provider(*models: str) -> str:
    """A config with a provider that nobody asks: a gateway that is ready at once, without workers."""
    return f"""[server]
watch = false
[[providers]]
id = "up"
base_url = "http://127.0.0.1:9/v1"
models = {json.dumps(models)}
"""


@contextlib.contextmanager
def serving(folder: Path, config: str, state: Path | None = None, **more) -> Iterator[Served]:
    """Runs a gateway with this config, as `penstock.toml` of a folder that has to be there; its log is in the state folder's parent. `more`:
    for the process."""
    port, state = free_port(), state or folder / "state"
    config = config.replace("[server]\n", f'[server]\nlisten = "127.0.0.1:{port}"\nstate_dir = "{state}"\n', 1)
    (folder / "penstock.toml").write_text(config)
    command = [binary(), "serve", "--config", folder / "penstock.toml"]
    with started(command, state.parent / "log", port, **more) as served:
        yield served


@contextlib.contextmanager
def started(command: list, log: Path, port: int = 0, **more) -> Iterator[Served]:
    """Runs a command that serves on a port of loopback; without a `port` it gets a free one. `more`: for the process."""
    if not port:
        port = free_port()
        command = [*command, "--listen", f"127.0.0.1:{port}"]
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, **more)
    served = Served(process, f"http://127.0.0.1:{port}", log)
    try:

        def ready() -> bool:
            assert process.poll() is None, served.text()
            return ask(f"{served.url}/ready") is not None

        wait_until(ready, "the gateway is ready", START_SECONDS)
        yield served
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
