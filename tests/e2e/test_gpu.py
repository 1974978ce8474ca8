"""`device = "cuda"` on a stand-in for NVIDIA's driver, which runs the kernels' own sources on the CPU: no GPU is needed, and few tokens are asked for."""

import contextlib
import os
import random
import re
import subprocess

import openai
import pytest

from harness import ROOT, binary, serving, user, wait_until

PROMPT = user("What is the capital of France?")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Environment in which the stand-in is the driver."""
    script = ROOT / "kernels" / "cuda" / "host" / "build.sh"
    built = subprocess.run(
        [script, tmp_path_factory.mktemp("driver"), "driver"], check=True, capture_output=True, text=True, timeout=300
    )
    env = {"LD_LIBRARY_PATH": os.path.dirname(built.stdout.strip())}
    # Not the machine's own driver, if it has one.
    assert "0: stand-in on the CPU" in penstock(env, "check").stdout
    return env


def penstock(env, *args):
    return subprocess.run(
        [binary(), *args], check=False, capture_output=True, text=True, timeout=60, env=os.environ | env
    )


def answer(gateway, tokens):
    client = gateway.client()
    done = client.chat.completions.create(
        model=gateway.model(), messages=PROMPT, temperature=0, max_tokens=tokens, logprobs=True, top_logprobs=2
    )
    return done.choices[0].logprobs.content


def test_auto_takes_a_gpu_only_if_its_kernels_have_been_measured(driver, tmp_path):
    # The stand-in is a GPU of compute capability 9.0.
    cubins = (ROOT / "kernels/cuda/prebuilt/manifest.toml").read_text().split("[[cubin]]")
    is_measured = not any("sm_90a" in cubin and "model-only" in cubin for cubin in cubins)
    with serving(tmp_path, env=driver) as ours:
        assert answer(ours, 2)
        assert ("a GPU computes" in ours.log()) == is_measured
        assert ("these kernels have been tested on a model of the GPU alone" in ours.log()) != is_measured


def test_a_gpu_answers_as_the_cpu_does(gateway, driver, tmp_path):
    want = answer(gateway, 12)
    with serving(tmp_path, "--device", "cuda", env=driver) as ours:
        got, compared = answer(ours, 12), 0
        for ours_token, token in zip(got, want, strict=True):
            first, second = token.top_logprobs
            # Two devices may differ where two tokens are about as likely; everything after that is another text.
            if first.logprob - second.logprob < 0.1:
                break
            assert ours_token.token == token.token and abs(ours_token.logprob - token.logprob) < 0.1, (got, want)
            compared += 1
        assert compared >= 3, want
        log = ours.log()
        assert "a GPU computes" in log and "stand-in on the CPU" in log and "cuda-sm90-bf16-v3" in log, log


def test_an_answer_goes_on_exactly_when_the_gpu_is_lost(driver, tmp_path):
    def told(content):
        return [(entry.token, entry.logprob) for entry in content]

    with serving(tmp_path / "whole", "--device", "cuda", env=driver) as ours:
        want = told(answer(ours, 8))
    # Some four steps of an answer, after which the next worker begins with as many.
    settings = {"PENSTOCK_STAND_IN": "lost-after=300"}
    with serving(tmp_path / "cut", "--device", "cuda", env=driver | settings) as ours:
        assert told(answer(ours, 8)) == want
        resumes = wait_until(lambda: re.findall(r'"resumes":(\d+)', ours.log()), "the request in the access log")
        assert int(resumes[0]) > 0


def test_a_gpu_that_fails_ends_its_worker_and_says_why(driver, tmp_path):
    # The probe of a start takes some fifty launches, and so does each step.
    settings = {"PENSTOCK_STAND_IN": "lost-after=120"}
    with serving(tmp_path, "--device", "cuda", env=driver | settings) as ours:

        def has_said_why():
            with contextlib.suppress(openai.APIError):
                client = ours.client(max_retries=0, timeout=5)
                client.completions.create(model="penstock-demo", prompt="Once", max_tokens=8)
            return "steps, at last: stand-in on the CPU: cu" in ours.log()

        wait_until(has_said_why, "the driver's error in the worker's log")
        assert "failed with CUDA_ERROR_LAUNCH_FAILED" in ours.log()


def test_check_lists_gpus_and_says_why_there_is_none(driver):
    def machine(env):
        text = penstock(env, "check").stdout
        return next(line.strip() for line in text.splitlines() if line.strip().startswith("GPU "))

    found = "0: stand-in on the CPU, 68.7 GB, compute capability 9.0, driver for CUDA 13.0, kernels sm_90a"
    assert found in machine(driver)
    reasons = {
        "no-device": "finds no GPU",
        "driver=11080": "serves CUDA 11.8, and 12.0 or later is needed",
        "capability=75": "kernels none",
    }
    for settings, reason in reasons.items():
        assert reason in machine(driver | {"PENSTOCK_STAND_IN": settings}), settings
    assert "libcuda.so.1 is not found" in machine({}) or has_driver()


def has_driver():
    return "libcuda.so.1" in subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True).stdout


def test_cuda_is_refused_without_a_gpu_and_with_too_little_memory(driver):
    for settings, reason in {
        "no-device": "the device cuda is not available on this machine: the NVIDIA driver finds no GPU",
        "capability=75": "there are no kernels for stand-in on the CPU (compute capability 7.5)",
    }.items():
        refused = penstock(driver | {"PENSTOCK_STAND_IN": settings}, "check", "--device", "cuda")
        assert refused.returncode != 0 and reason in refused.stderr + refused.stdout, refused
    small = penstock(driver | {"PENSTOCK_STAND_IN": "memory=3000000"}, "check", "--device", "cuda")
    assert small.returncode != 0 and "GPU with 3000000 bytes" in small.stderr + small.stdout, small
    # `auto` goes on with the CPU.
    auto = penstock(driver | {"PENSTOCK_STAND_IN": "no-device"}, "check")
    assert auto.returncode == 0 and ", cpu " in auto.stdout, auto


def test_what_leaves_the_gpu_comes_back_from_the_host(driver, tmp_path):
    # Twenty blocks of the demo model; each prompt takes six or seven.
    pool = (
        f'[[pools]]\ndevice = "cuda"\ncontext_tokens = 512\nkv_bytes_max = {20 * 98_304}\nkv_host_bytes = 16_000_000\n'
    )

    def ask(gateway, seed):
        draw = random.Random(seed)
        prompt = " ".join(draw.choice(["river", "old", "stone", "bridge", "light"]) for _ in range(180))
        done = gateway.client().completions.create(
            model="penstock-demo", prompt=prompt, max_tokens=4, temperature=0, logprobs=1
        )
        logprobs = done.choices[0].logprobs.token_logprobs
        return done.choices[0].text, logprobs, done.usage.prompt_tokens_details.cached_tokens

    with serving(tmp_path, config=pool, env=driver) as ours:
        first = ask(ours, 0)
        for seed in range(1, 5):
            ask(ours, seed)
        wait_until(lambda: ours.metric("penstock_kv_tier_stores_total") > 0, "evicted blocks are stored")
        again = ask(ours, 0)
        assert first[2] == 0 and again[2] >= 64 and again[:2] == first[:2], (first, again)
        assert ours.metric("penstock_kv_tier_loads_total") > 0
