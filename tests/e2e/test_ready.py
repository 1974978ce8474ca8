"""A worker is ready before its vocabulary is indexed; whatever needs the vocabulary right then is answered all the same."""

import json
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from quantized_files import tensors, write

import harness
from harness import DEMO_MODEL, Gateway, serving, user, wait_until

TOKENS = 100_000
CONFIG = """
[[pools]]
id = "penstock-demo"
model = "{model}"
workers = 1
threads = 1
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The demo model with a vocabulary of real size: tokens that no text of its own has, and rows of zeros for them."""
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("wide") / "penstock-demo"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    rows = config["vocab_size"]
    # The library counts added tokens behind the model's, unless they are among these.
    words = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words |= {f"q{number:x}z": number for number in range(rows, TOKENS)}
    tokenizer["model"]["vocab"] |= words
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": TOKENS}))
    stored = tensors(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    dtype, (_, width), data = stored[name]
    stored[name] = (dtype, [TOKENS, width], data + bytes(2 * width * (TOKENS - rows)))
    write(folder / "model.safetensors", stored)
    return folder


def asked(gateway: Gateway) -> list[str]:
    """A schema, a stop string, and tokens with their bytes, asked at once."""
    client = gateway.client(timeout=90)
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}

    def ask(**options) -> str:
        options = {"messages": user("What is the capital of France?"), "temperature": 0, "max_tokens": 48} | options
        (choice,) = client.chat.completions.create(model="penstock-demo", **options).choices
        if choice.logprobs:
            tokens = choice.logprobs.content
            assert (
                bytes(byte for token in tokens for byte in token.bytes).decode().strip()
                == choice.message.content.strip()
            )
            assert all(len(token.top_logprobs) == 3 for token in tokens)
        return f"{choice.finish_reason}: {choice.message.content}"

    kinds = [
        {"response_format": form, "reasoning_effort": "none", "max_tokens": 200},
        {"stop": ["Par"], "reasoning_effort": "none"},
        {"logprobs": True, "top_logprobs": 3, "reasoning_effort": "none"},
    ]
    with ThreadPoolExecutor(len(kinds)) as threads:
        return list(threads.map(lambda options: ask(**options), kinds))


def test_what_needs_the_vocabulary_waits_for_it_right_after_a_start(tmp_path, model):
    with serving(tmp_path, workers=0, config=CONFIG.format(model=model)) as gateway:
        before = asked(gateway)
        person = before[0].removeprefix("stop: ")
        jsonschema.validate(json.loads(person), PERSON)
        assert "Par" not in before[1]
        for _ in range(2):
            (pid,) = gateway.worker_pids()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: gateway.worker_pids() not in ([], [pid]), "a successor starts")
            # All three wait for the successor, and come in the moment in which it is ready.
            assert asked(gateway) == before
        ends = gateway.log().count("vocabulary indexed for grammars")
        assert ends == 3, "each worker indexed its vocabulary"


@pytest.mark.parametrize("damage", ["cut", "merges"])
def test_a_broken_tokenizer_ends_the_start_with_its_name(tmp_path, damage):
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path / "penstock-demo"))
    path = folder / "tokenizer.json"
    text = path.read_text()
    if damage == "cut":
        path.write_text(text[: len(text) // 2])
    else:
        # Workers pass over the merges; the gateway, which tokenizes, does not.
        tokenizer = json.loads(text)
        tokenizer["model"]["merges"].append(["no such", "token"])
        path.write_text(json.dumps(tokenizer))
    command = [
        harness.binary(),
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--state-dir",
        tmp_path / "state",
        "--model",
        folder,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "tokenizer.json" in done.stderr, done.stderr
