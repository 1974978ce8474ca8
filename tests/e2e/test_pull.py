"""Models pulled from a hub: whole or not at all, resumed, checked, served by their name."""

import json
import os
import shutil
import signal
import subprocess
import threading

import gguf_files
import hub as hubs
import pytest

from harness import DEMO_MODEL, binary, serving, user, wait_until

DEMO = "penstock/demo"
DEMO_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def hub():
    with hubs.running() as running:
        running.add(DEMO, DEMO_MODEL, *DEMO_FILES)
        running.repos[DEMO] |= {"pytorch_model.bin": b"a pickle", "README.md": b"# demo", "eval.json": b"{}"}
        yield running


def environment(hub, **more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PENSTOCK_CONFIG"))}
    return {**kept, "HF_ENDPOINT": hub.url, **more}


def penstock(hub, folder, *args, config="", **env):
    """Runs a command on the store in `folder`; returns its result."""
    where = ["--state-dir", str(folder / "state")]
    if config:
        (folder / "pull.toml").write_text(config)
        where += ["--config", str(folder / "pull.toml")]
    return subprocess.run(
        [binary(), *args, *where], check=False, capture_output=True, text=True, timeout=120, env=environment(hub, **env)
    )


def pull(hub, folder, name, *args, **more):
    done = penstock(hub, folder, "pull", name, *args, **more)
    assert done.returncode == 0, done.stderr
    return done


def refused(hub, folder, name, *parts, **more):
    done = penstock(hub, folder, "pull", name, **more)
    assert done.returncode == 1, done.stdout
    for part in parts:
        assert part in done.stderr, (part, done.stderr)
    assert listed(hub, folder)["models"] == []
    return done


def listed(hub, folder):
    done = penstock(hub, folder, "models", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def content(folder, name=DEMO):
    """The only model in the store: its folder."""
    org, repo = name.split("/")
    (found,) = (folder / "state" / "models" / org / repo).iterdir()
    return found / repo


def test_a_model_is_pulled_and_served_by_its_name(hub, tmp_path):
    done = pull(hub, tmp_path, f"hf.co/{DEMO}")
    assert "penstock serve --model penstock/demo" in done.stdout and done.stderr == ""
    files = sorted(path.name for path in content(tmp_path).iterdir())
    assert files == sorted(DEMO_FILES), "what an engine needs, no pickle, nothing unfinished"
    for name in files:
        assert (content(tmp_path) / name).read_bytes() == (DEMO_MODEL / name).read_bytes()
    (model,) = listed(hub, tmp_path)["models"]
    assert model["name"] == DEMO and model["commit"] == hubs.COMMIT and model["format"] == "safetensors"
    assert model["quantization"] == "bf16" and model["context_tokens"] == 8192
    # The second pull fetches no file again.
    before = dict(hub.sent)
    assert model["revision"] == "main"
    assert "is in the store" in pull(hub, tmp_path, f"{DEMO}@v1").stdout
    (again,) = listed(hub, tmp_path)["models"]
    assert again["revision"] == "v1" and again["pulled_at"] >= model["pulled_at"], (
        "it is the last one that was asked for"
    )
    assert {name: sent for name, sent in hub.sent.items() if name} == {
        name: sent for name, sent in before.items() if name
    }
    models = str(tmp_path / "state" / "models")
    with serving(tmp_path / "serve", "--model", DEMO, "--models-dir", models) as gateway:
        assert gateway.model() == "demo"
        answer = gateway.client().chat.completions.create(
            model="demo", messages=user("What is the capital of France?"), max_tokens=8, temperature=0
        )
        assert answer.choices[0].message.content


# Bytes that a pull writes at once, and of one range.
WRITE_BYTES = 256 << 10
PIECE_BYTES = 64 << 20


def written(folder, name="model.safetensors"):
    """Bytes of each piece of an unfinished file, as `NAME.state` counts them."""
    found = list((folder / "state" / "models" / ".partial").glob(f"*/*/{name}.state"))
    counts = found[0].read_bytes()[4096:] if found else b""
    return [int.from_bytes(counts[at : at + 4], "little") for at in range(0, len(counts), 4)]


def killed_pull(hub, folder, hold_at, pieces):
    """Kills a pull that has `hold_at` bytes of each piece, but for those that it has not written yet."""
    hub.hold_at = hold_at
    command = [binary(), "pull", DEMO, "--state-dir", str(folder / "state")]
    pulling = subprocess.Popen(command, env=environment(hub), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: [count > hold_at - WRITE_BYTES for count in written(folder)] == [True] * pieces, "what was sent"
        )
    finally:
        os.kill(pulling.pid, signal.SIGKILL)
        pulling.wait()
        hub.release()


def test_a_pull_that_is_killed_goes_on_where_it_was(hub, tmp_path):
    third = len(hub.repos[DEMO]["model.safetensors"]) // 3
    killed_pull(hub, tmp_path, third, 1)
    assert listed(hub, tmp_path)["models"] == [] and len(listed(hub, tmp_path)["unfinished"]) == 1
    (there,) = written(tmp_path)
    pull(hub, tmp_path, DEMO)
    assert hub.ranges_of("model.safetensors")[0][0] == there > third - WRITE_BYTES
    resumed = [headers for headers in hub.headers_to("cdn") if "range" in headers]
    assert resumed and all("if-range" in headers for headers in resumed), (
        "the rest is asked for, if the file is still the same"
    )
    assert content(tmp_path).joinpath("model.safetensors").read_bytes() == hub.repos[DEMO]["model.safetensors"]
    assert listed(hub, tmp_path)["unfinished"] == []


def test_a_large_file_comes_in_several_ranges_at_once(hub, tmp_path):
    weights = b"".join(n.to_bytes(8, "little") * 8192 for n in range(1088))  # 68 MiB: two pieces
    hub.repos[DEMO]["model.safetensors"] = weights
    hub.together = 2
    killed_pull(hub, tmp_path, 2_000_000, 2)
    assert hub.ranges_max == 2, "the first range is answered when the second has begun"
    there, first = written(tmp_path), len(hub.ranges_of("model.safetensors"))
    done = pull(hub, tmp_path, DEMO)
    assert "cannot serve it" in done.stderr, "what was pulled is no checkpoint, and that is said"
    resumed = dict(sorted(hub.ranges_of("model.safetensors")[first:], reverse=True))
    assert resumed == {there[0]: PIECE_BYTES - 1, PIECE_BYTES + there[1]: len(weights) - 1}
    assert content(tmp_path).joinpath("model.safetensors").read_bytes() == weights


def test_cut_connections_are_resumed(hub, tmp_path):
    hub.drop_after, hub.drops = 3_000_000, 2
    done = pull(hub, tmp_path, DEMO)
    assert done.stderr.count("next attempt in") >= 2
    starts = [start for start, _ in hub.ranges_of("model.safetensors")]
    assert starts[:2] == [3_000_000, 6_000_000]


def test_another_file_of_the_same_name_and_no_ranges_mean_from_the_start(hub, tmp_path):
    hub.drop_after, hub.drops, hub.ranges = 3_000_000, 1, False
    pull(hub, tmp_path, DEMO)
    assert content(tmp_path).joinpath("model.safetensors").read_bytes() == hub.repos[DEMO]["model.safetensors"]


def test_a_wrong_byte_is_found_and_fetched_again(hub, tmp_path):
    hub.corrupt = {"model.safetensors", "config.json"}
    done = pull(hub, tmp_path, DEMO)
    assert "model.safetensors does not have the checksum" in done.stderr and "config.json" in done.stderr
    assert penstock(hub, tmp_path, "models", "verify").returncode == 0
    # In the store, too.
    weights = content(tmp_path) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    done = penstock(hub, tmp_path, "models", "verify", DEMO)
    assert done.returncode == 1 and "DAMAGED" in done.stdout and "pull them again" in done.stderr


def test_files_of_another_endpoint_are_checked_again(hub, tmp_path):
    true = hub.repos[DEMO]["model.safetensors"]
    with hubs.running() as mirror:
        # A mirror with weights of its own under the hub's commit, and a pull of it that is killed later.
        mirror.repos[DEMO] = {**hub.repos[DEMO], "model.safetensors": bytes(len(true))}
        done = penstock(mirror, tmp_path, "pull", DEMO)
        assert done.returncode == 0, done.stderr
    done = penstock(hub, tmp_path, "pull", DEMO)
    assert done.returncode == 1 and "with other files than" in done.stderr, "what is stored is not what this hub has"
    partial = tmp_path / "state" / "models" / ".partial" / f"penstock--demo--safetensors@{hubs.COMMIT}"
    partial.parent.mkdir(exist_ok=True)
    content(tmp_path).parent.rename(partial)
    (partial / "manifest.json").unlink()
    pull(hub, tmp_path, DEMO)
    assert content(tmp_path).joinpath("model.safetensors").read_bytes() == true


def test_always_wrong_bytes_are_never_stored(hub, tmp_path):
    class Always(set):
        def discard(self, _):
            pass

    hub.corrupt = Always({"tokenizer.json"})
    refused(hub, tmp_path, DEMO, "tokenizer.json", "twice", "nothing was stored")


def test_a_token_goes_to_the_hub_and_nowhere_else(hub, tmp_path):
    hub.token = "hf_secret"
    refused(hub, tmp_path, DEMO, "status 401", "HF_TOKEN")
    pull(hub, tmp_path, DEMO, HF_TOKEN="hf_secret")
    hub_asked = [headers for headers in hub.headers_to("hub") if "authorization" in headers]
    assert hub_asked and hub.headers_to("cdn")
    assert all("authorization" not in headers for headers in hub.headers_to("cdn"))
    shutil.rmtree(tmp_path / "state")
    # From a file of the config; a mirror is asked first, and never gets it.
    (tmp_path / "token").write_text("hf_secret\n")
    with hubs.running() as mirror:
        config = f'[hub]\nendpoint = "{hub.url}"\nmirrors = ["{mirror.url}"]\ntoken_file = "{tmp_path / "token"}"\n'
        done = pull(hub, tmp_path, DEMO, config=config)
        assert "asking the next endpoint" in done.stderr
        assert mirror.asked and all("authorization" not in headers for _, _, headers in mirror.asked)
    # Not over an open network.
    config = '[hub]\nendpoint = "http://hub.invalid"\n'
    done = penstock(
        hub, tmp_path / "state", "pull", DEMO, "--models-dir", str(tmp_path / "m"), config=config, HF_TOKEN="x"
    )
    assert "https" in done.stderr and done.returncode == 1


def test_refusals_say_what_to_do(hub, tmp_path):
    refused(hub, tmp_path, "penstock/none", "status 401", "check the name")
    refused(hub, tmp_path, "penstock/none", "has no repository penstock/none", HF_TOKEN="x")
    refused(hub, tmp_path, f"{DEMO}@v9", 'no revision "v9"')
    refused(hub, tmp_path, "demo", "ORG/REPO")
    hub.gated.add(DEMO)
    refused(hub, tmp_path, DEMO, "status 403", "ask for access at", DEMO)
    hub.gated.clear()
    hub.busy = 2
    assert pull(hub, tmp_path, DEMO).stderr.count("limits requests") >= 2


def test_a_hub_is_not_trusted(hub, tmp_path):
    hub.extra = [{"rfilename": "../../evil.safetensors", "size": 1}]
    refused(hub, tmp_path, DEMO, "no path inside a repository")
    hub.extra, hub.unsummed = [], True
    refused(hub, tmp_path, DEMO, "without size and checksum")
    hub.unsummed = False
    hub.repos["penstock/pickle"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    refused(hub, tmp_path, "penstock/pickle", "pickles only (pytorch_model.bin)", "safetensors")
    hub.extra = [{"rfilename": "config.json" + "x" * 200, "size": 1} for _ in range(50_001)]
    refused(hub, tmp_path, DEMO, "50000 are the most")
    hub.extra = [{"rfilename": "model-1.safetensors", "size": 1 << 49, "lfs": {"sha256": "0" * 64, "size": 1 << 49}}]
    del hub.repos[DEMO]["model.safetensors"]
    refused(hub, tmp_path, DEMO, "are needed and", "make space")


def test_two_pulls_of_one_model_go_one_after_the_other(hub, tmp_path):
    hub.slow = 0.01
    results = []
    pulls = [threading.Thread(target=lambda: results.append(pull(hub, tmp_path, DEMO))) for _ in range(2)]
    for thread in pulls:
        thread.start()
    for thread in pulls:
        thread.join()
    assert sorted("is in the store" in done.stdout for done in results) == [False, True]
    assert hub.sent["model.safetensors"] == len(hub.repos[DEMO]["model.safetensors"])


def test_a_quantization_is_pulled_shown_and_removed(hub, tmp_path):
    gguf_files.demo(tmp_path / "demo-Q8_0.gguf", gguf_files.Q8_0)
    split = tmp_path / "split"
    split.mkdir()
    gguf_files.demo_split(split, 3)
    hub.add("penstock/demo-GGUF", tmp_path, "demo-Q8_0.gguf")
    parts = {
        f"BF16/demo-BF16-0000{n}-of-00003.gguf": (split / f"demo-0000{n}-of-00003.gguf").read_bytes() for n in (1, 2, 3)
    }
    hub.repos["penstock/demo-GGUF"] |= parts | {"mmproj-F16.gguf": b"x"}
    refused(hub, tmp_path, "penstock/demo-GGUF", "BF16 (", "Q8_0 (")
    refused(hub, tmp_path, "penstock/demo-GGUF:Q4_K_M", "no GGUF file of Q4_K_M")
    pull(hub, tmp_path, "penstock/demo-GGUF:q8_0")
    pull(hub, tmp_path, "penstock/demo-GGUF:BF16")
    models = {model["name"]: model for model in listed(hub, tmp_path)["models"]}
    assert sorted(models) == ["penstock/demo-GGUF:BF16", "penstock/demo-GGUF:Q8_0"]
    assert len(models["penstock/demo-GGUF:BF16"]["files"]) == 3
    assert models["penstock/demo-GGUF:Q8_0"]["architecture"] == "qwen3"
    shown = penstock(hub, tmp_path, "models", "show", "demo-GGUF:Q8_0").stdout
    assert "sha256:" in shown and hubs.COMMIT in shown
    several = penstock(hub, tmp_path, "check", "--model", "penstock/demo-GGUF")
    assert several.returncode == 1 and "name one of penstock/demo-GGUF:BF16, penstock/demo-GGUF:Q8_0" in several.stderr
    checked = penstock(hub, tmp_path, "check", "--model", "penstock/demo-GGUF:BF16")
    assert checked.returncode == 0 and "pool demo-BF16" in checked.stdout, checked.stderr
    # The path of a config names a model, too.
    config = '[[pools]]\nid = "mine"\nmodel = "penstock/demo-GGUF:Q8_0"\n'
    checked = penstock(hub, tmp_path, "check", config=config)
    assert checked.returncode == 0 and "pool mine" in checked.stdout, checked.stderr
    assert (
        "removed penstock/demo-GGUF:Q8_0@"
        in penstock(hub, tmp_path, "models", "remove", "penstock/demo-GGUF:Q8_0").stdout
    )
    assert [model["name"] for model in listed(hub, tmp_path)["models"]] == ["penstock/demo-GGUF:BF16"]
    gone = penstock(hub, tmp_path, "serve", "--model", "penstock/demo-GGUF:Q8_0", "--listen", "0")
    assert gone.returncode == 1 and "penstock pull penstock/demo-GGUF:Q8_0" in gone.stderr
