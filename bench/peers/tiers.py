"""Times to the first token by where a prefix is: see bench/tiers.sh. Standard library only."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

WORDS = "the river old stone bridge light water morning house road wind tree small bird song winter field stood".split()
PLACES = ["computed", "device", "disk", "disk after a restart"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Serve:
    """A gateway with one worker whose device holds little more than one prompt."""

    def __init__(self, args: argparse.Namespace, tokens: int, block_bytes: int):
        self.folder = Path(args.folder)
        self.binary = args.binary
        blocks = int(tokens / 32 * 1.25) + 8
        model = f'model = "{args.model}"\n' if args.model else ""
        (self.folder / "penstock.toml").write_text(
            f'[[pools]]\nid = "m"\n{model}threads = {args.threads}\nkv_bytes_max = {blocks * block_bytes}\n'
            f'kv_disk_path = "{self.folder / "kv"}"\nkv_disk_bytes = {60 * blocks * block_bytes}\n'
        )
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.port = free_port()
        command = [
            self.binary,
            "serve",
            "--listen",
            f"127.0.0.1:{self.port}",
            "--config",
            str(self.folder / "penstock.toml"),
        ]
        command += ["--state-dir", str(self.folder / "state")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 300
        while self.get("/ready")[0] != 200:
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()[
                -2000:
            ]
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        deadline = time.monotonic() + 60
        while self.workers():
            assert time.monotonic() < deadline, "the worker does not end"
            time.sleep(0.05)

    def workers(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            if b"worker" in words and str(self.folder / "state").encode() in words:
                found.append(int(entry.name))
        return found

    def get(self, path: str) -> tuple[int, str]:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics")[1], re.M)
        return sum(map(float, found))

    def settle(self) -> None:
        """Waits until what was evicted is written."""
        last = -1.0
        while last != (now := self.metric("penstock_kv_tier_stores_total")):
            last = now
            time.sleep(0.5)

    def first_token(self, prompt: str) -> tuple[float, int, int, str]:
        """Seconds to the first token, cached tokens, tokens of the prompt, and the answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        began, first, text, cached, tokens = time.perf_counter(), 0.0, "", 0, 0
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            if event["choices"] and event["choices"][0]["text"]:
                first = first or time.perf_counter() - began
                text += event["choices"][0]["text"]
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
                tokens = event["usage"]["prompt_tokens"]
        return first or time.perf_counter() - began, cached, tokens, text


def prompt(seed: int, tokens: int, per_word: float) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(int(tokens / per_word)))


def block_bytes(args: argparse.Namespace) -> int:
    folder = args.model or Path(__file__).resolve().parents[2] / "models" / "penstock-demo"
    config = json.loads((Path(folder) / "config.json").read_text())
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * dim * 2 * 32


def measure(args: argparse.Namespace, tokens: int) -> None:
    serve = Serve(args, tokens, block_bytes(args))
    serve.start()
    times: dict[str, list[float]] = {place: [] for place in PLACES}
    try:
        # The fit of both speeds, and words to tokens.
        per_word = serve.first_token(prompt(10_000, 500, 1.0))[2] / 500
        answers: dict[int, str] = {}

        def take(place: str, seed: int) -> None:
            seconds, cached, asked, text = serve.first_token(prompt(seed, tokens, per_word))
            assert answers.setdefault(seed, text) == text, f"{place}: another answer"
            share = cached / asked
            expected = share < 0.1 if place == "computed" else share > 0.8
            if not expected:
                print(f"{place}, prompt {seed}: {cached} of {asked} tokens cached, not counted", file=sys.stderr)
                return
            times[place].append(seconds)

        for seed in range(args.rounds):
            take("computed", seed)
            take("device", seed)
            # Another one pushes it out.
            take("computed", seed + 1000)
            serve.settle()
            take("disk", seed)
            serve.stop()
            serve.start()
            take("disk after a restart", seed)
        time.sleep(1.0)
        load = serve.metric("penstock_kv_tier_load_seconds_total") / max(
            serve.metric("penstock_kv_tier_loads_total"), 1
        )
        corrupt = serve.metric("penstock_kv_tier_corrupt_total")
    finally:
        if serve.process.poll() is None:
            serve.stop()
    shutil.rmtree(serve.folder / "kv", ignore_errors=True)
    computed = statistics.median(times["computed"])
    for place in PLACES:
        median = statistics.median(times[place]) if times[place] else float("nan")
        spread = f"{min(times[place]) * 1e3:.0f}–{max(times[place]) * 1e3:.0f}" if times[place] else ""
        print(f"| {tokens} | {place} | {median * 1e3:.0f} | {spread} | {median / computed:.3f} | {len(times[place])} |")
    print(
        f"| | *a block: {load * 1e3:.2f} ms to load, {computed / tokens * 32 * 1e3:.1f} ms to compute; corrupt {corrupt:.0f}* | | | | |"
    )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("folder")
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 6000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.model = os.path.abspath(args.model) if args.model else ""
    print("| tokens | where the prefix is | TTFT, ms | range | of computed | n |\n|---:|---|---:|---:|---:|---:|")
    for tokens in args.tokens:
        measure(args, tokens)


if __name__ == "__main__":
    main()
