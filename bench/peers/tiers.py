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
import threading
import time
from pathlib import Path

# Answers that a prompt waits behind in the gateway, and their tokens.
BEFORE, BEFORE_TOKENS = 3, 24
WORDS = "the river old stone bridge light water morning house road wind tree small bird song winter field stood".split()
PLACES = ["computed", "device", "disk", "disk after a restart"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Serve:
    """A gateway with one worker whose device holds little more than one prompt, or so many `times` that."""

    def __init__(self, args: argparse.Namespace, tokens: int, tier: str = "disk", more: str = "", times: int = 1):
        self.folder = Path(args.folder)
        self.binary = args.binary
        blocks = int(tokens / 32 * 1.25) * times + 8
        room = blocks * block_bytes(args)
        model = f'model = "{args.model}"\n' if args.model else ""
        disk = f'kv_disk_path = "{self.folder / "kv"}"\nkv_disk_bytes = {60 * room}\n'
        (self.folder / "penstock.toml").write_text(
            f'[[pools]]\nid = "m"\n{model}threads = {args.threads}\nkv_bytes_max = {room}\n'
            f"{disk if tier == 'disk' else tier}{more}"
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

    def metric(self, name: str, label: str = "") -> float:
        found = re.findall(rf"^{name}(?:{{.*{label}.*}})? (\S+)$", self.get("/metrics")[1], re.M)
        return sum(map(float, found))

    def settle(self) -> None:
        """Waits until what was evicted is written."""
        last = -1.0
        while last != (now := self.metric("penstock_kv_tier_stores_total")):
            last = now
            time.sleep(0.5)

    def first_token(self, prompt: str, answer: int = 8) -> tuple[float, int, int, str]:
        """Seconds to the first token, cached tokens, tokens of the prompt, and the answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": answer, "temperature": 0, "stream": True}
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
    serve = Serve(args, tokens)
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


class Waits:
    """A gateway whose only place is taken, and a prompt in a tier that waits for it: with its blocks loaded meanwhile, and without."""

    def __init__(self, args: argparse.Namespace, tokens: int, tier: str, prefetch: bool):
        more = f"sequences_max = 1\nkv_prefetch = {str(prefetch).lower()}\n"
        # What may come ahead is a quarter of the device.
        self.serve = Serve(args, tokens, tier, more, times=4)
        self.serve.start()
        self.tokens, self.seeds = tokens, iter(range(20_000, 30_000))
        self.per_word = self.serve.first_token(prompt(10_000, 500, 1.0))[2] / 500
        self.texts: dict[int, str] = {}
        self.ask(0)

    def ask(self, seed: int, tokens: int = 0, answer: int = 8) -> tuple[float, int, int, str]:
        took = self.serve.first_token(prompt(seed, tokens or self.tokens, self.per_word), answer)
        assert self.texts.setdefault(seed, took[3]) == took[3], "another answer"
        return took

    def round(self) -> tuple[float, float] | None:
        """Milliseconds to the first token, and of these after the one before it had ended; the prompt is on no device. Nothing where it was not
        read from the tier, or where another came after it."""
        for _ in range(5):
            self.ask(next(self.seeds))
        self.serve.settle()
        ended: list[float] = []

        def before(seed: int) -> None:
            self.ask(seed, 300, BEFORE_TOKENS)
            ended.append(time.perf_counter())

        threads = [threading.Thread(target=before, args=(next(self.seeds),)) for _ in range(BEFORE)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while self.serve.metric("penstock_queue_waiting") < BEFORE - 1 and not ended:
            assert time.monotonic() < deadline, "nobody waits"
            time.sleep(0.002)
        began = time.perf_counter()
        seconds, cached, asked, _ = self.ask(0)
        for thread in threads:
            thread.join()
        after = (began + seconds - max(ended)) * 1e3
        if cached < 0.8 * asked or after < 0:
            print(
                f"{cached} of {asked} tokens cached, {after:.0f} ms after the one before: not counted", file=sys.stderr
            )
            return None
        return seconds * 1e3, after


def measure_waits(args: argparse.Namespace, tokens: int, name: str, tier: str) -> None:
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    folder = Path(args.folder)
    for ahead in times:
        waits = Waits(args, tokens, tier, ahead)
        try:
            times[ahead] = [took for _ in range(args.rounds) if (took := waits.round())]
            used = waits.serve.metric("penstock_kv_prefetched_blocks_total", 'outcome="used"')
        finally:
            if waits.serve.process.poll() is None:
                waits.serve.stop()
            for part in ("kv", "state"):
                shutil.rmtree(folder / part, ignore_errors=True)
        if not times[ahead]:
            print(f"| {tokens} | {name} | {ahead} | | | none counted | |")
            continue
        first, after = (statistics.median(column) for column in zip(*times[ahead], strict=True))
        low, high = min(a for _, a in times[ahead]), max(a for _, a in times[ahead])
        word = "ahead" if ahead else "when it comes"
        print(f"| {tokens} | {name} | {word} | {first:.0f} | {after:.0f} | {low:.0f}–{high:.0f} | {used:.0f} |")
        sys.stdout.flush()


def remote(folder: Path) -> tuple[str, subprocess.Popen] | None:
    """A Redis of its own, where there is one."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        return None
    path = folder / "redis.sock"
    command = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, "the store does not start"
        time.sleep(0.05)
    return f'kv_remote = "redis+unix://{path}"\n', process


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
    print("\n| tokens | prefix in | loaded | TTFT, ms | of these once it was its turn | range | came ahead, blocks |")
    print("|---:|---|---|---:|---:|---:|---:|")
    store = remote(Path(args.folder))
    try:
        for tokens in args.tokens:
            measure_waits(args, tokens, "disk", "disk")
            if store:
                measure_waits(args, tokens, "Redis", store[0])
    finally:
        if store:
            store[1].terminate()
            store[1].wait(20)


if __name__ == "__main__":
    main()
