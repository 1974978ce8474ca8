"""`penstock chat` as a person uses it: in a terminal, with Ctrl-C and Ctrl-D."""

import os
import pty
import select
import subprocess
import time

import pytest

from harness import binary, free_port, serving, wait_until


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *command):
        self.master, follower = pty.openpty()
        # As the session's controlling terminal, so that Ctrl-C becomes a signal.
        command = ["setsid", "--ctty", *command]
        self.process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower)
        os.close(follower)
        self.shown = ""

    def type(self, text):
        os.write(self.master, text.encode())

    def sees(self, text, seconds=30):
        """Waits until `text` is on the screen, and forgets everything up to it."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} is not among {self.shown[-500:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def slow(tmp_path):
    """A gateway whose answers take long enough to be interrupted."""
    with serving(tmp_path, "--device", "reference") as gateway:
        yield gateway


def test_a_conversation_with_interruption(slow):
    terminal = Terminal(str(binary()), "chat", "--url", slow.url)
    try:
        terminal.sees("> ")
        terminal.type("My name is Alice.\r")
        terminal.sees("Nice to meet you, Alice!")
        terminal.sees("> ")

        # Some 400 tokens.
        terminal.type("Count from 1 to 100.\r")
        terminal.sees("1, 2, 3")
        terminal.type("\x03")
        assert "99, 100" not in terminal.sees("stopped"), "Ctrl-C stops the answer"
        wait_until(lambda: slow.metric("penstock_sequences_running") == 0, "the sequence is gone", 5)

        terminal.sees("> ")
        terminal.type("What is my name?\r")
        terminal.sees("Your name is Alice.")
        terminal.sees("> ")
        terminal.type("\x04")
        assert terminal.process.wait(10) == 0, "Ctrl-D leaves"
    finally:
        terminal.close()


def test_reasoning_is_dim(slow):
    terminal = Terminal(str(binary()), "chat", "--url", slow.url)
    try:
        terminal.sees("> ")
        terminal.type("What is 27 + 48? /think\r")
        terminal.sees("\x1b[2m")
        reasoning = terminal.sees("\x1b[0m")
        assert "Ones" in reasoning and "think>" not in reasoning
        terminal.sees("27 + 48 = 75")
    finally:
        terminal.close()


def test_serving_on_a_terminal(tmp_path):
    """It shows what it loads, says where it answers, and leaves on Ctrl-C."""
    address = f"127.0.0.1:{free_port()}"
    terminal = Terminal(str(binary()), "serve", "--listen", address, "--state-dir", str(tmp_path / "state"))
    try:
        shown = terminal.sees(f"http://{address}/v1/chat/completions", 60)
        assert "panicked" not in shown
        terminal.type("\x03")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
