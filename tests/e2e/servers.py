"""Real PostgreSQL, Redis and S3 servers for one test: started in a folder of their own, stopped by their process ids."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import boto3

from harness import free_port, wait_until

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
    """PostgreSQL with a password: on a Unix socket; with `tls`, the files of a key and its certificate, on loopback too."""

    def __init__(self, tls: tuple[Path, Path] | None = None):
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
        self.tls = []
        if tls:
            port, (key, certificate) = free_port(), [shutil.copy(path, self.folder) for path in tls]
            os.chmod(key, 0o600)
            if self.how:
                shutil.chown(key, "postgres", "postgres")
            self.tls = ["ssl=on", f"ssl_key_file={key}", f"ssl_cert_file={certificate}", f"port={port}"]
            host = f"127.0.0.1:{port}"
        self.url = f"postgres://penstock:{PASSWORD}@{host}/postgres"
        self.start()

    def start(self) -> None:
        settings = [f"unix_socket_directories={self.folder}", "fsync=off", "shared_buffers=16MB", *self.tls]
        settings.append(f"listen_addresses={'127.0.0.1' if self.tls else ''}")
        command = [find("postgres"), "-D", str(self.folder / "data")]
        command += [word for setting in settings for word in ("-c", setting)]
        port = self.tls[-1].split("=")[1] if self.tls else "5432"
        self.run(command, [find("pg_isready"), "-q", "-h", str(self.folder), "-p", port], "PostgreSQL", **self.how)


class Redis(Server):
    """Redis with a password: on a Unix socket; with `tls`, the files of a key and its certificate, on loopback too."""

    def __init__(self, tls: tuple[Path, Path] | None = None):
        super().__init__("redis")
        self.socket = self.folder / "socket"
        self.kv_url, self.secret = f"redis+unix://{self.socket}", PASSWORD
        self.url = f"redis+unix://{self.socket}?pass={PASSWORD}"
        self.tls = ""
        if tls:
            port = free_port()
            self.tls = f"bind 127.0.0.1\ntls-port {port}\ntls-key-file {tls[0]}\ntls-cert-file {tls[1]}\n"
            self.tls += f"tls-ca-cert-file {tls[1]}\ntls-auth-clients no\n"
            self.url = f"rediss://:{PASSWORD}@127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        settings = f'port 0\nunixsocket {self.socket}\nsave ""\nappendonly no\nrequirepass {PASSWORD}\n{self.tls}'
        (self.folder / "redis.conf").write_text(settings)
        self.run([find("redis-server"), str(self.folder / "redis.conf")], self.client("ping"), "Redis")

    def client(self, *words: str) -> list[str]:
        """How its operator tells it something."""
        return [find("redis-cli"), "-s", str(self.socket), "-a", PASSWORD, "--no-auth-warning", *words]

    def empty(self) -> None:
        """It forgets everything, and goes on."""
        subprocess.run(self.client("FLUSHALL"), check=True, capture_output=True)

    def restart(self) -> None:
        """It dies, and comes back without anything."""
        self.kill()
        self.start()


class S3(Server):
    """S3 as moto plays it, with one bucket and one user; objects are in its memory, signatures are checked."""

    BUCKET = "blocks"
    REGION = "eu-central-1"

    def __init__(self):
        super().__init__("s3")
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        self.kv_url = f"s3://{self.BUCKET}/kv/test?endpoint={self.endpoint}&region={self.REGION}"
        listens = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        # Until bucket and user are made, everybody may do everything.
        env = os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": "4"}
        self.run(command, [sys.executable, "-c", listens], "S3", env=env)
        self.keys = ("first", "secret")
        self.client("s3").create_bucket(
            Bucket=self.BUCKET, CreateBucketConfiguration={"LocationConstraint": self.REGION}
        )
        users, policy = self.client("iam"), {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        users.create_user(UserName="penstock")
        document = json.dumps({"Version": "2012-10-17", "Statement": [policy]})
        users.put_user_policy(UserName="penstock", PolicyName="all", PolicyDocument=document)
        made = users.create_access_key(UserName="penstock")["AccessKey"]
        self.keys = (made["AccessKeyId"], made["SecretAccessKey"])
        self.secret = ":".join(self.keys)

    def client(self, service: str):
        """How its operator tells it something."""
        key_id, key = self.keys
        return boto3.client(
            service,
            endpoint_url=self.endpoint,
            region_name=self.REGION,
            aws_access_key_id=key_id,
            aws_secret_access_key=key,
        )

    def objects(self) -> dict[str, bytes]:
        """All that is in the bucket."""
        client = self.client("s3")
        listed = client.list_objects_v2(Bucket=self.BUCKET).get("Contents", [])
        return {one["Key"]: client.get_object(Bucket=self.BUCKET, Key=one["Key"])["Body"].read() for one in listed}

    def put(self, objects: dict[str, bytes]) -> None:
        for name, body in objects.items():
            self.client("s3").put_object(Bucket=self.BUCKET, Key=name, Body=body)


@contextlib.contextmanager
def both():
    """A PostgreSQL and a Redis."""
    with contextlib.ExitStack() as stack:
        postgres = Postgres()
        stack.callback(postgres.close)
        redis = Redis()
        stack.callback(redis.close)
        yield postgres, redis
