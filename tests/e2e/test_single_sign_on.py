"""Tokens of an identity provider, from its login to an answer; certificates of clients."""

import signal
import sqlite3
import ssl
import subprocess

import httpx
import openai
import pytest
from many import Many
from test_batches import begin, lines

from harness import START_SECONDS, Gateway, serving, text_of, user, wait_until
from issuer import issuing


def status(gateway, token: str) -> int:
    return httpx.get(f"{gateway.url}/v1/models", headers={"authorization": f"Bearer {token}"}, timeout=30).status_code


def test_a_service_signs_in_and_asks(tmp_path):
    """Client credentials at the issuer, the token at the gateway, through the official SDK; then the issuer turns its key and goes away."""
    more = 'team_claim = "groups"\nteams = { "/engineering/search" = "search" }\nteam_required = true\n'
    with issuing(tmp_path) as issuer:
        config = issuer.config(more) + '[[teams]]\nid = "search"\nmodels = ["penstock-*"]\n'
        with serving(tmp_path / "g", config=config) as gateway:
            form = {"grant_type": "client_credentials", "client_id": "search", "client_secret": "s3cret-of-search"}
            token = httpx.post(f"{issuer.url}/protocol/openid-connect/token", data=form, timeout=30).json()[
                "access_token"
            ]
            client = gateway.client(api_key=token)
            stream = client.chat.completions.create(
                model="penstock-demo", messages=user("Hello"), temperature=0, stream=True
            )
            assert text_of(stream) == "Hello! How can I help you today?"
            assert status(gateway, "none") == 401, "a gateway that knows an issuer is not open"
            for outsider in (issuer.token("eve"), issuer.token("eve", groups=["/sales"])):
                with pytest.raises(openai.AuthenticationError, match="team"):
                    gateway.client(api_key=outsider).models.list()
            groups = {"groups": ["/engineering/search"]}
            assert status(gateway, issuer.token("ada", aud="other", **groups)) == 401
            assert status(gateway, issuer.token("ada", iss="https://evil.example", **groups)) == 401

            fetches = issuer.fetches
            issuer.turn()
            assert status(gateway, issuer.token("ada", **groups)) == 200, "the new key is fetched when it is met"
            assert issuer.fetches == fetches + 1
            assert status(gateway, token) == 401, "the old key is gone, and what it signed"
            issuer.server.shutdown()
            issuer.server.server_close()
            assert status(gateway, issuer.token("grace", **groups)) == 200, "its keys are good while it is away"


def talker(many: Many) -> str:
    """A provider that takes its time: 200 lines of a batch last for five seconds, and longer where this process stands still."""
    return f'[[providers]]\nid = "talker"\nbase_url = "{many.url}/v1"\nmodels = ["m"]\n[batches]\nconcurrency = 4\n'


def test_a_batch_goes_on_without_its_user(tmp_path):
    """The gateway is killed in the middle of a batch of a token's user, who never comes back: its lines run on in that name, under what
    the config says then."""
    more = 'team_claim = "groups"\nteam_required = true\n'
    teams = '[[teams]]\nid = "search"\nmodels = ["m"]\n[[keys]]\nid = "ops"\nkey_env = "OPS"\nroutes = ["/metrics"]\n'
    ops = {"authorization": "Bearer sk-ops"}
    with issuing(tmp_path) as issuer, Many(delay=0.1) as many:
        config = issuer.config(more) + teams + talker(many)
        options = {"config": config, "env": {"OPS": "sk-ops"}, "workers": 0}

        def metric(gateway, name: str) -> float:
            text = httpx.get(f"{gateway.url}/metrics", headers=ops, timeout=30).raise_for_status().text
            return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

        with serving(tmp_path / "g", "--access-log", "off", **options) as gateway:
            token = issuer.token("ada", groups=["search"])
            client = gateway.client(api_key=token)
            count = 200
            batch = begin(client, lines(count, "m"))
            second = begin(client, lines(2, "m"), endpoint="/v1/chat/completions")

            def some_ran() -> bool:
                return client.batches.retrieve(batch.id).request_counts.completed >= 20

            wait_until(some_ran, "some lines ran", 120)
            gateway.process.kill()
            gateway.process.wait()
            # Nobody can be asked who she is, and no token comes.
            issuer.server.shutdown()
            issuer.server.server_close()
            gateway.start()
            wait_until(lambda: metric(gateway, "penstock_batch_lines_total") > 0, "lines run again", 60)
            wait_until(lambda: metric(gateway, "penstock_batches_running") == 0, "both batches have ended", 240)
            assert metric(gateway, 'penstock_batch_lines_total{outcome="failed"}') == 0
            assert metric(gateway, 'penstock_batch_lines_total{outcome="retried"}') == 0
            gateway.stop()
            # What was left behind is not done when its user may not any more: the config that runs it decides.
            database = sqlite3.connect(gateway.state / "penstock.db")
            done = database.execute("SELECT id, status, completed, failed FROM batches ORDER BY seq").fetchall()
            assert done == [(batch.id, "completed", count, 0), (second.id, "completed", 2, 0)]
            (who,) = database.execute("SELECT tenant FROM people").fetchone()
            assert who == "jwt:corp:ada"


def test_a_batch_ends_with_what_its_user_may(tmp_path):
    """Its issuer leaves the config while the gateway is down: what the user left is not done any more."""
    with issuing(tmp_path) as issuer, Many(delay=0.1) as many:
        keys = '[[keys]]\nid = "ops"\nkey_env = "OPS"\nroutes = ["/metrics"]\n' + talker(many)
        options = {"config": issuer.config() + keys, "env": {"OPS": "sk-ops"}, "workers": 0}
        with serving(tmp_path / "g", "--access-log", "off", **options) as gateway:
            client = gateway.client(api_key=issuer.token("ada"))
            batch = begin(client, lines(200, "m"))
            ran = lambda: client.batches.retrieve(batch.id).request_counts.completed  # noqa: E731
            wait_until(lambda: ran() >= 5, "some lines ran", 120)
            gateway.process.kill()
            gateway.process.wait()
            gateway.config = keys
            gateway.start(ready=False)

            def ended() -> tuple | None:
                with sqlite3.connect(f"file:{gateway.state}/penstock.db?mode=ro", uri=True) as database:
                    row = database.execute("SELECT status, completed, failed FROM batches").fetchone()
                return row if row[0] == "completed" else None

            _, completed, failed = wait_until(ended, "the batch ends", 120)
            assert completed >= 5 and failed > 0 and completed + failed == 200
            with sqlite3.connect(f"file:{gateway.state}/penstock.db?mode=ro", uri=True) as database:
                said = b"".join(row[0] for row in database.execute("SELECT data FROM file_chunks"))
            assert b"token issuer of the caller is no longer configured" in said


def run(*words) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def authority(folder, name: str):
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    run(*new, "-keyout", key, "-out", certificate, "-subj", f"/CN={name}")
    return key, certificate


def certificate_of(folder, signer, name: str, alternative: str | None):
    key, request, certificate = folder / f"{name}.key", folder / f"{name}.csr", folder / f"{name}.pem"
    new = ["req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run(*new, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName={alternative}\n" if alternative else "basicConstraints=CA:FALSE\n")
    signing = ["x509", "-req", "-in", request, "-CA", signer[1], "-CAkey", signer[0], "-CAcreateserial", "-days", "2"]
    run(*signing, "-extfile", extensions, "-out", certificate)
    return key, certificate


@pytest.mark.parametrize("demand", ["optional", "required"])
def test_a_certificate_is_a_key(tmp_path, demand):
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    clients = tmp_path / "clients.pem"
    clients.write_bytes(ours[1].read_bytes())
    server = certificate_of(tmp_path, ours, "server", "IP:127.0.0.1")
    search = certificate_of(tmp_path, ours, "search", "URI:spiffe://example.com/search/blue")
    plain = certificate_of(tmp_path, ours, "plain-name", None)
    stranger = certificate_of(tmp_path, ours, "stranger", "DNS:stranger.example.com")
    forged = certificate_of(tmp_path, theirs, "forged", "URI:spiffe://example.com/search/blue")
    config = f"""
[server.tls]
certificate = "{server[1]}"
key = "{server[0]}"
client_ca = "{clients}"
client_auth = "{demand}"
[[keys]]
id = "search"
certificate = "spiffe://example.com/search/*"
[[keys]]
id = "narrow"
certificate = "plain-name"
routes = ["/v1/files"]
[[keys]]
id = "plain"
key_env = "PLAIN_KEY"
"""

    def context(pair=None):
        made = ssl.create_default_context(cafile=ours[1])
        if pair:
            made.load_cert_chain(pair[1], pair[0])
        return made

    gateway = Gateway(tmp_path / "g", config=config, env={"PLAIN_KEY": "pk-plain"})
    url = gateway.url.replace("http:", "https:")

    def ask(pair, http2: bool = False, key: str | None = None) -> int:
        headers = {"x-api-key": key} if key else {}
        with httpx.Client(verify=context(pair), http2=http2, timeout=30) as session:
            reply = session.get(f"{url}/v1/models", headers=headers)
            assert reply.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            return reply.status_code

    def ready() -> bool:
        assert gateway.process.poll() is None, gateway.log()[-4000:]
        try:
            return httpx.get(f"{url}/ready", verify=context(search), timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    try:
        gateway.start(ready=False)
        wait_until(ready, "the gateway is ready", START_SECONDS, 0.05)
        for http2 in (False, True):
            assert ask(search, http2) == 200, "by its URI"
            assert ask(plain, http2) == 403, "by its common name, to what it may"
            assert ask(stranger, http2) == 401, "signed, but nobody's"
            assert ask(stranger, http2, "pk-plain") == 200, "a key beside it"
            with pytest.raises(httpx.TransportError):
                ask(forged, http2)
        if demand == "required":
            with pytest.raises(httpx.TransportError):
                ask(None, key="pk-plain")
        else:
            assert ask(None) == 401 and ask(None, key="pk-plain") == 200
        wait_until(lambda: '"key":"search"' in gateway.log(), "the access log says who it was")

        clients.write_bytes(theirs[1].read_bytes())
        gateway.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: "changed authorities of client certificates in use" in gateway.log(), "the file is read again"
        )
        for http2 in (False, True):
            assert ask(forged, http2) == 200, "vouched for by now"
            with pytest.raises(httpx.TransportError):
                ask(search, http2)
    finally:
        gateway.stop()
