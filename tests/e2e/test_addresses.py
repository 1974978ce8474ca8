"""Limits by the client's address: who is counted together, and that nobody is counted elsewhere by saying so."""

import contextlib
import itertools

import httpx
import pytest
from test_limits import KEY, OTHER, body_of, limited

from swarm import Swarm

BY = 'by = "address"\nfor = "everyone"\nmax_tokens_default = 10\n'
# Loopback has many addresses: each is a client of its own.
HERE, THERE = "127.0.0.2", "127.0.0.3"
# Whatever proxies write, and whoever wants to be somebody else.
CLAIMS = (
    "X-Forwarded-For",
    "X-Real-IP",
    "X-Client-IP",
    "X-Original-Forwarded-For",
    "True-Client-IP",
    "CF-Connecting-IP",
    "Fastly-Client-IP",
    "X-Envoy-External-Address",
    "X-Cluster-Client-IP",
)
RATES = ["requests_per_hour = 3", "tokens_per_hour = 400", "usd_per_day = 0.001", "output_tokens_per_day = 30"]


@pytest.fixture
def swarm():
    swarm = Swarm()
    yield swarm
    swarm.close()


def send(gateway, peer: str, *headers, surface="chat:chat", key: str | None = KEY, words: str = "word " * 20) -> int:
    """The status of a request from `peer`."""
    path, body = body_of(surface, words, False, 8)
    credential = [("authorization", f"Bearer {key}")] if key else []
    transport = httpx.HTTPTransport(local_address=peer)
    with httpx.Client(transport=transport, timeout=60) as client:
        return client.post(gateway.url + path, json=body, headers=[*credential, *headers]).status_code


def use_up(gateway, peer: str, *headers: tuple[str, str], **how) -> None:
    """Until what the address may have is used up: not even a shorter request than others are fits."""
    statuses = []
    while not statuses or statuses[-1] == 200:
        statuses.append(send(gateway, peer, *headers, words="hi", **how))
        assert len(statuses) < 100, "there is a limit"
    assert statuses[0] == 200 and statuses[-1] == 429, statuses


@pytest.mark.parametrize("rate", RATES)
def test_an_address_has_its_own_counter_whatever_it_says(tmp_path, swarm, rate):
    with limited(tmp_path, swarm, BY + rate) as gateway:
        use_up(gateway, HERE)
        for number, claim in enumerate(CLAIMS):
            assert send(gateway, HERE, (claim, f"198.51.100.{number}")) == 429, claim
        assert send(gateway, HERE, ("Forwarded", "for=198.51.100.99;proto=https")) == 429
        assert send(gateway, HERE, ("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-For", THERE)) == 429
        for surface in ("messages:claude", "generate:gem", "responses:chat"):
            assert send(gateway, HERE, surface=surface) == 429, surface
        assert send(gateway, HERE, key=OTHER) == 429, "another key is no other address"
        assert send(gateway, THERE) == 200, "and what the first one said was not counted there"


@pytest.mark.parametrize("rate", RATES)
def test_behind_a_trusted_proxy_each_client_has_its_own_counter(tmp_path, swarm, rate):
    proxy, more = "127.0.0.1", '\n[auth]\ntrusted_proxies = ["127.0.0.1", "10.0.0.0/8"]\n'
    with limited(tmp_path, swarm, BY + rate, more) as gateway:

        def client(*hops: str) -> tuple[str, str]:
            return "X-Forwarded-For", ", ".join(hops)

        use_up(gateway, proxy, client("192.0.2.1"))
        # What stands before the client's address is the client's own invention.
        assert send(gateway, proxy, client("198.51.100.7", "192.0.2.1")) == 429
        assert send(gateway, proxy, client("198.51.100.7"), client("192.0.2.1", "10.1.2.3")) == 429
        assert send(gateway, proxy, client("10.0.0.9", "127.0.0.1", "192.0.2.1:4711")) == 429
        assert send(gateway, proxy, client("::ffff:192.0.2.1")) == 429, "the same address in other letters"
        assert send(gateway, proxy, client("192.0.2.2")) == 200
        # A subscriber has a /64.
        use_up(gateway, proxy, client("2001:db8::1"))
        assert send(gateway, proxy, client("[2001:db8::ffff:1]:4711")) == 429
        assert send(gateway, proxy, client("2001:db8:0:1::1")) == 200
        # A proxy that does not say whom it speaks for, or nonsense, has one counter for all that.
        use_up(gateway, proxy)
        assert send(gateway, proxy, client("nonsense")) == 429
        assert send(gateway, proxy, client("192.0.2.3", "nonsense")) == 429
        # Who is no proxy is believed nothing.
        use_up(gateway, HERE, client("192.0.2.4"))
        assert send(gateway, HERE, client("192.0.2.5")) == 429
        assert send(gateway, proxy, client("192.0.2.4")) == 200


def test_so_many_at_once_for_an_address(tmp_path, swarm):
    with limited(tmp_path, swarm, BY.replace("10", "1000") + "in_flight = 2") as gateway:
        path, slow = body_of("chat:chat", "<slow> <tokens=1000>", True)
        claims = itertools.count()

        @contextlib.contextmanager
        def stream(peer: str, key: str = KEY):
            headers = {"authorization": f"Bearer {key}", "x-forwarded-for": f"198.51.100.{next(claims)}"}
            client = httpx.Client(transport=httpx.HTTPTransport(local_address=peer), timeout=60)
            with client, client.stream("POST", gateway.url + path, json=slow, headers=headers) as answer:
                yield answer.status_code

        with stream(HERE) as first, stream(HERE, OTHER) as second:
            assert (first, second) == (200, 200)
            for _ in range(5):
                with stream(HERE) as third:
                    assert third == 429, "another header is no other client"
            with stream(THERE) as other:
                assert other == 200
        assert swarm.seen.most <= 3


def test_a_free_quota_is_held_by_address(tmp_path, swarm):
    """Nobody in particular: without a key the address is all there is."""
    more = '\n[auth]\nanonymous = "allow"\n'
    limit = 'by = "address"\nfor = "anonymous"\nrequests_per_day = 3\n'
    with limited(tmp_path, swarm, limit, more) as gateway:
        use_up(gateway, HERE, key=None)
        for number in range(5):
            assert send(gateway, HERE, ("X-Forwarded-For", f"198.51.100.{number}"), key=None) == 429
        assert send(gateway, HERE, key=OTHER) == 200, "who has a key is under its own limits"
        assert send(gateway, THERE, key=None) == 200
