"""LoRA adapters served beside their model: each by its own name, with answers and a cache of its own, whatever happens to the workers."""

import contextlib
import json
import subprocess
import threading

import adapter_files
import httpx
import openai
import pytest
from test_batches import begin, ended, lines, results
from test_faults import Busy, disturbed, undisturbed
from test_gguf import penstock
from test_pool import CONFIG, apart
from test_reload import hang_up, models

import harness
from harness import binary, holding, serving, two_tenants, user, wait_until

BASE = "penstock-demo"
PROMPT = user("Count from 1 to 12.")
NAMES = (BASE, "sql", "poem")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """PEFT folders of two adapters, by name."""
    place = tmp_path_factory.mktemp("adapters")
    return {name: adapter_files.folder(place / name, seed) for seed, name in enumerate(NAMES[1:])}


def flags(folders) -> list[str]:
    return [word for name, path in folders.items() for word in ("--adapter", f"{name}={path}")]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, folders):
    """A gateway whose one worker has both adapters."""
    with serving(tmp_path_factory.mktemp("adapted"), *flags(folders)) as gateway:
        yield gateway


def answer(gateway, model: str, messages=PROMPT, tokens: int = 24, **more) -> tuple[str, list[float], int]:
    """Text, log-probabilities and cached tokens of a greedy answer."""
    asked = {"messages": messages, "max_tokens": tokens, "temperature": 0, "logprobs": True, **more}
    done = gateway.client().chat.completions.create(model=model, **asked)
    choice, details = done.choices[0], done.usage.prompt_tokens_details
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    return choice.message.content, logprobs, details.cached_tokens if details else 0


def test_they_are_listed_beside_their_model(adapted):
    listed = {model.id: model.model_extra["parent"] for model in adapted.client().models.list().data}
    assert listed == {BASE: None, "poem": BASE, "sql": BASE}
    one = adapted.client().models.retrieve("sql")
    assert (one.id, one.root, one.parent) == ("sql", "sql", BASE)

    def get(path, **headers):
        return httpx.get(f"{adapted.url}{path}", headers=headers).raise_for_status().json()

    assert {model["id"] for model in get("/v1/models", **{"anthropic-version": "2023-06-01"})["data"]} == set(NAMES)
    assert {model["name"] for model in get("/v1beta/models")["models"]} == {f"models/{name}" for name in NAMES}
    assert {model["name"].removesuffix(":latest") for model in get("/api/tags")["models"]} == set(NAMES)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        answer(adapted, "sql-2")


def test_each_has_answers_of_its_own_in_every_dialect(adapted):
    said = {name: answer(adapted, name)[:2] for name in NAMES}
    assert len({text for text, _ in said.values()}) == len({tuple(logprobs) for _, logprobs in said.values()}) == 3
    assert {name: answer(adapted, name)[:2] for name in NAMES} == said, "and the same again"
    asked = {"temperature": 0, "max_tokens": 24}

    def post(path, body):
        return httpx.post(f"{adapted.url}{path}", json=body, timeout=60).raise_for_status().json()

    for name, (text, _) in said.items():
        message = post("/v1/messages", {"model": name, "messages": PROMPT, **asked})
        assert (message["model"], message["content"][0]["text"]) == (name, text)
        body = {"model": name, "input": PROMPT[0]["content"], "temperature": 0, "max_output_tokens": 24}
        assert post("/v1/responses", body)["output"][0]["content"][0]["text"] == text
        contents = [{"role": "user", "parts": [{"text": PROMPT[0]["content"]}]}]
        config = {"temperature": 0, "maxOutputTokens": 24}
        made = post(f"/v1beta/models/{name}:generateContent", {"contents": contents, "generationConfig": config})
        assert made["candidates"][0]["content"]["parts"][0]["text"] == text
        body = {"model": name, "messages": PROMPT, "stream": False, "options": {"temperature": 0, "num_predict": 24}}
        assert post("/api/chat", body)["message"]["content"] == text


def test_the_answer_is_the_same_alone_and_in_a_mixed_batch(adapted):
    prompts = [user(f"Count from {number} to {number + 9}.") for number in range(3)]
    asked = [(name, prompt) for prompt in prompts for name in NAMES]
    alone = [answer(adapted, name, prompt, tokens=48)[:2] for name, prompt in asked]
    together = [None] * len(asked)

    def one(at):
        together[at] = answer(adapted, *asked[at], tokens=48)[:2]

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_the_prefix_cache_is_not_shared(adapted):
    long = user(" ".join(f"{number} plums and {number} nuts." for number in range(60)))
    for name in NAMES:
        first, second = (answer(adapted, name, long, tokens=4) for _ in range(2))
        # The template's beginning is shorter than a block, so that nothing of another prompt is found either.
        assert first[2] == 0 and second[2] > 300, (name, first, second)
        assert first[:2] == second[:2]


def test_a_batch_runs_with_an_adapter(adapted):
    client = adapted.client()
    final = ended(client, begin(client, lines(4, "sql")).id)
    assert (final.status, final.request_counts.completed) == ("completed", 4)
    bodies = {line["custom_id"]: line["response"]["body"] for line in results(client, final.output_file_id)}
    for number in range(4):
        want = client.chat.completions.create(model="sql", messages=user(f"Say {number}."), max_tokens=2, temperature=0)
        body = bodies[f"line-{number}"]
        assert (body["model"], body["choices"][0]["message"]["content"]) == ("sql", want.choices[0].message.content)


def test_a_key_may_use_an_adapter_without_its_model(tmp_path, folders):
    config = json.dumps(str(folders["sql"]))
    with two_tenants(tmp_path, 'models = ["sql"]', f"[[pools]]\nadapters = {{ sql = {config} }}") as (_, alice, bob):
        assert [model.id for model in alice.models.list().data] == ["sql"]
        assert [model.id for model in bob.models.list().data] == [BASE, "sql"]
        ask = {"messages": PROMPT, "max_tokens": 2}
        assert alice.chat.completions.create(model="sql", **ask).model == "sql"
        with pytest.raises(openai.NotFoundError):
            alice.chat.completions.create(model=BASE, **ask)


def test_a_killed_worker_is_not_noticed(tmp_path, folders):
    config = f"[server]\n{holding(tmp_path)}"
    with harness.serving(tmp_path, *flags(folders), workers=2, config=config) as gateway:
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers are ready", 90)
        base = undisturbed(gateway, BASE, temperature=0)
        for options in ({"temperature": 0}, {"temperature": 1.1, "seed": 42}):
            want = undisturbed(gateway, "sql", **options)
            assert want != base
            resumes = gateway.metric("penstock_resumes_total")
            assert disturbed(gateway, "sql", Busy(gateway).kill, **options) == want
            wait_until(lambda: gateway.metric("penstock_resumes_total") > resumes, "the stream went on elsewhere")  # noqa: B023
            assert gateway.metric("penstock_resumes_inexact_total") == 0
            wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "the dead worker is replaced", 90)


def test_a_prompt_computed_elsewhere_gives_the_same_answer(adapted, tmp_path, folders):
    long = user(" ".join(f"{number} apples and {number} pears." for number in range(200)))
    want = {name: answer(adapted, name, long, tokens=12)[:2] for name in NAMES}
    adapters = ", ".join(f"{name} = {json.dumps(str(path))}" for name, path in folders.items())
    with serving(tmp_path, workers=0, config=f"{CONFIG}adapters = {{ {adapters} }}\n") as gateway:
        workers = apart(gateway).get("/workers")["data"]
        assert [worker["adapters"] for worker in workers] == [["poem", "sql"]] * 2
        for at, name in enumerate(NAMES, 1):
            assert answer(gateway, name, long, tokens=12)[:2] == want[name]
            wait_until(lambda: gateway.metric("penstock_prefilled_apart_total") == at, "the transfer is told")  # noqa: B023
        wait_until(
            lambda: gateway.metric("penstock_kv_first_tokens_total") == 3, "the worker has told of the first tokens", 20
        )


@contextlib.contextmanager
def worker(place, *args: str):
    """A worker of its own, with its address."""
    command = [str(binary()), "worker", "--listen", f"unix:{place}", "--threads", "1", *args]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_worker_without_the_adapter_gets_none_of_its_requests(adapted, tmp_path, folders):
    want = {name: answer(adapted, name)[:2] for name in (BASE, "sql")}
    config = f"""[[pools]]
connect = ["unix:{tmp_path / "with"}", "unix:{tmp_path / "without"}"]
adapters = {{ sql = "as the worker was started" }}
"""
    able = worker(tmp_path / "with", "--adapter", f"sql={folders['sql']}")
    with able as able, worker(tmp_path / "without"), serving(tmp_path / "gateway", workers=0, config=config) as gateway:
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers are ready", 90)
        for _ in range(4):
            assert {name: answer(gateway, name)[:2] for name in want} == want
        able.kill()
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 1, "one worker is gone")
        with pytest.raises(openai.APIStatusError, match="No worker of this model has its adapter") as refused:
            answer(gateway, "sql")
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
        assert answer(gateway, BASE)[:2] == want[BASE]


def test_a_changed_list_takes_effect_without_a_restart(adapted, tmp_path, folders):
    want = {name: answer(adapted, name)[:2] for name in NAMES}

    def table(name):
        return f'[[pools]]\n[pools.adapters]\n{name} = "{folders[name]}"\n'

    with serving(tmp_path, config=table("sql")) as gateway:
        assert answer(gateway, "sql")[:2] == want["sql"]
        (tmp_path / "penstock.toml").write_text(table("poem"))
        hang_up(gateway)
        wait_until(lambda: models(gateway) == [BASE, "poem"], "the new list")
        with pytest.raises(openai.NotFoundError):
            answer(gateway, "sql")

        def serves_poem():
            with contextlib.suppress(openai.APIStatusError):
                return answer(gateway, "poem")[:2] == want["poem"]

        wait_until(serves_poem, "the changed pool answers", 90)
        assert answer(gateway, BASE)[:2] == want[BASE]


def test_check_shows_them(folders):
    done = penstock("check", *flags(folders))
    assert done.returncode == 0, done
    for name in folders:
        assert f"adapter         {name}: rank {adapter_files.RANK}, " in done.stdout, done.stdout


@pytest.mark.parametrize("damage", ["nothing there", "no config", "no weights", "short weights", "other sizes"])
def test_a_damaged_adapter_is_refused_with_file_and_reason(tmp_path, damage):
    place = tmp_path / "broken"
    if damage != "nothing there":
        adapter_files.folder(place, 7)
    weights, named = place / "adapter_model.safetensors", "adapter_model.safetensors"
    if damage in ("nothing there", "no config"):
        named = "adapter_config.json" if damage == "no config" else "broken"
        (place / "adapter_config.json").unlink(missing_ok=True)
    elif damage == "no weights":
        weights.unlink()
    elif damage == "short weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        weights.write_bytes(weights.read_bytes().replace(b"[4, 256]", b"[4, 128]"))
    done = penstock("serve", "--listen", "0", "--state-dir", str(tmp_path / "state"), "--adapter", f"sql={place}")
    said = done.stderr
    assert done.returncode == 1 and 'adapter "sql"' in said and str(place) in said and named in said, said
    assert "panicked" not in said


def test_two_models_of_one_name_are_refused(folders):
    done = penstock("check", "--adapter", f"{BASE}={folders['sql']}")
    assert done.returncode == 1 and "is the name of another pool or adapter" in done.stderr, done.stderr
    done = penstock("check", "--adapter", str(folders["sql"]))
    assert done.returncode == 2 and "NAME=PATH" in done.stderr, done.stderr
