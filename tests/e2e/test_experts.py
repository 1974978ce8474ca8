"""Mixtures of experts served: as the dense model that they were made of, and the same answer whatever happens to their workers."""

import gguf_files
import pytest
from test_faults import Busy, disturbed, undisturbed
from test_gguf import answer, penstock
from test_pool import CONFIG, apart

import harness
from harness import holding, serving, user, wait_until


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Mixtures as folders and files."""
    folder = tmp_path_factory.mktemp("experts")
    gguf_files.mixture_folder(folder / "equal", "equal")
    gguf_files.mixture_folder(folder / "mixed", "mixed")
    gguf_files.mixture_file(folder / "equal-bf16.gguf", "equal", gguf_files.BF16)
    gguf_files.mixture_file(folder / "mixed-bf16.gguf", "mixed", gguf_files.BF16)
    gguf_files.mixture_file(folder / "equal-q8_0.gguf", "equal", gguf_files.Q8_0)
    return folder


def test_halves_of_an_mlp_answer_as_the_whole_does(gateway, models, tmp_path):
    text, logprobs, usage = answer(gateway)
    seen = {}
    for name, args, far in (
        ("folder", ["equal"], 0.05),
        ("gguf", ["equal-bf16.gguf"], 0.05),
        ("q8_0", ["equal-q8_0.gguf"], 0.2),
        ("int8", ["equal", "--quantize", "int8"], 0.2),
    ):
        with serving(tmp_path / name, "--model", str(models / args[0]), *args[1:]) as ours:
            got, near, used = seen[name] = answer(ours)
            assert used.prompt_tokens == usage.prompt_tokens
            # The first token is certain enough not to depend on rounding.
            assert got[:1] == text[:1] and abs(near[0] - logprobs[0]) < far, (name, got, near[0], logprobs[0])
    assert seen["folder"][0] == text
    assert seen["folder"][:2] == seen["gguf"][:2], "the same bits from both containers"


def test_routers_decide(models, tmp_path):
    with serving(tmp_path / "equal", "--model", str(models / "equal")) as ours:
        equal = answer(ours)
    with serving(tmp_path / "folder", "--model", str(models / "mixed")) as ours:
        mixed = answer(ours)
    with serving(tmp_path / "gguf", "--model", str(models / "mixed-bf16.gguf")) as ours:
        assert answer(ours)[:2] == mixed[:2]
    assert mixed[:2] != equal[:2]


def test_a_killed_worker_is_not_noticed(models, tmp_path):
    args = ("--model", str(models / "mixed"))
    config = f"[server]\n{holding(tmp_path)}"
    with harness.serving(tmp_path, *args, workers=2, config=config) as gateway:
        wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers are ready", 90)
        model = gateway.model()
        for options in ({"temperature": 0}, {"temperature": 1.1, "seed": 42}):
            want = undisturbed(gateway, model, **options)
            resumes = gateway.metric("penstock_resumes_total")
            assert disturbed(gateway, model, Busy(gateway).kill, **options) == want
            wait_until(lambda: gateway.metric("penstock_resumes_total") > resumes, "the stream went on elsewhere")  # noqa: B023
            assert gateway.metric("penstock_resumes_inexact_total") == 0
            wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "the dead worker is replaced", 90)


def test_a_prompt_computed_elsewhere_gives_the_same_answer(models, tmp_path):
    long = " ".join(f"{number} apples and {number} pears." for number in range(200))

    def ask(gateway):
        asked = {"messages": user(long), "max_tokens": 12, "temperature": 0, "logprobs": True}
        choice = gateway.client().chat.completions.create(model=gateway.model(), **asked).choices[0]
        return choice.message.content, [entry.logprob for entry in choice.logprobs.content]

    args = ("--model", str(models / "mixed"))
    with serving(tmp_path / "one", *args) as gateway:
        want = ask(gateway)
    config = f'{CONFIG}model = "{models / "mixed"}"\n'
    with serving(tmp_path / "two", workers=0, config=config) as gateway:
        apart(gateway)
        assert ask(gateway) == want
        wait_until(lambda: gateway.metric("penstock_prefilled_apart_total") == 1, "the transfer is told")


def test_check_knows_mixtures(models):
    for name in ("equal", "equal-q8_0.gguf"):
        done = penstock("check", "--model", str(models / name))
        assert done.returncode == 0 and "Qwen3MoeForCausalLM" in done.stdout and "fits" in done.stdout, done


def test_a_gpu_is_refused_and_auto_takes_the_cpu(models):
    refused = penstock("check", "--model", str(models / "equal"), "--device", "cuda")
    assert refused.returncode != 0 and "mixtures of experts have no GPU kernels" in refused.stdout + refused.stderr
    taken = penstock("check", "--model", str(models / "equal"), "--device", "auto")
    assert taken.returncode == 0 and ", cpu " in taken.stdout, taken


def test_experts_that_are_not_there_are_refused(models, tmp_path):
    model = {name: tensor for name, tensor in gguf_files.mixture("equal").items() if ".experts." not in name}
    gguf_files.write(tmp_path / "old.gguf", list(gguf_files.tensors(gguf_files.BF16, model)), "qwen3moe")
    done = penstock("serve", "--model", str(tmp_path / "old.gguf"))
    assert done.returncode == 1 and "blk.0.ffn_gate_exps.weight: is missing" in done.stderr, done.stderr
