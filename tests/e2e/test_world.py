"""Clocks that jump, disks that are full, stores that are slow, away or behind TLS: what the documentation says of each."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from test_limits import KEY, OPS, OTHER, body_of, config, measure, metric, settled
from test_reload import hang_up
from test_single_sign_on import authority, certificate_of
from world import Slow, World

from harness import Gateway, promised, serving, wait_until
from issuer import issuing
from servers import PASSWORD, Postgres, Redis
from swarm import Swarm, ask, until

HOUR, DAY = 3600, 86_400
ENV = {"KEY_LIMITED": KEY, "KEY_OTHER": OTHER, "KEY_OPS": OPS, "KEY_UP": "sk-up"}


@pytest.fixture
def swarm():
    swarm = Swarm()
    yield swarm
    swarm.close()


@pytest.fixture(scope="module")
def postgres():
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="module")
def redis():
    server = Redis()
    yield server
    server.close()


def one(gateway: Gateway, key: str = KEY, words: str = "hi") -> int:
    return asyncio.run(ask(gateway.port, *body_of("chat:chat", words, False), key)).status


def counted(gateway: Gateway) -> int:
    """The same, once the counters have answered: until then a closed limit refuses."""
    return wait_until(lambda: (status := one(gateway)) != 503 and status, "the counters answer")


def up(gateway: Gateway, store: str = "store") -> float:
    return metric(gateway, f'penstock_store_up{{store="{store}"}}')


# ---- the clock ----


def test_a_clock_that_jumps_opens_no_budget_and_holds_up_none(tmp_path, swarm):
    world = World(tmp_path / "g")
    # At noon, so that no hour's jump passes midnight.
    noon = DAY // 2 - int(time.time()) % DAY
    world.clock(noon)
    limit = "requests_per_minute = 4\nrequests_per_day = 6"
    text = config(swarm, limit)
    with serving(tmp_path / "g", workers=0, config=text, env=ENV | world.env) as gateway:
        assert [one(gateway) for _ in range(4)] == [200] * 4
        for jump in (HOUR, -HOUR, 10 * HOUR, 0):
            world.clock(noon + jump)
            assert one(gateway) == 429, f"a minute is a minute, whatever the clock says ({jump})"
            assert measure(gateway, "requests_per_day")["used"] == 4
        assert metric(gateway, "penstock_panics_total") == 0
        # More than a day off: it was wrong before. The day is another; the minute goes on.
        world.clock(noon + 2 * DAY)
        wait_until(lambda: measure(gateway, "requests_per_day")["used"] == 0, "the day is another")
        assert one(gateway) == 429
        world.clock(noon)
        wait_until(lambda: metric(gateway, "penstock_ledger_waiting") == 0, "the ledger is written")
        assert len(entries(gateway)) == 4
    # Started by a clock that is an hour behind: what was spent an hour ahead counts.
    world.clock(noon - HOUR)
    with serving(tmp_path / "g", workers=0, config=text, env=ENV | world.env) as gateway:
        assert measure(gateway, "requests_per_day")["used"] == 4


def entries(gateway: Gateway) -> list[tuple]:
    """The entries of the ledger that are settled."""
    with contextlib.closing(sqlite3.connect(gateway.state / "penstock.db")) as database:
        return database.execute("SELECT request, at FROM ledger WHERE state > 0").fetchall()


def test_tokens_follow_the_clock_that_they_are_dated_by(tmp_path):
    world = World(tmp_path / "g")
    with (
        issuing(tmp_path) as issuer,
        serving(tmp_path / "g", workers=0, config=issuer.config(), env=world.env) as gateway,
    ):

        def status(token: str) -> int:
            headers = {"authorization": f"Bearer {token}"}
            return httpx.get(f"{gateway.url}/v1/models", headers=headers, timeout=30).status_code

        now = int(time.time())
        token = issuer.token("ada", nbf=now, exp=now + 600)
        assert status(token) == 200
        world.clock(HOUR)
        assert status(token) == 401, "over, though it was found good a moment ago"
        later = issuer.token("ada", iat=now + HOUR, nbf=now + HOUR, exp=now + HOUR + 600)
        assert status(later) == 200
        world.clock(0)
        assert status(token) == 200, "the clock was wrong, not the token"
        assert status(later) == 401, "not good yet, though it was found good a moment ago"
        world.clock(-HOUR)
        assert status(token) == 401
        world.clock(0)
        assert status(token) == 200


# ---- the disk ----


def test_a_full_disk_stops_what_must_be_written_and_nothing_else(tmp_path, swarm):
    world = World(tmp_path / "g")
    more = '\n[[limits]]\nid = "open"\nrequests_per_day = 1000\non_store_failure = "open"\n'
    text = config(swarm, 'requests_per_day = 1000\non_store_failure = "closed"', more)
    text = text.replace('id = "other"\n', 'id = "other"\nlimits = ["open"]\n')
    with serving(tmp_path / "g", workers=0, config=text, env=ENV | world.env) as gateway:
        client = gateway.client(api_key=KEY)
        kept = client.files.create(file=("kept", b"k" * 1000), purpose="user_data")
        assert one(gateway) == one(gateway, OTHER) == 200
        settled(gateway, "requests_per_day")
        wait_until(lambda: metric(gateway, "penstock_ledger_waiting") == 0, "the ledger is written")
        wait_until(lambda: up(gateway) == 1, "the store is up")
        world.disk(full=True)
        served = 2
        for _ in range(20):
            assert one(gateway, OTHER) == 200, "a limit that is open lets in"
            served += 1
        assert client.files.content(kept.id).read() == b"k" * 1000, "what is there can be read"
        with pytest.raises(httpx.HTTPStatusError) as refused:
            file = {"file": ("more", b"m" * 100_000), "purpose": (None, "user_data")}
            headers = {"authorization": f"Bearer {KEY}"}
            httpx.post(f"{gateway.url}/v1/files", files=file, headers=headers, timeout=60).raise_for_status()
        assert refused.value.response.status_code == 507, refused.value.response.text
        assert refused.value.response.json()["error"]["code"] == "storage_full"

        closed = []

        def is_closed() -> bool:
            closed.append(one(gateway))
            return closed[-1] == 503

        wait_until(is_closed, "a limit that is closed refuses what cannot be written down", step=0.2)
        assert set(closed) == {200, 503}
        served += closed.count(200)
        assert one(gateway, OTHER) == 200
        served += 1
        assert metric(gateway, "penstock_ledger_waiting") > 0
        wait_until(lambda: up(gateway) == 0, "the store is said to be down")
        assert metric(gateway, "penstock_panics_total") == 0
        world.disk(full=False)
        wait_until(lambda: one(gateway) == 200, "served again", step=0.2)
        served += 1
        client.files.create(file=("more", b"m" * 100_000), purpose="user_data")
        wait_until(lambda: metric(gateway, "penstock_ledger_waiting") == 0, "what waited is written")
        wait_until(lambda: up(gateway) == 1, "the store is up")
        assert metric(gateway, "penstock_ledger_lost_total") == 0
        assert len(entries(gateway)) == served, "each once"
        with contextlib.closing(sqlite3.connect(gateway.state / "penstock.db")) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# ---- stores ----


def on_servers(swarm: Swarm, limit: str, more: str = "", counters: str = 'url_env = "COUNTERS_URL"') -> str:
    return config(swarm, limit, f'\n[store]\nurl_env = "STORE_URL"\n[counters]\n{counters}\n{more}')


def test_a_store_that_is_away_refuses_the_start_and_counters_do_not(tmp_path, swarm, postgres, redis):
    env = ENV | {"STORE_URL": postgres.url, "COUNTERS_URL": redis.url}
    gateway = Gateway(tmp_path / "g", "--admin", "off", workers=0, env=env)
    limit = 'requests_per_hour = 3\non_store_failure = "closed"'
    gateway.config = on_servers(swarm, limit, 'prefix = "away:"')
    postgres.hang()
    began = time.monotonic()
    try:
        gateway.start(ready=False)
        assert gateway.process.wait(30) != 0
    finally:
        postgres.go_on()
    assert time.monotonic() - began < 25
    assert "PostgreSQL of [store] cannot be used" in gateway.log() and PASSWORD not in gateway.log()
    redis.kill()
    try:
        gateway.start()
        assert one(gateway) == 503, "closed: nobody knows what the others have let in"
        assert up(gateway) == 1 and up(gateway, "counters") == 0
        assert one(gateway, OTHER) == 200
        redis.start()
        wait_until(lambda: one(gateway) == 200, "counted together", step=0.2)
        wait_until(lambda: up(gateway, "counters") == 1, "they are up")
        assert [counted(gateway) for _ in range(3)] == [200, 200, 429]
    finally:
        gateway.stop()


def test_a_reload_needs_no_store(tmp_path, swarm, postgres, redis):
    env = ENV | {"STORE_URL": postgres.url, "COUNTERS_URL": redis.url}
    text = on_servers(swarm, "requests_per_hour = 1000", 'prefix = "reload:"\n[server]\nwatch = false')
    with serving(tmp_path / "g", "--admin", "off", workers=0, config=text, env=env) as gateway:

        async def stream_across():
            path, body = body_of("chat:chat", "<slow> <tokens=20>", True)
            swarm.shut()
            stream = asyncio.create_task(ask(gateway.port, path, body, KEY))
            await until(lambda: swarm.seen.now == 1, "the stream runs")
            postgres.hang()
            redis.hang()
            try:
                before = count_of_reloads(gateway)
                (gateway.folder / "penstock.toml").write_text(text.replace("= 1000", "= 7"))
                hang_up(gateway)
                await until(lambda: count_of_reloads(gateway) > before, "the reload does not wait for the store", 10)
                assert (await ask(gateway.port, *body_of("chat:chat", "hi", False), KEY)).status == 200
            finally:
                postgres.go_on()
                redis.go_on()
            swarm.open()
            return await stream

        answer = asyncio.run(stream_across())
        assert answer.status == 200 and answer.body.endswith(b"0\r\n\r\n"), "the stream is whole"
        assert measure(gateway, "requests_per_hour")["max"] == 7
        wait_until(lambda: metric(gateway, "penstock_ledger_waiting") == 0, "the ledger is written", 30)


def count_of_reloads(gateway: Gateway) -> float:
    return metric(gateway, 'penstock_config_reloads_total{outcome="applied"}')


def test_slow_stores_slow_down_no_request(tmp_path, swarm, postgres, redis):
    with contextlib.ExitStack() as stack:
        # PostgreSQL's socket has its port in its name.
        slow_store = Slow(short(stack), postgres.folder / ".s.PGSQL.5432", ".s.PGSQL.5432")
        slow_counters = Slow(short(stack), redis.socket, "redis")
        stack.callback(slow_store.close), stack.callback(slow_counters.close)
        host = str(slow_store.path.parent).replace("/", "%2f")
        env = ENV | {"STORE_URL": f"postgres://penstock:{PASSWORD}@{host}/postgres"}
        env["COUNTERS_URL"] = f"redis+unix://{slow_counters.path}?pass={PASSWORD}"
        more = '\n[[limits]]\nid = "strict"\nrequests_per_hour = 1000\non_store_failure = "closed"\n'
        text = on_servers(swarm, "requests_per_hour = 1000", 'prefix = "slow:"' + more)
        text = text.replace('id = "other"\n', 'id = "other"\nlimits = ["strict"]\n')
        gateway = stack.enter_context(serving(tmp_path / "g", "--admin", "off", workers=0, config=text, env=env))
        assert one(gateway) == 200
        wait_until(lambda: one(gateway, OTHER) == 200, "the counters are reached")
        slow_store.seconds = slow_counters.seconds = 0.5
        took = []
        for _ in range(40):
            began = time.monotonic()
            assert one(gateway) == 200
            took.append(time.monotonic() - began)
        # Who waits for a store waits for half a second; a machine that stands still for a moment does that to few.
        assert sorted(took)[len(took) // 2] < 0.2 and sum(seconds >= 0.5 for seconds in took) <= 2, sorted(took)[-5:]
        # Who must wait is served all the same: nothing is away.
        assert [one(gateway, OTHER) for _ in range(5)] == [200] * 5
        assert up(gateway, "counters") == 1
        wait_until(lambda: metric(gateway, "penstock_ledger_waiting") == 0, "a slow ledger is written")
        assert metric(gateway, "penstock_ledger_lost_total") == 0
        slow_store.seconds = slow_counters.seconds = 0.0
        wait_until(lambda: one(gateway, OTHER) == 200, "closed limits serve again", step=0.2)
        wait_until(lambda: up(gateway) == up(gateway, "counters") == 1, "both are up")


def short(stack: contextlib.ExitStack):
    """A folder whose path leaves room for a socket's name."""
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-slow-")))


# ---- TLS ----


def test_stores_are_reached_over_tls_and_their_certificates_checked(tmp_path, swarm):
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    pair = certificate_of(tmp_path, ours, "stores", "IP:127.0.0.1,DNS:localhost")
    with contextlib.ExitStack() as stack:
        postgres, redis = Postgres(tls=pair), Redis(tls=pair)
        stack.callback(postgres.close), stack.callback(redis.close)
        env = ENV | {"STORE_URL": postgres.url + "?sslmode=require", "COUNTERS_URL": redis.url}

        def text(store, counters) -> str:
            out = on_servers(swarm, 'requests_per_hour = 2\non_store_failure = "closed"', f'ca_file = "{counters}"')
            return out.replace('"STORE_URL"', f'"STORE_URL"\nca_file = "{store}"')

        good, bad = ours[1], theirs[1]
        with serving(tmp_path / "a", "--admin", "off", workers=0, config=text(good, good), env=env) as gateway:
            # Until the counters are reached, the limit is closed.
            wait_until(lambda: one(gateway) == 200, "the stores are reached")
            assert [counted(gateway) for _ in range(2)] == [200, 429]
            wait_until(lambda: metric(gateway, "penstock_ledger_waiting") == 0, "the ledger is written")
            wait_until(lambda: up(gateway) == up(gateway, "counters") == 1, "both are up")
        # Signed by somebody else: the store refuses the start, the counters are away.
        gateway = Gateway(tmp_path / "b", "--admin", "off", workers=0, config=text(bad, good), env=env)
        gateway.start(ready=False)
        assert gateway.process.wait(30) != 0
        assert "PostgreSQL of [store] cannot be used" in gateway.log() and PASSWORD not in gateway.log()
        with serving(tmp_path / "c", "--admin", "off", workers=0, config=text(good, bad), env=env) as gateway:
            assert one(gateway) == 503 and up(gateway, "counters") == 0
            assert PASSWORD not in gateway.log()


# ---- the cache that gateways share ----


def test_an_answer_of_one_gateway_is_given_again_by_the_other(tmp_path, swarm, redis):
    more = '[counters]\nurl_env = "COUNTERS_URL"\nprefix = "cache:"\n[[plugins]]\nname = "cache"\n'
    text = config(swarm, "requests_per_hour = 1000", more + 'settings = { store = "shared" }\n')
    env = ENV | {"COUNTERS_URL": redis.url}
    with (
        serving(tmp_path / "a", "--admin", "off", workers=0, config=text, env=env) as first,
        serving(tmp_path / "b", "--admin", "off", workers=0, config=text, env=env) as second,
    ):

        def cached(gateway: Gateway, words: str, key: str = KEY, stream: bool = False):
            answer = asyncio.run(ask(gateway.port, *body_of("chat:chat", words, stream), key))
            assert answer.status == 200, answer
            return answer.headers["x-penstock-cache"], answer

        assert cached(first, "hello")[0] == "miss"
        wait_until(lambda: cached(second, "hello")[0] == "hit", "the other has it")
        bills = len(swarm.seen.bills)
        assert cached(first, "hello")[0] == cached(second, "hello", stream=True)[0] == "hit"
        assert len(swarm.seen.bills) == bills, "nobody was asked"
        assert cached(second, "hello", OTHER)[0] == "miss", "keys share nothing"
        redis.hang()

        def asked() -> float:
            began = time.monotonic()
            assert cached(second, f"another {began}")[0] == "miss", "without the cache the provider is asked"
            return time.monotonic() - began

        try:
            promised(3, asked)
        finally:
            redis.go_on()
        wait_until(lambda: cached(first, "hello")[0] == "hit", "it is back")
