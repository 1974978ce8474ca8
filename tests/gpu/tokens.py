"""Greedy tokens of the demo model on the GPU and on the CPU, from the real server: `tokens.py PENSTOCK [TOKENS]`.

Tokens must be equal up to the first place where the CPU's two likeliest are within 0.1 of each other.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PROMPTS = ["What is the capital of France?", "Tell me about rivers.", "How old is the Earth?"]
# Log-probabilities that bf16 roundings of two devices do not tell apart.
CLOSE = 0.1


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, prompt, tokens):
    body = {"model": "penstock-demo", "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    body |= {"max_tokens": tokens, "logprobs": True, "top_logprobs": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as response:
        content = json.load(response)["choices"][0]["logprobs"]["content"]
    return content, time.monotonic() - began


def answers(penstock, device, tokens):
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = [penstock, "serve", "--listen", f"127.0.0.1:{port}", "--state-dir", folder, "--device", device]
        with open(f"{folder}/serve.txt", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    ask(port, "Hello", 1)
                    break
                except (urllib.error.URLError, ConnectionError):
                    assert time.monotonic() < deadline, Path(folder, "serve.txt").read_text()
                    time.sleep(0.2)
            return [ask(port, prompt, tokens) for prompt in PROMPTS]
        finally:
            process.terminate()
            process.wait(60)


def main():
    penstock, tokens = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 48
    wrong = 0
    ours, theirs = (answers(penstock, device, tokens) for device in ("cuda", "cpu"))
    for prompt, (got, seconds), (want, _) in zip(PROMPTS, ours, theirs, strict=True):
        same = 0
        for ours_token, token in zip(got, want, strict=False):
            first, second = (entry["logprob"] for entry in token["top_logprobs"])
            if first - second < CLOSE or ours_token["token"] != token["token"]:
                break
            same += 1
        is_good = same == len(want) or first - second < CLOSE
        wrong += not is_good
        print(
            f"{prompt!r}: {same} of {len(want)} tokens equal, {len(got) / seconds:.0f} tokens/s{'' if is_good else ' WRONG'}"
        )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
