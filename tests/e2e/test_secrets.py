"""No secret that went through a run is in what the run wrote: log at its loudest, access log, metrics, answers, the database."""

import json
import re
import subprocess

import httpx

from harness import binary, serving, user
from issuer import issuing
from providers import OpenAi

FILE_KEY = "planted-file-key-4c1f9a"
PEPPER = "planted-pepper-9b2e7d-and-more-than-32-bytes"
PROVIDER_KEY = "planted-provider-key-77aa01"
WRONG_KEY = "planted-wrong-key-55e0c3"
QUERY_KEY = "planted-query-key-18d4f6"
COOKIE = "planted-cookie-a0b1c2"
PROMPT = "planted-prompt-d3e4f5"


def test_secrets_are_nowhere(tmp_path):
    """Planted: keys of each kind, a token, the pepper, a provider's key, a cookie, a prompt. Then everything is searched for each."""
    pieces: list[str] = []

    def note(reply: httpx.Response) -> httpx.Response:
        pieces.append(f"{reply.status_code} {dict(reply.headers)} {reply.text}")
        return reply

    with issuing(tmp_path) as issuer, OpenAi() as mock:
        mock.key = PROVIDER_KEY
        mock.models = ("mock",)
        config = (
            f'[auth]\npepper_env = "PEPPER"\nfailures_per_minute = 0\n{issuer.config()}'
            '[[keys]]\nid = "planted"\nkey_env = "FILE_KEY"\nroutes = ["*"]\n'
            f'[[providers]]\nid = "mock"\nbase_url = "{mock.url}/v1"\nkey_env = "PROVIDER_KEY"\nmodels = ["mock"]\n'
            '[[models]]\nname = "both"\nto = [{ provider = "mock", model = "mock" }]\n[log]\nlevel = "trace"\n'
        )
        env = {"FILE_KEY": FILE_KEY, "PEPPER": PEPPER, "PROVIDER_KEY": PROVIDER_KEY}
        with serving(tmp_path / "g", config=config, env=env, workers=0) as gateway:

            def issue(*args: str) -> str:
                command = [
                    binary(),
                    "keys",
                    *args,
                    "--state-dir",
                    gateway.state,
                    "--config",
                    gateway.folder / "penstock.toml",
                ]
                done = subprocess.run(
                    list(map(str, command)), check=False, capture_output=True, text=True, env=env, timeout=60
                )
                assert done.returncode == 0, done.stderr
                pieces.append(done.stderr)
                return done.stdout.strip()

            issued, revoked = issue("create"), json.loads(issue("create", "--json"))
            pieces.append(issue("list", "--json"))
            issue("revoke", revoked["id"])
            token = issuer.token("ada")
            altered = token[:-8] + "AAAAAAAA"
            body = {"model": "mock", "messages": user(PROMPT), "max_tokens": 5}
            for secret in (FILE_KEY, issued, revoked["key"], token, altered, WRONG_KEY, "sk-ps-" + WRONG_KEY):
                for headers in (
                    {"authorization": f"Bearer {secret}"},
                    {"x-api-key": secret},
                    {"x-goog-api-key": secret},
                ):
                    headers |= {"cookie": f"session={COOKIE}"}
                    for model in ("mock", "both", "absent"):
                        ask = body | {"model": model}
                        note(httpx.post(f"{gateway.url}/v1/chat/completions", json=ask, headers=headers, timeout=30))
                    note(httpx.get(f"{gateway.url}/v1/models", headers=headers, timeout=30))
            mock.fail(status=401, message=f"Incorrect API key provided: {PROVIDER_KEY}")
            mock.fail(status=500, message=f"Your key {PROVIDER_KEY} met an error")
            for _ in range(3):
                headers = {"authorization": f"Bearer {FILE_KEY}"}
                note(httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=30))
                stream = body | {"stream": True}
                note(httpx.post(f"{gateway.url}/v1/chat/completions", json=stream, headers=headers, timeout=30))
            note(httpx.get(f"{gateway.url}/v1beta/models?key={QUERY_KEY}", timeout=30))
            note(httpx.get(f"{gateway.url}/v1beta/models?key={issued}", timeout=30))
            torn = {"content": b"{" + PROMPT.encode(), "headers": headers}
            note(httpx.post(f"{gateway.url}/v1/chat/completions", timeout=30, **torn))
            metrics = note(httpx.get(f"{gateway.url}/metrics", headers={"x-api-key": FILE_KEY}, timeout=30))
            assert "penstock_auth_failures_total" in metrics.text
            sent = [f"{seen.path} {seen.query} {seen.headers}" for seen in mock.seen]
            assert sent and all(PROVIDER_KEY in text for text in sent)
        written = [gateway.log(), *pieces]
        database = b"".join(path.read_bytes() for path in gateway.state.glob("penstock.db*"))
    assert database, "there is a database to search"
    statuses = {piece.split(" ", 1)[0] for piece in pieces}
    assert {"200", "401", "404"} <= statuses, "the run had its failures"
    client_secrets = {
        "file key": FILE_KEY,
        "issued key": issued,
        "revoked key": revoked["key"],
        "token": token,
        "token's signature": token.rsplit(".", 1)[1],
        "wrong key": WRONG_KEY,
        "key in the query": QUERY_KEY,
        "cookie": COOKIE,
    }
    for name, secret in (client_secrets | {"pepper": PEPPER, "provider's key": PROVIDER_KEY, "prompt": PROMPT}).items():
        # Who sent the prompt may be told what it said.
        for text in (gateway.log(), metrics.text) if name == "prompt" else written:
            at = text.find(secret)
            assert at < 0, f"the {name} is in: …{text[max(0, at - 300) : at + 50]}"
        assert secret.encode() not in database, f"the {name} is in the database"
    for name, secret in client_secrets.items():
        assert not any(secret in text for text in sent), f"the provider was sent the {name}"
    assert not re.search(r"sk-ps-[A-Za-z0-9]{20}", "".join(written))
