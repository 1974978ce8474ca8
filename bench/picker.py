#!/usr/bin/env python3
"""What the endpoint picker adds to a request behind Envoy: the same requests, one at a time, through Envoy alone and through Envoy that asks penstock.

    PENSTOCK_BIN=target/release/penstock .venv/bin/python bench/picker.py        REQUESTS=1000  ROUNDS=3

One Envoy forwards to a mock of an OpenAI server, another asks the picker first (ext_proc, FULL_DUPLEX_STREAMED both ways). Every prompt is another one, so that
all of it is hashed anew. CPU time is that of penstock alone, per request. The environment is the one of `make e2e`.
"""

import http.client
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))

from envoy_proxy import assignment, by_header, envoy, picker, picking
from test_endpoint_picker import Vllm, picking_gateway

REQUESTS = int(os.environ.get("REQUESTS", "1000"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(port: int, count: int, size: int) -> list[float]:
    connection, out = http.client.HTTPConnection("127.0.0.1", port, timeout=60), []
    for number in range(count):
        message = {"role": "user", "content": f"{number} " + "x" * size}
        body = json.dumps({"model": "chat", "messages": [message], "max_tokens": 1})
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        out.append(time.perf_counter() - began)
        assert answer.status == 200, answer.status
    return sorted(out)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    with Vllm() as server:
        running, port = picking_gateway(folder / "g", {"a": server}, model="chat")
        fixed = {"name": "servers", "type": "STATIC", "load_assignment": assignment("servers", [server.port])}
        with (
            running as gateway,
            envoy(folder / "direct", [], [fixed]) as direct,
            envoy(folder / "picked", [picking(port)], [by_header(), picker(port)]) as picked,
        ):
            for size in (256, 32_000):
                for _ in range(ROUNDS):
                    for name, proxy in (("direct", direct), ("picked", picked)):
                        load(proxy.port, 50, size)
                        server.reset()
                        before = cpu_seconds(gateway.process.pid)
                        took = load(proxy.port, REQUESTS, size)
                        cpu = (cpu_seconds(gateway.process.pid) - before) * 1e6 / REQUESTS
                        p50, p99 = (took[int(len(took) * share)] * 1e3 for share in (0.5, 0.99))
                        print(
                            f"{size} B {name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, penstock {cpu:.0f} us of CPU",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
