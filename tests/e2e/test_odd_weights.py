"""Checkpoints with weights that cannot be held as they are, or that break some texts: what the log says, and what clients read."""

import json
import struct

import gguf_files
import httpx
import openai
import pytest
from gguf_files import DEMO, singles

from harness import serving, user, wait_until

# Bad word of the model below: its embedding is no number.
BAD = " penstock"
FORMATS = {"F16": "e", "F32": "f"}


def tokens(gateway, text: str) -> list[int]:
    asked = {"model": gateway.model(), "prompt": text}
    return httpx.post(f"{gateway.url}/tokenize", json=asked, timeout=60).raise_for_status().json()["tokens"]


def folder(path, dtype: str, bad: int | None = None):
    """The demo model with its weights as `dtype`, which holds the same numbers; the embedding of token `bad` is NaN."""
    path.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((DEMO / name).read_bytes())
    config = json.loads((DEMO / "config.json").read_text())
    # A head of its own, so that the bad token is bad in a prompt alone.
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = gguf_files.weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    header, blob, matrices = {}, bytearray(), 0
    for name, (shape, data) in weights.items():
        values = singles(data)
        if bad is not None and name == "model.embed_tokens.weight":
            values[bad * shape[1]] = float("nan")
        stored = struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(blob), len(blob) + len(stored)]}
        blob += stored
        matrices += len(stored) if len(shape) > 1 else 0
    head = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + blob)
    return matrices


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_the_log_says_that_weights_are_rounded(tmp_path, dtype):
    matrices = folder(tmp_path / "odd", dtype)
    with serving(tmp_path, "--model", str(tmp_path / "odd")) as gateway:
        said = [json.loads(line) for line in gateway.log().splitlines() if "weights are rounded" in line]
        assert [line["level"] for line in said] == ["WARN"]
        fields = {"model": "odd", "stored": dtype.lower(), "held": "bf16", "rounded_bytes": matrices}
        assert fields.items() <= said[0]["fields"].items(), said


def test_nothing_is_said_of_weights_that_are_held_as_they_are(gateway):
    assert "weights are rounded" not in gateway.log()


def test_a_text_whose_logits_are_no_numbers_fails_in_words_and_others_are_answered(tmp_path, gateway):
    bad = tokens(gateway, BAD)[0]
    good = "Hello"
    assert bad not in tokens(gateway, good)
    folder(tmp_path / "odd", "F32", bad)
    with serving(tmp_path, "--model", str(tmp_path / "odd")) as served:
        client = served.client()

        def chat(text: str, **more):
            return client.chat.completions.create(model="odd", messages=user(text), max_tokens=4, **more)

        assert chat(good).choices[0].finish_reason
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as failed:
                chat(BAD)
            assert (failed.value.status_code, failed.value.code) == (500, "model_failed")
            assert "its logits are not finite (NaN or infinity)" in failed.value.message
            assert failed.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match="logits are not finite"):
            for _ in chat(BAD, stream=True):
                pass
        asked = {"model": "odd", "max_tokens": 4, "messages": user(BAD)}
        answer = httpx.post(f"{served.url}/v1/messages", json=asked, timeout=60)
        assert answer.status_code == 500 and "logits are not finite" in answer.json()["error"]["message"]
        # The worker goes on: for others, and with the bad text beside a good one.
        assert chat(good).choices[0].finish_reason
        log = "request ends with an error: no token can be sampled for it"
        wait_until(lambda: log in served.log(), "the log says so", 30)
        assert "worker ended" not in served.log() and len(served.worker_pids()) == 1
