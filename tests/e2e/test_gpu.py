"""`device = "cuda"` on a stand-in for NVIDIA's driver, which runs the kernels' own sources on the CPU: no GPU is needed, and few tokens are asked for."""

import contextlib
import os
import random
import re
import subprocess

import httpx
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


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("busy", "the GPU cannot be used now"),
        ("memory=100000000,held=99000000", "too little of the GPU's memory is free for the model"),
    ],
)
def test_auto_takes_the_cpu_where_other_processes_hold_the_gpu(driver, tmp_path, settings, reason):
    with serving(tmp_path, env=driver | {"PENSTOCK_STAND_IN": settings}) as ours:
        assert answer(ours, 2)
        assert f"the CPU computes: {reason}" in ours.log() and "cuda-sm90" not in ours.log()


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


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Environment with a driver that tells its GPU's PCI address, and a stand-in for NVIDIA's management library with two GPUs."""
    folder, beside = tmp_path_factory.mktemp("watched"), ROOT / "backends" / "worker" / "stand-in"
    driver = [ROOT / "kernels" / "cuda" / "host" / "build.sh", folder, "driver", f"-include {beside}/pci.h"]
    built = [
        subprocess.run(args, check=True, capture_output=True, text=True, timeout=300).stdout.strip()
        for args in (driver, [beside / "build.sh", folder, "two"])
    ]
    return {"LD_LIBRARY_PATH": ":".join(os.path.dirname(path) for path in built)}


def test_an_operator_sees_what_the_gpu_of_a_worker_does(watched, tmp_path):
    # The worker's GPU is the library's second one: the PCI address says so.
    now = "now: power 699 W of 700 W, memory 80.0 GB of 85.9 GB, busy 100 %, SM clock 1410 MHz"
    checked = penstock(watched, "check", "--device", "cuda")
    assert checked.returncode == 0 and now in checked.stdout, checked
    with serving(tmp_path, "--device", "cuda", env=watched) as ours:
        wait_until(lambda: "penstock_worker_gpu_power_watts" in ours.metrics(), "figures of the GPU")
        text = httpx.get(f"{ours.url}/metrics", timeout=30).raise_for_status().text
    series = dict(re.findall(r'^penstock_worker_gpu_(\w+){worker="[^"]+-0"(?:,\w+="\w+")?} (\S+)$', text, re.MULTILINE))
    assert (series["power_watts"], series["temperature_celsius"], series["ecc_errors_total"]) == ("699", "88", "2")
    assert re.search(r'gpu_throttled{worker="[^"]+",reason="hardware_thermal"} 1$', text, re.MULTILINE), text
    assert re.search(r'gpu_throttled{worker="[^"]+",reason="sync"} 0$', text, re.MULTILINE), text
    assert re.search(r'gpu_clock_hertz{worker="[^"]+",clock="memory"} 2619000000$', text, re.MULTILINE), text


def test_a_worker_without_the_management_library_says_so_and_serves(driver, tmp_path):
    if has_library():
        pytest.skip("this machine has the library")
    with serving(tmp_path, "--device", "cuda", env=driver) as ours:
        assert answer(ours, 1)
        wait_until(lambda: "temperature of the GPU are not shown" in ours.log(), "the reason in the log")
        assert not [name for name in ours.metrics() if name.startswith("penstock_worker_gpu_")]


def test_a_worker_stays_within_its_share_of_the_gpu(driver, tmp_path):
    config = tmp_path / "share.toml"

    def check(share, workers=1):
        config.write_text(f'[[pools]]\ndevice = "cuda"\nworkers = {workers}\ngpu_memory_share = {share}\n')
        return penstock(driver | {"PENSTOCK_STAND_IN": "memory=100000000"}, "check", "--config", config)

    two = check(0.45, 2)
    assert two.returncode == 0 and "0.04 GB each at most: gpu_memory_share is 0.45" in two.stdout, two
    small = check(0.01)
    assert small.returncode != 0 and "a larger gpu_memory_share" in small.stderr, small
    for share in ("0", "1.5", "-1", '"half"'):
        refused = check(share)
        assert refused.returncode != 0 and "gpu_memory_share" in refused.stderr, refused


def test_pools_on_one_gpu_are_checked_together(driver, tmp_path):
    config = tmp_path / "pools.toml"

    def check(*pools):
        config.write_text("".join(f'[[pools]]\nid = "p{at}"\n{keys}\n' for at, keys in enumerate(pools)))
        return penstock(driver | {"PENSTOCK_STAND_IN": "memory=100000000"}, "check", "--config", config)

    gpu, cpu = 'device = "cuda"', 'device = "cpu"'
    # Each alone takes most of the GPU.
    both = check(gpu, gpu)
    assert both.returncode != 0 and "gpu_memory_share of each pool" in both.stderr, both
    shared, on_demand = f"{gpu}\ngpu_memory_share = 0.45", f"{gpu}\non_demand = true"
    for good in ([gpu], [gpu, cpu], [shared, shared], [on_demand, on_demand]):
        done = check(*good)
        assert done.returncode == 0, (good, done)


def has_library():
    listed = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    return "libnvidia-ml.so.1" in listed


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
