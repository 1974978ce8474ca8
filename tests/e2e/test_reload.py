"""Another config, and other plugins, come into force while a thousand streams run: none is cut, nobody is refused, nothing is kept."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest
from many import Many, Steady
from test_memory import memory

from harness import Gateway, held, holding, serving, text_of, user, wait_until

STREAMS = 1000


@pytest.fixture(autouse=True)
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def config(url: str, more: str = "", server: str = "", provider: str = "") -> str:
    return f"""[server]
grace_ms = 1000
{server}
[log]
access = "off"
[[providers]]
id = "talker"
base_url = "{url}/v1"
models = ["m"]
{provider}
{more}
"""


def path(gateway: Gateway) -> Path:
    return gateway.folder / "penstock.toml"


def hang_up(gateway: Gateway) -> None:
    gateway.process.send_signal(signal.SIGHUP)


def reloads(gateway: Gateway, outcome: str) -> int:
    for line in httpx.get(f"{gateway.url}/metrics", timeout=30).text.splitlines():
        if line.startswith(f'penstock_config_reloads_total{{outcome="{outcome}"}}'):
            return int(float(line.split()[-1]))
    raise AssertionError("no reloads in the metrics")


def models(gateway: Gateway) -> list[str]:
    return [card["id"] for card in httpx.get(f"{gateway.url}/v1/models", timeout=30).json()["data"]]


def reload(gateway: Gateway, text: str, outcome: str = "applied") -> None:
    """Writes the file, sends SIGHUP, waits for what becomes of it."""
    before = reloads(gateway, outcome)
    path(gateway).write_text(text)
    hang_up(gateway)
    wait_until(lambda: reloads(gateway, outcome) > before, f"the reload is {outcome}")


def talk(gateway: Gateway, model: str) -> httpx.Response:
    body = {"model": model, "messages": user("hi")}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)


def plugins(name: str) -> str:
    """One that sees heads and one that sees every event of every stream, and cuts its text elsewhere; both know the name."""
    return f"""[[plugins]]
name = "headers"
settings = {{ response = {{ set = {{ "x-wave" = "{name}" }} }} }}
[[plugins]]
name = "guard"
[[plugins.settings.rules]]
name = "words"
words = ["not {name}"]
action = "mask"
"""


def wave(many: Many, gateway: Gateway, name: str, streams: int) -> int:
    """Streams, fifty reloads beside new requests, the end of the streams; the memory after it."""
    many.begin(gateway.port, streams)
    began = time.monotonic()
    with Steady(many, gateway.port, 40) as steady:
        for at in range(50):
            # Models, limits, providers, plugins: everything is another each time.
            names = (f"{name}{at}-{number}" for number in range(60))
            more = "".join(
                f'[[models]]\nname = "{one}"\nto = [{{ provider = "talker", model = "m" }}]\n' for one in names
            )
            more += plugins(f"{name}{at}")
            provider = f"idle_timeout_ms = {60000 + at}\nin_flight_max = {5000 + at}"
            reload(gateway, config(many.url, more, f"watch = false\nbody_bytes_max = {1 << 20 | at}", provider))
            answer = talk(gateway, f"{name}{at}-7")
            assert answer.status_code == 200 and answer.headers["x-wave"] == f"{name}{at}", answer.headers
    seconds = time.monotonic() - began
    assert steady.failures() == [], steady.failures()[:3]
    assert models(gateway)[0] == f"{name}49-0" and len(models(gateway)) == 61
    ended = [outcome for outcome in many.end() if outcome.words]
    assert len(ended) == streams and all(one.complete for one in ended), [one for one in ended if not one.complete][:3]
    wait_until(lambda: gateway.metric("penstock_connections") <= 2, "all connections gone")
    print(f"50 reloads in {seconds:.1f} s under {streams} streams, {len(steady.results)} requests beside")
    return memory(gateway.process.pid)


def test_fifty_reloads_under_a_thousand_streams(tmp_path):
    with (
        Many(pace=2.0) as many,
        serving(tmp_path, workers=0, config=config(many.url, server="watch = false")) as gateway,
    ):
        # The first waves pay what is paid once: the history of configs, the allocator's pages. Fifty configs that were kept would be
        # some 6 MB more each time.
        after = [wave(many, gateway, "a", STREAMS)]
        while len(after) < 2 or after[-1] - after[-2] > 2e6:
            assert len(after) < 5, f"memory grows with every 50 reloads: {after}"
            after.append(wave(many, gateway, "abcdef"[len(after)], STREAMS))
        print(f"memory after each wave: {after}")


def test_a_bad_config_under_load_changes_nothing(tmp_path):
    good = '[[models]]\nname = "good"\nto = [{ provider = "talker", model = "m" }]\n'
    with (
        Many(pace=0.05) as many,
        serving(tmp_path, workers=0, config=config(many.url, good, "watch = false")) as gateway,
    ):
        many.begin(gateway.port, 50)
        listed = models(gateway)
        bad = [
            "[server\n",
            config(many.url, good + '[[models]]\nname = "good"\nto = [{ provider = "nobody", model = "m" }]\n'),
            config(
                many.url,
                good + '[[providers]]\nid = "far"\nbase_url = "https://127.0.0.1:1"\nca_file = "/nowhere/ca.pem"\n',
            ),
            config(many.url, good, provider='key_env = "UNSET_IN_THIS_TEST"'),
            config(many.url, good, server="head_timeout_ms = -1\nhead_bytes_max = 7\nlisten = 5"),
            config(many.url, good + '[[pools]]\nid = "own"\nmodel = "/nowhere/model"\n'),
        ]
        with Steady(many, gateway.port, 40, "good") as steady:
            for text in bad:
                reload(gateway, text, "refused")
                assert models(gateway) == listed
                assert gateway.metric("penstock_config_last_reload_ok") == 0
        assert steady.failures() == [], steady.failures()[:3]
        log = gateway.log()
        # All faults of a file, not the first.
        for words in (
            "server.head_timeout_ms",
            "server.head_bytes_max",
            "server.listen",
            "nobody",
            "/nowhere/ca.pem",
            "UNSET_IN_THIS_TEST",
            "/nowhere/model",
        ):
            assert words in log, words
        assert gateway.metric("penstock_config_version") == 1
        reload(gateway, config(many.url, good + good.replace("good", "better"), "watch = false"))
        assert gateway.metric("penstock_config_last_reload_ok") == 1
        assert "better" in models(gateway)
        assert all(outcome.complete for outcome in many.end())


def test_what_cannot_change_is_named_and_the_rest_applies(tmp_path):
    with Many() as many, serving(tmp_path, workers=0, config=config(many.url, server="watch = false")) as gateway:
        server = 'watch = false\nthreads = 3\nunix = "/nowhere/else.sock"\nexplain = true\n'
        more = '[[models]]\nname = "new"\nto = [{ provider = "talker", model = "m" }]\n[store]\npath = "/nowhere/else.db"\n'
        reload(gateway, config(many.url, more, server))
        assert "new" in models(gateway)
        assert gateway.metric("penstock_config_keys_pending") == 3
        assert 'keys="server.unix server.threads store.path"' in gateway.log()
        body = {"model": "new", "messages": user("hi")}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.headers["x-penstock-target"] == "talker/m"
        # The log level follows.
        reload(
            gateway,
            config(many.url, server="watch = false\nexplain = true").replace(
                'access = "off"', 'access = "off"\nlevel = "error"'
            ),
        )
        length = len(gateway.log())
        reload(
            gateway,
            config(many.url, more, "watch = false").replace('access = "off"', 'access = "off"\nlevel = "error"'),
        )
        assert "config in force" not in gateway.log()[length:]


def test_a_storm_of_signals(tmp_path):
    with Many() as many, serving(tmp_path, workers=0, config=config(many.url, server="watch = false")) as gateway:
        many.begin(gateway.port, 50)
        with Steady(many, gateway.port, 40) as steady:
            for _ in range(500):
                hang_up(gateway)
            text = config(
                many.url, '[[models]]\nname = "last"\nto = [{ provider = "talker", model = "m" }]\n', "watch = false"
            )
            # At once, as an editor does: a signal still on its way shall not find half of it.
            whole = path(gateway).with_suffix(".new")
            whole.write_text(text)
            whole.replace(path(gateway))
            hang_up(gateway)
            wait_until(lambda: "last" in models(gateway), "what was written before the last signal is in force")
        assert steady.failures() == []
        assert all(outcome.complete for outcome in many.end())


def named(many: Many, name: str) -> str:
    return config(many.url, f'[[models]]\nname = "{name}"\nto = [{{ provider = "talker", model = "m" }}]\n')


def in_force(gateway: Gateway, name: str) -> None:
    wait_until(lambda: name in models(gateway), f"{name} is in force")


def test_the_file_is_watched(tmp_path):
    """However it changes: written in place, slowly, replaced by an editor, by a ConfigMap's links, gone for a while."""
    with Many() as many, serving(tmp_path, workers=0, config=config(many.url)) as gateway:
        file = path(gateway)
        file.write_text(named(many, "in-place"))
        in_force(gateway, "in-place")

        # An editor writes beside it and renames.
        (tmp_path / ".penstock.toml.swp").write_text(named(many, "renamed"))
        os.replace(tmp_path / ".penstock.toml.swp", file)
        in_force(gateway, "renamed")

        # Half a file that would be a valid config is not taken while its writer has it open.
        half = named(many, "half")
        with open(file, "w") as writer:
            writer.write(half)
            writer.flush()
            time.sleep(1)
            assert "half" not in models(gateway) and "renamed" in models(gateway)
            writer.write('[[models]]\nname = "slow"\nto = [{ provider = "talker", model = "m" }]\n')
        in_force(gateway, "slow")
        assert "half" in models(gateway)

        # Gone, and empty: what runs goes on.
        file.unlink()
        hang_up(gateway)
        wait_until(lambda: reloads(gateway, "refused") == 1, "a file that is gone is refused")
        file.write_text("")
        time.sleep(1)
        assert "slow" in models(gateway)
        file.write_text(named(many, "back"))
        in_force(gateway, "back")


def test_a_config_map_is_watched(tmp_path):
    """`penstock.toml` → `..data/penstock.toml`, `..data` → a folder with the time of its writing; the middle link is replaced."""
    mount = tmp_path / "mount"
    with Many() as many:

        def write(name: str, text: str):
            (mount / name).mkdir(parents=True)
            (mount / name / "penstock.toml").write_text(text)
            (mount / "..data_tmp").symlink_to(name)
            os.replace(mount / "..data_tmp", mount / "..data")

        write("..2026_01", named(many, "one"))
        (mount / "penstock.toml").symlink_to("..data/penstock.toml")
        with serving(tmp_path, "--config", str(mount / "penstock.toml"), workers=0) as gateway:
            assert "one" in models(gateway)
            for at, name in enumerate(["two", "three"], 2):
                write(f"..2026_0{at}", named(many, name))
                in_force(gateway, name)


def test_breakers_and_connections_of_what_is_unchanged_go_on(tmp_path):
    more = '[[models]]\nname = "pair"\nto = [{ provider = "dead", model = "d" }, { provider = "talker", model = "m" }]\npolicy = "order"\n'
    dead = '[[providers]]\nid = "dead"\nbase_url = "http://127.0.0.1:1/v1"\nmodels = ["d"]\n'
    with Many() as many, serving(tmp_path, workers=0, config=config(many.url, more + dead, "watch = false")) as gateway:

        def state() -> str:
            text = httpx.get(f"{gateway.url}/metrics", timeout=30).text
            return next(
                line for line in text.splitlines() if line.startswith('penstock_target_state{target="dead/d"}')
            )[-1]

        def is_open() -> bool:
            assert talk(gateway, "pair").status_code == 200
            return state() == "3"

        wait_until(is_open, "the breaker of the dead provider opens")
        reload(gateway, config(many.url, more + dead + more.replace("pair", "other"), "watch = false"))
        # After a second the next request would be a probe.
        assert state() in "31", "the breaker is still open"
        # Another address is another provider: nothing is known of it.
        reload(gateway, config(many.url, more + dead.replace(":1/", ":2/"), "watch = false"))
        assert state() == "0"


DEMO = "penstock-demo"


def own(folder: Path, more: str) -> str:
    return f'[server]\nwatch = false\ngrace_ms = 1000\n{holding(folder)}[log]\naccess = "off"\n{more}'


def pool(name: str, more: str = "") -> str:
    return f'[[pools]]\nid = "{name}"\nthreads = 1\n{more}\n'


def test_pools_come_change_and_go(tmp_path):
    with serving(tmp_path, workers=0, config=own(tmp_path, pool(DEMO))) as gateway:
        first = gateway.worker_pids()
        asked = {
            "messages": user("Count from 1 to 30."),
            "max_tokens": 400,
            "extra_body": {"ignore_eos": True},
            "seed": 1,
        }
        client = gateway.client()
        whole = client.chat.completions.create(model=DEMO, **asked).choices[0].message.content
        with held(gateway, model=DEMO, **asked) as stream:
            text = text_of([next(stream), next(stream)])

            # What is the gateway's alone changes without another worker.
            reload(gateway, own(tmp_path, pool(DEMO, "queue_max = 7")))
            assert gateway.worker_pids() == first

            # Another worker takes the place of the old one when it is ready; the stream stays where it is.
            reload(gateway, own(tmp_path, pool(DEMO, "sequences_max = 5") + pool("more")))
            answers = "changed pool answers from now on"
            wait_until(lambda: gateway.log().count(answers) == 2, "the new worker is ready", 90)
            assert client.chat.completions.create(model=DEMO, **asked).choices[0].message.content == whole
            wait_until(
                lambda: client.chat.completions.create(model="more", **asked).choices[0].message.content == whole,
                "the new pool answers",
            )
            assert set(first) < set(gateway.worker_pids()), "the stream runs"
            text += text_of(stream)
        assert text == whole
        wait_until(lambda: not set(first) & set(gateway.worker_pids()), "the old worker ends after its stream")
        assert len(gateway.worker_pids()) == 2

        # A pool that is taken out ends its streams first.
        with held(gateway, model="more", **asked) as stream:
            text = text_of([next(stream), next(stream)])
            reload(gateway, own(tmp_path, pool(DEMO, "sequences_max = 5")))
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="more", **asked)
            assert len(gateway.worker_pids()) == 2, "the stream runs"
            text += text_of(stream)
        assert text == whole
        wait_until(lambda: len(gateway.worker_pids()) == 1, "its worker ends")


def certificate(folder: Path, name: str) -> None:
    """A pair of its own making, in place of the last one."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        + ["-keyout", folder / "new.key", "-out", folder / "new.cert", "-subj", f"/CN={name}"],
        check=True,
        capture_output=True,
    )
    os.replace(folder / "new.key", folder / "tls.key")
    os.replace(folder / "new.cert", folder / "tls.cert")


def shown(port: int) -> str:
    """The certificate that is shown to a new connection."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=20)


def test_a_renewed_certificate_is_used(tmp_path):
    certificate(tmp_path, "one")
    tls = f'[server.tls]\ncertificate = "{tmp_path}/tls.cert"\nkey = "{tmp_path}/tls.key"\n'
    gateway = Gateway(tmp_path, workers=0, config=config("http://127.0.0.1:1", tls, "watch = false"))
    gateway.start(ready=False)
    try:
        with contextlib.suppress(OSError):
            wait_until(lambda: gateway.log_path.exists() and "serves" in gateway.log(), "it listens", 60)
        first = shown(gateway.port)
        # Half of a pair, and nonsense: what is in use stays.
        good = (tmp_path / "tls.key").read_text()
        (tmp_path / "tls.key").write_text("nonsense")
        hang_up(gateway)
        wait_until(lambda: "the one in use stays" in gateway.log(), "the pair is refused")
        assert shown(gateway.port) == first
        (tmp_path / "tls.key").write_text(good)
        certificate(tmp_path, "two")
        hang_up(gateway)
        wait_until(lambda: shown(gateway.port) != first, "the new one is shown")
    finally:
        gateway.stop()
