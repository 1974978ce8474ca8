"""`penstock chat`, `top` and `serve` as a person uses them: in a terminal, with keys."""

import codecs
import fcntl
import os
import pty
import select
import stat
import struct
import subprocess
import termios
import time

import pytest

from harness import binary, free_port, serving, wait_until
from providers import OpenAi


class Terminal:
    """A program on a pseudo-terminal of 80 columns, with a folder for its state."""

    def __init__(self, state, *command):
        self.master, follower = pty.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "xterm"}
        # As the session's controlling terminal, so that Ctrl-C becomes a signal.
        command = ["setsid", "--ctty", *command]
        self.process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=env)
        os.close(follower)
        self.shown = ""
        # A read may end within a character.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def type(self, text):
        os.write(self.master, text.encode())

    def sees(self, text, seconds=30):
        """Waits until `text` is on the screen, and forgets everything up to it."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} is not among {self.shown[-500:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += self.decoder.decode(os.read(self.master, 65536))
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


def test_a_conversation_with_interruption(slow, tmp_path):
    terminal = Terminal(tmp_path, str(binary()), "chat", "--url", slow.url, "--temperature", "0")
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


def test_reasoning_is_dim(slow, tmp_path):
    terminal = Terminal(tmp_path, str(binary()), "chat", "--url", slow.url, "--temperature", "0")
    try:
        terminal.sees("> ")
        terminal.type("What is 27 + 48? /think\r")
        terminal.sees("\x1b[2m")
        reasoning = terminal.sees("\x1b[0m")
        assert "Ones" in reasoning and "think>" not in reasoning
        terminal.sees("27 + 48 = 75")
    finally:
        terminal.close()


def test_prompts_are_edited_and_remembered(tmp_path):
    with OpenAi() as mock:
        mock.models = ("m",)
        config = f'[[providers]]\nid = "up"\nbase_url = "{mock.url}/v1"\nkey_env = "KEY_UP"\nmodels = ["m"]\n'
        with serving(tmp_path / "g", config=config, env={"KEY_UP": mock.key}, workers=0) as gateway:

            def asked(*keys: str) -> str:
                """What was asked for by these keys, in a conversation of its own."""
                terminal = Terminal(tmp_path / "state", str(binary()), "chat", "--url", gateway.url)
                try:
                    terminal.sees("> ")
                    for key in keys:
                        terminal.type(key)
                    terminal.sees("\x1b[?2004h")
                    terminal.type("\x03")
                    terminal.sees("Ctrl-C again or Ctrl-D to leave")
                    terminal.sees("> ")
                    terminal.type("\x03")
                    assert terminal.process.wait(30) == 0
                    return mock.last.body["messages"][-1]["content"]
                finally:
                    terminal.close()

            # Left twice, Ctrl-A, Delete, Alt-Enter; then what was typed there, from the file.
            assert (
                asked("xRepeat: oe", "\x1b[D", "n", "\x01", "\x1b[3~", "\x05", "\x1b\r", "two", "\r")
                == "Repeat: one\ntwo"
            )
            assert asked("\x1b[A", " three", "\r") == "Repeat: one\ntwo three"
            assert asked('"""Repeat: a\r', 'b"""', "\r") == "Repeat: a\nb"
            assert asked("\x1b[200~Repeat: c \\\nd\x1b[201~", "\r") == "Repeat: c \\\nd", "what is pasted stays whole"
            history = tmp_path / "state" / "penstock" / "chat_history"
            assert stat.S_IMODE(history.stat().st_mode) == 0o600 and "three" in history.read_text()


def test_top_is_left_as_it_was_found(tmp_path):
    with OpenAi() as mock:
        mock.models = ("m",)
        config = f'[[providers]]\nid = "up"\nbase_url = "{mock.url}/v1"\nkey_env = "KEY_UP"\nmodels = ["m"]\n'
        with serving(tmp_path / "g", config=config, env={"KEY_UP": mock.key}, workers=0) as gateway:
            command = [str(binary()), "top", "--state-dir", str(gateway.state), "--every", "0.2"]
            terminal = Terminal(tmp_path, *command)
            try:
                terminal.sees("\x1b[?1049h")
                terminal.sees("0 workers")
                terminal.type("?")
                terminal.sees("show or hide these lines")
                terminal.type("p")
                terminal.sees("HELD")
                terminal.type("q")
                terminal.sees("\x1b[?1049l")
                assert terminal.process.wait(30) == 0
            finally:
                terminal.close()
            # Where nobody can press a key: one snapshot, and no panic when nobody reads it.
            piped = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            assert piped.stdout.startswith("pool ") and "\x1b" not in piped.stdout
            closed = subprocess.run(
                ["bash", "-c", '"$@" | true; echo ${PIPESTATUS[0]}', "-", *command],
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (closed.stdout.strip(), closed.stderr) == ("141", "")


def test_serving_on_a_terminal(tmp_path):
    """It shows what it loads, says where it answers, and leaves on Ctrl-C."""
    address = f"127.0.0.1:{free_port()}"
    terminal = Terminal(tmp_path, str(binary()), "serve", "--listen", address, "--state-dir", str(tmp_path / "state"))
    try:
        shown = terminal.sees(f"http://{address}/v1/chat/completions", 60)
        assert "panicked" not in shown
        terminal.type("\x03")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
