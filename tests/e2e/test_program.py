"""The program around the server: version, help, check, chat, and the Node SDK."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_terminal import Terminal

from harness import ROOT, binary, serving, user

HERE = Path(__file__).resolve().parent


def penstock(*args, stdin="", timeout=60):
    return subprocess.run([binary(), *args], check=False, input=stdin, capture_output=True, text=True, timeout=timeout)


def test_version():
    done = penstock("--version")
    assert done.returncode == 0 and done.stdout.startswith("penstock 0.")


@pytest.mark.parametrize("command", [[], ["serve"], ["worker"], ["check"], ["chat"], ["bench"]], ids=str)
def test_help_is_worth_reading(command):
    done = penstock(*command, "--help")
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 8


def test_a_stop_that_was_asked_for_is_no_warning(tmp_path):
    with serving(tmp_path, workers=2) as gateway:
        assert len(gateway.worker_pids()) == 2
    log = gateway.log_path.read_text()
    assert log.count("worker ended as requested") == 2 and "retry_in_ms" not in log, log


def test_check_accepts_the_commented_config():
    done = penstock("check", "--config", str(ROOT / "configs" / "penstock.toml"))
    assert done.returncode == 0, done.stderr


def test_check_tells_all_faults_at_once(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[server]\nlisten = "nowhere"\nlissten = 1\nbody_bytes_max = -5\n')
    done = penstock("check", "--config", str(path))
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "lissten" in said and "panicked" not in said


def test_bench_times_the_demo_model(tmp_path):
    page = tmp_path / "bench.html"
    done = penstock("bench", "--prefill", "40", "--decode", "1,3", "--context", "16", "--json", "--html", str(page))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == "penstock-demo" and found["limits"]["gigabytes_per_second"] > 0
    assert [one["tokens"] for one in found["prefill"]] == [40]
    assert [one["sequences"] for one in found["decode"]] == [1, 3]
    assert all(one["share_of_limit"] > 0 for one in found["prefill"] + found["decode"])
    assert "penstock-demo" in page.read_text() and "src=" not in page.read_text()


def test_bench_refuses_what_it_cannot_measure(tmp_path):
    for args, reason in [
        (["--prefill", "9000"], "context of 8192"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--device", "abacus"], "not a device"),
        (["--html", str(tmp_path / "no" / "page.html")], "cannot be written"),
    ]:
        done = penstock("bench", *args)
        assert done.returncode != 0 and reason in done.stderr and "panicked" not in done.stderr, args


def test_simulations_are_compared_on_a_page_and_on_a_terminal(tmp_path):
    page = tmp_path / "fleet.html"
    run = ("simulate", "--limit", "60", "--engines", "2", "--policies", "round_robin,cache_aware")
    plain = penstock(*run)
    assert plain.returncode == 0 and "\u2588" not in plain.stdout and plain.stdout.endswith("|\n"), plain
    done = penstock(*run, "--json", "--html", str(page))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    text = page.read_text()
    assert [one["name"] for one in found] == ["round_robin", "cache_aware"]
    assert all(f'<td class="n">{one["in_slo"] * 100:.1f}</td>' in text for one in found), text
    assert "60 requests in " in text and "<svg" in text
    assert not any(part in text for part in ("<script", "http://", "https://", "src=", "href=")), text
    terminal = Terminal(tmp_path, str(binary()), *run)
    try:
        terminal.sees("requests in SLO, %")
        terminal.sees("round_robin \u2588")
        terminal.sees("seconds to the first token, p99")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
    done = penstock(*run, "--html", str(tmp_path / "no" / "page.html"))
    assert done.returncode != 0 and "cannot be written" in done.stderr


@pytest.mark.parametrize("damage", ["nothing there", "no config", "short weights", "no JSON"])
def test_a_damaged_model_is_refused_with_file_and_reason(tmp_path, damage):
    folder = tmp_path / "model"
    if damage != "nothing there":
        shutil.copytree(ROOT / "models" / "penstock-demo", folder)
    if damage == "no config":
        (folder / "config.json").unlink()
    if damage == "short weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
    if damage == "no JSON":
        (folder / "config.json").write_text("{")
    done = penstock("worker", "--model", str(folder), "--listen", f"unix://{tmp_path}/w.sock")
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "panicked" not in said
    assert {"short weights": "model.safetensors", "nothing there": "model"}.get(damage, "config.json") in said


def test_chat_piped(gateway):
    done = penstock("chat", "--url", gateway.url, "--temperature", "0", stdin="Hello\n")
    assert (done.returncode, done.stdout) == (0, "Hello! How can I help you today?\n"), done.stderr


def test_chat_answers_a_prompt_of_its_command_line(gateway):
    """Standard input is not read: a pipe that nobody closes holds nothing up."""
    done = penstock("chat", "--url", gateway.url, "--temperature", "0", "Hello", stdin="Something else\n")
    assert (done.returncode, done.stdout) == (0, "Hello! How can I help you today?\n"), done.stderr
    none = penstock("chat", "--url", gateway.url, " ")
    assert none.returncode == 1 and "no prompt" in none.stderr


def test_chat_ends_silently_with_its_reader(gateway):
    """As every other command does: the status is that of a program that SIGPIPE has ended."""
    read, write = os.pipe()
    os.close(read)
    command = [binary(), "chat", "--url", gateway.url, "Hello"]
    done = subprocess.run(command, check=False, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_chat_without_a_gateway_says_what_to_do():
    done = penstock("chat", "--url", "http://127.0.0.1:9", stdin="Hello\n")
    assert done.returncode != 0 and "penstock serve" in done.stderr and "panicked" not in done.stderr


def test_the_demo_model_is_as_good_as_its_card_says(gateway, tmp_path):
    """Ten prompts of each skill through the endpoint; the card states 99 % for fifty."""
    script = ROOT / "models" / "penstock-demo" / "scripts" / "eval_http.py"
    report = tmp_path / "eval.json"
    command = [sys.executable, "-B", script, "--url", gateway.url, "--prompts", "10", "--json", report]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(report.read_text())["mean_accuracy"] >= 0.98, done.stdout


def test_the_node_sdk(gateway, model):
    command = ["node", HERE / "sdk.mjs", f"{gateway.url}/v1", model]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["checks"] >= 10


def test_curl_as_the_readme_says(gateway, model):
    body = json.dumps({"model": model, "stream": True, "messages": user("Hello"), "temperature": 0})
    command = ["curl", "-sS", f"{gateway.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("data: [DONE]")
