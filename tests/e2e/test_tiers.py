"""KV tiers: what leaves memory comes back from disk, also after a restart; what is wrong there is never used."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

from harness import Gateway, serving, user, wait_until
from servers import PASSWORD, Redis

# Forty blocks of the demo model: three prompts of these tests do not fit.
KV_BYTES = 40 * 98_304
WORDS = "the river old stone bridge light water morning house road wind tree small bird song winter field stood".split()


def config(folder: Path, more: str = "") -> str:
    disk = f'kv_disk_path = "{folder / "kv"}"\nkv_disk_bytes = 64_000_000\n'
    return f"[[pools]]\nkv_bytes_max = {KV_BYTES}\n{more or disk}"


def prompt(seed: int) -> str:
    """About 700 tokens that no other seed shares."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(550))


def ask(gateway: Gateway, seed: int) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    answer = gateway.client().chat.completions.create(
        model=gateway.model(), messages=user(prompt(seed)), max_tokens=12, temperature=0
    )
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def written(gateway: Gateway) -> bool:
    """Nothing runs, and what was evicted is in the tier."""
    before = gateway.metric("penstock_kv_tier_stores_total")
    gateway.idle()
    return before > 0 and gateway.metric("penstock_kv_tier_stores_total") == before


def fill(gateway: Gateway, seeds: range) -> dict[int, str]:
    """Asks one after another, so that the first ones leave memory."""
    answers = {seed: ask(gateway, seed)[0] for seed in seeds}
    wait_until(lambda: written(gateway), "evicted blocks are written")
    return answers


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "kv").glob("**/segment-*.kv"))


def flip(path: Path, stride: int = 4096) -> None:
    """Changes a byte in every page behind the headers."""
    with open(path, "r+b") as file:
        size = path.stat().st_size
        # The first page, then 128 bytes for each of the slots of 256 MiB.
        slots = (256 << 20) // 98_304
        begin = 4096 + -(-slots * 128 // 4096) * 4096
        for at in range(begin, size, stride):
            file.seek(at + 1000)
            byte = file.read(1)
            file.seek(at + 1000)
            file.write(bytes([byte[0] ^ 0x10]))


def test_what_left_memory_comes_back_from_disk_also_after_a_restart(tmp_path):
    gateway = Gateway(tmp_path, config=config(tmp_path))
    try:
        gateway.start()
        answers = fill(gateway, range(4))
        text, cached = ask(gateway, 0)
        assert text == answers[0]
        assert cached > 500, "its blocks had left memory"
        name = "penstock_kv_tier_loads_total"
        wait_until(lambda: gateway.metric(name) >= cached // 32 - 2, "the loads are told")
        assert gateway.metric("penstock_kv_tier_corrupt_total") == 0
    finally:
        gateway.stop()
    wait_until(lambda: not gateway.worker_pids(), "the worker is gone")
    with serving(tmp_path, config=config(tmp_path)) as again:
        assert again.metric("penstock_kv_tier_blocks") > 20, "the files were found"
        text, cached = ask(again, 0)
        assert (text, cached > 500) == (answers[0], True)


def test_a_flipped_byte_is_never_used(tmp_path):
    with serving(tmp_path, config=config(tmp_path)) as gateway:
        answers = fill(gateway, range(4))
        for path in segments(tmp_path):
            flip(path)
        text, cached = ask(gateway, 0)
        assert text == answers[0]
        assert cached < 32 * 2, "nothing of it was good"
        wait_until(lambda: gateway.metric("penstock_kv_tier_corrupt_total") > 0, "it was counted")
        for seed in range(1, 4):
            assert ask(gateway, seed)[0] == answers[seed]


def test_a_worker_killed_while_it_writes_leaves_no_wrong_block(tmp_path):
    with serving(tmp_path, config=config(tmp_path)) as gateway:
        answers = fill(gateway, range(3))
        for round_ in range(3):
            # The request is continued by the next worker; meanwhile evicted blocks were being written.
            (pid,) = gateway.worker_pids()
            ask(gateway, 10 + round_)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda dead=pid: gateway.worker_pids() not in ([], [dead]), "another worker", 60)
            wait_until(lambda: gateway.metric("penstock_workers_ready") == 1, "it is ready", 60)
            for seed, answer in answers.items():
                assert ask(gateway, seed)[0] == answer


def test_a_disk_that_cannot_be_used_is_left_out(tmp_path):
    (tmp_path / "kv").write_text("not a folder")
    with serving(tmp_path, config=config(tmp_path)) as gateway:
        assert ask(gateway, 1)[0] == ask(gateway, 1)[0]
        assert "no KV tier on disk" in gateway.log()


def test_workers_share_a_server_and_go_on_without_it(tmp_path):
    server = Redis()
    secret = tmp_path / "password"
    secret.write_text(PASSWORD + "\n")
    remote = f'kv_remote = "redis+unix://{server.socket}"\nkv_remote_password_file = "{secret}"\n'
    try:
        with serving(tmp_path / "one", config=config(tmp_path, remote)) as one:
            answers = fill(one, range(4))
        with serving(tmp_path / "two", config=config(tmp_path, remote)) as two:
            text, cached = ask(two, 0)
            assert (text, cached > 500) == (answers[0], True), "what another worker computed"
            server.kill()
            for seed in range(1, 4):
                assert ask(two, seed)[0] == answers[seed], "it goes on without the server"
            assert PASSWORD not in two.log()
    finally:
        server.close()
