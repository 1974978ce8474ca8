"""Runs the real binary for one test or for all: start, watch, kill, stop. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "models" / "penstock-demo"

# A debug build on two busy cores needs some seconds to load the model; a hang is a failure all the same.
START_SECONDS = 90.0
STOP_SECONDS = 60.0
# What makes the pieces of a stream large: see `held`.
HOLDS = {"logprobs": True, "top_logprobs": 20}

CHANCE = random.SystemRandom()
# Ports that were given out.
PORTS: set[int] = set()


def binary() -> Path:
    """The binary under test: $PENSTOCK_BIN, or the debug build."""
    path = Path(os.environ.get("PENSTOCK_BIN", ROOT / "target" / "debug" / "penstock"))
    assert path.is_file(), f"{path} does not exist: run `make e2e`, or build and set PENSTOCK_BIN"
    return path


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who does not name it: whoever asked may bind it later, and again
    after a restart."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", CHANCE.randrange(10_000, first_given) if first_given > 12_000 else 0))
            port = probe.getsockname()[1]
            if port not in PORTS:
                PORTS.add(port)
                return port


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0, step: float = 0.02):
    """Returns the first true value of `condition`; fails after `seconds`, which say that it hangs, not how fast it is: see `promised`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(step)


def promised(seconds: float, attempt: Callable[[], float], tries: int = 5) -> float:
    """What `attempt` measures is below `seconds` at least once: what a machine adds that is busy, or stands still for a moment, it does not
    add every time."""
    took: list[float] = []
    while not took or took[-1] >= seconds:
        assert len(took) < tries, f"promised within {seconds} s, took {took}"
        took.append(attempt())
    return took[-1]


def last_good(ask: Callable[[], bool]) -> float:
    """When the last request began that was still let in, in seconds from now."""
    began, last = time.monotonic(), 0.0
    while True:
        asked = time.monotonic() - began
        if not ask():
            return last
        assert asked < 60, "it is let in for ever"
        last = asked


def holding(folder: Path) -> str:
    """Keys of `[server]` for a gateway in that folder whose streams a test holds: see `held`."""
    return f'unix = "{folder / "http.sock"}"\nwrite_stall_ms = 120_000\n'


@contextlib.contextmanager
def held(gateway: Gateway, **asked) -> Iterator[openai.Stream]:
    """A stream of a pool that does not end before its caller reads it to the end, on a machine of any speed.

    What a test does to a stream must happen while it runs. So it does not read meanwhile, and some hundred pieces with their alternatives
    (1.5 kB each) are more than the Unix socket between holds (some 200 kB; TCP on loopback would grow to 4 MB): the worker comes to the
    end of its token window and waits.
    """
    place = str(gateway.folder / "http.sock")
    with httpx.Client(transport=httpx.HTTPTransport(uds=place), timeout=120) as http:
        client = gateway.client(http_client=http)
        with client.chat.completions.create(**asked, **HOLDS, stream=True) as stream:
            yield stream


class Gateway:
    """One `penstock serve` with its workers, in a folder of its own."""

    def __init__(self, folder: Path, *args: str, workers: int = 1, config: str = "", env: dict | None = None):
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = folder / "serve.log"
        self.state = folder / "state"
        self.args = list(args)
        self.workers = workers
        self.config = config
        # Beside what this process has: the keys of providers.
        self.env = env or {}
        self.process: subprocess.Popen | None = None

    def start(self, ready: bool = True) -> Gateway:
        """Starts the gateway; with `ready`, waits until it takes requests."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [str(binary()), "serve", "--listen", f"127.0.0.1:{self.port}"]
        # Without workers there is no pool: providers answer.
        command += ["--workers", str(self.workers)] if self.workers else []
        command += ["--state-dir", str(self.state), *self.args]
        if self.config:
            path = self.folder / "penstock.toml"
            path.write_text(self.config)
            command += ["--config", str(path)]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | self.env
            )
        if ready:
            wait_until(self._is_ready, f"gateway ready; its log: {self.log_path}", START_SECONDS, 0.05)
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the gateway ended with {self.process.returncode}:\n{self.log()[-4000:]}"
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> int:
        """Asks the gateway to end, waits for it and for its workers; returns its exit status."""
        workers = self.worker_pids()
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            return self.process.wait(STOP_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            for pid in set(workers) | set(self.worker_pids()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def log(self) -> str:
        """What gateway and workers wrote so far."""
        paths = [self.log_path, *sorted(self.state.glob("**/*.log"))]
        return "\n".join(path.read_text(errors="replace") for path in paths if path.is_file())

    def worker_pids(self) -> list[int]:
        """Processes that are workers of this gateway: their command line names its state folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                status = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if b"worker" in words and any(str(self.state).encode() in word for word in words) and status != "Z":
                    found.append(int(entry.name))
        return sorted(found)

    def metrics(self) -> dict[str, float]:
        """Metrics summed over their labels, by name."""
        sums: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text.splitlines():
            match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", line)
            if match:
                sums[match[1]] = sums.get(match[1], 0.0) + float(match[2])
        return sums

    def metric(self, name: str) -> float:
        """One metric; it must exist."""
        metrics = self.metrics()
        assert name in metrics, f"/metrics has no {name}; it has {sorted(metrics)}"
        return metrics[name]

    def idle(self, seconds: float = 60.0) -> None:
        """Waits until no request is in flight and no sequence waits or runs."""
        names = ("penstock_sequences_running", "penstock_sequences_waiting", "penstock_requests_in_flight")

        def nothing_runs() -> bool:
            metrics = self.metrics()
            # The scrape itself may count as a request in flight.
            return metrics[names[0]] == 0 and metrics[names[1]] == 0 and metrics[names[2]] <= 1

        wait_until(nothing_runs, "nothing runs", seconds)

    def client(self, **options) -> openai.OpenAI:
        """An SDK client without retries, so that a test sees what the gateway said first."""
        options = {"api_key": "none", "max_retries": 0, "timeout": 120.0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def model(self) -> str:
        """The first model it lists."""
        return self.client().models.list().data[0].id


@contextlib.contextmanager
def serving(folder: Path, *args: str, **options) -> Iterator[Gateway]:
    """A gateway for the length of a `with`."""
    gateway = Gateway(folder, *args, **options)
    try:
        yield gateway.start()
    finally:
        gateway.stop()


TENANTS = """
[[keys]]
id = "alice"
key_env = "ALICE_KEY"
{alice}
[[keys]]
id = "bob"
key_env = "BOB_KEY"
{bob}
"""


@contextlib.contextmanager
def two_tenants(folder: Path, alice: str = "", bob: str = "") -> Iterator[tuple[Gateway, openai.OpenAI, openai.OpenAI]]:
    """A gateway with the keys of two tenants, and their clients. `alice`, `bob`: more of the config of each key."""
    env = {"ALICE_KEY": "sk-alice", "BOB_KEY": "sk-bob"}
    with serving(folder, config=TENANTS.format(alice=alice, bob=bob), env=env) as gateway:
        yield gateway, gateway.client(api_key="sk-alice"), gateway.client(api_key="sk-bob")


def user(text: str) -> list[dict]:
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]


def text_of(chunks) -> str:
    """The text of a streamed answer's first choice."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
