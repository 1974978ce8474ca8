"""Two gateways on one PostgreSQL and one Redis: they share keys and limits, and live on while a server is away."""

import contextlib
import time

import httpx
import pytest
from test_keys import issue, keys
from test_shared_budget import sql

from harness import Gateway, last_good, promised, wait_until
from servers import PASSWORD, both

KEY, FREE, OPS = "pk-shared", "pk-free", "pk-ops"
CONFIG = """
[store]
url_env = "STORE_URL"

[counters]
url_env = "COUNTERS_URL"

[auth]
pepper_env = "PEPPER"

[[keys]]
id = "shared"
key_env = "KEY_SHARED"
limits = ["ten"]

[[keys]]
id = "free"
key_env = "KEY_FREE"

[[keys]]
id = "ops"
key_env = "KEY_OPS"
routes = ["/metrics", "/status"]

[[limits]]
id = "ten"
requests_per_hour = 10
on_store_failure = "closed"
"""


@pytest.fixture
def servers():
    with both() as servers:
        yield servers


@pytest.fixture
def pair(servers, tmp_path):
    """Two gateways with one config."""
    postgres, redis = servers
    env = {"STORE_URL": postgres.url, "COUNTERS_URL": redis.url, "PEPPER": "p" * 64}
    env |= {"KEY_SHARED": KEY, "KEY_FREE": FREE, "KEY_OPS": OPS}
    with contextlib.ExitStack() as stack:
        gateways = [Gateway(tmp_path / name, "--admin", "off", config=CONFIG, env=env) for name in ("one", "two")]
        for gateway in gateways:
            gateway.start(ready=False)
            stack.callback(gateway.stop)
        for gateway in gateways:
            wait_until(gateway._is_ready, "both ready", 90)
        yield gateways


def chat(gateway: Gateway, key: str = KEY) -> int:
    body = {"model": "penstock-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=30).status_code


def models(gateway: Gateway, key: str) -> int:
    return httpx.get(f"{gateway.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=10).status_code


def counted(gateway: Gateway) -> int:
    """The same, once the counters have answered: a limit that is closed refuses until it is known what was counted."""
    return wait_until(lambda: (status := chat(gateway)) != 503 and status, "the counters answer")


def test_two_gateways_share_limits_and_keys(pair, monkeypatch):
    one, two = pair
    answers = [counted(gateway) for _ in range(8) for gateway in pair]
    assert answers.count(200) == 10 and answers.count(429) == 6, answers

    for name, value in one.env.items():
        monkeypatch.setenv(name, value)

    def revoked_after() -> float:
        issued = issue(one, "--name", "laptop")
        wait_until(lambda: models(two, issued["key"]) == 200, "the key of one is good at two")
        assert models(one, issued["key"]) == 200
        keys(two, "revoke", issued["id"])
        return last_good(lambda: models(one, issued["key"]) == 200)

    promised(1.5, revoked_after)
    for gateway in pair:
        assert PASSWORD not in gateway.log()


SLOW_SAVES = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END $$;
CREATE TRIGGER slow BEFORE INSERT ON penstock.responses FOR EACH ROW EXECUTE FUNCTION slow();
"""


def test_a_response_that_one_gateway_is_saving_is_known_to_the_other(pair, servers):
    one, two = pair
    postgres, _ = servers
    sql(postgres, SLOW_SAVES, "postgres")
    headers = {"authorization": f"Bearer {FREE}"}

    def ask(gateway: Gateway, **more) -> httpx.Response:
        body = {"model": "penstock-demo", "input": "Hi", "max_output_tokens": 16} | more
        return httpx.post(f"{gateway.url}/v1/responses", json=body, headers=headers, timeout=30)

    def made() -> str:
        answer = ask(one)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    for _ in range(2):
        after = ask(two, previous_response_id=made())
        assert after.status_code == 200, after.text
        assert httpx.get(f"{two.url}/v1/responses/{made()}", headers=headers, timeout=30).status_code == 200
        gone = made()
        assert httpx.delete(f"{two.url}/v1/responses/{gone}", headers=headers, timeout=30).status_code == 200
        assert httpx.get(f"{one.url}/v1/responses/{gone}", headers=headers, timeout=30).status_code == 404
    began = time.monotonic()
    unknown = ask(two, previous_response_id="resp_" + "0" * 48)
    assert unknown.status_code == 404 and time.monotonic() - began < 0.5, "no gateway makes such an id"


def test_requests_live_on_without_the_store_and_say_so_without_closed_counters(pair, servers):
    postgres, redis = servers
    one, _ = pair
    assert counted(one) == 200
    postgres.hang()
    began = time.monotonic()
    assert [counted(one) for _ in range(3)] == [200] * 3, "no request waits on the store"
    assert time.monotonic() - began < 10
    postgres.go_on()
    postgres.kill()
    assert counted(one) == 200
    redis.kill()
    wait_until(lambda: chat(one) in (429, 503), "closed: refused while the counters are away")
    redis.start()
    postgres.start()
    wait_until(lambda: chat(one) == 200, "served again")
    assert one.process.poll() is None and PASSWORD not in one.log()
