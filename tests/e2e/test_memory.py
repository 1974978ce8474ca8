"""What an open stream costs the gateway, and that it gives it back."""

import contextlib
import json
import resource
import socket
import time
from pathlib import Path

from harness import serving, user, wait_until

STREAMS = 2000
# Promise: at most 48 KiB of the gateway for each open stream, waiting or stalled; 17 were measured.
STREAM_BYTES_MAX = 48 * 1024
CONFIG = '[[pools]]\nid = "penstock-demo"\nqueue_max = 4096\n'


def memory(pid: int) -> int:
    """Resident bytes of its own, without mapped files."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def open_streams(port: int, count: int) -> list[socket.socket]:
    """Streams whose head has come and of which nothing more is read."""
    asked = {"model": "penstock-demo", "messages": user("Count from 1 to 30."), "stream": True, "max_tokens": 4000}
    body = json.dumps(asked | {"ignore_eos": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    clients = []
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", port), timeout=60)
        client.sendall((head + body).encode())
        clients.append(client)
    for client in clients:
        assert client.recv(64).startswith(b"HTTP/1.1 200"), "a stream that did not begin"
    return clients


def close(clients: list[socket.socket]) -> None:
    for client in clients:
        with contextlib.suppress(OSError):
            client.close()


def test_2000_open_streams_cost_at_most_48_kib_each(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    try:
        with serving(tmp_path, config=CONFIG) as gateway:
            pid = gateway.process.pid
            # What one-time costs there are, a hundred streams have paid.
            close(open_streams(gateway.port, 100))
            gateway.idle(60)
            before, began = memory(pid), time.monotonic()
            clients = open_streams(gateway.port, STREAMS)
            each = (memory(pid) - before) / STREAMS
            print(f"{each / 1024:.1f} KiB for each stream, {time.monotonic() - began:.1f} s to open them")
            close(clients)
            wait_until(lambda: gateway.metric("penstock_connections") <= 2, "all connections gone", 60)
            gateway.idle(60)
            assert each <= STREAM_BYTES_MAX, f"{each / 1024:.1f} KiB for each of {STREAMS} streams"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
