"""One budget, two gateways, real stores: what the provider bills never exceeds it, whoever dies in the middle.

The size of the crowd: $PENSTOCK_STREAMS (CI takes 200; `make test-shared` takes 1,000).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time

import pytest
from test_background_streams import until_text
from test_batches import begin, ended, lines
from test_limits import KEY, OPS, OTHER, STEADY, SURFACES, body_of, config, metric, settled, used_up

from harness import Gateway, user, wait_until
from servers import PASSWORD, Postgres, both, find
from swarm import Swarm, ask, until

STREAMS = int(os.environ.get("PENSTOCK_STREAMS", "200"))
# About half of the crowd fits at once; the rest is refused, and comes in later waves.
BUDGET = 0.0008 * STREAMS
# Closed: counters that do not answer in time, which a busy machine may take, would let in what nobody has counted.
CLOSED = '\non_store_failure = "closed"'
LIMIT = f'usd_per_day = {BUDGET}\nreserve = "most"\nmax_tokens_default = 40\nmax_tokens_max = 40{CLOSED}'
STORES = '\n[store]\nurl_env = "STORE_URL"\n[counters]\n{counters}\n[[teams]]\nid = "crowd"\nlimits = ["places"]\n'
PLACES = '\n[[limits]]\nid = "places"\nin_flight = 4\nby = "team"' + CLOSED + "\n"
WHERE = {"redis": 'url_env = "COUNTERS_URL"', "postgres": 'url = "store"'}


@pytest.fixture(scope="module")
def servers():
    with both() as servers:
        yield servers


@pytest.fixture
def swarm():
    swarm = Swarm()
    yield swarm
    swarm.close()


@contextlib.contextmanager
def pair(folder, servers, swarm: Swarm, where: str, limit: str = LIMIT, pace: str = "", more: str = ""):
    """Two gateways with one config, on a database of their own. `pace`: keys of the provider "openai"; `more`: further tables."""
    postgres, redis = servers
    name = f"t{folder.name.replace('-', '_').lower()}"
    sql(postgres, f'CREATE DATABASE "{name}"', "postgres")
    counters = WHERE[where] + (f'\nprefix = "{name}:"' if where == "redis" else "")
    text = config(swarm, limit, STORES.format(counters=counters) + PLACES + more)
    text = text.replace('id = "other"\n', 'id = "other"\nteam = "crowd"\n')
    text = text.replace('id = "openai"\n', f'id = "openai"\n{pace}')
    env = {"KEY_LIMITED": KEY, "KEY_OTHER": OTHER, "KEY_OPS": OPS, "KEY_UP": "sk-up"}
    env |= {"STORE_URL": postgres.url.rsplit("/", 1)[0] + f"/{name}", "COUNTERS_URL": redis.url}
    with contextlib.ExitStack() as stack:
        gateways = [
            Gateway(folder / name, "--admin", "off", workers=0, config=text, env=env) for name in ("one", "two")
        ]
        for gateway in gateways:
            gateway.start(ready=False)
            stack.callback(gateway.stop)
        for gateway in gateways:
            wait_until(gateway._is_ready, "both ready", 90)
        gateways[0].database = name
        yield gateways


def sql(postgres: Postgres, text: str, database: str) -> list[list[str]]:
    command = [find("psql"), "-h", str(postgres.folder), "-U", "penstock", "-d", database, "-AtX", "-c", text]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PGPASSWORD": PASSWORD}
    )
    return [line.split("|") for line in done.stdout.splitlines()]


def ledger(postgres: Postgres, gateway: Gateway) -> dict[str, tuple[int, float]]:
    """Entries and dollars, by state: 0 open, 1 settled, 2 assumed."""
    rows = sql(postgres, "SELECT state, count(*), sum(micro_usd) FROM penstock.ledger GROUP BY state", gateway.database)
    return {state: (int(count), float(usd or 0) / 1e6) for state, count, usd in rows}


def kill(gateway: Gateway) -> None:
    gateway.process.send_signal(signal.SIGKILL)
    gateway.process.wait()


async def crowd(gateways, swarm: Swarm, count: int, seed: int, meanwhile=None, **how):
    """So many requests at once, shared out among the gateways, each on another surface and with another fate. `meanwhile`: called all
    the time until it returns true; the slow ones do not end before."""
    chance = random.Random(seed)
    hows = how.get("hows", ("full", "mute", "break", "fail", "slow"))
    surfaces = how.get("surfaces", SURFACES)

    async def one(at: int):
        fate = chance.choice(hows)
        words = f"Hello <{fate}> <tokens={chance.randint(1, 60)}> " + "word " * chance.randint(0, 60)
        path, body = body_of(chance.choice(surfaces), words, chance.random() < 0.7, chance.choice([None, 10, 1000]))
        leave = how.get("leave", True) and chance.random() < 0.2
        leave_after = chance.randint(0, 2500) if leave else None
        return await ask(gateways[at % len(gateways)].port, path, body, KEY, leave_after)

    asked = asyncio.gather(*(one(at) for at in range(count)))
    if meanwhile:
        swarm.shut()
        await until(lambda: meanwhile() or asked.done(), "what is done meanwhile")
        swarm.open()
    return await asked


def wave(gateways, swarm: Swarm, number: int) -> list:
    """Half a crowd, when nothing is in flight (portions that one holds and does not use go back after 2 s)."""
    for gateway in gateways:
        settled(gateway, "usd_per_day")
    answers = asyncio.run(crowd(gateways, swarm, STREAMS // 2, number, hows=STEADY))
    assert swarm.usd <= BUDGET, "no more is billed than the budget"
    return answers


@pytest.mark.parametrize("where", ["redis", "postgres"])
def test_a_budget_of_two_gateways_holds_while_one_is_killed(tmp_path, servers, swarm, where):
    with pair(tmp_path, servers, swarm, where) as (one, two):
        gateways = (one, two)

        def die() -> bool:
            if swarm.seen.now < STREAMS // 20 or len(swarm.seen.bills) < STREAMS // 8:
                return False
            kill(one)
            return True

        answers = asyncio.run(crowd(gateways, swarm, STREAMS, 1, die))
        assert one.process.poll() is not None, "it was killed while streams ran"
        assert swarm.usd <= BUDGET
        assert any(answer.status == 0 for answer in answers[::2]), "requests of the dead one were cut off"
        one.start()

        answers = used_up(lambda number: wave(gateways, swarm, number))
        assert any(answer.status == 200 for answer in answers), "the other, and the new one, went on"
        # What the dead one had leased for its streams stays spent until the window ends: up to half of the crowd fits at once.
        assert swarm.usd > BUDGET * 0.1, f"{swarm.usd} of {BUDGET}: what was not used was given back"
        for gateway in gateways:
            assert metric(gateway, "penstock_panics_total") == 0
            wait_until(lambda gateway=gateway: metric(gateway, "penstock_limit_holds") == 0, "nothing is held")
            wait_until(lambda gateway=gateway: metric(gateway, "penstock_ledger_waiting") == 0, "the ledger is written")
        print(f"{where}: {STREAMS} streams, billed {swarm.usd:.6f} of {BUDGET:.6f}, {len(swarm.seen.bills)} asked")


@pytest.mark.parametrize("where", ["redis", "postgres"])
def test_guesses_of_two_gateways_exceed_a_budget_by_no_more_than_they_were_wrong(tmp_path, servers, swarm, where):
    """Nothing bounds the answers: what is spent is above the budget by what answers used beyond their reservations, and by no more."""
    postgres, _ = servers
    budget = 0.00025 * STREAMS
    with pair(tmp_path, servers, swarm, where, f'usd_per_day = {budget}\non_store_failure = "closed"') as gateways:
        answers = []
        for number in range(4):
            answers += asyncio.run(crowd(gateways, swarm, STREAMS, number, hows=("full", "mute", "break", "slow")))

        def written() -> bool:
            held = sum(metric(gateway, "penstock_limit_holds") for gateway in gateways)
            return held == 0 and all(metric(gateway, "penstock_ledger_waiting") == 0 for gateway in gateways)

        wait_until(written, "the ledger is written", 60)
        entries = ledger(postgres, gateways[0])
        assert set(entries) == {"1"}, entries
        count, used = entries["1"]
        exceeded = sum(metric(gateway, 'penstock_limit_exceeded_total{unit="usd"}') for gateway in gateways)
        # Entries are rounded up to millionths.
        assert used <= budget + exceeded + 1e-6 * count, (used, budget, exceeded)
        assert used > budget * 0.2, "what was not used was given back"
        assert {answer.status for answer in answers} >= {200, 429}
        print(f"{where}: used {used:.6f} of {budget:.6f}, {exceeded:.6f} beyond reservations, {count} requests")


@pytest.mark.parametrize("loss", ["empty", "restart"])
def test_a_budget_outlives_the_counters(tmp_path, servers, swarm, loss):
    """The counters are emptied, or restarted without what they had, while a crowd is served: what was spent counts on, by the ledger."""
    _, redis = servers
    with pair(tmp_path, servers, swarm, "redis") as gateways:
        lost = []

        def times() -> list[float]:
            return [metric(gateway, "penstock_limit_counters_restored_total") for gateway in gateways]

        def restored(before: list[float]) -> None:
            def both() -> bool:
                # One that has nothing leased and is asked nothing has nothing to notice.
                asyncio.run(crowd(gateways, swarm, 4, len(swarm.seen.bills)))
                return all(now > known for now, known in zip(times(), before, strict=True))

            wait_until(both, "both have restored what they know", 60, 0.2)

        before = times()

        def lose() -> bool:
            if not lost and len(swarm.seen.bills) > STREAMS // 6:
                getattr(redis, loss)()
                lost.append(swarm.usd)
            return bool(lost)

        answers = asyncio.run(crowd(gateways, swarm, STREAMS, 1, lose))
        assert lost, "they were lost in the middle"
        assert {answer.status for answer in answers} <= {0, 200, 429, 500, 502, 503}
        assert swarm.usd <= BUDGET, f"{swarm.usd} of {BUDGET}, {lost[0]} before the loss"

        restored(before)
        used_up(lambda number: wave(gateways, swarm, number))
        spent, before = swarm.usd, times()
        print(f"{loss}: lost after {lost[0]:.6f}, billed {spent:.6f} of {BUDGET:.6f}")
        # Streams that break off, or are left, count as they were reserved: about half of it is never billed.
        assert spent > max(lost[0], BUDGET * 0.25), f"{spent} of {BUDGET}: what was left could be spent"
        # Again, when nearly all is spent: each gateway remembers its own part, and only the ledger the whole.
        getattr(redis, loss)()
        for number in range(40, 42):
            asyncio.run(crowd(gateways, swarm, STREAMS // 2, number))
            assert swarm.usd <= BUDGET, f"{spent} before the loss, and then {swarm.usd} of {BUDGET}"
            restored(before)
        assert all(metric(gateway, "penstock_panics_total") == 0 for gateway in gateways)


def test_what_two_gateways_spend_is_in_the_ledger_once(tmp_path, servers, swarm):
    postgres, _ = servers
    surfaces = [surface for surface in SURFACES if "hedged" not in surface and "two" not in surface]
    how = {"hows": ("full",), "leave": False, "surfaces": surfaces}
    limit = 'usd_per_day = 100.0\nreserve = "most"\nmax_tokens_default = 40\nmax_tokens_max = 40'
    count = STREAMS // 4
    with pair(tmp_path, servers, swarm, "redis", limit) as (one, two):
        # The store hangs in the middle, dies, and comes back: what waits is written again, and counts once.
        hung = []

        def hang() -> bool:
            if not hung and len(swarm.seen.bills) > count // 2:
                postgres.hang()
                hung.append(time.monotonic())
            return bool(hung)

        answers = asyncio.run(crowd((one, two), swarm, count, 1, hang, **how))
        assert {answer.status for answer in answers} == {200}, "no request waits for the store"
        assert hung
        postgres.go_on()
        postgres.kill()
        answers = asyncio.run(crowd((one, two), swarm, count, 2, **how))
        assert all(answer.status == 200 for answer in answers)
        postgres.start()

        def written() -> bool:
            return all(metric(gateway, "penstock_ledger_waiting") == 0 for gateway in (one, two))

        wait_until(written, "what waited is written", 60)
        assert all(metric(gateway, "penstock_ledger_lost_total") == 0 for gateway in (one, two))
        # Now one dies with streams open: what it has settled stays, and what was open is settled by what was held.
        before = ledger(postgres, one)
        assert before["1"][0] == 2 * count and set(before) == {"1"}
        assert before["1"][1] == pytest.approx(swarm.usd, abs=2e-6 * before["1"][0])

        async def cut():
            path, body = body_of("chat:chat", "<slow> <tokens=40>", True)
            swarm.shut()
            streams = [asyncio.create_task(ask(one.port, path, body, KEY)) for _ in range(5)]
            await until(lambda: swarm.seen.now == 5, "five streams run")
            await until(lambda: ledger(postgres, one).get("0", (0,))[0] == 5, "what they hold is written down")
            kill(one)
            await asyncio.gather(*streams)
            swarm.open()

        asyncio.run(cut())
        wait_until(lambda: ledger(postgres, one).get("2", (0,))[0] == 5, "the other settles what the dead one left", 90)
        after = ledger(postgres, one)
        assert after["1"] == before["1"] and "0" not in after
        assert swarm.usd <= after["1"][1] + after["2"][1] <= swarm.usd + 5 * 0.004


def test_a_gateway_that_ends_leaves_nothing_leased_and_nothing_open(tmp_path, servers, swarm):
    """It is stopped while streams run, which its grace time ends, and a moment after others have ended."""
    postgres, _ = servers
    limit = "usd_per_month = 100.0\nmax_tokens_default = 40\nmax_tokens_max = 40"
    with pair(tmp_path, servers, swarm, "postgres", limit, more="\n[server]\ngrace_ms = 500\n") as (one, _):

        def sums() -> list[list[str]]:
            return sql(postgres, "SELECT spent, leases FROM penstock.counters WHERE name LIKE 'it/%'", one.database)

        async def stop():
            path, quick = body_of("chat:chat", "hi", False)
            _, slow = body_of("chat:chat", "<slow> <tokens=40>", True)
            swarm.shut()
            streams = [asyncio.create_task(ask(one.port, path, slow, KEY)) for _ in range(3)]
            await until(lambda: swarm.seen.now == 3, "three streams run")
            assert (await ask(one.port, path, quick, KEY)).status == 200
            assert any(leases != "{}" for _, leases in sums()), "a portion is leased"
            assert await asyncio.to_thread(one.stop) == 0
            await asyncio.gather(*streams)
            swarm.open()

        asyncio.run(stop())
        entries = ledger(postgres, one)
        assert set(entries) == {"1"} and entries["1"][0] == 4, entries
        ((spent, leases),) = sums()
        assert leases == "{}", "others would lack it until the month ends"
        assert int(spent) / 1e9 == pytest.approx(entries["1"][1], abs=1e-6 * 4)


def test_background_work_of_a_gateway_that_ends_is_settled_and_goes_on_at_another(tmp_path, servers, swarm):
    """A response, one that is streamed, and a line of a batch run at each when it is stopped, and another line waits for its place."""
    postgres, _ = servers
    limit = "usd_per_month = 100.0\nin_flight = 10\nmax_tokens_default = 40\nmax_tokens_max = 40"
    with pair(tmp_path, servers, swarm, "postgres", limit, more="\n[batches]\nconcurrency = 1\n") as gateways:

        def entries(state: int) -> int:
            return ledger(postgres, gateways[0]).get(str(state), (0,))[0]

        def left() -> list[str]:
            rows = sql(postgres, "SELECT leases FROM penstock.counters WHERE name LIKE 'it/%'", gateways[0].database)
            assert rows, "it is counted"
            return [leases for (leases,) in rows if leases != "{}"]

        swarm.shut()
        slow = {"model": "chat", "input": "<slow> <tokens=40>", "background": True}
        whole = gateways[0].client(api_key=KEY).responses.create(**slow)

        def runs(gateway: Gateway) -> float:
            return metric(gateway, "penstock_background_responses")

        first = wait_until(lambda: next(filter(runs, gateways), None), "one of them runs it")
        second = next(gateway for gateway in gateways if gateway is not first)
        client = first.client(api_key=KEY)
        with client.responses.create(stream=True, **slow) as stream:
            streamed = until_text(stream)[0].response
        batch = begin(client, lines(2, "chat", messages=user("<slow> <tokens=40>"), max_tokens=40))
        wait_until(lambda: entries(0) == 3, "three run")
        assert (runs(first), runs(second)) == (2, 0)

        assert first.stop() == 0
        assert entries(2) == 0 and entries(1) == 3, "each counts what it used"
        wait_until(
            lambda: entries(0) == 2, "what told nobody anything runs at the other, before claims would lapse", 15
        )
        assert runs(second) == 1
        assert second.stop() == 0
        assert set(ledger(postgres, gateways[0])) == {"1"} and entries(1) == 5
        assert left() == [], "others would lack it"

        first.start()
        wait_until(lambda: entries(0) == 2, "they run again")
        swarm.open()
        client = first.client(api_key=KEY)
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 0)
        wait_until(lambda: client.responses.retrieve(whole.id).status == "completed", "the response is answered")
        told = client.responses.retrieve(streamed.id)
        assert (told.status, told.error.code) == ("failed", "server_error")
        assert told.error.message == "The server is shutting down."


def test_places_of_a_dead_gateway_come_back(tmp_path, servers, swarm):
    with pair(tmp_path, servers, swarm, "redis") as (one, two):
        path, slow = body_of("chat:chat", "<slow> <tokens=1000>", True)
        _, quick = body_of("chat:chat", "hi", False)

        async def told() -> int:
            """What the other one says, once the counters have told it anything."""
            while (status := (await ask(two.port, path, quick, OTHER)).status) == 503:
                await asyncio.sleep(0.1)
            return status

        async def die_with_all_places():
            swarm.shut()
            streams = [asyncio.create_task(ask(one.port, path, slow, OTHER)) for _ in range(4)]
            await until(lambda: swarm.seen.now == 4, "four streams run")
            assert await told() == 429, "one has all places"
            kill(one)
            await asyncio.gather(*streams)
            swarm.open()

        asyncio.run(die_with_all_places())
        assert asyncio.run(told()) == 429
        wait_until(lambda: asyncio.run(told()) == 200, "places come back", 60, 0.5)


def test_gateways_keep_the_pace_of_a_provider_together(tmp_path, servers, swarm):
    """What one gateway has sent with a key is room that the other does not have; what the other has not sent is lent."""
    pace = "requests_per_minute = 600\ntokens_per_minute = 2000\npace_wait_ms = 0\npace_gateways = 2\n"
    with pair(tmp_path, servers, swarm, "redis", "tokens_per_day = 1_000_000", pace) as (one, two):

        def asked(gateway: Gateway, model: str = "chat") -> int:
            path, body = body_of(model, "Hello <full> <tokens=900>", False, 920)
            return asyncio.run(ask(gateway.port, path, body, KEY)).status

        # About 950 tokens each: two fit into the key's minute, one into the part of one of two gateways.
        assert (asked(one), asked(one)) == (200, 200), "one gateway has the part of the other too"
        assert (asked(two), asked(one)) == (429, 429), "the minute is used up for both"
        assert asked(two, "claude") == 200, "another provider has a pace of its own"
        assert metric(two, 'penstock_provider_paced_total{provider="openai",outcome="refused"}') == 1
