"""A small identity provider: keys and tokens made with the openssl program, served as OpenID Connect says."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Issuer:
    """An issuer with one RSA key at a time, a discovery document, and a token endpoint for the client-credentials flow."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.clients = {"search": ("s3cret-of-search", {"groups": ["/engineering/search"]})}
        self.fetches = 0
        self.turns = 0
        self.turn()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/realms/main/.well-known/openid-configuration":
                    keys = f"{issuer.url}/protocol/openid-connect/certs"
                    return self.answer(200, {"issuer": issuer.url, "jwks_uri": keys})
                if self.path == "/realms/main/protocol/openid-connect/certs":
                    issuer.fetches += 1
                    return self.answer(200, {"keys": [issuer.jwk]})
                return self.answer(404, {})

            def do_POST(self):
                form = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
                name, secret = form["client_id"][0], form["client_secret"][0]
                known, claims = issuer.clients.get(name, (None, {}))
                if form["grant_type"] != ["client_credentials"] or secret != known:
                    return self.answer(401, {"error": "invalid_client"})
                return self.answer(200, {"access_token": issuer.token(name, **claims), "token_type": "Bearer"})

            def answer(self, status: int, document: dict):
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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

    def token(self, subject: str, **claims) -> str:
        """A signed token; claims may replace the usual ones."""
        now = int(time.time())
        usual = {"iss": self.url, "aud": "penstock", "sub": subject, "iat": now, "exp": now + 300}
        header = {"alg": "RS256", "typ": "JWT", "kid": self.kid}
        parts = [encode(json.dumps(part).encode()) for part in (header, usual | claims)]
        message = ".".join(parts)
        signed = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", self.pem], input=message.encode(), check=True, capture_output=True
        )
        return f"{message}.{encode(signed.stdout)}"

    def config(self, more: str = "") -> str:
        return f'[[jwt]]\nid = "corp"\nissuer = "{self.url}"\naudience = ["penstock"]\n{more}\n'


@contextlib.contextmanager
def issuing(folder: Path) -> Iterator[Issuer]:
    """An issuer for the length of a `with`."""
    issuer = Issuer(folder)
    try:
        yield issuer
    finally:
        issuer.server.shutdown()
        issuer.server.server_close()
