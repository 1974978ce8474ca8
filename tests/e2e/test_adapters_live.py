"""Adapters come and go while the gateway and its workers run: by the admin API, the command line and the file, in the same worker processes."""

import json
import os
import signal
from pathlib import Path

import adapter_files
import openai
import pytest
from test_adapters import BASE, NAMES, answer, flags
from test_admin import Api, admin
from test_faults import Busy, disturbed, undisturbed
from test_reload import models, reload

from harness import Gateway, holding, serving, wait_until

CONFIG = """# Ours: ask before changing.
[server]
config_writes = true   # the admin API may write here
{server}
# The one model.
[[pools]]
id = "penstock-demo"   # its name
"""
ADAPTERS = "/admin/v1/pools/penstock-demo/adapters"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """PEFT folders of two adapters, by name."""
    place = tmp_path_factory.mktemp("adapters")
    return {name: adapter_files.folder(place / name, seed) for seed, name in enumerate(NAMES[1:])}


@pytest.fixture(scope="module")
def want(tmp_path_factory, folders) -> dict[str, tuple]:
    """Answers of a gateway that has both adapters from the start."""
    with serving(tmp_path_factory.mktemp("want"), *flags(folders)) as gateway:
        return {name: answer(gateway, name)[:2] for name in NAMES}


def file_of(gateway: Gateway) -> str:
    return (gateway.folder / "penstock.toml").read_text()


def config(folder: Path, more: str = "") -> str:
    return CONFIG.format(server=holding(folder)) + more


def add(api: Api, name: str, path: Path) -> None:
    made = api.client.post(ADAPTERS, json={"name": name, "path": str(path)})
    assert made.status_code == 201, made.text
    wait_until(lambda: state(api, name) == "ready", "the worker has the adapter")


def state(api: Api, name: str) -> str:
    return api.get(f"/pools/penstock-demo/adapters/{name}")["state"]


def refused(gateway: Gateway, model: str) -> int:
    """Status with which a request for the model is refused."""
    with pytest.raises(openai.APIStatusError) as error:
        answer_once(gateway, model)
    return error.value.status_code


def answer_once(gateway: Gateway, model: str) -> tuple:
    asked = {"messages": [{"role": "user", "content": "Count from 1 to 12."}], "max_tokens": 2}
    return gateway.client(max_retries=0).chat.completions.create(model=model, **asked)


def worker(api: Api) -> dict:
    [worker] = api.get("/workers")["data"]
    return worker


def test_one_comes_and_goes_while_a_stream_of_the_base_runs(tmp_path, folders, want):
    with serving(tmp_path, config=config(tmp_path)) as gateway:
        api, [pid] = Api(gateway), gateway.worker_pids()
        story = undisturbed(gateway, BASE, temperature=0)
        first = file_of(gateway)
        assert refused(gateway, "sql") == 404

        def come():
            add(api, "sql", folders["sql"])
            assert answer(gateway, "sql")[:2] == want["sql"]

        assert disturbed(gateway, BASE, come, temperature=0) == story, "the stream went on as if nothing had been"
        assert gateway.worker_pids() == [pid] and models(gateway) == [BASE, "sql"]
        assert answer(gateway, BASE)[:2] == want[BASE]
        assert gateway.metric("penstock_adapter_workers") == 1

        # Comments, order and spelling of the file are there still.
        added = [line for line in file_of(gateway).splitlines() if line not in first.splitlines()]
        assert all(line in file_of(gateway) for line in first.splitlines()) and str(folders["sql"]) in "".join(added)
        one = api.client.get(f"{ADAPTERS}/sql")
        shown = one.json()
        assert (shown["path"], shown["workers_ready"], shown["workers"]) == (str(folders["sql"]), 1, 1), shown
        again = api.client.post(ADAPTERS, json={"name": "sql", "path": str(folders["poem"])})
        assert again.status_code == 409, again.text
        stale = api.client.delete(f"{ADAPTERS}/sql", headers={"if-match": '"another"'})
        assert stale.status_code == 412, stale.text
        assert worker(api)["adapters"] == ["sql"] and worker(api)["adapters_pending"] == []

        def go():
            gone = api.client.delete(f"{ADAPTERS}/sql", headers={"if-match": one.headers["etag"]})
            assert gone.status_code == 200 and gone.json()["adapter"] is None, gone.text
            assert refused(gateway, "sql") == 404

        own = undisturbed(gateway, "sql", temperature=0)
        assert own != story
        assert disturbed(gateway, "sql", go, temperature=0) == own, "its open stream ends with it"
        wait_until(lambda: "adapters unloaded" in worker_log(gateway), "its memory is free")
        assert gateway.worker_pids() == [pid] and worker(api)["adapters"] == []
        assert answer(gateway, BASE)[:2] == want[BASE]
        assert api.client.delete(f"{ADAPTERS}/sql").status_code == 404
        events = api.get("/audit?action=adapter.*&outcome=done")["data"]
        assert [(event["action"], event["target"]) for event in events] == [
            ("adapter.delete", "pools/penstock-demo/adapters/sql"),
            ("adapter.create", "pools/penstock-demo/adapters/sql"),
        ]
        # The version before is applied again as any other.
        version = api.get("/config/history")["data"][1]["version"]
        admin(gateway, "config", "rollback", str(version))
        wait_until(lambda: state(api, "sql") == "ready", "it is back")
        assert answer(gateway, "sql")[:2] == want["sql"] and gateway.worker_pids() == [pid]


def worker_log(gateway: Gateway) -> str:
    return "".join(path.read_text() for path in gateway.state.glob("*.log"))


def test_a_stream_with_a_removed_adapter_survives_its_worker(tmp_path, folders):
    with serving(tmp_path, config=config(tmp_path)) as gateway:
        api = Api(gateway)
        add(api, "sql", folders["sql"])
        own = undisturbed(gateway, "sql", temperature=0)
        busy = Busy(gateway)

        def go():
            api.client.delete(f"{ADAPTERS}/sql").raise_for_status()
            busy.kill()

        assert disturbed(gateway, "sql", go, temperature=0) == own
        assert gateway.metric("penstock_resumes_total") == 1
        wait_until(lambda: worker(api)["adapters"] == [], "the new worker lets go of it too")


def test_a_damaged_folder_is_refused_and_changes_nothing(tmp_path, folders, want):
    broken = adapter_files.folder(tmp_path / "broken", 7)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with serving(tmp_path, config=config(tmp_path)) as gateway:
        api, [pid], first = Api(gateway), gateway.worker_pids(), file_of(gateway)
        for path, named in ((broken, "adapter_model.safetensors"), (tmp_path / "nothing", "nothing")):
            made = api.client.post(ADAPTERS, json={"name": "sql", "path": str(path)})
            assert made.status_code >= 400 and 'adapter \\"sql\\"' in made.text and named in made.text, made.text
        taken = api.client.post(ADAPTERS, json={"name": BASE, "path": str(folders["sql"])})
        assert taken.status_code == 400 and "is the name of another pool or adapter" in taken.text, taken.text
        assert api.client.post("/admin/v1/pools/none/adapters", json={"name": "a", "path": "/a"}).status_code == 404
        assert file_of(gateway) == first and gateway.worker_pids() == [pid] and models(gateway) == [BASE]
        assert answer(gateway, BASE)[:2] == want[BASE]


def killed(gateway: Gateway) -> None:
    """Kills the only worker and waits for the next one."""
    [pid] = gateway.worker_pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gateway.worker_pids() not in ([], [pid]), "a new process", 90)
    wait_until(lambda: gateway.metric("penstock_workers_ready") == 1, "it is ready", 90)


def test_a_worker_that_is_started_anew_has_the_list_in_force(tmp_path, folders, want):
    own = adapter_files.folder(tmp_path / "own", 0)
    with serving(tmp_path, config=config(tmp_path)) as gateway:
        api = Api(gateway)
        add(api, "sql", own)
        add(api, "poem", folders["poem"])
        killed(gateway)
        assert {name: answer(gateway, name)[:2] for name in NAMES} == want
        # One that cannot be read any more is missing alone, with its reason, and comes back with the next reload.
        weights = own / "adapter_model.safetensors"
        weights.rename(own / "aside")
        killed(gateway)
        assert {name: answer(gateway, name)[:2] for name in (BASE, "poem")} == {
            name: want[name] for name in (BASE, "poem")
        }
        assert refused(gateway, "sql") == 503
        [pending] = worker(api)["adapters_pending"]
        assert pending["name"] == "sql" and "adapter_model.safetensors" in pending["reason"], pending
        shown = api.get("/pools/penstock-demo/adapters/sql")
        assert (shown["state"], shown["workers_ready"]) == ("failed", 0) and shown["failures"][0]["worker"], shown
        assert api.client.get("/admin/v1/ready").json()["ready"] is True
        (own / "aside").rename(weights)
        admin(gateway, "config", "reload")
        wait_until(lambda: state(api, "sql") == "ready", "it is read again")
        assert answer(gateway, "sql")[:2] == want["sql"]


def test_the_file_names_other_content_under_a_name(tmp_path, folders, want):
    def table(**adapters) -> str:
        lines = (f"{name} = {json.dumps(str(folders[content]))}\n" for name, content in adapters.items())
        return config(tmp_path, "[pools.adapters]\n" + "".join(lines))

    with serving(tmp_path, config=table(sql="sql"), workers=2) as gateway:
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers are ready", 90)
        pids = gateway.worker_pids()
        assert answer(gateway, "sql")[:2] == want["sql"]
        reload(gateway, table(sql="poem", other="sql"))
        wait_until(lambda: answer(gateway, "sql")[:2] == want["poem"], "the new content")
        api = Api(gateway)
        wait_until(lambda: state(api, "sql") == state(api, "other") == "ready", "both workers have both")
        for _ in range(4):
            assert (answer(gateway, "sql")[:2], answer(gateway, "other")[:2]) == (want["poem"], want["sql"])
        assert answer(gateway, BASE)[:2] == want[BASE] and gateway.worker_pids() == pids


def test_the_command_line_adds_lists_replaces_and_removes(tmp_path, folders, want):
    with serving(tmp_path, config=config(tmp_path)) as gateway:
        [pid] = gateway.worker_pids()
        assert "no adapters" in admin(gateway, "adapters")
        added = admin(gateway, "adapters", "add", BASE, "team/a", str(folders["sql"]), "--note", "for a")
        assert "team/a" in added and "ready" in added, added
        assert answer(gateway, "team/a")[:2] == want["sql"]
        again = admin(gateway, "adapters", "add", BASE, "team/a", str(folders["poem"]), check=False)
        assert "already" in again, again
        admin(gateway, "adapters", "add", "--replace", BASE, "team/a", str(folders["poem"]))
        assert answer(gateway, "team/a")[:2] == want["poem"]
        listed = admin(gateway, "adapters", "list", BASE)
        assert str(folders["poem"]) in listed and "1" in listed, listed
        admin(gateway, "adapters", "remove", BASE, "team/a")
        assert refused(gateway, "team/a") == 404 and gateway.worker_pids() == [pid]
        assert "no adapters" in admin(gateway, "adapters", "list", BASE)


def test_an_adapter_of_the_command_line_is_changed_there(tmp_path, folders, want):
    with serving(tmp_path, *flags(folders), config=config(tmp_path)) as gateway:
        api, path = Api(gateway), str(folders["poem"])
        made = api.client.post(ADAPTERS, json={"name": "sql", "path": path})
        put = api.client.put(f"{ADAPTERS}/sql", json={"path": path})
        for refusal in (made, put):
            assert refusal.status_code == 409 and "command line" in refusal.text, refusal.text
        assert answer(gateway, "sql")[:2] == want["sql"]
