"""KV tiers: what leaves memory comes back from disk, also after a restart; what is wrong there is never used."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

from harness import Gateway, serving, user, wait_until
from servers import S3, Redis

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


def answered(gateway: Gateway, seed: int) -> ChatCompletion:
    return gateway.client().chat.completions.create(
        model=gateway.model(), messages=user(prompt(seed)), max_tokens=12, temperature=0
    )


def ask(gateway: Gateway, seed: int) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    answer = answered(gateway, seed)
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def fill(gateway: Gateway, seeds: range) -> dict[int, str]:
    """Asks one after another, so that the first ones leave memory, and waits until all that has left it is in the tier."""
    said = {seed: answered(gateway, seed) for seed in seeds}
    gateway.idle()
    # The last token of an answer is never computed on.
    blocks = sum((answer.usage.total_tokens - 1) // 32 for answer in said.values())

    def left() -> float:
        # What is said of the worker is a moment old.
        return blocks - gateway.metric("penstock_kv_blocks_cached")

    wait_until(lambda: gateway.metric("penstock_kv_tier_stores_total") >= left() > 0, "evicted blocks are written")
    assert left() > 20, "not all fits into memory"
    return {seed: answer.choices[0].message.content for seed, answer in said.items()}


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
            wait_until(lambda dead=pid: gateway.worker_pids() not in ([], [dead]), "another worker", 90)
            wait_until(lambda: gateway.metric("penstock_workers_ready") == 1, "it is ready", 90)
            for seed, answer in answers.items():
                assert ask(gateway, seed)[0] == answer


def test_a_disk_that_cannot_be_used_is_left_out_and_said(tmp_path):
    (tmp_path / "kv").write_text("not a folder")
    with serving(tmp_path, config=config(tmp_path)) as gateway:
        assert ask(gateway, 1)[0] == ask(gateway, 1)[0]
        wait_until(lambda: "a KV tier is off" in gateway.log(), "the log says so")
        assert "Not a directory" in gateway.log()


def remote(server: Redis | S3, folder: Path) -> str:
    """The keys for a tier at `server`, with its secret in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    secret = folder / "secret"
    secret.write_text(server.secret + "\n")
    return f'kv_remote = "{server.kv_url}"\nkv_remote_password_file = "{secret}"\n'


def command_lines(gateway: Gateway) -> str:
    """What everybody on the machine can read of its processes."""
    paths = [Path(f"/proc/{pid}/cmdline") for pid in [gateway.process.pid, *gateway.worker_pids()]]
    return " ".join(path.read_text() for path in paths)


@pytest.mark.parametrize("kind", [Redis, S3])
def test_workers_share_a_server_and_go_on_without_it(tmp_path, kind):
    server = kind()
    keys = remote(server, tmp_path)
    try:
        with serving(tmp_path / "one", config=config(tmp_path, keys)) as one:
            answers = fill(one, range(4))
        with serving(tmp_path / "two", config=config(tmp_path, keys)) as two:
            text, cached = ask(two, 0)
            assert (text, cached > 500) == (answers[0], True), "what another worker computed"
            server.hang()
            assert ask(two, 1)[0] == answers[1], "it waits for the server no longer than for computing"
            server.kill()
            for seed in range(2, 4):
                assert ask(two, seed)[0] == answers[seed], "it goes on without the server"
            secret = server.secret.split(":")[-1]
            assert secret not in two.log() and secret not in command_lines(two)
    finally:
        server.close()


def test_what_is_wrong_in_a_bucket_is_never_used(tmp_path):
    server = S3()
    # The secret of the environment, as on machines that have a role.
    key_id, key = server.keys
    env = {"AWS_ACCESS_KEY_ID": key_id, "AWS_SECRET_ACCESS_KEY": key}
    keys = f'kv_remote = "{server.kv_url}"\n'
    try:
        with serving(tmp_path / "one", config=config(tmp_path, keys), env=env) as one:
            answers = fill(one, range(4))
        good = server.objects()
        assert len(good) > 60, "the blocks of all four, orderly put away"
        flipped = {name: body[:-9] + bytes([body[-9] ^ 1]) + body[-8:] for name, body in good.items()}
        wrongs = [
            flipped,
            {name: body[:-1] for name, body in good.items()},
            {name: body * 3 for name, body in good.items()},
            # Each is whole, and not what its name says.
            dict(zip(good, reversed(good.values()), strict=True)),
        ]
        for number, wrong in enumerate(wrongs):
            server.put(wrong)
            with serving(tmp_path / f"wrong-{number}", config=config(tmp_path, keys), env=env) as two:
                text, cached = ask(two, number)
                assert text == answers[number]
                assert cached < 32 * 2, "nothing of it was good"
                wait_until(lambda two=two: two.metric("penstock_kv_tier_corrupt_total") > 0, "it was counted")
    finally:
        server.close()


def test_a_bucket_that_is_not_ours_is_left_alone(tmp_path):
    server = S3()
    server.secret = f"{server.keys[0]}:not-the-secret"
    try:
        with serving(tmp_path, config=config(tmp_path, remote(server, tmp_path))) as gateway:
            answers = {seed: ask(gateway, seed)[0] for seed in range(4)}
            assert ask(gateway, 0)[0] == answers[0]
            wait_until(lambda: "the remote KV tier does not answer" in gateway.log(), "it is said")
            assert "not-the-secret" not in gateway.log()
        assert server.objects() == {}
    finally:
        server.close()
