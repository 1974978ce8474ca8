"""Real PostgreSQL and Redis servers for one test: started in a folder of their own, stopped by their process ids."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from harness import wait_until

PASSWORD = "Zw7-store-password"


def find(name: str) -> str:
    """A program, on the path or where Debian keeps PostgreSQL's."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    found = str(places[0]) if places else shutil.which(name)
    assert found, f"{name} is missing: `make test-stores` installs it (Debian: postgresql, redis-server)"
    return found


class Server:
    """A server process and its children."""

    def __init__(self, name: str):
        # A Unix socket's path has 107 bytes, which pytest's folders can use up.
        self.folder = Path(tempfile.mkdtemp(prefix=f"penstock-{name}-"))
        self.process: subprocess.Popen | None = None

    def pids(self) -> list[int]:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], check=False, capture_output=True, text=True
        )
        return [self.process.pid, *map(int, listed.stdout.split())]

    def signal(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def hang(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(20)

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.go_on()
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command: list[str], ready: list[str], what: str, **how) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **how)
        wait_until(lambda: subprocess.run(ready, check=False, capture_output=True).returncode == 0, what, 60)


class Postgres(Server):
    """PostgreSQL, on a Unix socket, with a password."""

    def __init__(self):
        super().__init__("pg")
        # It does not run as root.
        self.how = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        if self.how:
            for path in (self.folder, secret):
                shutil.chown(path, "postgres", "postgres")
        made = [find("initdb"), "-U", "penstock", "-A", "scram-sha-256", "--locale=C.UTF-8", "-N"]
        made += ["--pwfile", str(secret), "-D", str(self.folder / "data")]
        subprocess.run(made, check=True, capture_output=True, **self.how)
        host = str(self.folder).replace("/", "%2f")
        self.url = f"postgres://penstock:{PASSWORD}@{host}/postgres"
        self.start()

    def start(self) -> None:
        settings = ["listen_addresses=", f"unix_socket_directories={self.folder}", "fsync=off", "shared_buffers=16MB"]
        command = [find("postgres"), "-D", str(self.folder / "data")]
        command += [word for setting in settings for word in ("-c", setting)]
        self.run(command, [find("pg_isready"), "-q", "-h", str(self.folder)], "PostgreSQL", **self.how)


class Redis(Server):
    """Redis, on a Unix socket, with a password."""

    def __init__(self):
        super().__init__("redis")
        self.socket = self.folder / "socket"
        self.url = f"redis+unix://{self.socket}?pass={PASSWORD}"
        self.start()

    def start(self) -> None:
        settings = f'port 0\nunixsocket {self.socket}\nsave ""\nappendonly no\nrequirepass {PASSWORD}\n'
        (self.folder / "redis.conf").write_text(settings)
        ping = [find("redis-cli"), "-s", str(self.socket), "-a", PASSWORD, "--no-auth-warning", "ping"]
        self.run([find("redis-server"), str(self.folder / "redis.conf")], ping, "Redis")
