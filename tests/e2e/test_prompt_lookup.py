"""Prompt lookup: the same answers in fewer steps, also where a worker that drafts and one that does not go on with each other's streams."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from test_faults import GUIDED, KINDS, disturbed, undisturbed

from harness import binary, holding, serving, user, wait_until

MODEL = "penstock-demo"
POOL = f'[[pools]]\nid = "{MODEL}"\nthreads = 1\nprompt_lookup = %d\n'
WORDS = "blue otter amber stone quick river lamp north candle green"

ASKS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.2, "seed": 5, "top_p": 0.9},
    "cool": {"temperature": 0.3, "seed": 6, "n": 3},
    "penalized": {"temperature": 0.6, "seed": 7, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "stopped": {"temperature": 0, "stop": ["river"]},
    "guided": {"temperature": 0.8, "seed": 8} | GUIDED,
    "untold": {"temperature": 0.2, "seed": 9, "logprobs": None, "top_logprobs": None},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A gateway whose worker drafts nothing, and one whose worker drafts."""
    with contextlib.ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(name) for name in ("plain", "lookup")]
        configs = [POOL % drafts for drafts in (0, 8)]
        pairs = zip(folders, configs, strict=True)
        yield [stack.enter_context(serving(folder, workers=0, config=config)) for folder, config in pairs]


@pytest.mark.parametrize("kind", ASKS)
def test_an_answer_is_the_same_with_drafts(two, kind):
    asked = {"model": MODEL, "messages": user(f"Repeat after me: {WORDS}"), "max_tokens": 300}
    asked |= {"logprobs": True, "top_logprobs": 5} | ASKS[kind]
    asked = {name: value for name, value in asked.items() if value is not None}
    plain, lookup = (gateway.client().chat.completions.create(**asked) for gateway in two)
    assert [choice.to_dict() for choice in lookup.choices] == [choice.to_dict() for choice in plain.choices]
    assert lookup.usage.completion_tokens == plain.usage.completion_tokens
    assert lookup.usage.prompt_tokens == plain.usage.prompt_tokens


def test_accepted_drafts_are_counted(two):
    plain, lookup = two
    undisturbed(lookup, MODEL, temperature=0)
    names = ("penstock_draft_tokens_total", "penstock_accepted_draft_tokens_total")
    wait_until(lambda: lookup.metric(names[1]) > 20, "accepted drafts")
    drafted, accepted = (lookup.metric(name) for name in names)
    assert drafted >= accepted and lookup.metric("penstock_output_tokens_total") > accepted
    assert [plain.metric(name) for name in names] == [0, 0]


@pytest.fixture
def mixed(tmp_path):
    """A gateway over two workers of which one drafts."""
    state = tmp_path / "state"
    state.mkdir()
    sockets = [state / f"{name}.sock" for name in ("plain", "lookup")]
    with contextlib.ExitStack() as stack:
        for socket, drafts in zip(sockets, ("0", "8"), strict=True):
            command = [binary(), "worker", "--listen", f"unix://{socket}", "--threads", "1", "--prompt-lookup", drafts]
            log = stack.enter_context(open(tmp_path / f"{socket.stem}.log", "wb"))
            worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        places = ", ".join(f'"unix://{socket}"' for socket in sockets)
        config = f'[server]\n{holding(tmp_path)}[[pools]]\nid = "{MODEL}"\nconnect = [{places}]\n'
        with serving(tmp_path, workers=0, config=config) as gateway:
            wait_until(lambda: gateway.metric("penstock_workers_ready") == 2, "both workers are ready", 90)
            yield gateway


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("killed", ["plain", "lookup"])
def test_a_stream_goes_on_at_a_worker_of_the_other_kind(mixed, kind, killed):
    pids = {"lookup" if is_drafting(pid) else "plain": pid for pid in mixed.worker_pids()}
    want = undisturbed(mixed, MODEL, **KINDS[kind])
    other = pids["plain" if killed == "lookup" else "lookup"]
    # The stream begins where it is to be killed: the other worker stands still until then.
    os.kill(other, signal.SIGSTOP)
    wait_until(lambda: mixed.metric("penstock_workers_ready") == 1, "the stopped worker is left", 60)

    def kill():
        os.kill(other, signal.SIGCONT)
        wait_until(lambda: mixed.metric("penstock_workers_ready") == 2, "both are ready again", 60)
        os.kill(pids[killed], signal.SIGKILL)

    assert disturbed(mixed, MODEL, kill, **KINDS[kind]) == want
    assert mixed.metric("penstock_resumes_total") == 1 and mixed.metric("penstock_resumes_inexact_total") == 0


def is_drafting(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[words.index(b"--prompt-lookup") + 1] != b"0"
