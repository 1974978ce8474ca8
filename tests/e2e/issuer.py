"""A small identity provider: keys and tokens made with the openssl program, served as OpenID Connect says; people sign in with a click."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlencode, urlsplit


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Issuer:
    """An issuer with one RSA key at a time, a discovery document, and a token endpoint for services (client credentials) and for people
    (authorization code with PKCE). `people` have their claims; `twist` is what goes wrong at the next sign-ins."""

    def __init__(self, folder: Path, port: int = 0):
        self.folder = folder
        self.people: dict[str, dict] = {}
        # Secret by client id; None: a public client.
        self.consoles: dict[str, str | None] = {"console": "s3cret of the console:"}
        self.twist: dict = {}
        # What each code was given for, and the codes that were redeemed.
        self.codes: dict[str, dict] = {}
        self.redeemed: list[str] = []
        self.clients = {"search": ("s3cret-of-search", {"groups": ["/engineering/search"]})}
        self.fetches = 0
        self.turns = 0
        self.turn()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                place, below = urlsplit(self.path), f"{issuer.url}/protocol/openid-connect"
                if self.path == "/realms/main/.well-known/openid-configuration":
                    addresses = {"authorization_endpoint": f"{below}/auth", "token_endpoint": f"{below}/token"}
                    document = {"issuer": issuer.url, "jwks_uri": f"{below}/certs"} | addresses
                    return self.answer(200, document | issuer.twist.get("discovery", {}))
                if place.path == "/realms/main/protocol/openid-connect/auth":
                    return self.sign_in({name: value for name, [value] in parse_qs(place.query).items()})
                if self.path == "/realms/main/protocol/openid-connect/certs":
                    issuer.fetches += 1
                    return self.answer(200, {"keys": [issuer.jwk]})
                return self.answer(404, {})

            def do_POST(self):
                form = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
                if form["grant_type"] == ["authorization_code"]:
                    return self.redeem({name: value for name, [value] in form.items()})
                name, secret = form["client_id"][0], form["client_secret"][0]
                known, claims = issuer.clients.get(name, (None, {}))
                if form["grant_type"] != ["client_credentials"] or secret != known:
                    return self.answer(401, {"error": "invalid_client"})
                return self.answer(200, {"access_token": issuer.token(name, **claims), "token_type": "Bearer"})

            def sign_in(self, asked: dict):
                """A page where one clicks on who one is, which leads back to the client with a code."""
                assert asked["response_type"] == "code" and asked["code_challenge_method"] == "S256", asked
                assert "openid" in asked["scope"].split() and asked["client_id"] in issuer.consoles, asked
                who = asked.pop("who", None)
                if who is None:
                    links = [urlencode(asked | {"who": name}) for name in issuer.people]
                    page = "".join(
                        f'<p><a href="?{html.escape(link)}">{html.escape(name)}</a>'
                        for link, name in zip(links, issuer.people, strict=True)
                    )
                    return self.send(
                        200, f"<!doctype html><link rel=icon href=data:,><title>Who are you?</title>{page}", "text/html"
                    )
                back = {"state": asked["state"]} | issuer.twist.get("back", {})
                if "error" not in back:
                    back = {"code": secrets.token_urlsafe(24)} | back
                    issuer.codes[back["code"]] = asked | {"who": who}
                self.send_response(302)
                self.send_header("location", f"{asked['redirect_uri']}?{urlencode(back)}")
                self.send_header("content-length", "0")
                self.end_headers()

            def redeem(self, form: dict):
                """The ID token for a code: for its client, its URL, its verifier, and once."""
                if status := issuer.twist.get("status"):
                    return self.send(status, "<h1>bad gateway</h1>", "text/html")
                name, secret = form.get("client_id"), form.get("client_secret")
                if basic := self.headers["authorization"]:
                    pair = base64.b64decode(basic.removeprefix("Basic ")).decode().split(":", 1)
                    name, secret = map(unquote, pair)
                if name not in issuer.consoles or secret != issuer.consoles[name]:
                    return self.answer(401, {"error": "invalid_client"})
                asked = issuer.codes.pop(form["code"], None)
                challenge = encode(hashlib.sha256(form["code_verifier"].encode()).digest())
                same = asked and (asked["client_id"], asked["redirect_uri"], asked["code_challenge"])
                if same != (name, form["redirect_uri"], challenge):
                    return self.answer(400, {"error": "invalid_grant"})
                issuer.redeemed.append(form["code"])
                claims = {"aud": name, "nonce": asked["nonce"]} | issuer.people[asked["who"]]
                token = issuer.token(f"id-of-{asked['who']}", **(claims | issuer.twist.get("claims", {})))
                if issuer.twist.get("unsigned"):
                    body = token.split(".")[1]
                    token = f"{encode(json.dumps({'alg': 'none'}).encode())}.{body}."
                return self.answer(200, {"access_token": "opaque", "token_type": "Bearer", "id_token": token})

            def send(self, status: int, text: str, kind: str):
                body = text.encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def answer(self, status: int, document: dict):
                self.send(status, json.dumps(document), "application/json")

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/realms/main"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def turn(self) -> None:
        """Another key from now on."""
        self.turns += 1
        self.kid = f"key-{self.turns}"
        self.pem = self.folder / f"{self.kid}.pem"
        subprocess.run(["openssl", "genrsa", "-out", self.pem, "2048"], check=True, capture_output=True)
        said = subprocess.run(
            ["openssl", "rsa", "-in", self.pem, "-noout", "-modulus"], check=True, capture_output=True, text=True
        )
        modulus = bytes.fromhex(said.stdout.strip().removeprefix("Modulus="))
        self.jwk = {"kty": "RSA", "kid": self.kid, "use": "sig", "alg": "RS256", "n": encode(modulus), "e": "AQAB"}

    def token(self, subject: str | None, **claims) -> str:
        """A signed token; claims may replace the usual ones, and None takes one out."""
        now = int(time.time())
        usual = {"iss": self.url, "aud": "penstock", "sub": subject, "iat": now, "exp": now + 300}
        header = {"alg": "RS256", "typ": "JWT", "kid": self.kid}
        said = {name: value for name, value in (usual | claims).items() if value is not None}
        parts = [encode(json.dumps(part).encode()) for part in (header, said)]
        message = ".".join(parts)
        signed = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", self.pem], input=message.encode(), check=True, capture_output=True
        )
        return f"{message}.{encode(signed.stdout)}"

    def logout(self, audience: str = "console", **claims) -> str:
        """A logout token: of the person that `sub` names, or of its session `sid`. None takes a claim out."""
        event = {"http://schemas.openid.net/event/backchannel-logout": {}}
        said = {"sub": None, "aud": audience, "jti": secrets.token_urlsafe(8), "events": event} | claims
        return self.token(said.pop("sub"), **said)

    def config(self, more: str = "") -> str:
        return f'[[jwt]]\nid = "corp"\nissuer = "{self.url}"\naudience = ["penstock"]\n{more}\n'


@contextlib.contextmanager
def issuing(folder: Path, port: int = 0) -> Iterator[Issuer]:
    """An issuer for the length of a `with`."""
    issuer = Issuer(folder, port)
    try:
        yield issuer
    finally:
        issuer.server.shutdown()
        issuer.server.server_close()
