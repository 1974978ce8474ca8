"""One packed copy of the weights for all workers of a machine: who comes second packs nothing, whoever died before."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from test_upgrade import end, processes, upgrade

from harness import DEMO_MODEL, Gateway, serving, user, wait_until

MEMORY = "/memfd:penstock-weights"
CONFIG = """
[[pools]]
id = "penstock-demo"
model = "{model}"
workers = {workers}
threads = 1
{more}
"""


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the demo model that a test may change."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "penstock-demo"))


def config(model: Path, workers: int, more: str = "") -> str:
    return CONFIG.format(model=model, workers=workers, more=more)


def loads(gateway: Gateway) -> tuple[int, int, int]:
    """Loads of the weights so far: packed into shared memory, found there, packed by a worker for itself."""
    counts = {"packed into memory that workers share": 0, "shared: packed by another worker": 0}
    counts["packed into memory of this worker"] = 0
    for line in gateway.log().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fields = json.loads(line)["fields"]
            if fields["message"] == "checkpoint loaded":
                counts[fields["weights"]] += 1
    return tuple(counts.values())


def maps(pid: int) -> dict[int, tuple[int, int]]:
    """Shared weights that a process maps: resident and proportional bytes, by the memory's inode."""
    found: dict[int, tuple[int, int]] = {}
    inode, resident = None, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inode = int(words[4]) if line.endswith(f"{MEMORY} (deleted)") else None
        elif inode is not None and words[0] == "Rss:":
            resident = int(words[1]) * 1024
        elif inode is not None and words[0] == "Pss:":
            before = found.get(inode, (0, 0))
            found[inode] = (before[0] + resident, before[1] + int(words[1]) * 1024)
    return found


def copies(pid: int) -> set[str]:
    """Memory of weights of which a process has descriptors, whoever maps it."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith(MEMORY):
                found.add(entry.stat().st_ino)
    return found


def said(gateway: Gateway) -> str:
    answer = gateway.client().chat.completions.create(
        model="penstock-demo", messages=user("What is the capital of France?"), max_tokens=24, temperature=0
    )
    return answer.choices[0].message.content


def all_ready(gateway: Gateway, count: int) -> None:
    wait_until(lambda: gateway.metric("penstock_workers_ready") == count, f"{count} workers are ready", 90)


def lose(gateway: Gateway, count: int) -> None:
    """Kills the first worker, and waits for its successor."""
    pid, starts = gateway.worker_pids()[0], sum(loads(gateway))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: sum(loads(gateway)) > starts, "a successor has loaded the model", 90)
    all_ready(gateway, count)
    assert pid not in gateway.worker_pids()


def test_two_workers_have_one_copy_and_a_successor_finds_it(tmp_path, model):
    with serving(tmp_path, workers=0, config=config(model, 2)) as gateway:
        all_ready(gateway, 2)
        assert loads(gateway) == (1, 1, 0)
        before = said(gateway)
        for _ in range(2):
            first, second = (maps(pid) for pid in gateway.worker_pids())
            assert first.keys() == second.keys() and len(first) == 1, "both map one memory"
            size = gateway.metric("penstock_shared_weights_bytes")
            assert size > 5_000_000
            together = sum(pss for part in (first, second) for _, pss in part.values())
            assert together <= 1.1 * size, f"{together} of {size}"
            lose(gateway, 2)
            assert said(gateway) == before, "the same tokens from the same weights"
        assert loads(gateway) == (1, 3, 0), "nobody packed again"
        wait_until(lambda: gateway.metric("penstock_worker_shared_loads_total") == 4, "four loads are counted")
        assert "cannot be used" not in gateway.log()


def test_a_changed_checkpoint_is_packed_anew(tmp_path, model):
    with serving(tmp_path, workers=0, config=config(model, 1)) as gateway:
        before, (old,) = said(gateway), maps(gateway.worker_pids()[0])
        # Another file of that name, as a download makes it.
        new = model / "new"
        shutil.copy(model / "model.safetensors", new)
        new.rename(model / "model.safetensors")
        lose(gateway, 1)
        (now,) = maps(gateway.worker_pids()[0])
        assert loads(gateway) == (2, 0, 0) and now != old
        assert copies(gateway.process.pid) == {now}, "the old copy is gone"
        assert said(gateway) == before
        lose(gateway, 1)
        assert loads(gateway) == (2, 1, 0)


def test_weights_that_no_worker_uses_are_given_back(tmp_path, model):
    more = 'on_demand = true\nkeep_alive = "1s"'
    with serving(tmp_path, workers=0, config=config(model, 1, more)) as gateway:
        assert copies(gateway.process.pid) == set()
        before = said(gateway)
        assert len(copies(gateway.process.pid)) == 1
        wait_until(lambda: not gateway.worker_pids(), "the worker is stopped")
        wait_until(lambda: not copies(gateway.process.pid), "its weights are given back")
        assert said(gateway) == before and loads(gateway) == (2, 0, 0)


def test_each_worker_packs_its_own_where_the_config_says_so(tmp_path, model):
    with serving(tmp_path, workers=0, config=config(model, 2, "shared_weights = false")) as gateway:
        all_ready(gateway, 2)
        assert loads(gateway) == (0, 0, 2)
        assert not any(maps(pid) for pid in gateway.worker_pids()) and not copies(gateway.process.pid)
        assert gateway.metric("penstock_shared_weights_bytes") == 0


def test_the_next_gateway_has_the_copy_of_the_workers_that_it_adopts(tmp_path, model):
    gateway = Gateway(tmp_path, workers=0, config=config(model, 2))
    try:
        gateway.start()
        all_ready(gateway, 2)
        before, workers = said(gateway), gateway.worker_pids()
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        all_ready(gateway, 2)
        assert gateway.worker_pids() == workers, "adopted"
        lose(gateway, 2)
        assert loads(gateway) == (1, 2, 0) and said(gateway) == before
        # Both are lost at once: what the gateway holds is enough.
        for pid in gateway.worker_pids():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: sum(loads(gateway)) == 5, "both successors have loaded the model", 90)
        all_ready(gateway, 2)
        assert loads(gateway) == (1, 4, 0) and said(gateway) == before
    finally:
        gateway.stop()


def test_an_upgrade_keeps_the_copy(tmp_path, model):
    gateway = Gateway(tmp_path, workers=0, config=config(model, 1))
    try:
        gateway.start()
        before, old = said(gateway), gateway.process.pid
        upgrade(gateway)
        wait_until(lambda: old not in processes(gateway), "the old process has ended", 60)
        (now,) = processes(gateway)
        assert len(copies(now)) == 1
        lose(gateway, 1)
        assert loads(gateway) == (1, 1, 0) and said(gateway) == before
    finally:
        end(gateway)
        # The workers end with the gateway, or alone after their time.
        deadline = time.monotonic() + 20
        while gateway.worker_pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in gateway.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
