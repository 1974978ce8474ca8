"""Restarts of a worker behind `penstock serve`: `restarts.py PENSTOCK MODEL [RESTARTS]`; cold starts: `restarts.py PENSTOCK MODEL STARTS --cold [--evict] [--quantize int8|int4]`.

Kills the pool's only worker, asks for a completion at once, and prints the seconds from the successor's exec until it is ready, and until the first
token has come. Times of exec are the kernel's (to 10 ms), times of ready those of the gateway's log. The first line is the start of all.

With `--cold` the gateway and its worker end and start again, by turns without files of packed weights and with them (`server.weights_cache_bytes_max`), and the seconds from the gateway's exec until the worker is ready are printed. `--evict` takes the model's files
and those of packed weights out of the page cache before each start, as after a boot.
"""

import argparse
import contextlib
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

CACHE = "[server]\nweights_cache_bytes_max = {bytes_max}\n"
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


def next_ready(log, known, gateway):
    end = time.time() + START_SECONDS
    while len(readies(log)) <= known:
        if time.time() > end or gateway.poll() is not None:
            sys.exit(f"no worker is ready after {START_SECONDS} s, or the gateway has ended: {log.read_text()[-2000:]}")
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


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def evict(*folders):
    """Takes the files of folders out of the page cache, as far as the disk has them."""
    os.sync()
    for path in (path for folder in folders for path in folder.glob("**/*") if path.is_file()):
        with contextlib.suppress(PermissionError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def started(program, folder, config):
    """A gateway, its log, and the seconds from exec to ready; it has ended, and its worker, when the block ends."""
    path, log = folder / "penstock.toml", folder / "log"
    path.write_text(config)
    log.write_bytes(b"")
    command = [program, "serve", "--listen", f"127.0.0.1:{free_port()}", "--admin", "off"]
    began = time.time()
    with log.open("ab") as out:
        gateway = subprocess.Popen(
            [*command, "--state-dir", folder / "state", "--config", path],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield log, next_ready(log, 0, gateway)[0] - began
    finally:
        gateway.terminate()
        gateway.wait(60)


def cold(program, model, starts, evicts, quantize):
    pool = CONFIG.format(model=model) + f'quantize = "{quantize}"\n'
    with tempfile.TemporaryDirectory(prefix="penstock-cold-") as name:
        ways = {"packs": 0, "reads": 1 << 40}
        for way in ways:
            Path(name, way).mkdir()
        with started(program, Path(name, "reads"), CACHE.format(bytes_max=ways["reads"]) + pool) as (log, seconds):
            end = time.time() + START_SECONDS
            while "packed weights written to the cache" not in log.read_text():
                if time.time() > end:
                    sys.exit(f"nothing is written after {START_SECONDS} s: {log.read_text()[-2000:]}")
                time.sleep(0.1)
        print(f"first start, which packs and writes: {seconds:.2f} s", flush=True)
        rows = {way: [] for way in ways}
        for _ in range(starts):
            for way, bytes_max in ways.items():
                folder = Path(name, way)
                if evicts:
                    evict(model, folder)
                with started(program, folder, CACHE.format(bytes_max=bytes_max) + pool) as (log, seconds):
                    is_read = "packed weights read from the cache" in log.read_text()
                if is_read != (way == "reads"):
                    sys.exit(
                        f"the start {'has' if is_read else 'has not'} read from the cache: {log.read_text()[-2000:]}"
                    )
                rows[way].append(seconds)
                print(f"{way}: gateway's exec to ready {seconds:.2f} s", flush=True)
        for way, row in rows.items():
            print(f"{way}: median of {starts}: {statistics.median(row):.2f} s ({min(row):.2f} to {max(row):.2f})")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model", type=lambda text: Path(text).resolve())
    parser.add_argument("restarts", type=int, nargs="?", default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--evict", action="store_true")
    parser.add_argument("--quantize", default="none")
    asked = parser.parse_args()
    program, model, restarts = asked.program, asked.model, asked.restarts
    if asked.cold:
        return cold(program, model, restarts, asked.evict, asked.quantize)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="penstock-restarts-") as name:
        folder = Path(name)
        config, log = folder / "penstock.toml", folder / "log"
        config.write_text(CONFIG.format(model=model))
        command = [program, "serve", "--listen", f"127.0.0.1:{port}", "--state-dir", folder / "state"]
        began = time.time()
        with log.open("wb") as out:
            gateway = subprocess.Popen([*command, "--config", config], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            ready, pid = next_ready(log, 0, gateway)
            print(f"start: gateway's exec to ready {ready - began:.2f} s, worker's {ready - exec_time(pid):.2f} s")
            rows = []
            for known in range(1, restarts + 1):
                time.sleep(1.5)
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
                token = first_token(port)
                ready, pid = next_ready(log, known, gateway)
                rows.append((ready - exec_time(pid), token - exec_time(pid)))
                print(f"restart: exec to ready {rows[-1][0]:.2f} s, to first token {rows[-1][1]:.2f} s", flush=True)
            medians = [statistics.median(row[at] for row in rows) for at in (0, 1)]
            print(f"medians of {restarts}: {medians[0]:.2f} s, {medians[1]:.2f} s")
        finally:
            gateway.terminate()
            gateway.wait(30)


if __name__ == "__main__":
    main()
