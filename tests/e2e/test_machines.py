"""Workers that are started elsewhere, over TCP: the pool key, and TLS with certificates at both ends, also between workers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_admin import Api
from test_faults import GUIDED

from harness import HOLDS, binary, free_port, held, holding, serving, text_of, user, wait_until

MODEL = "penstock-demo"


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


class Authority:
    """An authority of the pool, made as the guide says."""

    NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder, self.ca, self.key = folder, folder / "ca.pem", folder / "ca-key.pem"
        openssl("req", "-x509", *self.NEW_KEY, "-days", 2, "-keyout", self.key, "-out", self.ca, "-subj", "/CN=pool")

    def member(self, name: str) -> dict[str, Path]:
        """Files of a member: certificate, key, ca."""
        key, request, certificate, names = (self.folder / f"{name}.{end}" for end in ["key", "csr", "pem", "ext"])
        openssl("req", *self.NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        names.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        signed = ["-CA", self.ca, "-CAkey", self.key, "-days", 2, "-extfile", names, "-out", certificate]
        openssl("x509", "-req", "-in", request, *signed)
        return {"certificate": certificate, "key": key, "ca": self.ca}


class Workers:
    """Workers with addresses on TCP."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, []
        self.key = folder / "pool.key"
        self.key.write_text("a secret of this pool alone")

    def start(self, role: str, tls: dict[str, Path]) -> str:
        port = free_port()
        words = ["worker", "--listen", f"tcp:127.0.0.1:{port}", "--role", role, "--key-file", self.key]
        words += ["--threads", 1, "--orphan-ttl", 300]
        for name, path in tls.items():
            words += [f"--tls-{name}", path]
        with (self.folder / f"{port}.log").open("ab") as log:
            command = [str(binary()), *map(str, words)]
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        return f"tcp://127.0.0.1:{port}"

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def workers(tmp_path):
    workers = Workers(tmp_path)
    yield workers
    workers.stop()


def config(addresses: list[str], key: Path, tls: dict[str, Path]) -> str:
    lines = ["[[pools]]", f"connect = {addresses!r}", f'key_file = "{key}"']
    return "\n".join(lines + [f'tls_{name} = "{path}"' for name, path in tls.items()])


def ask(gateway, text: str) -> str:
    answer = gateway.client().chat.completions.create(
        model=MODEL, messages=user(text), max_tokens=12, temperature=0, timeout=60
    )
    return answer.choices[0].message.content


def test_a_pool_over_tls_moves_kv_too(tmp_path, workers):
    authority = Authority(tmp_path / "ca")
    addresses = [workers.start(role, authority.member(role)) for role in ["prefill", "decode"]]
    long = "The river runs under the old stone bridge and the light moves on the water. " * 180
    with serving(tmp_path / "plain") as alone:
        expected = ask(alone, long)
    text = config(addresses, workers.key, authority.member("gateway"))
    with serving(tmp_path / "gateway", workers=0, config=text) as gateway:
        api = Api(gateway)
        wait_until(lambda: [w["phase"] for w in api.get("/workers")["data"]] == ["ready"] * 2, "both serve", 90)
        assert ask(gateway, long) == expected

        def moved() -> dict[str, int]:
            return {w["role"]: w["transfer_bytes_in"] for w in api.get("/workers")["data"]}

        # Which prompts are computed elsewhere is the router's to say: it learns the workers' speeds from the first ones.
        for number in range(30):
            ask(gateway, f"{number} {long}")
            if moved()["decode"] > 100_000:
                break
        assert moved()["decode"] > 100_000 and moved()["prefill"] == 0, moved()


def test_guided_answers_are_the_same_through_each_of_two_gateways_of_a_pool(tmp_path, workers):
    """One gateway of a pool that two share holds a guided stream while its worker dies; the other answers the same meanwhile."""
    addresses = [workers.start("mixed", {}) for _ in range(2)]
    asked = {"messages": user("Count from 1 to 30."), "max_tokens": 400, "seed": 7, "temperature": 1} | GUIDED

    def say(gateway) -> str:
        return text_of(gateway.client().chat.completions.create(model=MODEL, stream=True, **asked, **HOLDS))

    def gateway(name: str):
        folder = tmp_path / name
        text = f"[server]\n{holding(folder)}\n{config(addresses, workers.key, {})}"
        return serving(folder, workers=0, config=text)

    with serving(tmp_path / "alone") as alone:
        expected = say(alone)
    assert expected.startswith('[{"number":')
    with gateway("one") as one, gateway("two") as two:
        for each in (one, two):
            wait_until(lambda each=each: each.metric("penstock_workers_ready") == 2, "both serve", 90)
            assert say(each) == expected
        got = ""
        with held(one, model=MODEL, **asked) as stream:
            for number, chunk in enumerate(stream):
                got += text_of([chunk])
                if number == 5:
                    assert say(two) == expected, "beside the other's, whichever worker has it"
                    busy = wait_until(
                        lambda: [w["name"] for w in Api(one).get("/workers")["data"] if w["requests"]], "its worker", 10
                    )
                    workers.processes[addresses.index(busy[0])].kill()
        assert got == expected
        wait_until(lambda: one.metric("penstock_resumes_total") == 1, "the stream went on elsewhere")
        assert one.metric("penstock_resumes_inexact_total") == 0
        assert say(two) == expected, "and the other gateway answers from the worker that is left"


def test_who_has_no_certificate_of_the_pool_is_no_member(tmp_path, workers):
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    addresses = [
        workers.start("mixed", ours.member("worker")),
        workers.start("mixed", theirs.member("worker")),
        workers.start("mixed", {}),
    ]
    text = config(addresses, workers.key, ours.member("gateway"))
    with serving(tmp_path / "gateway", workers=0, config=text) as gateway:
        api = Api(gateway)
        assert ask(gateway, "Hello.")
        wait_until(lambda: workers.log().count("worker listens") == 3, "all three listen", 60)

        def reasons() -> list[str | None]:
            phases = {w["name"]: (w["phase"], w["detail"]) for w in api.get("/workers")["data"]}
            assert [phases[address][0] for address in addresses[1:]] == ["down", "down"], phases
            return [phases[address][1] for address in addresses[1:]]

        wait_until(lambda: "certificate" in (reasons()[0] or ""), "the other authority's worker is refused for it", 60)
        wait_until(lambda: reasons()[1] not in (None, "not connected yet"), "the worker without TLS is refused", 60)
        assert [w["phase"] for w in api.get("/workers")["data"]].count("ready") == 1
        wait_until(lambda: gateway.log().count("worker not reached") >= 2, "the log says so")


def test_files_that_are_wrong_are_named(tmp_path):
    member = Authority(tmp_path / "ca").member("gateway")
    for wrong, why in [
        ({"certificate": member["certificate"]}, "go together"),
        (member | {"ca": tmp_path / "missing.pem"}, "missing.pem"),
    ]:
        path = tmp_path / "penstock.toml"
        path.write_text(config(["tcp://127.0.0.1:9"], member["key"], wrong))
        command = [
            str(binary()),
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--config",
            str(path),
            "--state-dir",
            str(tmp_path / "s"),
        ]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert ended.returncode != 0 and why in ended.stdout + ended.stderr, ended.stderr
