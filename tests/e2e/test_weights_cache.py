"""Files of packed weights: a cold start finds what the last one packed, or packs again, and the answers are the same."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from test_shared_weights import config, lose, model, said

from harness import Gateway, wait_until

__all__ = ["model"]

CACHE = "[server]\nweights_cache_bytes_max = {bytes_max}\n"
READ = "packed weights read from the cache"


def gateway_of(folder: Path, model: Path, bytes_max: int = 1 << 30, more: str = "", workers: int = 1) -> Gateway:
    text = CACHE.format(bytes_max=bytes_max) + config(model, workers, more)
    return Gateway(folder, workers=0, config=text)


def entries(gateway: Gateway) -> list[Path]:
    return sorted((gateway.state / "weights").glob("*.weights"))


def counts(gateway: Gateway, metric: str, label: str, values: list[str]) -> tuple[float, ...]:
    """A metric for each value of a label."""
    text = httpx.get(f"{gateway.url}/metrics", timeout=30).raise_for_status().text
    series = [re.findall(rf'^{metric}{{[^}}]*{label}="{value}"[^}}]*}} (\S+)$', text, re.M) for value in values]
    return tuple(sum(map(float, found)) for found in series)


def reads(gateway: Gateway) -> tuple[float, ...]:
    return counts(gateway, "penstock_weights_cache_reads_total", "outcome", ["hit", "miss", "bad"])


def packed(gateway: Gateway) -> tuple[float, ...]:
    """Starts of workers that packed, and that found packed weights."""
    return counts(gateway, "penstock_worker_shared_loads_total", "how", ["packed", "found"])


def written(gateway: Gateway, count: int = 1) -> None:
    wait_until(lambda: len(entries(gateway)) == count, f"{count} entries are written", 90)
    wait_until(lambda: gateway.metric("penstock_weights_cache_bytes") > 0, "their bytes are counted")


@pytest.fixture
def run(tmp_path, model):
    """Starts a gateway in the same folder again, after the last one and its workers have ended."""
    running: list[Gateway] = []

    def start(**options) -> Gateway:
        end()
        running.append(gateway_of(tmp_path, model, **options).start())
        return running[-1]

    def end() -> None:
        while running:
            running.pop().stop()

    yield start
    end()


def test_a_cold_start_reads_what_the_last_one_packed(run):
    gateway = run()
    before = said(gateway)
    written(gateway)
    assert (reads(gateway), packed(gateway)) == ((0, 1, 0), (1, 0))
    (entry,) = entries(gateway)
    assert entry.stat().st_mode & 0o777 == 0o600 and entry.parent.stat().st_mode & 0o777 == 0o700
    used = entry.stat().st_mtime_ns

    gateway = run(workers=2)
    wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both are ready", 90)
    assert (reads(gateway), packed(gateway)) == ((1, 0, 0), (0, 2)), "nobody packs"
    assert said(gateway) == before and gateway.log().count(READ) == 1
    assert gateway.metric("penstock_weights_cache_bytes") == entry.stat().st_size
    lose(gateway, 2)
    assert reads(gateway) == (1, 0, 0), "a successor finds the copy in memory"
    assert entry.stat().st_mtime_ns > used, "used last"


@pytest.mark.parametrize("damage", ["flipped", "cut", "grown", "linked"])
def test_an_entry_that_has_changed_is_packed_again(run, damage):
    gateway = run()
    before = said(gateway)
    written(gateway)
    (entry,) = entries(gateway)
    good = entry.read_bytes()
    if damage == "flipped":
        entry.write_bytes(good[:-1_000_000] + bytes([good[-1_000_000] ^ 1]) + good[-999_999:])
    elif damage == "cut":
        entry.write_bytes(good[:-1])
    elif damage == "grown":
        entry.write_bytes(good + b"\0")
    else:
        aside = entry.with_name("aside")
        entry.rename(aside)
        entry.symlink_to(aside)

    gateway = run()
    assert said(gateway) == before
    assert (reads(gateway), packed(gateway)) == ((0, 0, 1), (1, 0))
    assert "an entry of the cache of packed weights is bad" in gateway.log()
    wait_until(lambda: entries(gateway) == [entry] and not entry.is_symlink(), "a good one takes its place", 90)
    written(gateway)
    assert entry.read_bytes() == good, "packing is deterministic"

    gateway = run()
    assert said(gateway) == before and reads(gateway) == (1, 0, 0)


def test_other_files_or_another_form_are_not_served_from_an_entry(run, model):
    gateway = run()
    before = said(gateway)
    written(gateway)
    # The same bytes under another inode.
    new = model / "new"
    new.write_bytes((model / "model.safetensors").read_bytes())
    new.rename(model / "model.safetensors")

    gateway = run()
    assert said(gateway) == before and (reads(gateway), packed(gateway)) == ((0, 1, 0), (1, 0))
    written(gateway, 2)

    gateway = run(more='quantize = "int8"')
    assert said(gateway) and (reads(gateway), packed(gateway)) == ((0, 1, 0), (1, 0))
    written(gateway, 3)
    sizes = [entry.stat().st_size for entry in entries(gateway)]

    # Room for one: the others go at the start.
    gateway = run(more='quantize = "int8"', bytes_max=max(sizes))
    assert said(gateway) and packed(gateway) == (0, 1), "the one that was used last stays"
    wait_until(lambda: len(entries(gateway)) == 1, "the others are removed")


def test_weights_larger_than_the_cap_and_a_folder_of_others_cost_nothing_but_the_packing(run, tmp_path):
    gateway = run(bytes_max=1_000_000)
    before = said(gateway)
    wait_until(lambda: "packed weights are not kept: larger than" in gateway.log(), "the log says so")
    assert not entries(gateway)

    folder = tmp_path / "state" / "weights"
    folder.chmod(0o755)
    gateway = run()
    assert said(gateway) == before and packed(gateway) == (1, 0)
    wait_until(lambda: "other users may use it" in gateway.log(), "the log says so")
    assert not entries(gateway)


def test_without_a_cap_nothing_is_written(run):
    gateway = run(bytes_max=0)
    assert said(gateway)
    assert not (gateway.state / "weights").exists()
    assert not any(name.startswith("penstock_weights_cache") for name in gateway.metrics())
