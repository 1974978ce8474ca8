"""Sign-in at the console with an identity provider: what guards it over HTTP, then people in a browser."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
from test_console import browse
from test_guide import one

from harness import Gateway, free_port, serving, wait_until
from issuer import Issuer, decode, issuing
from providers import OpenAi

OWNER = "psa_owner_of_the_tests"
SECRET = "s3cret of the console:"
# A name that is markup, and one that is none.
NAME = "Sons & <b>Daughters</b>"
PEOPLE = {
    "ada": {"groups": ["staff", "admins"], "email": "ada@corp.example"},
    "olaf": {"groups": ["ops"], "preferred_username": "olaf"},
    "vic": {"groups": "staff", "email": "vic@corp.example"},
    "eve": {"groups": ["others", "Admins"], "email": "<img src=x onerror=alert(1)>@corp.example"},
    "nobody": {},
}
ROLES = {"admins": "owner", "ops": "operator", "staff": "viewer"}


def config(issuer_url: str, roles: dict | None = None, more: str = 'client_secret_env = "OIDC_SECRET"') -> str:
    digest = hashlib.sha256(OWNER.encode()).hexdigest()
    pairs = ", ".join(f'"{group}" = "{role}"' for group, role in (ROLES if roles is None else roles).items())
    return f"""
[[providers]]
id = "elsewhere"
base_url = "http://127.0.0.1:9/v1"
models = ["far-model"]

[[admin_keys]]
id = "owner"
digest = "{digest}"
role = "owner"

[admin]
origins = ["https://pages.example"]

[admin.oidc]
issuer = "{issuer_url}"
name = "{NAME}"
client_id = "console"
roles = {{ {pairs} }}
{more}
"""


@contextmanager
def console(folder: Path, **options) -> Iterator[tuple[Issuer, Gateway]]:
    """An issuer with its people, and a gateway that sends them there."""
    with issuing(folder) as issuer:
        issuer.people = PEOPLE
        with serving(
            folder / "g", workers=0, config=config(issuer.url, **options), env={"OIDC_SECRET": SECRET}
        ) as gateway:
            yield issuer, gateway
            assert " panicked" not in gateway.log()


class Visitor:
    """A browser at the console: its cookies, its origin, and the token once it has a session."""

    def __init__(self, gateway: Gateway):
        self.url = (gateway.state / "admin.url").read_text().split()[0]
        self.port = self.url.rsplit(":", 1)[1]
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self.token = ""

    def ask(self, method: str, path: str, json: object = None, **fields: str) -> httpx.Response:
        headers = {"origin": self.url, "x-penstock-session": self.token} | fields
        return self.client.request(method, f"/admin/v1{path}", json=json, headers=headers)

    def begin(self, **fields: str) -> httpx.Response:
        return self.ask("POST", "/sign-on", **fields)

    def leave(self, who: str) -> dict:
        """Begins a sign-in, and says who one is at the provider; its answer, as it stands in the address that it leads back to."""
        begun = self.begin()
        assert begun.status_code == 201, begun.text
        there = httpx.get(f"{begun.json()['url']}&who={who}", timeout=60)
        assert there.status_code == 302, there.text
        back = urlsplit(there.headers["location"])
        assert f"{back.scheme}://{back.netloc}{back.path}" == f"{self.url}/console/"
        return dict(parse_qsl(back.query))

    def finish(self, answer: dict, **fields: str) -> httpx.Response:
        done = self.ask("POST", "/sign-on/answer", answer, **fields)
        if done.status_code == 201:
            self.token = done.json()["token"]
        else:
            assert "penstock_session" not in done.headers.get("set-cookie", ""), "no session without a sign-in"
        return done

    def sign_in(self, who: str) -> httpx.Response:
        return self.finish(self.leave(who))


def refused(answer: httpx.Response, why: str) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (403, "application/json"), answer.text
    assert why in answer.json()["error"]["message"], answer.text


def audit(visitor: Visitor, action: str) -> list[dict]:
    headers = {"authorization": f"Bearer {OWNER}"}
    return httpx.get(f"{visitor.url}/admin/v1/audit?action={action}", headers=headers, timeout=60).json()["data"]


def test_people_have_the_roles_of_their_groups(tmp_path):
    with console(tmp_path) as (issuer, gateway):
        visitor = Visitor(gateway)
        assert visitor.ask("GET", "/sign-on").json() == {"provider": NAME}
        begun = visitor.begin()
        cookie = begun.headers["set-cookie"]
        path = "Path=/admin/v1/sign-on; HttpOnly; SameSite=Strict; Max-Age=600"
        assert re.fullmatch(rf"penstock_login_{visitor.port}=[\w-]{{43}}; {path}", cookie), cookie
        asked = dict(parse_qsl(urlsplit(begun.json()["url"]).query))
        assert asked["state"] == begun.json()["state"] and asked["code_challenge_method"] == "S256"
        assert asked["redirect_uri"] == f"{visitor.url}/console/" and "secret" not in begun.text
        level = {"level": "info"}
        for who, name, role, status in [
            ("ada", "ada@corp.example", "owner", 200),
            ("olaf", "olaf", "operator", 200),
            ("vic", "vic@corp.example", "viewer", 403),
        ]:
            person = Visitor(gateway)
            opened = person.sign_in(who)
            assert opened.status_code == 201, opened.text
            cookies = opened.headers.get_list("set-cookie")
            session = rf"penstock_session_{person.port}=[\w-]{{43}}; Path=/admin/v1; HttpOnly; SameSite=Strict"
            assert re.fullmatch(session, cookies[0]), cookies
            assert cookies[1].startswith(f"penstock_login_{person.port}=;") and "Max-Age=0" in cookies[1]
            key = f"oidc:id-of-{who}"
            assert person.ask("GET", "/whoami").json() == {"key": key, "role": role}
            found = person.ask("GET", "/session").json()
            assert (found["key"], found["person"], found["role"]) == (key, name, role)
            assert 0 < found["seconds_left"] <= 480 * 60
            assert person.ask("PUT", "/log-level", level).status_code == status
            assert person.ask("GET", "/audit").status_code == (200 if role == "owner" else 403)
            # The cookie alone opens nothing, as with keys.
            token, person.token = person.token, ""
            assert person.ask("GET", "/whoami").status_code == 403
            person.token = token
            if who == "olaf":
                assert person.ask("DELETE", "/session").status_code == 204
                assert person.ask("GET", "/whoami").status_code == 401
        for who in ("eve", "nobody"):
            refused(Visitor(gateway).sign_in(who), "none of your groups has a role here")
        events = [(event["actor"], event["target"], event["outcome"]) for event in audit(visitor, "sign_on.finish")]
        assert events == [
            ("", "oidc:id-of-nobody", "denied"),
            ("", "oidc:id-of-eve", "denied"),
            *((key, key, "done") for key in ("oidc:id-of-vic", "oidc:id-of-olaf", "oidc:id-of-ada")),
        ]
        changed = {event["actor"]: event for event in audit(visitor, "log_level.set")}
        detail = changed["oidc:id-of-ada"]["detail"]
        assert detail["person"] == "ada@corp.example" and "after" in detail
        assert changed["oidc:id-of-vic"]["outcome"] == "denied", "who was refused is named, too"
        said = gateway.log() + json.dumps(audit(visitor, "*"))
        assert all(secret not in said for secret in (SECRET, *issuer.redeemed, asked["state"]))
        assert len(issuer.redeemed) == 5


def test_an_answer_counts_once_and_for_the_browser_that_asked(tmp_path):
    unknown = "belongs to no sign-in of this browser"
    with console(tmp_path) as (issuer, gateway):
        ada, eve = Visitor(gateway), Visitor(gateway)
        answer, other = ada.leave("ada"), eve.leave("vic")
        refused(ada.finish(answer | {"state": "x" * 43}), unknown)
        refused(ada.finish(answer | {"state": ""}), unknown)
        refused(eve.finish(answer), unknown)
        refused(Visitor(gateway).finish(answer), unknown)
        # Login CSRF: a link with somebody else's answer, at a browser that has begun a sign-in itself.
        refused(ada.finish(other), unknown)
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{gateway.port}", "https://pages.example"):
            for response in (ada.finish(answer, origin=origin), ada.begin(origin=origin)):
                assert response.status_code == 403, origin
        bare = httpx.post(f"{ada.url}/admin/v1/sign-on/answer", json=answer, cookies=ada.client.cookies, timeout=60)
        assert bare.status_code == 403, "a browser says which page it was"
        assert ada.finish(answer | {"more": "x"}).status_code == 400
        assert ada.finish(answer | {"code": "x" * 5000}).status_code == 400
        assert not issuer.redeemed
        cookies = httpx.Cookies(ada.client.cookies)
        assert ada.finish(answer).status_code == 201, "none of these has spoiled the sign-in"
        for again in (ada, Visitor(gateway)):
            again.client.cookies.update(cookies)
            refused(again.finish(answer), unknown)
        assert ada.ask("GET", "/whoami").status_code == 200
        # A code that was seen on its way: spent, or for another sign-in's challenge.
        for code in (answer["code"], other["code"]):
            thief = Visitor(gateway)
            refused(thief.finish(thief.leave("eve") | {"code": code}), "invalid_grant")
        assert len(issuer.redeemed) == 1
        # A sign-in gives new secrets, whatever the browser brings.
        fixed = Visitor(gateway)
        fixed.client.cookies.set(f"penstock_session_{fixed.port}", "chosen-by-eve", path="/admin/v1")
        assert fixed.sign_in("vic").status_code == 201
        held = {"cookie": f"penstock_session_{fixed.port}=chosen-by-eve", "x-penstock-session": fixed.token}
        assert httpx.get(f"{fixed.url}/admin/v1/whoami", headers=held, timeout=60).status_code == 401
        denied = [event for event in audit(ada, "sign_on.finish") if event["outcome"] == "denied"]
        assert len(denied) == 1, "one event for many wrong answers of an address"


def test_id_tokens_are_for_this_client_and_this_sign_in(tmp_path):
    with console(tmp_path) as (issuer, gateway):
        now = int(time.time())
        for twist, why in [
            ({"claims": {"nonce": "another"}}, "nonce"),
            ({"claims": {"aud": "penstock"}}, "audience"),
            ({"claims": {"aud": ["console", "other"]}}, "azp"),
            ({"claims": {"azp": "other"}}, "azp"),
            ({"claims": {"iss": "https://evil.example"}}, "issuer"),
            ({"claims": {"iat": now - 900, "exp": now - 600}}, "expired"),
            ({"claims": {"iat": now - 900}}, "iat"),
            ({"unsigned": True}, "algorithm"),
            ({"back": {"iss": "https://evil.example"}}, "not the configured identity provider's"),
            ({"back": {"error": "access_denied", "error_description": "<b>\n no"}}, "access_denied: <b>  no"),
        ]:
            issuer.twist = twist
            refused(Visitor(gateway).sign_in("ada"), why)
        # The key that the issuer names is not the one that signed.
        issuer.twist = {}
        visitor = Visitor(gateway)
        answer, published = visitor.leave("ada"), issuer.jwk
        issuer.turn()
        issuer.jwk = published | {"kid": issuer.kid}
        refused(visitor.finish(answer), "signature")
        issuer.turn()
        assert Visitor(gateway).sign_in("ada").status_code == 201, "keys are fetched anew"
        # From here on, answers are slowed down as wrong keys are, and right ones of others with them.
        for _ in range(21):
            last = visitor.finish({"code": "x", "state": "x"}).status_code
        assert last == 429


def test_a_provider_that_is_away_keeps_nobody_else_out(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}/realms/main"
    with serving(tmp_path / "g", workers=0, config=config(url), env={"OIDC_SECRET": SECRET}) as gateway:
        visitor = Visitor(gateway)
        away = visitor.begin()
        assert (away.status_code, away.json()["error"]["code"]) == (503, "unavailable"), away.text
        assert "identity provider cannot be reached or used now" in away.json()["error"]["message"]
        by_key = visitor.client.post("/admin/v1/session", json={"key": OWNER}, headers={"origin": visitor.url})
        assert by_key.status_code == 201, "keys sign in all the same"
        with issuing(tmp_path, port) as issuer:
            issuer.people = PEOPLE
            issuer.twist = {"discovery": {"issuer": "https://evil.example"}}
            assert visitor.begin().status_code == 503
            issuer.twist = {}
            wait_until(lambda: visitor.begin().status_code == 201, "the provider is back", step=0.2)
            answer = visitor.leave("ada")
            issuer.twist = {"status": 502}
            broken = visitor.finish(answer)
            assert broken.status_code == 503 and "bad gateway" not in broken.text, broken.text
            issuer.twist = {}
            answer = visitor.leave("ada")
        assert visitor.finish(answer).status_code == 503, "away between the two steps"
        assert SECRET not in gateway.log()


def test_a_public_client_is_guarded_by_pkce_alone(tmp_path):
    with console(tmp_path, more="session_minutes = 5") as (issuer, gateway):
        issuer.consoles["console"] = None
        person = Visitor(gateway)
        opened = person.sign_in("ada")
        assert opened.status_code == 201 and opened.json()["seconds_left"] == 300, opened.text


def test_the_config_of_the_guide(tmp_path):
    """The page's lines as they stand, with another issuer."""
    text = one("console.md", "toml", "[admin.oidc]")
    with issuing(tmp_path) as issuer:
        issuer.people = {"ada": {"groups": ["penstock-ops", "staff"]}}
        issuer.consoles = {"penstock-console": SECRET}
        elsewhere = "https://sso.example.com/realms/main"
        assert elsewhere in text
        provider = config(issuer.url).split("[[admin_keys]]")[0]
        options = {"config": provider + text.replace(elsewhere, issuer.url), "env": {"PENSTOCK_OIDC_SECRET": SECRET}}
        with serving(tmp_path / "g", workers=0, **options) as gateway:
            person = Visitor(gateway)
            assert person.ask("GET", "/sign-on").json() == {"provider": "Example SSO"}
            assert person.sign_in("ada").status_code == 201
            assert person.ask("GET", "/whoami").json() == {"key": "oidc:id-of-ada", "role": "operator"}


def test_the_playground_knows_who_asks(tmp_path):
    """Requests of people are theirs in the ledger, and under the limits of the table, each person alone."""
    with OpenAi() as mock, issuing(tmp_path) as issuer:
        issuer.people = PEOPLE
        text = config(issuer.url, more='limits = ["people"]').replace("http://127.0.0.1:9/v1", f"{mock.url}/v1")
        text = text.replace('models = ["far-model"]', f'models = ["{mock.models[0]}"]\nkey_env = "KEY_UP"')
        text += '[[limits]]\nid = "people"\nrequests_per_day = 1\n'
        asked = {"model": mock.models[0], "stream": True, "messages": [{"role": "user", "content": "Repeat: hello"}]}
        with serving(tmp_path / "g", workers=0, config=text, env={"KEY_UP": mock.key}) as gateway:
            issuer.consoles["console"] = None
            people = {who: Visitor(gateway) for who in ("ada", "olaf", "vic")}
            for who, person in people.items():
                assert person.sign_in(who).status_code == 201
            got = [people[who].ask("POST", "/playground", asked) for who in ("olaf", "olaf", "ada", "vic")]
            assert [answer.status_code for answer in got] == [200, 429, 200, 403], [answer.text for answer in got]
            page = "/usage/requests?key=console:oidc:id-of-olaf"
            wait_until(
                lambda: [one["status"] for one in people["ada"].ask("GET", page).json()["data"]][-1:] == [200],
                "the request is in the ledger",
            )


def test_a_reload_changes_what_people_may(tmp_path):
    with console(tmp_path) as (issuer, gateway):
        ada, vic = Visitor(gateway), Visitor(gateway)
        assert (ada.sign_in("ada").status_code, vic.sign_in("vic").status_code) == (201, 201)
        owner = {"authorization": f"Bearer {OWNER}"}

        def put(text: str) -> None:
            done = httpx.put(f"{ada.url}/admin/v1/config", json={"text": text}, headers=owner, timeout=60)
            assert done.status_code == 200, done.text

        assert ada.ask("GET", "/audit").status_code == 200
        ask = {"accept": "text/event-stream", "x-penstock-session": vic.token}
        with vic.client.stream("GET", "/admin/v1/live", headers=ask) as live:
            lines = live.iter_lines()
            assert next(lines).startswith("data: ")
            put(config(issuer.url, {"admins": "viewer"}))
            assert ada.ask("GET", "/whoami").json()["role"] == "viewer"
            assert ada.ask("GET", "/audit").status_code == 403
            assert "event: end" in list(lines), "the stream ends with the role"
        assert vic.ask("GET", "/whoami").status_code == 401
        put(config(issuer.url))
        assert vic.ask("GET", "/whoami").status_code == 401, "a session that has ended does not come back"
        assert ada.ask("GET", "/whoami").json()["role"] == "owner"
        # Another registration: who was signed in under the first is nobody.
        answer = vic.leave("vic")
        put(config(issuer.url).replace('client_id = "console"', 'client_id = "other"'))
        assert ada.ask("GET", "/whoami").status_code == 401
        refused(vic.finish(answer), "belongs to no sign-in")
        put(config(issuer.url))
        assert ada.sign_in("ada").status_code == 201
        put(config(issuer.url).split("[admin.oidc]")[0])
        assert ada.ask("GET", "/whoami").status_code == 401
        assert ada.begin().status_code == 404
        assert ada.ask("GET", "/sign-on").json() == {"provider": None}
        put(config(issuer.url) + 'redirect_url = "https://gw.example/console/"\n')
        elsewhere = ada.begin()
        assert (elsewhere.status_code, "https://gw.example/console/" in elsewhere.text) == (409, True)


def test_who_signs_out_at_the_provider_is_signed_out_here(tmp_path):
    with console(tmp_path) as (issuer, gateway):
        url = (gateway.state / "admin.url").read_text().split()[0]

        def tell(token: str | None, **options) -> httpx.Response:
            form = {"other": "x"} if token is None else {"logout_token": token}
            return httpx.post(f"{url}/admin/v1/sign-on/logout", **({"data": form} | options), timeout=60)

        def signed_in(who: str, session: str | None) -> Visitor:
            issuer.twist = {"claims": {"sid": session} if session else {}}
            visitor = Visitor(gateway)
            assert visitor.sign_in(who).status_code == 201
            return visitor

        ada, at_home, nameless = (signed_in("ada", session) for session in ("s1", "s2", None))
        vic = signed_in("vic", "s3")
        now = int(time.time())
        for token, why in [
            (None, "missing field"),
            ("x", "not a JSON Web Token"),
            (issuer.logout("penstock", sub="id-of-ada"), "another audience"),
            (issuer.logout(sub="id-of-ada", iss="https://evil.example"), "issuer"),
            (issuer.logout(sub="id-of-ada", events={}), "events"),
            (issuer.logout(sub="id-of-ada", nonce="n"), "nonce"),
            (issuer.logout(), "sub is missing"),
            (issuer.logout(sub="id-of-ada", iat=now - 900), "iat is too long ago"),
            (issuer.logout(sub="id-of-ada")[:-8] + "AAAAAAAA", "signature"),
            (issuer.token("id-of-ada", aud="console"), "events"),
        ]:
            answer = tell(token)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logout_token"), answer.text
            assert why in answer.json()["error"]["message"], answer.text
        assert tell(None, json={"logout_token": issuer.logout(sub="id-of-ada")}).status_code == 400, "a form, not JSON"
        assert all(one.ask("GET", "/whoami").status_code == 200 for one in (ada, at_home, nameless, vic))
        # One session of hers, with the stream of its page; then all that are left.
        assert tell(issuer.logout(sid="s3", sub="id-of-ada")).json() == {"sessions": 0}, "not the session of another"
        ask = {"accept": "text/event-stream", "x-penstock-session": ada.token}
        with ada.client.stream("GET", "/admin/v1/live", headers=ask) as live:
            lines = live.iter_lines()
            assert next(lines).startswith("data: ")
            done = tell(issuer.logout(sid="s1"))
            assert (done.status_code, done.json()) == (200, {"sessions": 1}), done.text
            assert done.headers["cache-control"] == "no-store"
            assert "event: end" in list(lines), "the stream ends with the session"
        assert [one.ask("GET", "/whoami").status_code for one in (ada, at_home, nameless, vic)] == [401, 200, 200, 200]
        all_of_hers = issuer.logout(sub="id-of-ada", exp=None)
        assert tell(all_of_hers).json() == {"sessions": 2}
        assert [one.ask("GET", "/whoami").status_code for one in (at_home, nameless, vic)] == [401, 401, 200]
        # The same token later: it does not reach who has signed in since.
        wait_until(lambda: int(time.time()) > json.loads(decode(all_of_hers.split(".")[1]))["iat"], "a second goes by")
        again = signed_in("ada", "s4")
        assert tell(all_of_hers).json() == {"sessions": 0}
        assert again.ask("GET", "/whoami").status_code == 200
        events = audit(vic, "sign_on.end")
        done = [(event["target"], event["detail"]["sessions"]) for event in events if event["outcome"] == "done"]
        assert done == [("oidc:id-of-ada", 2), ("", 1)], events
        assert len(events) == 3, "one event for many wrong tokens of an address"
        # Behind a proxy, who guesses has the address of the provider.
        forged, began, asked = issuer.logout(sub="id-of-ada")[:-8] + "AAAAAAAA", time.monotonic(), issuer.fetches
        assert any(tell(forged).status_code == 429 for _ in range(200)), "slowed down"
        assert tell(issuer.logout(sid="s4")).json() == {"sessions": 1}, "a right one is taken all the same"
        assert issuer.fetches - asked <= 2 + (time.monotonic() - began), "once a second at most"
        # Keys that are a second old do not keep a token of the next key out.
        issuer.turn()
        fetched = time.monotonic()
        wait_until(lambda: time.monotonic() > fetched + 1.2, "the keys are old enough")
        assert tell(issuer.logout(sid="s3")).json() == {"sessions": 1}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: text.replace('"staff" = "viewer"', '"staff" = "root"'), "is not a role"),
        (lambda text: text.replace("http://127.0.0.1", "http://sso.example"), "must be https"),
        (lambda text: text.replace("OIDC_SECRET", "OIDC_UNSET"), "OIDC_UNSET is not there or empty"),
        (lambda text: text + 'algorithms = ["none"]\n', "never none"),
    ],
)
def test_a_config_that_signs_nobody_in_is_refused(tmp_path, change, fault):
    gateway = Gateway(tmp_path, workers=0, config=change(config("http://127.0.0.1:1/realms/main")))
    gateway.env = {"OIDC_SECRET": SECRET}
    gateway.start(ready=False)
    assert gateway.process.wait(60) != 0
    assert f"{fault}" in gateway.log() and "admin.oidc" in gateway.log(), gateway.log()


def test_people_in_a_browser(tmp_path):
    """Sign-in by clicking as viewer and as owner, refusals as text, and links with answers that are somebody else's."""
    with console(tmp_path) as (issuer, gateway):
        told = {
            "url": (gateway.state / "admin.url").read_text().split()[0],
            "issuer": issuer.url.removesuffix("/realms/main"),
            "name": NAME,
            "key": OWNER,
            "shots": os.environ.get("PENSTOCK_SHOTS", ""),
        }
        assert browse("console_oidc.mjs", told, 240) == {"people": 2, "refused": 4}
        assert len(issuer.redeemed) == 3, "what belongs to no sign-in of the browser is not redeemed"
