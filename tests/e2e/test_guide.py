"""Pages of the guide, done as they say: their configs, their programs, their commands, and what they say comes out."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
from many import Many
from test_examples import mocked
from test_reload import hang_up, models, reloads
from test_reload import path as config_of
from test_upgrade import processes, quick, upgradable

from harness import ROOT, Gateway, binary, free_port, serving, user, wait_until
from issuer import issuing
from providers import OpenAi
from servers import both


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language; an empty one for those without."""
    found, inside = [], None
    for line in (ROOT / "docs" / "guide" / page).read_text().splitlines(keepends=True):
        if not line.startswith("```"):
            if inside is not None:
                inside.append(line)
        elif inside is None:
            inside, said = [], line[3:].strip()
        else:
            found += ["".join(inside)] if said == language else []
            inside = None
    return found


def one(page: str, language: str, holds: str) -> str:
    """The one block that holds these words."""
    found = [block for block in blocks(page, language) if holds in block]
    assert len(found) == 1, f"{page} has {len(found)} {language} blocks with {holds!r}"
    return found[0]


def shell(text: str, folder, env: dict, seconds: int = 120) -> str:
    """What the commands print, in a folder of their own, with this build's program."""
    places = f"{binary().parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        check=False,
        cwd=folder,
        env=os.environ | env | {"PATH": places},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def commands(block: str) -> list[str]:
    """What a block of a terminal has behind its prompts."""
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


def test_a_key_with_a_budget(tmp_path):
    page = "limits.md"
    example = (ROOT / "configs" / "examples" / "limits.toml").read_text()
    assert one(page, "toml", 'id = "budget"') in example, "the page shows the file"
    with mocked(example) as (text, env, _), serving(tmp_path, config=text, env=env, workers=0) as gateway:
        key = {"SEARCH_KEY": "pk-example"}
        for holds in ("grep -i ratelimit", "/status"):
            command, _, shown = one(page, "console", holds).removeprefix("$ ").partition("\nx-")
            command = command.replace("localhost:8080", f"127.0.0.1:{gateway.port}")
            said = [line.strip() for line in shell(command, tmp_path, key).splitlines()]
            assert said, command
            # The names as the page shows them, and what does not change from one request to the next.
            lines = [f"x-{shown}".splitlines(), []][shown == ""]
            names = [line.split(":")[0] for line in lines]
            assert [line.split(":")[0] for line in said if line.startswith("x-")] == names
            assert {line for line in lines if "-limit-" in line} <= set(said)


def test_a_plugin_that_is_a_service_of_ones_own(tmp_path):
    page, port = "plugins.md", free_port()
    program = tmp_path / "hook.py"
    program.write_text(one(page, "python", "class Hook").replace("9000", str(port)))
    env = {"HOOK_SECRET": "hunter2", "KEY_INTERNS": "pk-interns", "KEY_STAFF": "pk-staff", "KEY_UP": ""}
    with OpenAi() as mock, open(tmp_path / "hook.log", "wb") as log:
        mock.models = ("chat",)
        env["KEY_UP"] = mock.key
        config = one(page, "toml", 'name = "http_hook"').replace("9000", str(port))
        config += '[[keys]]\nid = "interns"\nkey_env = "KEY_INTERNS"\n[[keys]]\nid = "staff"\nkey_env = "KEY_STAFF"\n'
        config += f'[[providers]]\nid = "up"\nbase_url = "{mock.url}/v1"\nkey_env = "KEY_UP"\nmodels = ["chat"]\n'
        hook = subprocess.Popen([sys.executable, program], env=os.environ | env, stdout=log, stderr=log)
        try:
            with serving(tmp_path / "g", config=config, env=env, workers=0) as gateway:

                def ask(key: str, choices: int) -> httpx.Response:
                    body = {"model": "chat", "messages": user("Hello"), "n": choices}
                    headers = {"authorization": f"Bearer {key}"}
                    url = f"{gateway.url}/v1/chat/completions"
                    return httpx.post(url, json=body, headers=headers, timeout=30)

                wait_until(lambda: ask("pk-staff", 1).status_code == 200, "the service answers", 30)
                assert ask("pk-interns", 1).status_code == 200 and ask("pk-staff", 2).status_code == 200
                refused = ask("pk-interns", 2)
                assert refused.status_code == 403 and "One answer at a time." in refused.text
                hook.terminate()
                hook.wait(10)
                assert ask("pk-staff", 1).status_code == 500, "on_fail is closed"
        finally:
            hook.kill()
            hook.wait()


def test_a_plugin_by_config(tmp_path):
    config = one("plugins.md", "toml", 'name = "pii"')
    with OpenAi() as mock:
        mock.models = ("chat",)
        config += f'[[providers]]\nid = "up"\nbase_url = "{mock.url}/v1"\nkey_env = "KEY_UP"\nmodels = ["chat"]\n'
        (tmp_path / "penstock.toml").write_text(config)
        checks = next(line for line in one("plugins.md", "console", "penstock check").splitlines() if "check" in line)
        shell(checks.removeprefix("$ "), tmp_path, {"KEY_UP": mock.key})
        with serving(tmp_path / "g", config=config, env={"KEY_UP": mock.key}, workers=0) as gateway:
            answer = gateway.client().chat.completions.create(
                model="chat", messages=user("Repeat: mail ann@example.com")
            )
            assert answer.choices[0].message.content == "mail ann@example.com"
            assert b"[EMAIL_1]" in mock.last.raw and b"ann@" not in mock.last.raw


@pytest.fixture(scope="module")
def servers():
    with both() as servers:
        yield servers


def test_several_gateways(tmp_path, servers):
    """Two of them with the page's config, and its loop: ten requests a minute, whichever is asked."""
    page = "several-gateways.md"
    postgres, redis = servers
    env = {"PENSTOCK_STORE_URL": postgres.url, "PENSTOCK_COUNTERS_URL": redis.url, "TEAM_A_KEY": "pk-team-a"}
    env["PENSTOCK_PEPPER"] = "0123456789abcdef" * 4
    config = one(page, "toml", "# gateways.toml")
    names = re.findall(r'_env = "(\w+)"', config)
    assert sorted(names) == sorted(env), "the page exports what its config names"
    assert all(name in one(page, "sh", "penstock serve") for name in names)
    with contextlib.ExitStack() as stack:
        gateways = [Gateway(tmp_path / name, "--admin", "off", config=config, env=env) for name in ("one", "two")]
        for gateway in gateways:
            gateway.start()
            stack.callback(gateway.stop)
        loop = one(page, "sh", "for n in").replace("8080", str(gateways[0].port)).replace("8090", str(gateways[1].port))

        def begins_a_minute() -> bool:
            return int(subprocess.run(["date", "+%S"], check=True, capture_output=True, text=True).stdout) < 30

        # The loop takes some seconds of one minute.
        wait_until(begins_a_minute, "a minute with time left", 40, 0.2)
        said = shell(loop, tmp_path, env).split()
        shown = next(block for block in blocks(page, "") if block.startswith("200 ")).split()
        assert (len(said), said[:9]) == (len(shown), shown[:9])
        assert said.count("200") == shown.count("200") and set(said) == set(shown)


APP = """
from openai import OpenAI
messages = [{"role": "user", "content": "Repeat: signed in"}]
print(OpenAI().chat.completions.create(model="chat-small", messages=messages).choices[0].message.content)
"""


def test_single_sign_on(tmp_path):
    """The page's token, fetched as it says and used by a program; then its teams: who is in which, and what they may."""
    page, elsewhere = "single-sign-on.md", "https://sso.example.com/realms/main"
    (tmp_path / "app.py").write_text(APP)
    first, teams = blocks(page, "toml")
    with issuing(tmp_path) as issuer, OpenAi() as mock:
        mock.models = ("chat-small", "chat-large", "embed")
        secret, _ = issuer.clients["search"]
        provider = f'[[providers]]\nid = "up"\nbase_url = "{mock.url}/v1"\nkey_env = "KEY_UP"\n'
        provider += 'models = ["chat-small", "chat-large", "embed"]\n'
        options = {"env": {"KEY_UP": mock.key}, "workers": 0}

        with serving(tmp_path / "one", config=first.replace(elsewhere, issuer.url) + provider, **options) as gateway:
            env = {"OPENAI_BASE_URL": f"{gateway.url}/v1", "CLIENT_SECRET": secret}
            assert shell(one(page, "sh", "TOKEN=").replace(elsewhere, issuer.url), tmp_path, env) == "signed in\n"
            with pytest.raises(openai.AuthenticationError):
                gateway.client(api_key=issuer.token("ada", aud="another")).models.list()

        with serving(tmp_path / "two", config=teams.replace(elsewhere, issuer.url) + provider, **options) as gateway:

            def listed(*groups: str, verified: object = True) -> list[str] | str:
                claims = {"groups": list(groups), "email": "ada@example.com", "email_verified": verified}
                try:
                    cards = gateway.client(api_key=issuer.token("ada", **claims)).models.list()
                    return sorted(card.id for card in cards)
                except openai.AuthenticationError as error:
                    return error.message

            assert listed("/guests", "/engineering/search") == ["chat-large", "chat-small"]
            assert listed("/sales", "/engineering/search") == ["chat-small"], "the first that is a team counts"
            assert "team" in listed("/guests")
            assert "email_verified" in listed("/sales", verified=False)
            claims = {"groups": ["/engineering/search"], "email": "ada@example.com", "email_verified": True}
            client = gateway.client(api_key=issuer.token("ada", **claims))
            answer = client.chat.completions.with_raw_response.create(model="chat-large", messages=user("Hello"))
            assert int(answer.headers["x-ratelimit-limit-tokens"]) == 50_000_000, "the team's limit"


def test_another_config_and_another_version(tmp_path):
    """The page's commands, with a stream that notices none of them."""
    page = "upgrades.md"
    check, reload = commands(one(page, "console", "penstock check"))
    upgrade = one(page, "console", "penstock upgrade")
    with Many() as many:
        many.models = ["m", "n"]
        config = quick(many).replace("[server]", f'[server]\nstate_dir = "{tmp_path}/g/state"')
        with upgradable(tmp_path / "g", workers=0, config=config) as gateway:
            many.begin(gateway.port, 3)
            file = config_of(gateway)

            def said(command: str) -> str:
                command = command.replace("/etc/penstock.toml", str(file))
                return shell(command + " 2>&1", tmp_path, {"PENSTOCK_CONFIG": str(file)})

            file.write_text(config.replace('models = ["m"]', 'models = ["m", "n"]'))
            assert "n" in said(check)
            said(reload)
            wait_until(lambda: models(gateway) == ["m", "n"], "the new config", 30)
            wait_until(lambda: "config in force" in gateway.log(), "the log says so")
            file.write_text(config.replace("base_url", "base_ulr"))
            # A reload that is refused ends with status 1 and says why; this file is read by SIGHUP.
            hang_up(gateway)
            wait_until(lambda: gateway.metric("penstock_config_last_reload_ok") == 0, "what is wrong is noticed", 30)
            wait_until(lambda: "base_ulr" in gateway.log(), "the log names it")
            assert models(gateway) == ["m", "n"]
            file.write_text(config)

            (command,), shown = commands(upgrade), upgrade.splitlines()[1:]
            lines = said(command).splitlines()
            assert [re.sub(r"\d+", "4711", line) for line in lines] == shown
            wait_until(lambda: models(gateway) == ["m"], "the new process has the file", 30)
            assert str(processes(gateway)[-1]) in lines[-1]
            ended = [outcome for outcome in many.end() if outcome.words]
            assert len(ended) == 3 and all(outcome.complete for outcome in ended), ended


def test_a_service_of_systemd(tmp_path):
    """The unit's commands, as systemd runs them, and what they tell it."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(one("upgrades.md", "ini", "ExecStart"))
    service, port, file = unit["Service"], free_port(), tmp_path / "penstock.toml"
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "all"), "another process than the first will tell"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, OpenAi() as mock:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        mock.models = ("m",)
        file.write_text(f"""[server]
listen = "127.0.0.1:{port}"
state_dir = "{tmp_path}/state"
watch = false
[admin]
listen = "127.0.0.1:{free_port()}"
[[providers]]
id = "up"
base_url = "{mock.url}/v1"
models = ["m"]
""")
        start, reload = (
            service[name].replace("/etc/penstock.toml", str(file)).replace("/usr/bin/penstock", str(binary()))
            for name in ("ExecStart", "ExecReload")
        )
        env = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen(shlex.split(start), env=env, stdout=log, stderr=log)
        try:
            assert manager.recv(1024).decode() == f"READY=1\nMAINPID={process.pid}"
            gateway = Gateway(tmp_path)
            gateway.url = f"http://127.0.0.1:{port}"
            file.write_text(file.read_text().replace('["m"]', '["m", "n"]'))
            shell(reload, tmp_path, {"MAINPID": str(process.pid)})
            wait_until(lambda: reloads(gateway, "applied") == 1, "the config is read again", 30)
            assert models(gateway) == ["m", "n"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(int(service["TimeoutStopSec"])) == 0
        finally:
            process.kill()
            process.wait()


# What a shell puts between commands, and redirections.
BETWEEN = re.compile(r"&&|\|\||[|;&)]|\$\(|`")
PAGES = sorted(path.name for path in (ROOT / "docs" / "guide").glob("*.md")) + ["../../README.md"]


def typed(page: str) -> list[list[str]]:
    """Every command line of our program on a page: in fenced blocks, in indented ones, and between backticks."""
    found, fence = [], False
    text = (ROOT / "docs" / "guide" / page).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fence = not fence
        is_block = fence or line.startswith("    ")
        for part in BETWEEN.split(line) if is_block else re.findall(r"`(penstock [^`]+)`", line):
            words = re.sub(r"^\s*(\$ )?(\w+=\S* )*", "", part)
            if words.startswith("penstock "):
                words = re.split(r" \d?[<>]", words)[0]
                found.append(shlex.split(words, comments=True)[1:])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_every_page_exists(page):
    """With `--help` behind them: subcommands, options and their values are read, and nothing is done."""
    for words in typed(page):
        done = subprocess.run(
            [str(binary()), *words, "--help"], check=False, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{page}: penstock {shlex.join(words)}\n{done.stderr}"


def test_commands_are_found_in_pages():
    assert ["admin", "config", "reload"] in typed("upgrades.md")
    assert sum(len(typed(page)) for page in PAGES) > 60
