"""Limits and budgets, held against what a provider really bills."""

import asyncio
import itertools
import json
import random
import signal
import time
from collections import Counter

import httpx
import pytest

from harness import serving, wait_until
from swarm import OUTPUT_USD, PROMPT_USD, Swarm, ask, until

KEY, OTHER, OPS = "pk-limited", "pk-other", "pk-ops"
CONFIG = """
[[keys]]
id = "limited"
key_env = "KEY_LIMITED"
limits = ["it"]

[[keys]]
id = "other"
key_env = "KEY_OTHER"

[[keys]]
id = "ops"
key_env = "KEY_OPS"
routes = ["/metrics"]

[[limits]]
id = "it"
{limit}

[[providers]]
id = "openai"
base_url = "{url}/v1"
key_env = "KEY_UP"

[[providers]]
id = "anthropic"
protocol = "anthropic"
base_url = "{url}/v1"
key_env = "KEY_UP"

[[providers]]
id = "gemini"
protocol = "gemini"
base_url = "{url}/v1beta"
key_env = "KEY_UP"
"""
MODELS = {
    "chat": '[{ provider = "openai", model = "m" }]',
    "claude": '[{ provider = "anthropic", model = "m" }]',
    "gem": '[{ provider = "gemini", model = "m" }]',
    "embed": '[{ provider = "openai", model = "m" }]',
    "two": '[{ provider = "openai", model = "m" }, { provider = "anthropic", model = "m" }]',
    "hedged": '[{ provider = "openai", model = "m" }, { provider = "gemini", model = "m" }]',
}


def config(swarm: Swarm, limit: str, more: str = "") -> str:
    text = CONFIG.format(url=swarm.url, limit=limit)
    price = (
        f"{{ input = {PROMPT_USD}, cached_input = {PROMPT_USD}, cache_write = {PROMPT_USD}, output = {OUTPUT_USD} }}"
    )
    for name, to in MODELS.items():
        text += f'\n[[models]]\nname = "{name}"\nto = {to}\nprice = {price}\n'
        text += {"hedged": "hedge_after_ms = 30\n"}.get(name, "retries = 1\n")
    return text + more


def limited(folder, swarm: Swarm, limit: str, more: str = "", **options):
    env = {"KEY_LIMITED": KEY, "KEY_OTHER": OTHER, "KEY_OPS": OPS, "KEY_UP": "sk-up"}
    return serving(folder, config=config(swarm, limit, more), env=env, workers=0, **options)


@pytest.fixture
def swarm():
    swarm = Swarm()
    yield swarm
    swarm.close()


def body_of(model: str, words: str, stream: bool, max_tokens: int | None = None) -> tuple[str, dict]:
    """A request on a surface, by the model's name: `chat`, `responses:chat`, `completions`..."""
    surface, _, name = model.rpartition(":")
    bound = {} if max_tokens is None else {"max_tokens": max_tokens}
    messages = [{"role": "user", "content": words}]
    match surface:
        case "" | "chat":
            return "/v1/chat/completions", {"model": name, "messages": messages, "stream": stream} | bound
        case "messages":
            bound = {"max_tokens": max_tokens or 4096}
            return "/v1/messages", {"model": name, "messages": messages, "stream": stream} | bound
        case "responses":
            bound = {} if max_tokens is None else {"max_output_tokens": max_tokens}
            return "/v1/responses", {"model": name, "input": words, "stream": stream, "store": False} | bound
        case "generate":
            method = "streamGenerateContent?alt=sse" if stream else "generateContent"
            config = {} if max_tokens is None else {"generationConfig": {"maxOutputTokens": max_tokens}}
            content = [{"role": "user", "parts": [{"text": words}]}]
            return f"/v1beta/models/{name}:{method}", {"contents": content} | config
        case "ollama":
            options = {} if max_tokens is None else {"options": {"num_predict": max_tokens}}
            return "/api/chat", {"model": name, "messages": messages, "stream": stream} | options
        case "embeddings":
            return "/v1/embeddings", {"model": name, "input": words}
    raise AssertionError(surface)


SURFACES = [
    "chat:chat",
    "chat:claude",
    "chat:gem",
    "chat:two",
    "chat:hedged",
    "messages:claude",
    "messages:chat",
    "responses:chat",
    "responses:gem",
    "generate:gem",
    "generate:claude",
    "ollama:chat",
    "ollama:claude",
    "embeddings:embed",
]


# Fates that open no breaker: while a target is left alone, nothing is spent.
STEADY = ("full", "mute", "slow")


def used_up(wave) -> list:
    """Answers of `wave(2)`, `wave(3)`... until hardly anything fits any more: what is left is too little for all but the smallest."""
    answers, deadline = [], time.monotonic() + 60
    for number in itertools.count(2):
        last = wave(number)
        answers += last
        statuses = Counter(answer.status for answer in last)
        is_used_up = statuses[200] <= len(last) // 20 and statuses[429] >= len(last) // 2
        # What is left then is for the caller to judge.
        if is_used_up or time.monotonic() > deadline:
            return answers
        if statuses[503]:
            # A breaker that the fates before have opened, or counters that do not answer.
            time.sleep(0.5)


async def swarm_of(gateway, count: int, seed: int, leave: bool = True, hows=("full", "mute", "break", "fail", "slow")):
    """So many requests at once, each on another surface and with another fate."""
    chance = random.Random(seed)

    async def one():
        surface, how = chance.choice(SURFACES), chance.choice(hows)
        words = f"Hello <{how}> <tokens={chance.randint(1, 60)}> " + "word " * chance.randint(0, 60)
        path, body = body_of(surface, words, chance.random() < 0.7, chance.choice([None, 10, 1000]))
        leave_after = chance.randint(0, 2500) if leave and chance.random() < 0.2 else None
        return await ask(gateway.port, path, body, KEY, leave_after)

    return await asyncio.gather(*(one() for _ in range(count)))


def status(gateway, key: str = KEY) -> dict:
    answer = httpx.get(f"{gateway.url}/status", headers={"authorization": f"Bearer {key}"}, timeout=20)
    return {limit["id"]: limit for limit in answer.raise_for_status().json()["limits"]}


def measure(gateway, name: str, limit: str = "it") -> dict:
    return next(one for one in status(gateway)[limit]["measures"] if one["measure"] == name)


def metric(gateway, name: str) -> float:
    """A metric, over all its labels that the name leaves open."""
    answer = httpx.get(f"{gateway.url}/metrics", headers={"authorization": f"Bearer {OPS}"}, timeout=20)
    lines = answer.raise_for_status().text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def settled(gateway, name: str, limit: str = "it") -> float:
    """What a measure counts when nothing is in flight any more."""
    wait_until(lambda: measure(gateway, name, limit)["reserved"] == 0, "everything settled", 60)
    return measure(gateway, name, limit)["used"]


def test_a_budget_holds_under_a_thousand_streams(tmp_path, swarm):
    budget = 0.4
    limit = f'usd_per_day = {budget}\nreserve = "most"\nmax_tokens_default = 40\nmax_tokens_max = 40'
    with limited(tmp_path, swarm, limit) as gateway:
        answers = asyncio.run(swarm_of(gateway, 1000, 1))
        assert swarm.usd <= budget
        assert sum(answer.status == 200 for answer in answers) > 100, "many are served"
        refused = [answer for answer in answers if answer.status == 429]
        assert refused, "the thousand do not fit at once"

        def wave(number: int):
            # What is still held by answers whose clients have left would refuse the others.
            settled(gateway, "usd_per_day")
            answers = asyncio.run(swarm_of(gateway, 200, number, hows=STEADY))
            assert swarm.usd <= budget, "no more is billed than the budget"
            return answers

        used_up(wave)
        used = settled(gateway, "usd_per_day")
        assert swarm.usd <= used + 1e-6 and used <= budget + 1e-9, (swarm.usd, used)
        assert used > budget * 0.9, "what was not used was given back"
        assert metric(gateway, "penstock_panics_total") == 0
        wait_until(lambda: metric(gateway, "penstock_limit_holds") == 0, "nothing is held")


def test_guesses_exceed_a_budget_by_no_more_than_they_were_wrong(tmp_path, swarm):
    with limited(tmp_path, swarm, "usd_per_day = 0.05") as gateway:
        for number in range(6):
            asyncio.run(swarm_of(gateway, 200, number, leave=False, hows=("full", "mute")))
        used = settled(gateway, "usd_per_day")
        exceeded = metric(gateway, 'penstock_limit_exceeded_total{unit="usd"}')
        assert used <= 0.05 + exceeded + 1e-9
        assert swarm.usd <= used * 1.3, "what is counted here without the provider is close; losers of hedges bill more"


def test_refusals_name_the_rule_and_when(tmp_path, swarm):
    with limited(tmp_path, swarm, "requests_per_minute = 2\nusd_per_month = 1.0") as gateway:
        path, body = body_of("chat:chat", "hi", False)
        first = asyncio.run(ask(gateway.port, path, body, KEY))
        assert (first.status, first.headers["x-ratelimit-limit-requests"]) == (200, "2")
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].startswith("1m")
        path, stream = body_of("messages:claude", "hi", True)
        second = asyncio.run(ask(gateway.port, path, stream, KEY))
        assert second.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert second.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        for surface, told in [
            ("chat:chat", lambda body: body["error"]["code"] == "rate_limit_exceeded"),
            ("messages:claude", lambda body: body["error"]["type"] == "rate_limit_error"),
            ("generate:gem", lambda body: body["error"]["status"] == "RESOURCE_EXHAUSTED"),
        ]:
            path, body = body_of(surface, "hi", False)
            refused = asyncio.run(ask(gateway.port, path, body, KEY))
            said = json.loads(refused.body)
            assert refused.status == 429 and told(said), said
            assert "requests_per_minute" in said["error"]["message"] and '"it"' in said["error"]["message"]
            assert refused.headers["x-penstock-error-source"] == "gateway"
            assert 0 < int(refused.headers["retry-after"]) <= 61
            assert int(refused.headers["retry-after-ms"]) <= 61000
        lines = wait_until(lambda: [line for line in gateway.log().splitlines() if '"limit":' in line], "a line")
        line = json.loads(lines[0])
        assert line["limit"] == "it: requests_per_minute" and line["status"] == 429
        assert asyncio.run(ask(gateway.port, *body_of("chat:chat", "hi", False), OTHER)).status == 200, "others go on"


def test_a_sudden_rise_is_slowed_down(tmp_path, swarm):
    with limited(tmp_path, swarm, "surge_times = 3\nsurge_above = 4\nrequests_per_month = 1000") as gateway:
        path, body = body_of("chat:chat", "hi", False)
        answers = [asyncio.run(ask(gateway.port, path, body, KEY)) for _ in range(6)]
        assert [answer.status for answer in answers] == [200] * 4 + [429] * 2
        assert "requests_per_minute" in json.loads(answers[-1].body)["error"]["message"]
        assert 0 < int(answers[-1].headers["retry-after"]) <= 61
        assert asyncio.run(ask(gateway.port, path, body, OTHER)).status == 200, "others go on"
        assert status(gateway)["it"]["surge"] == {"times": 3, "above": 4}


def test_a_budget_that_is_used_up_is_no_rate(tmp_path, swarm):
    with limited(tmp_path, swarm, "usd_per_month = 0.000001") as gateway:
        refused = asyncio.run(ask(gateway.port, *body_of("chat:chat", "hi", False), KEY))
        assert refused.status == 429 and refused.headers["x-should-retry"] == "false"
        limit = "tokens_per_minute = 1000"
    with limited(tmp_path / "b", swarm, limit) as gateway:
        refused = asyncio.run(ask(gateway.port, *body_of("chat:chat", "hi", False, 5000), KEY))
        error = json.loads(refused.body)["error"]
        assert (refused.status, error["type"]) == (429, "tokens") and "never fit" in error["message"]
        assert "retry-after" not in refused.headers and not swarm.seen.bodies


@pytest.mark.parametrize("surface", ["chat:chat", "messages:claude", "generate:gem", "responses:chat", "chat:claude"])
def test_output_is_bounded_on_every_way(tmp_path, swarm, surface):
    with limited(tmp_path, swarm, "max_tokens_default = 7\nmax_tokens_max = 9") as gateway:
        for asked, expected in [(None, 9 if surface.startswith("messages") else 7), (5, 5), (50, 9)]:
            answer = asyncio.run(ask(gateway.port, *body_of(surface, "<tokens=100>", False, asked), KEY))
            assert answer.status == 200, answer
            seen = swarm.seen.bodies[-1]
            bound = (
                seen.get("max_tokens")
                or seen.get("max_completion_tokens")
                or seen.get("generationConfig", {}).get("maxOutputTokens")
            )
            assert bound == expected, seen


def with_bound(surface: str, value) -> tuple[str, dict]:
    """A request whose bound is that value, whatever it is."""
    path, body = body_of(surface, "<mute> <tokens=200>", True)
    body |= {
        "generate:gem": {"generation_config": {"max_output_tokens": value}},
        "responses:chat": {"max_output_tokens": value},
    }.get(surface, {"max_tokens": value})
    return path, body


def test_a_bound_written_oddly_is_lowered_or_refused(tmp_path, swarm):
    limit = 'tokens_per_day = 100000\nmax_tokens_max = 32\nreserve = "most"'
    with limited(tmp_path, swarm, limit) as gateway:

        def asked(path: str, body: dict, key: str = KEY):
            return asyncio.run(ask(gateway.port, path, body, key))

        for surface in ("chat:chat", "messages:claude", "generate:gem"):
            for none in (None, -1, 100_000, 1e5):
                answer = asked(*with_bound(surface, none))
                assert answer.status == 200, (surface, none, answer)
                seen = swarm.seen.bodies[-1]
                bound = seen.get("max_tokens") or seen.get("generation_config", {}).get("max_output_tokens")
                assert bound == 32 and isinstance(bound, int), seen
        before = len(swarm.seen.bodies)
        refused = [with_bound(surface, odd) for surface in SURFACES[:-1] for odd in ("100000", 16.5, 2**32, 0, [16])]
        path, chat = body_of("chat:chat", "hi", True)
        more = [{"max_tokens": 8, "max_completion_tokens": 9}, {"n": "8"}, {"MAX_TOKENS": 8}, {"max_output_tokens": 8}]
        refused += [(path, chat | odd) for odd in more]
        for path, body in refused:
            answer = asked(path, body)
            error = json.loads(answer.body)["error"]
            assert answer.status == 400, (body, error)
            if path == "/v1/messages":
                assert error["type"] == "invalid_request_error"
            elif "Content" in path:
                assert error["status"] == "INVALID_ARGUMENT"
            elif path.startswith("/api/"):
                assert "options.num_predict" in error
            else:
                assert error["param"]
        for alike in ("Model", "MODEL", "MAX_TO\u212aENS"):
            answer = asked(path, chat | {alike: "claude"}, OTHER)
            error = json.loads(answer.body)["error"]
            assert answer.status == 400 and error["param"] == alike, "also where no limit is"
        assert len(swarm.seen.bodies) == before, "nobody was asked"
        odd = {"max_tokens": None, "n": "1"}
        assert asked(path, chat | odd, OTHER).status == 200, "where no limit counts, the upstream reads it"
        assert swarm.seen.bodies[-1].items() >= odd.items()


@pytest.mark.parametrize("reserve", ["likely", "most"])
def test_what_came_counts_where_a_bound_may_be_ignored(tmp_path, swarm, reserve):
    with limited(tmp_path, swarm, f'output_tokens_per_day = 100000\nreserve = "{reserve}"') as gateway:
        path, body = body_of("chat:chat", "<mute> <deaf> <tokens=500>", True)
        answer = asyncio.run(ask(gateway.port, path, body | {"max_completion_tokens": 4}, KEY))
        assert answer.status == 200 and answer.body.count(b'" a"') == 500
        assert settled(gateway, "output_tokens_per_day") >= 500 * len(" a") / 3, "by its text, not four"


def test_what_is_reserved_covers_what_is_added_to_a_prompt(tmp_path, swarm):
    """By a plugin, and by the conversation that goes before it."""
    added = "word " * 600
    more = f"""
[[plugins]]
name = "prompt"
models = ["gem"]
settings = {{ prepend = [{{ role = "system", content = "{added}" }}] }}
"""
    limit = 'tokens_per_day = 1000000\nreserve = "most"\nmax_tokens_default = 10'
    with limited(tmp_path, swarm, limit, more) as gateway:

        def reserved(path: str, body: dict) -> int:
            before = len(gateway.log().splitlines())
            answer = asyncio.run(ask(gateway.port, path, body, KEY))
            assert answer.status == 200, answer
            reserved.last = json.loads(answer.body)

            def line():
                lines = [line for line in gateway.log().splitlines()[before:] if '"reserved_tokens"' in line]
                return lines and json.loads(lines[0])

            return wait_until(line, "its line in the log")["reserved_tokens"]

        assert reserved(*body_of("chat:chat", "hi", False)) < 200
        assert reserved(*body_of("chat:gem", "hi", False)) > len(added)
        path, body = body_of("responses:claude", added, False)
        assert reserved(path, body | {"store": True}) > len(added)
        again = {"model": "claude", "input": "and?", "previous_response_id": reserved.last["id"], "store": False}
        assert reserved(path, again) > len(added)
        assert settled(gateway, "tokens_per_day") == sum(bill.prompt + bill.output for bill in swarm.seen.bills)


def test_so_many_at_once(tmp_path, swarm):
    with limited(tmp_path, swarm, "in_flight = 5") as gateway:

        async def crowd():
            path, body = body_of("chat:chat", "<slow> <tokens=20>", True)
            swarm.shut()
            asked = [asyncio.create_task(ask(gateway.port, path, body, KEY)) for _ in range(50)]
            await until(lambda: sum(one.done() for one in asked) == 45, "nobody ends before the last has asked")
            swarm.open()
            return await asyncio.gather(*asked)

        answers = asyncio.run(crowd())
        assert swarm.seen.most <= 5
        assert [sum(answer.status == code for answer in answers) for code in (200, 429)] == [5, 45]
        assert settled(gateway, "in_flight") == 0


def test_what_was_spent_survives_the_gateway(tmp_path, swarm):
    limit = 'usd_per_day = 1.0\ntokens_per_month = 1000000\nreserve = "most"\nmax_tokens_default = 40'
    with limited(tmp_path, swarm, limit) as gateway:
        answers = [asyncio.run(ask(gateway.port, *body_of("chat:chat", "<tokens=30>", True), KEY)) for _ in range(5)]
        assert all(answer.status == 200 for answer in answers)
        used = settled(gateway, "usd_per_day")
        assert used == pytest.approx(swarm.usd, abs=1e-6)
        wait_until(lambda: metric(gateway, "penstock_ledger_waiting") == 0, "the ledger is written")

        async def cut():
            path, body = body_of("chat:chat", "<slow> <tokens=40>", True)
            swarm.shut()
            streams = [asyncio.create_task(ask(gateway.port, path, body, KEY)) for _ in range(3)]
            await until(lambda: swarm.seen.now == 3, "three streams run")
            await until(lambda: metric(gateway, "penstock_ledger_waiting") == 0, "what they hold is written down")
            gateway.process.send_signal(signal.SIGKILL)
            await asyncio.gather(*streams)
            swarm.open()

        asyncio.run(cut())
        gateway.process.wait()
        gateway.start()
        after = measure(gateway, "usd_per_day")["used"]
        assert after >= swarm.usd - 1e-6, "what the provider bills for the three that were cut is counted"
        assert after <= used + 3 * 0.002
        again = measure(gateway, "tokens_per_month")["used"]
        gateway.stop()
        gateway.start()
        assert measure(gateway, "usd_per_day")["used"] == pytest.approx(after), "and once only"
        assert measure(gateway, "tokens_per_month")["used"] == again


def test_batches_are_counted_where_live_requests_are(tmp_path, swarm):
    with limited(tmp_path, swarm, "requests_per_hour = 4\ntokens_per_day = 100000") as gateway:
        client = gateway.client(api_key=KEY)
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body_of("chat:chat", "hi", False)[1],
            }
            for number in range(6)
        ]
        text = "\n".join(json.dumps(line) for line in lines).encode()
        file = client.files.create(file=("in.jsonl", text), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        done = wait_until(lambda: (b := client.batches.retrieve(batch.id)).status == "completed" and b, "the batch", 60)
        assert (done.request_counts.completed, done.request_counts.failed) == (4, 2)
        errors = client.files.content(done.error_file_id).text
        assert "requests_per_hour" in errors
        assert settled(gateway, "tokens_per_day") == sum(bill.prompt + bill.output for bill in swarm.seen.bills)


def test_status_says_what_is_in_effect(tmp_path, swarm):
    more = '\n[[limits]]\nid = "idle"\nrequests_per_day = 5\n'
    with limited(tmp_path, swarm, "requests_per_day = 5", more) as gateway:
        assert asyncio.run(ask(gateway.port, *body_of("chat:chat", "hi", False), KEY)).status == 200
        limits = status(gateway)
        assert limits["it"]["effective"] and limits["it"]["yours"] and limits["it"]["measures"][0]["used"] == 1
        assert list(limits) == ["it"], "what others may use is not told"
        assert status(gateway, OTHER) == {}
        assert httpx.get(f"{gateway.url}/status", timeout=30).status_code == 401
