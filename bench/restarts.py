"""Restarts of a worker behind `penstock serve`: `restarts.py PENSTOCK MODEL [RESTARTS]`.

Kills the pool's only worker, asks for a completion at once, and prints the seconds from the successor's exec until it is ready, and until the first
token has come. Times of exec are the kernel's (to 10 ms), times of ready those of the gateway's log. The first line is the start of all.
"""

import datetime
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = '[[pools]]\nid = "m"\nmodel = "{model}"\nworkers = 1\nthreads = 2\nkv_bytes_max = 268435456\n'
READY = re.compile(r"(\d{4}-\S+Z)\s+INFO worker ready .*pid=(\d+)")
START_SECONDS = 120


def exec_time(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def readies(log):
    """Times at which workers became ready, and their process ids."""
    found = READY.findall(re.sub(r"\x1b\[[0-9;]*m", "", log.read_text()))
    return [(datetime.datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp(), int(pid)) for at, pid in found]


def next_ready(log, known):
    end = time.time() + START_SECONDS
    while len(readies(log)) <= known:
        if time.time() > end:
            sys.exit(f"no worker is ready after {START_SECONDS} s: {log.read_text()[-2000:]}")
        time.sleep(0.01)
    return readies(log)[-1]


def first_token(port):
    """Time at which the first event of a completion has come."""
    body = {"model": "m", "prompt": "abc", "max_tokens": 4, "stream": True, "temperature": 0}
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = client.getresponse()
    if answer.status != 200:
        sys.exit(f"{answer.status}: {answer.read()[:500]}")
    while not answer.readline().startswith(b"data:"):
        pass
    at = time.time()
    client.close()
    return at


def main():
    program, model, restarts = sys.argv[1], Path(sys.argv[2]).resolve(), int((sys.argv[3:] or [5])[0])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="penstock-restarts-") as name:
        folder = Path(name)
        config, log = folder / "penstock.toml", folder / "log"
        config.write_text(CONFIG.format(model=model))
        command = [program, "serve", "--listen", f"127.0.0.1:{port}", "--state-dir", folder / "state"]
        began = time.time()
        with log.open("wb") as out:
            gateway = subprocess.Popen([*command, "--config", config], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            ready, pid = next_ready(log, 0)
            print(f"start: gateway's exec to ready {ready - began:.2f} s, worker's {ready - exec_time(pid):.2f} s")
            rows = []
            for known in range(1, restarts + 1):
                time.sleep(1.5)
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
                token = first_token(port)
                ready, pid = next_ready(log, known)
                rows.append((ready - exec_time(pid), token - exec_time(pid)))
                print(f"restart: exec to ready {rows[-1][0]:.2f} s, to first token {rows[-1][1]:.2f} s", flush=True)
            medians = [statistics.median(row[at] for row in rows) for at in (0, 1)]
            print(f"medians of {restarts}: {medians[0]:.2f} s, {medians[1]:.2f} s")
        finally:
            gateway.terminate()
            gateway.wait(30)


if __name__ == "__main__":
    main()
