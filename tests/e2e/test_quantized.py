"""Quantized checkpoints served: answers near those of the checkpoint that they were made of, a plan that counts what is held, and errors that say what helps."""

import json
import re
import shutil

import pytest
import quantized_files
from test_gguf import answer, penstock

from harness import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return quantized_files.demo(tmp_path_factory.mktemp("quantized") / "demo-gptq", bits=8)


def test_a_gptq_checkpoint_answers(gateway, folder, tmp_path):
    text, logprobs, _ = answer(gateway)
    for name, more in (("bf16", []), ("int8", ["--quantize", "int8"]), ("int4", ["--quantize", "int4"])):
        with serving(tmp_path / name, "--model", str(folder), *more) as ours:
            assert ours.model() == "demo-gptq"
            got, near, usage = answer(ours)
            assert got and usage.completion_tokens == len(near)
            # The first token is certain enough not to depend on rounding.
            far = 0.5 if name == "int4" else 0.2
            assert got[:1] == text[:1] and abs(near[0] - logprobs[0]) < far, (name, got, near[0], logprobs[0])


def test_the_plan_counts_what_is_held(folder):
    def weights(*args):
        done = penstock("check", *args)
        assert done.returncode == 0, done.stderr
        stored = re.search(r"weights +([\d.]+) GB, (.*)", done.stdout)
        return done.stdout, stored[2], float(re.search(r"each: weights ([\d.]+)", done.stdout)[1])

    _, _, plain = weights()
    _, stored, held = weights("--model", str(folder))
    # The same matrices in bf16; what is stored is about half.
    assert stored == "bf16+gptq8, rounded to bf16 when it is loaded" and held == plain
    _, stored, less = weights("--model", str(folder), "--quantize", "int8")
    assert "rounded to int8" in stored and less <= held
    _, stored, least = weights("--model", str(folder), "--quantize", "int4")
    assert "rounded to int4" in stored and least <= less


def test_kv_of_8_bits_answers_in_half_of_the_memory(gateway, tmp_path):
    text, logprobs, _ = answer(gateway)
    more = ["--kv-format", "int8"]
    with serving(tmp_path / "kv", *more) as ours:
        got, near, _ = answer(ours)
        # Behind a prefix hit, too.
        assert answer(ours)[:2] == (got, near)
        assert got[:1] == text[:1] and abs(near[0] - logprobs[0]) < 0.1, (got, near[0], logprobs[0])
        assert "/kv-int8" in ours.log(), "the worker tells the form in its numerics"

    def per_token(*args):
        done = penstock("check", *args)
        assert done.returncode == 0, done.stderr
        return float(re.search(r"([\d.]+) kB of KV per token", done.stdout)[1])

    # Heads of 64 values: 64 bytes and a scale of 4, not 128.
    assert per_token(*more) / per_token() == pytest.approx(68 / 128, rel=0.05)
    assert "int4" in penstock("serve", "--kv-format", "int4").stderr
    refused = penstock("check", *more, "--device", "cuda")
    assert refused.returncode == 1 and "KV of 8 bits has no GPU kernels" in refused.stderr, refused.stderr


def test_a_form_that_is_not_read_is_refused_by_its_field(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (other / "config.json").write_text(json.dumps(config))
    done = penstock("check", "--model", str(other))
    assert done.returncode == 1 and "quantization_config.bits: is 3, supported: 4, 8" in done.stderr
    config["quantization_config"] = {"quant_method": "hqq"}
    (other / "config.json").write_text(json.dumps(config))
    done = penstock("serve", "--model", str(other))
    assert done.returncode == 1 and 'quant_method: "hqq" is not supported (serve the original' in done.stderr
