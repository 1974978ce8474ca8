"""Gateways on one PostgreSQL whose leader loses its session: what it runs in the background is neither ended nor run by another, until it is dead."""

import contextlib
import os
import subprocess
import time

import pytest
from test_background_streams import COUNT, MOCK, Gate, again, numbers, text, until_text
from test_stored_responses import ended

from harness import Gateway, wait_until
from providers import OpenAi
from servers import PASSWORD, Postgres, find

FOR_GOOD = 1 << 30
WHOLE = ", ".join(map(str, range(1, 41)))
# "penstock" in ASCII, in two halves, as PostgreSQL lists it.
LOCK = f"locktype = 'advisory' AND granted AND classid = {0x70656E73} AND objid = {0x746F636B}"
LEADER = f"FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE {LOCK}"


def sql(postgres: Postgres, statement: str) -> str:
    """Answer of one statement, as its operator asks it."""
    command = [find("psql"), "-h", str(postgres.folder), "-U", "penstock", "-d", "postgres", "-XAtc", statement]
    env = os.environ | {"PGPASSWORD": PASSWORD}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=30).stdout.strip()


@pytest.fixture
def postgres():
    postgres = Postgres()
    yield postgres
    postgres.close()


@pytest.fixture
def mock():
    with OpenAi() as mock:
        yield mock


@pytest.fixture
def gate(mock):
    gate = Gate()
    # An answer that is not streamed comes once the gate is open for good.
    with mock.behaving(before=gate.before, before_whole=lambda: gate.before(FOR_GOOD)):
        yield gate
        gate.open(FOR_GOOD)


@pytest.fixture
def pair(postgres, mock, tmp_path):
    """Two gateways, by the name that each tells PostgreSQL."""
    with contextlib.ExitStack() as stack:
        gateways = {}
        for name in ("one", "two"):
            env = {"STORE_URL": f"{postgres.url}?application_name={name}", "KEY_UP": mock.key}
            config = MOCK.format(url=mock.url) + '[store]\nurl_env = "STORE_URL"\n'
            gateways[name] = Gateway(tmp_path / name, "--admin", "off", config=config, env=env, workers=0)
            gateways[name].start()
            stack.callback(gateways[name].stop)
        yield gateways


def leader(postgres) -> str:
    return wait_until(lambda: sql(postgres, f"SELECT application_name {LEADER}"), "one leads")


def asks(mock) -> int:
    """How often the model was asked."""
    return sum(one.path.endswith("/chat/completions") for one in mock.seen)


def begun(pair, postgres, gate, mock):
    """A response that is streamed in the background and has told some text: who runs it, what was told, and the stream."""
    first = leader(postgres)
    gate.open(5)
    with pair[first].client().responses.create(stream=True, **COUNT) as stream:
        seen = until_text(stream)
    assert pair[first].metric("penstock_background_responses") == 1
    return first, seen, asks(mock)


def test_a_leader_that_lost_its_session_goes_on(pair, postgres, gate, mock):
    first, seen, asked = begun(pair, postgres, gate, mock)
    (second,) = pair.keys() - {first}
    response = seen[0].response

    def leads_elsewhere() -> bool:
        """Ends the session of the leader until the other gateway is quicker."""
        if leader(postgres) == second:
            return True
        sql(postgres, f"SELECT pg_terminate_backend(pid) {LEADER}")
        return False

    wait_until(leads_elsewhere, "the other gateway leads", 120)
    # Several turns of the new leader, which sees the response that the other runs.
    time.sleep(6)
    assert pair[first].client().responses.retrieve(response.id).status == "in_progress"
    gate.open(FOR_GOOD)
    final = ended(pair[second].client(), response.id)
    assert final.status == "completed" and final.output_text == WHOLE, final
    events = again(pair[second].client(), response.id)
    assert numbers(events) == list(range(len(events))) and text(events) == WHOLE
    assert events[: len(seen)] == seen, "those that the client had are those that are kept"
    assert asks(mock) == asked, "the model was asked once"
    next_one = pair[first].client().responses.create(**COUNT)
    assert ended(pair[first].client(), next_one.id).status == "completed"
    wait_until(lambda: sql(postgres, "SELECT count(*) FROM penstock.claims") == "0", "claims end with their work")


def test_an_answer_outlives_a_restart_of_the_database(pair, postgres, gate, mock):
    first, seen, asked = begun(pair, postgres, gate, mock)
    postgres.kill()
    gate.open(FOR_GOOD)
    wait_until(lambda: "background work waits for the store" in pair[first].log(), "the answer is ready", 60)
    postgres.start()
    final = ended(pair[first].client(), seen[0].response.id)
    assert final.status == "completed" and final.output_text == WHOLE, final
    assert asks(mock) == asked, "the model was asked once"


def test_what_a_dead_gateway_ran_is_ended_or_run_again(pair, postgres, gate, mock):
    first, seen, asked = begun(pair, postgres, gate, mock)
    (second,) = pair.keys() - {first}
    client = pair[second].client()
    quiet = pair[first].client().responses.create(**COUNT)
    wait_until(lambda: client.responses.retrieve(quiet.id).status == "in_progress", "it is answered")
    wait_until(lambda: asks(mock) == asked + 1, "the model is asked")
    pair[first].process.kill()
    pair[first].process.wait()
    gate.open(FOR_GOOD)
    # Clients have had events of the one, so that it cannot begin again; nobody has had any of the other.
    assert ended(client, seen[0].response.id).status == "failed"
    final = ended(client, quiet.id)
    assert final.status == "completed" and final.output_text == WHOLE
    assert asks(mock) == asked + 2
