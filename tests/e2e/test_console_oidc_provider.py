"""Sign-in at the console with a certified OpenID provider: its client authentication, keys, claims and sign-out; groups that are read again."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl, urljoin, urlsplit

import httpx
import pytest
from test_console_oidc import SECRET, Visitor, audit, config, refused

from harness import Gateway, serving, wait_until

HERE = Path(__file__).parent
ROLES = {"admins": "owner", "ops": "operator", "staff": "viewer"}
# Some providers keep a secret in the registration's way alone, and give refresh tokens for a scope and a consent.
OFFLINE = 'scopes = ["openid", "email", "groups", "offline_access"]\nparameters = { prompt = "consent" }\n'
ONLINE = 'scopes = ["openid", "email", "groups"]\n'
CONFIDENTIAL = 'client_secret_env = "OIDC_SECRET"\n'
# Each turn of looks takes five seconds, which is the shortest period.
OFTEN = "refresh_seconds = 5\n"

pytestmark = pytest.mark.skipif(
    int(subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout[1:].split(".")[0])
    < 20,
    reason="oidc-provider needs Node.js 20",
)


class Op:
    """The provider, a process of its own."""

    def __init__(self):
        self.process = subprocess.Popen(
            ["node", str(HERE / "oidc_provider.mjs")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        guard = threading.Timer(60, self.process.kill)
        guard.start()
        self.url = self.process.stdout.readline().strip()
        guard.cancel()
        assert self.url, "the provider has not started"

    def set(self, **what) -> dict:
        return httpx.post(f"{self.url}/test", json={"set": what}, timeout=60).json()

    def seen(self) -> dict:
        return httpx.post(f"{self.url}/test", json={}, timeout=60).json()


class Person(Visitor):
    """A browser with cookies at the provider, too."""

    def __init__(self, gateway: Gateway):
        super().__init__(gateway)
        self.there = httpx.Client(timeout=60)

    def walk(self, answer: httpx.Response, who: str = "") -> str:
        """Fills in the pages of the provider until it leads back to the console; the address there."""
        for _ in range(12):
            if answer.is_redirect:
                place = urljoin(str(answer.url), answer.headers["location"])
                if place.startswith(self.url):
                    return place
                answer = self.there.get(place)
                continue
            assert answer.status_code == 200, answer.text
            form = re.search(r'<form[^>]*action="([^"]+)"', answer.text)
            assert form, answer.text
            fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', answer.text))
            if "op.logoutForm" in answer.text:
                fields["logout"] = "yes"
            elif fields["prompt"] == "login":
                fields |= {"login": who, "password": "any"}
            answer = self.there.post(urljoin(str(answer.url), unescape(form[1])), data=fields)
        raise AssertionError("the provider does not lead back")

    def leave(self, who: str) -> dict:
        begun = self.begin()
        assert begun.status_code == 201, begun.text
        return dict(parse_qsl(urlsplit(self.walk(self.there.get(begun.json()["url"]), who)).query))

    def role(self) -> str | None:
        """Role now; None: the session has ended."""
        answer = self.ask("GET", "/whoami")
        return answer.json()["role"] if answer.status_code == 200 else None


@contextmanager
def console(folder: Path, more: str, people: dict, client: dict | None = None, **told) -> Iterator[tuple[Op, Gateway]]:
    """The provider, and a gateway that is registered there as `client` says."""
    op = Op()
    try:
        text = config(op.url, ROLES, more)
        with serving(folder / "g", workers=0, config=text, env={"OIDC_SECRET": SECRET}) as gateway:
            url = (gateway.state / "admin.url").read_text().split()[0]
            registered = {
                "client_id": "console",
                "client_secret": SECRET,
                "redirect_uris": [f"{url}/console/"],
                "post_logout_redirect_uris": [f"{url}/console/"],
                "backchannel_logout_uri": f"{url}/admin/v1/sign-on/logout",
                "grant_types": ["authorization_code", "refresh_token"],
                "response_types": ["code"],
            }
            op.set(clients=[registered | (client or {})], people=people, **told)
            yield op, gateway
            log = gateway.log()
            tokens = op.seen()["refresh_tokens"]
            assert " panicked" not in log and all(secret not in log for secret in (SECRET, *tokens))
    finally:
        op.process.kill()
        op.process.wait()
        op.process.stdout.close()


def looks(gateway: Gateway, outcome: str) -> int:
    """Looks at groups with that outcome."""
    text = httpx.get(f"{gateway.url}/metrics", timeout=60).text
    found = re.search(rf'^penstock_console_renewals_total{{outcome="{outcome}"}} (\d+)', text, re.M)
    return int(found[1]) if found else 0


PEOPLE = {
    "ada": {"groups": ["staff", "admins"], "email": "ada@corp.example"},
    "vic": {"groups": ["staff"], "email": "vic@corp.example"},
    "eve": {"email": "eve@corp.example"},
}


@pytest.mark.parametrize(
    ("method", "algorithm", "conform"),
    [("client_secret_basic", "RS256", True), ("client_secret_post", "ES256", False), ("none", "PS256", True)],
)
def test_ways_of_authentication_kinds_of_keys_and_places_of_groups(tmp_path, method, algorithm, conform):
    """`conform`: claims of scopes are at the userinfo endpoint alone, as OpenID Connect has it; else in the ID token."""
    more = ONLINE + f'algorithms = ["{algorithm}"]\n'
    more += "" if method == "none" else f'{CONFIDENTIAL}client_auth = "{method}"\n'
    client = {"token_endpoint_auth_method": method, "id_token_signed_response_alg": algorithm}
    if method == "none":
        client["client_secret"] = None
    client = {name: value for name, value in client.items() if value is not None}
    with console(tmp_path, more, PEOPLE, client, conform=conform) as (op, gateway):
        ada, vic = Person(gateway), Person(gateway)
        opened = ada.sign_in("ada")
        assert opened.status_code == 201, opened.text
        assert (opened.json()["person"], opened.json()["role"]) == ("ada@corp.example", "owner")
        assert vic.sign_in("vic").json()["role"] == "viewer"
        refused(Person(gateway).sign_in("eve"), "the identity provider has named none")
        # The keys turn: who is signed in stays, and who comes is known by the new ones.
        op.set(turns=1)
        assert ada.role() == "owner" and Person(gateway).sign_in("vic").status_code == 201


def test_everybody_of_a_provider_without_groups(tmp_path):
    more = CONFIDENTIAL + ONLINE + 'default_role = "viewer"\nrequired = { email = "ada@corp.example" }\n'
    people = {"ada": {"email": "ada@corp.example"}, "mallory": {"email": "m@evil.example"}, "none": {}}
    with console(tmp_path, more, people, conform=False) as (_, gateway):
        assert Person(gateway).sign_in("ada").json()["role"] == "viewer"
        for who in ("mallory", "none"):
            refused(Person(gateway).sign_in(who), "email is not what admin.oidc.required says")


@pytest.mark.parametrize("conform", [True, False])
def test_groups_are_read_again(tmp_path, conform):
    """More, fewer and no groups, with refresh tokens that turn at each look; keys that turn meanwhile; the end of a running stream."""
    with console(tmp_path, CONFIDENTIAL + OFFLINE + OFTEN, PEOPLE, conform=conform) as (op, gateway):
        ada, vic = Person(gateway), Person(gateway)
        assert (ada.sign_in("ada").status_code, vic.sign_in("vic").status_code) == (201, 201)
        op.set(people=PEOPLE | {"vic": {"groups": ["staff", "ops"]}}, turns=1)
        wait_until(lambda: vic.role() == "operator", "the new group counts", step=0.2)
        assert ada.role() == "owner"
        before = op.seen()
        assert before["refreshed"] >= 2 and before["refused"] == []
        wait_until(lambda: op.seen()["refreshed"] >= before["refreshed"] + 4, "two looks at each", step=0.2)
        assert op.seen()["refused"] == [], "each refresh token was sent once"
        assert len(set(op.seen()["refresh_tokens"])) >= 6
        op.set(people={"vic": {"groups": ["ops"]}, "ada": {"groups": ["staff"]}})
        wait_until(lambda: ada.role() == "viewer", "a lost group lowers the role", step=0.2)
        ask = {"accept": "text/event-stream", "x-penstock-session": ada.token}
        with ada.client.stream("GET", "/admin/v1/live", headers=ask) as live:
            lines = live.iter_lines()
            assert next(lines).startswith("data: ")
            op.set(people={"vic": {"groups": ["ops"]}, "ada": {}})
            assert "event: end" in list(lines), "the stream ends with the last group"
        assert ada.role() is None and vic.role() == "operator"
        wait_until(lambda: op.seen()["revoked"] >= 1, "the token is revoked")
        # The provider no longer knows the person at all.
        op.set(people={})
        wait_until(lambda: vic.role() is None, "who is gone there is gone here", step=0.2)
        assert (looks(gateway, "changed"), looks(gateway, "ended")) == (2, 2) and looks(gateway, "kept") >= 4
        told = [(event["actor"], event["outcome"]) for event in audit(Visitor(gateway), "sign_on.renew")]
        assert told == [("oidc:vic", "denied"), ("oidc:ada", "denied"), ("oidc:ada", "done"), ("oidc:vic", "done")]


def test_a_refresh_token_that_somebody_else_has_used_ends_its_session_alone(tmp_path):
    with console(tmp_path, CONFIDENTIAL + OFFLINE + OFTEN, PEOPLE) as (op, gateway):
        ada, vic = Person(gateway), Person(gateway)
        assert ada.sign_in("ada").status_code == 201
        # Whoever is first, the second one who sends it ends all that came of it.
        form = {"grant_type": "refresh_token", "refresh_token": op.seen()["refresh_tokens"][-1]}
        httpx.post(f"{op.url}/token", data=form, auth=("console", quoted(SECRET)), timeout=60)
        assert vic.sign_in("vic").status_code == 201
        wait_until(lambda: ada.role() is None, "the session has ended", step=0.2)
        refreshed = op.seen()["refreshed"]
        wait_until(lambda: op.seen()["refreshed"] > refreshed, "the other goes on", step=0.2)
        assert vic.role() == "viewer"


def quoted(secret: str) -> str:
    return secret.replace(" ", "%20").replace(":", "%3A")


def test_without_a_refresh_token_userinfo_is_asked_while_the_access_token_lives(tmp_path):
    with console(tmp_path, CONFIDENTIAL + ONLINE + OFTEN, PEOPLE) as (op, gateway):
        ada = Person(gateway)
        assert ada.sign_in("ada").status_code == 201
        assert op.seen()["refresh_tokens"] == []
        op.set(people={"ada": {"groups": ["staff"]}})
        wait_until(lambda: ada.role() == "viewer", "a lost group lowers the role", step=0.2)
        op.set(people={})
        wait_until(lambda: ada.role() is None, "userinfo refuses the token", step=0.2)


def test_groups_of_the_id_token_are_believed_where_nothing_renews_them(tmp_path):
    """Userinfo of many providers knows no groups: its silence is not their loss."""
    with console(tmp_path, CONFIDENTIAL + ONLINE + OFTEN, PEOPLE, conform=False) as (op, gateway):
        ada = Person(gateway)
        assert ada.sign_in("ada").status_code == 201
        op.set(people={"ada": {"email": "ada@corp.example"}})
        time.sleep(12)
        assert ada.role() == "owner" and looks(gateway, "ended") == looks(gateway, "kept") == 0


def test_a_provider_that_is_away_keeps_a_session_for_a_stated_time(tmp_path):
    more = CONFIDENTIAL + OFFLINE + OFTEN + "refresh_stale_seconds = 40\n"
    with console(tmp_path, more, PEOPLE) as (op, gateway):
        ada = Person(gateway)
        assert ada.sign_in("ada").status_code == 201
        op.set(away=True)
        wait_until(lambda: looks(gateway, "failed") >= 1, "a look has failed", step=0.2)
        assert ada.role() == "owner", "the groups in memory count"
        refreshed = op.seen()["refreshed"]
        op.set(away=False)
        wait_until(lambda: op.seen()["refreshed"] > refreshed, "it is asked again", step=0.2)
        assert ada.role() == "owner"
        began = time.monotonic()
        op.set(away=True)
        wait_until(lambda: ada.role() is None, "the session has ended", 180, step=0.2)
        assert time.monotonic() - began > 20, "not at the first failure"
        assert "has not named the groups for too long" in gateway.log()


def test_signing_out_here_and_there(tmp_path):
    more = CONFIDENTIAL + OFFLINE + "sign_out_there = true\n"
    with console(tmp_path, more, PEOPLE) as (op, gateway):
        ada = Person(gateway)
        assert ada.sign_in("ada").status_code == 201
        begun = ada.there.get(ada.begin().json()["url"])
        assert "consent" in ada.there.get(urljoin(op.url, begun.headers["location"])).text, (
            "the provider knows the browser"
        )
        left = ada.ask("DELETE", "/session")
        assert left.status_code == 200 and ada.role() is None
        wait_until(lambda: op.seen()["revoked"] >= 1, "the refresh token is revoked")
        there = left.json()["url"]
        asked = dict(parse_qsl(urlsplit(there).query))
        assert asked["client_id"] == "console" and asked["id_token_hint"].count(".") == 2
        assert ada.walk(ada.there.get(there)) == f"{ada.url}/console/"
        begun = ada.there.get(ada.begin().json()["url"])
        page = ada.there.get(urljoin(op.url, begun.headers["location"])).text
        assert 'name="prompt" value="login"' in page, "the provider asks who it is"
        # Signed out at the provider by another page of its: it tells the gateway itself.
        vic, again = Person(gateway), Person(gateway)
        assert (vic.sign_in("vic").status_code, again.sign_in("ada").status_code) == (201, 201)
        page = vic.there.get(f"{op.url}/session/end")
        fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page.text))
        vic.there.post(f"{op.url}/session/end/confirm", data=fields | {"logout": "yes"})
        wait_until(lambda: vic.role() is None, "the session here has ended, too")
        assert again.role() == "owner"
        key = Visitor(gateway)
        opened = key.client.post(
            "/admin/v1/session", json={"key": "psa_owner_of_the_tests"}, headers={"origin": key.url}
        )
        key.token = opened.json()["token"]
        assert key.ask("DELETE", "/session").status_code == 204, "a key has no way out through the provider"
