"""A worker that the kernel kills for lack of memory, in a memory cgroup of the test's own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness import binary, serving, user, wait_until

# Memory that the cgroup may use beyond its use when the limit is set: the most that the test can take of the machine.
ROOM_BYTES = 64 << 20
WHY = "killed by SIGKILL: out of memory, by the kernel's count for its cgroup"
# Program that takes memory within the cgroup of its first argument, until the process of the second one is gone.
TAKER = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
victim, held = Path("/proc", sys.argv[2], "stat"), []
def is_there():
    try:
        return victim.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
while is_there() and len(held) < 4096:
    held.append(bytearray(b"x" * (1 << 20)))
"""

# Program that joins the cgroup of its first argument, holds memory there until its input ends, and is the first to be killed but the worker.
SPARE = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
Path("/proc/self/oom_score_adj").write_text("900")
held = bytearray(b"x" * (32 << 20))
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def spare(folder: Path) -> Iterator[None]:
    """A process for the kernel to kill in the gateway's place, if it asks for memory again before that of the worker is free."""
    command = [sys.executable, "-c", SPARE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.kill()


def own_cgroup() -> tuple[Path, str]:
    """Folder of this process's memory cgroup, and the file of its limit; skips the test where there is none."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for _, mount, kind, options, *_ in mounts:
            is_first = kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(",")
            is_second = kind == "cgroup2" and controllers == ""
            folder = Path(mount + path)
            # In a container the path may be one of the host.
            folder = folder if folder.is_dir() else Path(mount)
            if is_first:
                return folder, "memory.limit_in_bytes"
            if is_second and "memory" in (folder / "cgroup.controllers").read_text().split():
                return folder, "memory.max"
    pytest.skip("this process has no memory cgroup")


class Cgroup:
    """A memory cgroup."""

    def __init__(self, folder: Path, limit: str):
        self.folder, self.limit = folder, folder / limit
        self.usage = folder / ("memory.current" if limit == "memory.max" else "memory.usage_in_bytes")

    def bound(self) -> None:
        """Limits the memory to little more than is used now, without swap, which would only put off the kill."""
        most = int(self.usage.read_text()) + ROOM_BYTES
        self.limit.write_text(str(most))
        for file, value in [("memory.memsw.limit_in_bytes", most), ("memory.swap.max", 0)]:
            with contextlib.suppress(OSError):
                (self.folder / file).write_text(str(value))

    def unbound(self) -> None:
        """Lifts the limit."""
        for file, value in [
            ("memory.memsw.limit_in_bytes", "-1"),
            ("memory.limit_in_bytes", "-1"),
            ("memory.max", "max"),
        ]:
            if (self.folder / file).exists():
                with contextlib.suppress(OSError):
                    (self.folder / file).write_text(value)

    def has(self, pid: int) -> bool:
        """Whether a process is a member."""
        return str(pid) in (self.folder / "cgroup.procs").read_text().split()

    def remove(self) -> bool:
        """Removes the cgroup; false while a process that has ended is still a member."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return not self.folder.exists()


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    """A memory cgroup that is always removed; skips the test where none can be made."""
    parent, limit = own_cgroup()
    folder = parent / f"penstock-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    made = Cgroup(folder, limit)
    try:
        if not made.limit.exists():
            pytest.skip("the cgroup has no limit of memory: its parent does not delegate the controller")
        probe = subprocess.run(
            ["sh", "-c", f"echo $$ > {folder}/cgroup.procs"], capture_output=True, text=True, check=False
        )
        if probe.returncode:
            pytest.skip(f"no process may join the cgroup: {probe.stderr.strip()}")
        yield made
    finally:
        wait_until(made.remove, "the cgroup is empty", 30)


def test_a_worker_that_is_killed_for_memory_is_said_to_be(tmp_path, cgroup, monkeypatch):
    """The log, `/ready` and the metrics tell the cause; the gateway lives and starts the worker again."""
    start = tmp_path / "penstock"
    start.write_text(f'#!/bin/sh\necho $$ > {cgroup.folder}/cgroup.procs\nexec {binary()} "$@"\n')
    start.chmod(0o755)
    monkeypatch.setenv("PENSTOCK_BIN", str(start))
    with serving(tmp_path / "gateway") as gateway:
        deaths, said = gateway.metric("penstock_worker_deaths_total"), ""
        # How long it is down is nobody's promise: whoever was never asked meanwhile asks again.
        for number in range(1, 6):
            (worker,) = gateway.worker_pids()
            assert cgroup.has(worker) and cgroup.has(gateway.process.pid)
            # Of all in the cgroup the kernel kills this one.
            Path(f"/proc/{worker}/oom_score_adj").write_text("1000")
            with spare(cgroup.folder):
                cgroup.bound()
                with subprocess.Popen([sys.executable, "-c", TAKER, str(cgroup.folder), str(worker)]) as taker:
                    try:
                        while taker.poll() is None:
                            said = unready(gateway.url) or said
                        assert taker.returncode == 0, "what takes the memory lives"
                    finally:
                        taker.kill()
                cgroup.unbound()
            wait_until(lambda: WHY in gateway.log() or gateway.process.poll() is not None, "the log says why")
            while not (ready := httpx.get(f"{gateway.url}/ready", timeout=30).status_code == 200) and not said:
                said = unready(gateway.url) or said
            assert gateway.process.poll() is None, "the gateway lives"
            wait_until(lambda: gateway.metric("penstock_workers_ready") == 1, "the worker is started again", 90)
            assert gateway.metric("penstock_worker_deaths_total") == deaths + number
            if said:
                break
        assert WHY in said, (said, ready)
        answer = gateway.client().chat.completions.create(model=gateway.model(), messages=user("Hi"), max_tokens=4)
        assert answer.choices[0].message.content is not None


def unready(url: str) -> str:
    """Why the gateway is not ready: the body of the 503; empty while it is."""
    answer = httpx.get(f"{url}/ready", timeout=30)
    return answer.text if answer.status_code == 503 and "SIGKILL" in answer.text else ""
