"""HTTP/2 with and without TLS, keep-alive, and clients that are slow."""

import contextlib
import resource
import select
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from harness import START_SECONDS, Gateway, text_of, user, wait_until


def test_h2c_with_prior_knowledge(gateway, model):
    with httpx.Client(http1=False, http2=True, timeout=60) as session:
        answers = [
            session.post(
                f"{gateway.url}/v1/chat/completions",
                json={"model": model, "messages": user("Hello"), "temperature": 0},
            )
            for _ in range(3)
        ]
    assert {answer.http_version for answer in answers} == {"HTTP/2"}
    assert answers[0].json()["choices"][0]["message"]["content"] == "Hello! How can I help you today?"


def test_streams_over_h2c(gateway, model):
    with httpx.Client(http1=False, http2=True, timeout=60) as session:
        client = gateway.client(http_client=session)
        stream = client.chat.completions.create(model=model, messages=user("Hello"), temperature=0, stream=True)
        assert text_of(stream) == "Hello! How can I help you today?"


def test_connections_are_kept(gateway):
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(4096)
            assert received.startswith(b"HTTP/1.1 200")
            head, body = received.split(b"\r\n\r\n", 1)
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
            while len(body) < length:
                body += connection.recv(4096)


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    """A gateway with a certificate of its own making."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        + ["-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    config = f'[server.tls]\ncertificate = "{certificate}"\nkey = "{key}"\n'
    gateway = SecureGateway(folder / "gateway", certificate, config)
    gateway.start()
    yield gateway
    gateway.stop()


class SecureGateway:
    """A gateway on TLS: the harness's readiness check and metrics go through a context that trusts its certificate."""

    def __init__(self, folder, certificate, config):
        self.inner = Gateway(folder, config=config)
        self.certificate = certificate
        self.url = self.inner.url.replace("http:", "https:")
        self.context = ssl.create_default_context(cafile=certificate)

    def start(self):
        self.inner.start(ready=False)
        wait_until(self.is_ready, f"TLS gateway ready; its log: {self.inner.log_path}", START_SECONDS, 0.05)

    def is_ready(self):
        assert self.inner.process.poll() is None, self.inner.log()[-4000:]
        try:
            return httpx.get(f"{self.url}/ready", verify=self.context, timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self):
        self.inner.stop()


@pytest.mark.parametrize(("http2", "version"), [(True, "HTTP/2"), (False, "HTTP/1.1")])
def test_tls_negotiates_its_protocol(secure, http2, version):
    with httpx.Client(http2=http2, verify=secure.context, timeout=60) as session:
        reply = session.get(f"{secure.url}/v1/models")
        assert reply.http_version == version and reply.status_code == 200
        client = secure.inner.client(http_client=session)
        client.base_url = f"{secure.url}/v1"
        stream = client.chat.completions.create(
            model=reply.json()["data"][0]["id"], messages=user("Hello"), temperature=0, stream=True
        )
        assert text_of(stream) == "Hello! How can I help you today?"


def test_plain_http_on_a_tls_port_is_closed(secure):
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{secure.inner.url}/v1/models", timeout=10)


def test_slow_heads_are_cut(gateway):
    """A byte now and then does not hold a connection for ever."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"a" * 1000
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=0.25) as connection:
        for byte in head:
            try:
                connection.sendall(bytes([byte]))
                connection.recv(4096)
                break  # A refusal or a close; silence is a TimeoutError.
            except TimeoutError:
                assert time.monotonic() - started < 30, "a slow head holds its connection"
            except ConnectionError:
                break


def test_silent_connections_give_way(tmp_path):
    """As many as there are places, and more: whoever asks for something is served, with a limit that the gateway raised itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(256, hard)
    with contextlib.ExitStack() as held:
        gateway = Gateway(tmp_path, config="[server]\nconnections_max = 64\n")
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        try:
            gateway.start(ready=False)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        held.callback(gateway.stop)
        wait_until(gateway._is_ready, "it serves", START_SECONDS)
        limits = (Path("/proc") / str(gateway.process.pid) / "limits").read_text()
        row = next(line for line in limits.splitlines() if line.startswith("Max open files"))
        assert row.split()[3] == row.split()[4], "the soft limit is the hard one"
        for _ in range(200):
            silent = held.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=30))
            silent.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert silent.recv(12) == b"HTTP/1.1 200"
        assert httpx.get(f"{gateway.url}/v1/models", timeout=60).status_code == 200
        assert gateway.metric("penstock_connections_refused_total") >= 100


def test_silence_before_a_handshake_gives_way(secure, tmp_path):
    config = secure.inner.config + "[server]\nconnections_max = 8\n"
    gateway = SecureGateway(tmp_path / "gateway", secure.certificate, config)
    gateway.start()
    try:
        with contextlib.ExitStack() as held:
            address = ("127.0.0.1", gateway.inner.port)
            silent = [held.enter_context(socket.create_connection(address, timeout=30)) for _ in range(60)]
            # Those that are accepted behind a client could take its place before it has asked.
            wait_until(lambda: len(select.select(silent, [], [], 0)[0]) >= 60 - 8, "all were accepted", 60)
            for _ in range(3):
                with httpx.Client(verify=gateway.context, timeout=60) as session:
                    assert session.get(f"{gateway.url}/v1/models").status_code == 200
    finally:
        gateway.stop()


def test_an_early_refusal_over_http2_is_a_whole_answer(gateway):
    """curl 7.88 takes the reset behind an answer that comes before the end of a body for a failure, in a third of the cases."""
    command = ["curl", "-sS", "--http2-prior-knowledge", "-d", "x" * 20_000]
    for _ in range(15):
        done = subprocess.run(
            [*command, f"{gateway.url}/v1/models"], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, "takes GET requests only" in done.stdout) == (0, True), done
