"""GGUF files served: the same answers as from the checkpoint that they were made of, and errors that say what to do."""

import shutil
import subprocess

import gguf_files
import pytest

from harness import DEMO_MODEL, ROOT, binary, serving, user

PROMPT = user("What is the capital of France?")


def answer(gateway, **more):
    client = gateway.client()
    done = client.chat.completions.create(
        model=gateway.model(), messages=PROMPT, temperature=0, max_tokens=24, logprobs=True, **more
    )
    choice = done.choices[0]
    return choice.message.content, [entry.logprob for entry in choice.logprobs.content], done.usage


def penstock(*args):
    return subprocess.run([binary(), *args], check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    gguf_files.demo(folder / "demo-bf16.gguf", gguf_files.BF16)
    gguf_files.demo(folder / "demo-q8_0.gguf", gguf_files.Q8_0)
    return folder


def test_bf16_in_a_gguf_file_answers_as_the_checkpoint_does(gateway, folder, tmp_path):
    want = answer(gateway)
    with serving(tmp_path, "--model", str(folder / "demo-bf16.gguf")) as ours:
        assert ours.model() == "demo-bf16"
        text, logprobs, usage = answer(ours)
        assert (text, logprobs, usage.prompt_tokens) == (want[0], want[1], want[2].prompt_tokens)


def test_q8_0_and_int8_are_near(gateway, folder, tmp_path):
    text, logprobs, _ = answer(gateway)
    for name, args in (
        ("q8_0", ["--model", str(folder / "demo-q8_0.gguf")]),
        ("int8", ["--quantize", "int8"]),
    ):
        with serving(tmp_path / name, *args) as ours:
            got, near, _ = answer(ours)
            # The first token is certain enough not to depend on rounding.
            assert got[:1] == text[:1] and abs(near[0] - logprobs[0]) < 0.2, (name, got, near[0], logprobs[0])


def test_split_files_and_a_folder_with_one_model(gateway, tmp_path):
    want = answer(gateway)
    split = tmp_path / "split"
    split.mkdir()
    first = gguf_files.demo_split(split, 3)
    for name, model in (("a", split), ("b", first), ("c", split / "demo-00003-of-00003.gguf")):
        with serving(tmp_path / name, "--model", str(model)) as ours:
            assert answer(ours)[:2] == want[:2]
    (split / "demo-00002-of-00003.gguf").unlink()
    done = penstock("check", "--model", str(first))
    assert done.returncode == 1 and "demo-00002-of-00003.gguf: is missing" in done.stderr


def test_check_shows_the_memory_plan(folder):
    done = penstock("check", "--model", str(folder / "demo-q8_0.gguf"))
    assert done.returncode == 0, done.stderr
    assert "bf16+q8_0" in done.stdout and "memory" in done.stdout and "fits" in done.stdout
    done = penstock("check", "--quantize", "int8")
    assert done.returncode == 0 and "rounded to int8" in done.stdout


def test_models_that_cannot_be_served_say_what_to_do(folder, tmp_path):
    def said(*args):
        done = penstock("serve", *args)
        assert done.returncode == 1 and "panicked" not in done.stderr
        return done.stderr

    assert "`penstock pull Qwen/Qwen3-0.6B`" in said("--model", "Qwen/Qwen3-0.6B")
    assert "penstock pull ORG/REPO:QUANT" in said("--model", "qwen3:0.6b")
    assert "there is no such file or folder" in said("--model", str(tmp_path / "gone.gguf"))
    assert "has 2 GGUF models: demo-bf16.gguf, demo-q8_0.gguf" in said("--model", str(folder))
    pointer = tmp_path / "pointer.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git lfs pull" in said("--model", str(pointer))
    for name, parts in {
        "pickles": ["only safetensors are read"],
        "no-tokenizer": ["tokenizer.json: no such file", "save_pretrained"],
        "pointers": ["git lfs pull"],
    }.items():
        checkpoint = tmp_path / name
        shutil.copytree(DEMO_MODEL, checkpoint, ignore=shutil.ignore_patterns("scripts"))
        if name == "pickles":
            (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
        elif name == "no-tokenizer":
            (checkpoint / "tokenizer.json").unlink()
        else:
            (checkpoint / "model.safetensors").write_text(pointer.read_text())
        message = said("--model", str(checkpoint))
        assert all(part in message for part in parts), message
    other = tmp_path / "other.gguf"
    other.write_bytes((ROOT / "README.md").read_bytes())
    assert 'does not begin with "GGUF"' in said("--model", str(other))
    gguf_files.write(tmp_path / "gemma.gguf", [], **{"general.architecture": "gemma4"})
    assert '"gemma4" is not supported' in said("--model", str(tmp_path / "gemma.gguf"))
    assert "int3" in penstock("serve", "--quantize", "int3").stderr
