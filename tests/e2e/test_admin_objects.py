"""Entries of the config as objects of the admin API, with the real binary: a provider, a model and a limit come, change and go while people's comments in
the file stay."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openai
import pytest
from test_admin import Api, admin

from harness import Gateway, serving, user, wait_until
from providers import OpenAi

CONFIG = """# Ours: ask before changing.
[server]
config_writes = true   # the admin API may write here

# A provider that nobody asks.
[[providers]]
id = "first"
base_url = "http://127.0.0.1:1/v1"   # not there
models = ["nothing"]
headers = { x-secret = "never shown" }

# For everybody.
[[limits]]
id = "all"
for = "everyone"
requests_per_minute = 1_000   # generous
"""


@pytest.fixture
def served(tmp_path):
    with OpenAi() as mock, serving(tmp_path, workers=0, config=CONFIG, env={"SECOND_KEY": mock.key}) as gateway:
        yield gateway, mock


def file_of(gateway: Gateway) -> str:
    return (gateway.folder / "penstock.toml").read_text()


def ask(gateway: Gateway, model: str) -> str:
    answer = gateway.client(max_retries=0).chat.completions.create(model=model, messages=user("Hello"), max_tokens=8)
    return answer.choices[0].message.content


def test_a_provider_and_a_model_come_change_and_go(served):
    gateway, mock = served
    api, url = Api(gateway), "/admin/v1/config"
    first = file_of(gateway)
    start = api.get("/config")["version"]

    provider = {"id": "second", "base_url": f"{mock.url}/v1", "key_env": "SECOND_KEY", "models": ["mock-model"]}
    made = api.client.post(f"{url}/providers", json=provider, params={"note": "a second one"})
    assert made.status_code == 201 and made.json()["entry"]["value"] == provider, made.text
    assert made.json()["config"]["persisted"] is True
    model = {"name": "team/talk", "to": [{"provider": "second", "model": "mock-model"}]}
    made = api.client.put(f"{url}/models/team%2Ftalk", json=model, headers={"if-none-match": "*"})
    assert made.status_code == 201, made.text
    assert ask(gateway, "team/talk")

    # Comments, order and spelling of what was there are there still.
    text = file_of(gateway)
    second, talk = (
        text[text.index('[[providers]]\nid = "second"') : text.index("# For everybody.")],
        text[text.index("\n[[models]]") :],
    )
    assert text == first.replace("# For everybody.", second + "# For everybody.") + talk
    assert "mock-model" in second and "team/talk" in talk

    # A provider that a model names stays, and the refusal says which.
    refused = api.client.delete(f"{url}/providers/second")
    assert refused.status_code == 409 and "team/talk: there is no provider" in refused.text, refused.text
    assert file_of(gateway) == text

    # A limit is patched, and in force with the next request.
    limit = api.client.get(f"{url}/limits/all")
    tag = {"if-match": limit.headers["etag"]}
    patched = api.client.patch(f"{url}/limits/all", json={"requests_per_minute": 0}, headers=tag)
    assert patched.status_code == 200, patched.text
    with pytest.raises(openai.RateLimitError):
        ask(gateway, "team/talk")
    late = api.client.patch(f"{url}/limits/all", json={"requests_per_minute": 9}, headers=tag)
    assert late.status_code == 412 and late.json()["error"]["code"] == "version_mismatch", late.text
    assert file_of(gateway) == text.replace("1_000   # generous", "0   # generous")
    merge = {"content-type": "application/merge-patch+json"}
    body = json.dumps({"requests_per_minute": 1000})
    assert api.client.patch(f"{url}/limits/all", content=body, headers=merge).status_code == 200
    assert ask(gateway, "team/talk")

    for path in ("models/team%2Ftalk", "providers/second"):
        assert api.client.delete(f"{url}/{path}").status_code == 200
    with pytest.raises(openai.NotFoundError):
        ask(gateway, "team/talk")
    assert file_of(gateway) == first.replace("1_000", "1000")

    # Every change is a version, and each can be had back.
    history = api.get("/config/history")["data"]
    notes = [one["note"] for one in history if one["version"] > start and one["outcome"] == "applied"]
    assert notes == [
        "delete providers second",
        "delete models team/talk",
        "update limits all",
        "update limits all",
        "replace models team/talk",
        "a second one",
    ]
    with_both = next(one["version"] for one in history if one["note"] == "replace models team/talk")
    api.client.post(f"{url}/rollback", json={"version": with_both}).raise_for_status()
    assert ask(gateway, "team/talk") and file_of(gateway) == text
    events = api.get("/audit?action=entry.*")["data"]
    assert {"entry.create", "entry.replace", "entry.update", "entry.delete"} == {one["action"] for one in events}
    assert any(one["outcome"] == "failed" and one["target"] == "providers/second" for one in events)


def test_the_command_line_sets_and_deletes(served):
    gateway, mock = served
    first = file_of(gateway)
    told = admin(
        gateway, "providers", "set", "second", f"base_url={mock.url}/v1", "key_env=SECOND_KEY", 'models=["mock-model"]'
    )
    assert "+providers[second]" in told and "is in force" in told, told
    told = admin(gateway, "routes", "set", "talk", 'to=[{"provider": "second", "model": "mock-model"}]')
    assert "+models[talk]" in told and ask(gateway, "talk"), told
    assert "talk" in admin(gateway, "routes") and "second" in admin(gateway, "routes", "show", "talk")
    told = admin(gateway, "models", "set", "talk", "price.input=1", "price.output=2.5", "--note", "dear")
    assert "models[talk].price" in told, told
    shown = json.loads(admin(gateway, "models", "show", "talk", "--keys", "--json"))
    assert shown["value"]["price"] == {"input": 1, "output": 2.5}
    told = admin(gateway, "limits", "set", "all", "in_flight=5", "--unset", "requests_per_minute")
    assert "limits[all].requests_per_minute" in told, told
    assert "never shown" not in admin(gateway, "providers", "show", "first", "--keys")
    assert "is another by now" in admin(gateway, "routes", "delete", "talk", "--expect", '"stale"', check=False)
    assert "there is no provider" in admin(gateway, "providers", "delete", "second", check=False)
    assert "at most" in admin(gateway, "plugins", "set", "x" * 2000, "name=headers", check=False)
    plugin = gateway.folder / "plugin.json"
    plugin.write_text('{"name": "headers", "settings": {"request": {"set": {"x-team": "search"}}}}')
    admin(gateway, "plugins", "set", "team", "--file", str(plugin))
    assert "x-team" in admin(gateway, "plugins", "show", "team")
    for noun, name in (("plugins", "team"), ("routes", "talk"), ("providers", "second")):
        assert f"-{'models' if noun == 'routes' else noun}[{name}]" in admin(gateway, noun, "delete", name)
    admin(gateway, "limits", "set", "all", "requests_per_minute=1000", "--unset", "in_flight")
    # The comment of a key that goes away goes with it; all else is as it was.
    assert file_of(gateway) == first.replace("1_000   # generous", "1000")


def test_the_file_may_be_edited_between(served):
    """A change is made on the text in force, which an editor's change is a moment later."""
    gateway, _ = served
    api, path = Api(gateway), Path(gateway.folder / "penstock.toml")
    path.write_text(file_of(gateway).replace("# For everybody.", "# For everybody, since May."))
    wait_until(lambda: "since May" in api.get("/config")["text"], "the file is taken up")
    done = api.client.patch("/admin/v1/config/limits/all", json={"in_flight": 3})
    assert done.status_code == 200, done.text
    assert "# For everybody, since May." in file_of(gateway) and "in_flight = 3" in file_of(gateway)
    assert httpx.get(f"{gateway.url}/ready", timeout=30).status_code == 200
