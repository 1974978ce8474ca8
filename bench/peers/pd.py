"""Prefill and decode apart against two mixed workers: see bench/pd.sh. Standard library only."""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

WORDS = "the river old stone bridge light water morning house road wind tree small bird song winter field stood".split()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Serve:
    """A gateway with two workers of one thread each."""

    def __init__(self, args: argparse.Namespace, apart: bool):
        self.folder = Path(args.folder) / ("apart" if apart else "mixed")
        self.folder.mkdir()
        self.port, admin = free_port(), free_port()
        model = f'model = "{args.model}"\n' if args.model else ""
        roles = "prefill_workers = 1\n" if apart else ""
        (self.folder / "penstock.toml").write_text(
            f'[admin]\nlisten = "127.0.0.1:{admin}"\n[[pools]]\nid = "m"\n{model}workers = 2\nthreads = 1\n{roles}'
        )
        command = [
            args.binary,
            "serve",
            "--listen",
            f"127.0.0.1:{self.port}",
            "--state-dir",
            str(self.folder / "state"),
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(self.folder / "penstock.toml")], stdout=log, stderr=log
            )
        self.admin = admin
        deadline = time.monotonic() + 300
        while self.ready() < 2:
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.1)
        if apart:
            self.ask("POST", f"/admin/v1/workers/{self.workers()[1]['name']}/role", {"role": "decode"})

    def ask(self, method: str, path: str, body: dict | None = None) -> dict:
        key = (self.folder / "state" / "admin.key").read_text().strip()
        connection = http.client.HTTPConnection("127.0.0.1", self.admin, timeout=10)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        return json.loads(text)

    def workers(self) -> list[dict]:
        return self.ask("GET", "/admin/v1/workers")["data"]

    def ready(self) -> int:
        try:
            return sum(worker["phase"] == "ready" for worker in self.workers())
        except OSError:
            return 0

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def stream(self, prompt: str, tokens: int) -> tuple[list[float], str, int]:
        """Times of the events with text after the request, the text, and the tokens of the prompt."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        began, times, text, prompt_tokens = time.perf_counter(), [], "", 0
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            if event["choices"] and event["choices"][0]["text"]:
                times.append(time.perf_counter() - began)
                text += event["choices"][0]["text"]
            if event.get("usage"):
                prompt_tokens = event["usage"]["prompt_tokens"]
        return times, text, prompt_tokens


def words(seed: int, count: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(count))


def load(serve: Serve, args: argparse.Namespace, seed: int) -> dict:
    """Answers that run, and long prompts that come beside them."""
    over = time.monotonic() + args.seconds
    gaps, firsts, said, lengths, count = [], [], {}, [], [0]

    def answers(number: int) -> None:
        for round_ in range(1000):
            if time.monotonic() > over:
                return
            times, text, _ = serve.stream(words(seed + 1000 * number + round_, 20), args.answer)
            gaps.extend(b - a for a, b in zip(times, times[1:], strict=False))
            count[0] += args.answer
            said[number, round_] = text

    def long_one(number: int) -> None:
        times, text, tokens = serve.stream(words(seed + 77 * number, args.words), 8)
        firsts.append(times[0])
        lengths.append(tokens)
        said["long", number] = text

    threads = [threading.Thread(target=answers, args=(number,)) for number in range(args.streams)]
    began = time.perf_counter()
    for number in range(int(args.seconds / args.every)):
        threads.append(threading.Thread(target=lambda n=number: (time.sleep(n * args.every), long_one(n))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - began
    gaps.sort()
    # By the clock of the worker that decodes; of two that do, the mean.
    decoding = [worker["decode_steps"] for worker in serve.workers() if worker["role"] != "prefill"]
    step = {name: statistics.mean(one[f"{name}_seconds"] for one in decoding) * 1e3 for name in ("p50", "p99", "max")}
    moved = serve.ask("GET", "/admin/v1/pools")["data"][0]["transfers"]
    return {
        "itl_p50": statistics.median(gaps) * 1e3,
        "itl_p99": gaps[int(len(gaps) * 0.99)] * 1e3,
        "itl_max": gaps[-1] * 1e3,
        "step_p50": step["p50"],
        "step_p99": step["p99"],
        "step_max": step["max"],
        "ttft": statistics.median(firsts) * 1e3,
        "tokens_per_s": count[0] / wall,
        "moved_mb": moved["bytes"] / 1e6,
        "transfers": moved["completed"],
        "transfers_failed": moved["failed"],
        "hidden_percent": 100 * moved["hidden_seconds"] / moved["seconds"] if moved["seconds"] else 0.0,
        "said": said,
        "prompt_tokens": statistics.median(lengths),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("folder")
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=200, help="tokens of each running answer")
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.words = args.tokens
    runs: dict[bool, list[dict]] = {False: [], True: []}
    for round_ in range(args.rounds):
        for apart in (False, True):
            serve = Serve(args, apart)
            if not round_ and not apart:
                _, _, tokens = serve.stream(words(1, 500), 1)
                args.words = int(args.tokens * 500 / tokens)
            runs[apart].append(load(serve, args, 10_000 * round_))
            serve.stop()
            shutil.rmtree(serve.folder)
        mixed, apart_ = runs[False][-1]["said"], runs[True][-1]["said"]
        both = mixed.keys() & apart_.keys()
        assert all(mixed[key] == apart_[key] for key in both), "an answer depends on where it was computed"
        print(f"round {round_}: {len(both)} answers equal", file=sys.stderr)
    print("| | two mixed | prefill + decode | ratio |\n|---|---|---|---|")
    for name in [
        "itl_p50",
        "itl_p99",
        "itl_max",
        "step_p50",
        "step_p99",
        "step_max",
        "ttft",
        "tokens_per_s",
        "moved_mb",
        "transfers",
        "transfers_failed",
        "hidden_percent",
        "prompt_tokens",
    ]:
        mixed, apart_ = (statistics.median(run[name] for run in runs[apart]) for apart in (False, True))
        ratio = f"{apart_ / mixed:.2f}" if mixed else ""
        print(f"| {name} | {mixed:.1f} | {apart_:.1f} | {ratio} |")


if __name__ == "__main__":
    main()
