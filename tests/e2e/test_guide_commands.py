"""Every block of commands in the guides: run here as it stands, run by test_guide.py, or listed with the reason why it is not."""

from __future__ import annotations

import contextlib
import re
import shutil

import pytest
import test_guide
from test_admin import Api
from test_guide import PAGES, one, shell

from harness import DEMO_MODEL, ROOT, serving
from providers import OpenAi

# Blocks that test_guide.py runs, by what they hold, and its test.
THERE = {
    ("limits.md", "grep -i ratelimit"): "test_a_key_with_a_budget",
    ("limits.md", "/status"): "test_a_key_with_a_budget",
    ("plugins.md", "penstock check"): "test_a_plugin_by_config",
    ("several-gateways.md", "penstock serve"): "test_several_gateways",
    ("several-gateways.md", "for n in"): "test_several_gateways",
    ("single-sign-on.md", "TOKEN="): "test_single_sign_on",
    ("upgrades.md", "penstock check"): "test_another_config_and_another_version",
    ("upgrades.md", "penstock upgrade"): "test_another_config_and_another_version",
}
WEIGHTS = "serves a checkpoint that is not in the repository"
WASM = "needs a build with the feature wasm, which test_wasm.py is for"
# Blocks that are not run, by what they hold, and why. That their commands and options exist is tested by test_guide.py.
NOT_RUN = {
    (
        "admin.md",
        "penstock serve &",
    ): "a gateway of the default address and folder: all other blocks of the page run against one",
    ("adapters.md", "penstock serve"): WEIGHTS,
    ("adapters.md", "penstock worker"): "a server that goes on; test_adapters.py starts one with an adapter",
    (
        "adapters.md",
        "penstock admin adapters",
    ): "needs folders of adapters: test_adapters_live.py runs the commands with some",
    ("admin.md", "penstock admin adapters add"): "needs the folder of an adapter: test_adapters_live.py has some",
    ("admin.md", "ssh -L"): "needs another machine",
    ("console.md", "ssh -L"): "needs another machine",
    ("agents.md", "penstock serve"): WEIGHTS,
    ("agents.md", "ANTHROPIC_BASE_URL"): "starts a vendor's program; test_anthropic.py uses the vendor's SDK",
    ("install.md", "make package"): "builds for a release; tests/packages makes packages of the build under test",
    ("install.md", "systemd-run"): "needs systemd as the machine's first process",
    ("install.md", "sudo dpkg"): "tests/packages does it in a fresh Debian",
    ("install.md", "penstock completions"): "writes to the home folder; tests/packages runs both commands",
    ("keys.md", "export OPENAI_API_KEY"): "a variable for another program",
    ("limits.md", "export SEARCH_KEY"): "a server that goes on; test_guide.py starts the same file",
    ("machines.md", "penstock worker"): "a server that goes on; test_machines.py starts one with such files",
    ("models.md", "penstock chat"): WEIGHTS,
    ("models.md", "penstock pull Qwen/Qwen3-0.6B-GGUF"): "needs a hub: test_pull.py has one",
    (
        "models.md",
        "penstock pull Qwen/Qwen3-Embedding-0.6B",
    ): "needs a hub: test_pull.py has one, test_vectors.py asks for vectors",
    ("models.md", "penstock models verify"): "needs a pulled model: test_pull.py has one",
    ("models.md", "--kv-format int8"): WEIGHTS,
    ("models.md", "nomic-embed-text-v1.5-GGUF"): "needs a hub: test_pull.py has one",
    ("models.md", "bge-reranker-base"): WEIGHTS,
    ("models.md", "1 of that length at once"): WEIGHTS,
    ("models.md", "--workers 20"): WEIGHTS,
    ("own-servers.md", "vllm serve"): "another program",
    ("prefill-and-decode.md", "penstock worker"): WEIGHTS,
    ("several-gateways.md", "apt-get"): "installs packages of the system; test_guide.py starts both servers",
    (
        "simulate.md",
        "penstock simulate --trace hour.jsonl.gz --rate 1,1.5",
    ): "hours of somebody's own traffic, which take minutes; the tests of penstock-sim simulate shorter ones",
    ("simulate.md", "penstock simulate --replay"): "replays the decisions of somebody's own traffic",
    ("simulate.md", "--record decisions.jsonl"): "replays an hour of somebody's own traffic",
    ("wasm-plugins.md", "cargo build"): WASM,
    ("wasm-plugins.md", "npm install"): WASM,
    ("wasm-plugins.md", "penstock check"): WASM,
    ("wasm-plugins.md", "sha256sum"): WASM,
    ("../../README.md", "make serve"): "builds and serves; `make test` is what CI runs",
}
# Lines of blocks that run, and why they do not.
LINES_NOT_RUN = {
    "penstock serve --config penstock.toml": "the test starts the gateway",
    "penstock admin requests cancel": "needs a request in flight: test_admin.py cancels one",
    "penstock explain chat": "needs a pool with workers: test_route.py explains a choice between two",
    "penstock admin batches cancel": "needs a batch: test_batches.py cancels one",
    "penstock admin files delete": "needs a file: test_batches.py deletes one",
}
# Who has to be made before another block of the page blocks it.
FIRST = {"admin.md": ("penstock admin teams create",)}
# How a block of commands begins; other blocks show files and outputs.
BEGINNINGS = (
    "$ ",
    "penstock ",
    "curl ",
    "head ",
    "openssl ",
    "ssh ",
    "export ",
    "sudo ",
    "vllm ",
    "make ",
    "npm ",
    "cargo ",
) + ("for ", "TOKEN=", "ACME_KEY=")


def command_blocks(page: str) -> list[str]:
    """Fenced and indented blocks of commands, without prompts and what is printed behind them."""
    found, inside, indented = [], None, []
    for line in [*(ROOT / "docs" / "guide" / page).read_text().splitlines(), ""]:
        if line.startswith("```"):
            found += ["\n".join(inside)] if inside is not None else []
            inside = [] if inside is None else None
        elif inside is not None:
            inside.append(line)
        elif line.startswith("    "):
            indented.append(line[4:])
        elif indented:
            found.append("\n".join(indented))
            indented = []
    return [block for block in found if block.startswith(BEGINNINGS)]


def script(block: str) -> str:
    """What is typed: where there are prompts, the lines behind them and those that they go on in."""
    if not block.startswith("$ "):
        return block
    typed, goes_on = [], False
    for line in block.splitlines():
        if line.startswith("$ ") or goes_on:
            typed.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\")
    return "\n".join(typed)


def entries(table, page: str, block: str) -> list:
    return [key for key in table if key[0] == page and key[1] in block]


def runs_here(page: str) -> list[str]:
    found = [block for block in command_blocks(page) if not entries(THERE, page, block) + entries(NOT_RUN, page, block)]
    return sorted(found, key=lambda block: not block.startswith(FIRST.get(page, ("\0",))))


def test_every_entry_is_of_one_block():
    blocks = [(page, block) for page in PAGES for block in command_blocks(page)]
    assert len(blocks) > 30
    for table in (THERE, NOT_RUN):
        for key in table:
            of = [block for page, block in blocks if entries([key], page, block)]
            assert len(of) == 1, f"{key} is of {len(of)} blocks"
    assert all(callable(getattr(test_guide, name)) for name in THERE.values())
    for page, block in blocks:
        assert len(entries(THERE, page, block) + entries(NOT_RUN, page, block)) <= 1, f"{page}:\n{block}"
    assert {page for page in PAGES if runs_here(page)} == set(ROOMS)


@contextlib.contextmanager
def files_alone(tmp_path):
    """Pages that need no gateway."""
    shutil.copy(ROOT / "gateway/cli/src/import/golden/balanced.yaml", tmp_path / "config.yaml")
    yield [("/etc/penstock", str(tmp_path))], {}


@contextlib.contextmanager
def a_gateway(tmp_path):
    """A pool and a provider from the pages, two limits and a team."""
    with OpenAi() as mock:
        mock.models = ("big",)
        pool = one("replicas.md", "toml", 'replicas = "dry_run"').replace("/models/qwen3", str(DEMO_MODEL))
        tier = one("kv-tiers.md", "toml", "kv_disk_path").replace("/var/cache/penstock", str(tmp_path))
        pool += "".join(f"{line}\n" for line in tier.splitlines() if line.startswith("kv_"))
        provider = one("providers.md", "toml", 'id = "acme"').replace("http://127.0.0.1:9000", mock.url)
        ours = '[[limits]]\nid = "standard"\nrequests_per_minute = 600\n[[limits]]\nid = "search-month"\ntokens_per_month = 9_000_000\n'
        ours += '[[plugins]]\nname = "headers"\nid = "team-header"\nsettings = { request = { set = { x-team = "search" } } }\n'
        ours += one("keys.md", "toml", 'limits = ["search-month"]')
        state = f'[server]\nstate_dir = "{tmp_path}/g/state"\n'
        config = state + ours + pool + provider
        with serving(tmp_path / "g", config=config, env={"ACME_KEY": mock.key}, workers=0) as gateway:
            (tmp_path / "penstock.toml").write_text(config)
            env = {"PENSTOCK_CONFIG": str(tmp_path / "penstock.toml"), "ACME_KEY": mock.key}
            env["EDITOR"] = "sed -i s/requests_per_minute.=.600/requests_per_minute=601/"
            version = str(Api(gateway).get("/config")["version"])
            put = [("chat-0", "qwen-0"), ("--expect 4", f"--expect {version}")]
            put += [("rollback 4", f"rollback {version}"), ("localhost:8080", f"127.0.0.1:{gateway.port}")]
            put += [("127.0.0.1:8080", f"127.0.0.1:{gateway.port}")]
            yield put, env


# In their order: once a key has been issued, who has none is refused.
ROOMS = {
    "bench.md": files_alone,
    "fallback.md": files_alone,
    "machines.md": files_alone,
    "providers.md": a_gateway,
    "kv-tiers.md": a_gateway,
    "endpoint-picker.md": a_gateway,
    "own-servers.md": a_gateway,
    "replicas.md": a_gateway,
    "admin.md": a_gateway,
    "keys.md": a_gateway,
}


@pytest.mark.parametrize("room", dict.fromkeys(ROOMS.values()), ids=lambda room: room.__name__)
def test_commands_run_as_they_stand(tmp_path, room):
    with room(tmp_path) as (put, env):
        for page in (page for page, where in ROOMS.items() if where is room):
            for block in runs_here(page):
                text = script(block)
                lines = text.splitlines()
                text = "\n".join(line for line in lines if not any(words in line for words in LINES_NOT_RUN))
                if "key_…" in text:
                    made = shell("penstock keys create --name another 2>&1", tmp_path, env)
                    text = text.replace("key_…", re.search(r"\bkey_[\w-]+", made)[0])
                for written, meant in put:
                    text = text.replace(written, meant)
                said = shell(text, tmp_path, env)
                assert "curl" not in text or ('"choices"' in said or "penstock_" in said), f"{page}: {text}\n{said}"
